from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from awexd.demo import daemon
from awexd.demo.children import Children
from awexd.demo.session import differing
from awexd.demo.tasks import END_OF_TURN, LONGEST_ANSWER, TARGET_TOKENS, brevity, digits

DEADLINE = 100.0
MANY = "1000"
"""Steps of a run that does not end by itself before the deadline."""

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files of the run; short, because sockets lie in it. The run must leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="awexd-test-") as name:
        yield Path(name)
        assert os.listdir(name) == [], "the run left temporary files behind"


@contextmanager
def running(folder: Path, plot: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "awexd", "demo", "--model", "tiny", "--json", "--plot", str(plot), *options]
    pipe = subprocess.PIPE
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(folder: Path, plot: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the one object on standard output, and standard error."""
    with running(folder, plot, *options) as process:
        return end_of(process)


def end_of(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    output, errors = process.communicate(timeout=DEADLINE)
    (line,) = output.splitlines()
    return process.returncode, json.loads(line), errors


def await_step(process: subprocess.Popen[str], step: int) -> None:
    """Returns once the demo has told that this step is over."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if re.match(rf" +{step} +\d", line):
            return
    pytest.fail(f"the demo ended before step {step}: {''.join(told)}")


def descendant(process: subprocess.Popen[str], *words: str) -> int:
    """The process id of the demo's child whose command line has these words, in a row."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        command = Path(f"/proc/{pid}/cmdline").read_text()
        if "\0".join(("", *words, "")) in command:
            return int(pid)
    raise LookupError(f"no child with {words}")


def segments(pid: int) -> list[str]:
    """The shared memory that a daemon holds open."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return [link for link in links if link.startswith("/dev/shm/")]


def test_run_is_exact_and_learns(folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "reward.png"
    status, result, errors = run(folder, plot)
    assert status == 0, errors
    assert result["bit_exact"] is True
    assert result["tokens_equal"] is True
    assert [step["step"] for step in result["steps"]] == list(range(1, 11))
    for step in [result["initial"], *result["steps"]]:
        assert step["epoch"] == 1
        assert step["transport"] == "shm"
        assert step["bytes"] == 2 * 78_144  # every parameter of the tiny model, in bf16
        assert step["stage_seconds"] >= 0
        assert step["pause_seconds"] > 0
        assert step["differing"] == []
    assert result["reward_last"] == result["steps"][-1]["reward"]
    assert result["reward_last"] > result["reward_first"] + 0.3
    assert result["after"] != result["before"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_running_daemon_is_used_and_left_without_the_job(folder: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="awexd-test-") as place, Children(Path(place), os.environ) as children:
        serving = daemon.start(children, Path(place))
        options = ("--steps", "2", "--socket", str(daemon.socket_path(Path(place))))
        status, result, errors = run(folder, tmp_path / "reward.png", *options)
        assert status == 0, errors
        assert result["bit_exact"] is True
        assert serving.process.poll() is None
        assert segments(serving.process.pid) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trainer-1", ("awexd.demo.trainer", "--rank", "1")),
        ("generator", ("awexd.demo.generator",)),
        ("daemon", ("awexd", "serve")),
    ],
)
def test_killed_process_is_named_and_ends_the_run(
    name: str, words: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    with running(folder, tmp_path / "reward.png", "--steps", MANY) as process:
        await_step(process, 2)
        os.kill(descendant(process, *words), signal.SIGKILL)
        status, result, errors = end_of(process)
    assert status == 1
    assert re.search(rf"awexd demo: step \d+, .*: {name} \(process \d+\) was killed by SIGKILL", errors), errors
    assert name in result["error"]
    assert result["bit_exact"] is False


def test_interrupt_ends_the_run(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "reward.png", "--steps", MANY) as process:
        await_step(process, 1)
        process.send_signal(signal.SIGINT)
        status, result, errors = end_of(process)
    assert status == 128 + signal.SIGINT
    assert result["error"] == "interrupted by SIGINT"
    assert "Traceback" not in errors


def test_killed_run_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "reward.png", "--steps", MANY) as process:
        await_step(process, 1)
        janitor = os.pidfd_open(descendant(process, "awexd.demo.janitor"))
        try:
            process.kill()
            assert select.select([janitor], [], [], DEADLINE)[0], "the janitor has not finished"
        finally:
            os.close(janitor)


def test_missing_folder_of_the_plot_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    status, result, errors = run(folder, tmp_path / "nowhere" / "reward.png")
    assert status == 1
    assert "nowhere" in result["error"]
    assert "Traceback" not in errors


def test_differing_tensors_are_named_in_order() -> None:
    ours = {"a": "1", "b": "2", "c": "3"}
    assert differing(ours, dict(ours)) == []
    assert differing(ours, {"a": "1", "b": "x", "d": "4"}) == ["b", "c", "d"]


def test_reward_of_brevity() -> None:
    assert brevity([7] * (TARGET_TOKENS - 1) + [END_OF_TURN]) == 1.0
    assert brevity([7] * TARGET_TOKENS) == 0.0
    assert 0 < brevity([END_OF_TURN]) < 1
    assert brevity([7] * (LONGEST_ANSWER - 1) + [END_OF_TURN]) == 0.0


def test_reward_of_digits() -> None:
    assert digits([0, 9, 10, 63]) == 0.5
