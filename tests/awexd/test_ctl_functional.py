"""``awexctl`` and ``awexd`` as commands: what they print, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from awexd_client import WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60)


def ask(daemon: Daemon, *arguments: str) -> Any:
    done = run("awexd.ctl", *arguments, "--json", "--socket", daemon.socket)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def job(daemon: Daemon) -> Iterator[tuple[WeightWriter, WorkerWeightsReader]]:
    with WeightWriter("j", 0, 1, daemon.socket) as writer, WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader:
        writer.register({"a": torch.ones(1000)})
        reader.register({"a": torch.zeros(1000)})
        for step in (1, 2):
            writer.publish(step).committed()
        reader.update()
        yield writer, reader
        writer.close_job()


@pytest.mark.usefixtures("job")
def test_status_versions_and_sessions_say_what_is_held(daemon: Daemon) -> None:
    (shown,) = ask(daemon, "status")["jobs"]
    assert (shown["held"], shown["last_step"]) == ([[1, 2], [1, 1]], 2)
    assert shown["engines"][0]["workers"][0]["version"] == [1, 2]
    assert [row["step"] for row in ask(daemon, "versions", "--job", "j")["versions"]] == [2, 1]
    assert {row["role"] for row in ask(daemon, "sessions")["sessions"]} == {"writer", "reader", "control"}
    for command in ("status", "versions", "sessions"):
        text = run("awexd.ctl", command, "--socket", daemon.socket)
        assert text.returncode == 0
        assert shown["job"] in text.stdout


def test_status_says_who_is_in_which_phase_and_what_is_put_aside(
    daemon: Daemon, job: tuple[WeightWriter, WorkerWeightsReader]
) -> None:
    writer, reader = job
    writer.park("optimizer", [torch.ones(1 << 18)])
    writer.offload()
    with writer.phase("train"):
        shown = ask(daemon, "status")
        (gpu,) = shown["phases"]
        assert (gpu["gpu"], gpu["phase"], gpu["holders"][0]["who"]) == ("host", "train", "writer rank 0")
        assert shown["jobs"][0]["pinned"] == [{"version": [1, 2], "ranks": [0]}]
        text = run("awexd.ctl", "status", "--socket", daemon.socket).stdout
    for line in ("GPU host: phase train: writer rank 0 of ", "parked by rank 0: optimizer, 1.0 MiB\n", "pinned: 1.2, "):
        assert line in text
    done = run("awexd.ctl", "rollback", "--job", "j", "--step", "1", "--socket", daemon.socket)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is the only copy of the weights of rank 0" in done.stderr
    with reader.phase("rollout"):
        pass
    writer.restore()
    writer.restore("optimizer", keep=False)
    assert ask(daemon, "status")["jobs"][0]["parked"] == []


def test_drop_ends_what_a_deserted_job_had_put_aside(daemon: Daemon) -> None:
    with WeightWriter("j", 0, 1, daemon.socket) as writer:
        writer.register({"a": torch.ones(1000)})
        writer.publish(1)
        writer.offload()
        writer.park("optimizer", [torch.ones(10)])
    ask(daemon, "drop", "--job", "j")
    assert ask(daemon, "status")["jobs"] == []
    daemon.await_segments(0)


def test_rollback_makes_the_older_version_the_newest(
    daemon: Daemon, job: tuple[WeightWriter, WorkerWeightsReader]
) -> None:
    assert ask(daemon, "rollback", "--job", "j", "--step", "1") == {"withdrawn": [[1, 2]], "held": [[1, 1]]}
    assert job[1].update().step == 1
    job[0].publish(3).committed()
    assert job[1].update().step == 3


@pytest.mark.usefixtures("job")
def test_drop_and_gc_let_go(daemon: Daemon) -> None:
    assert ask(daemon, "drop", "--job", "j", "--step", "1")["held"] == [[1, 2]]
    assert ask(daemon, "drop", "--job", "j")["held"] == []
    assert ask(daemon, "gc")["freed_bytes"] >= 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["drop", "--job", "none"], "no job root/none here"),
        (["rollback", "--job", "j", "--step", "7"], "no held version of step 7"),
        (["versions", "--job", "../j"], "a job is NAME or OWNER/NAME"),
    ],
)
@pytest.mark.usefixtures("job")
def test_case_6_failure_is_told_and_exits_non_zero(daemon: Daemon, arguments: list[str], said: str) -> None:
    done = run("awexd.ctl", *arguments, "--socket", daemon.socket)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_case_6_missing_daemon_exits_non_zero(daemon: Daemon) -> None:
    done = run("awexd.ctl", "status", "--socket", f"{daemon.socket}.none")
    assert done.returncode == 1
    assert "no daemon answers" in done.stderr


def test_second_daemon_says_why_it_does_not_start(daemon: Daemon) -> None:
    done = run("awexd", "serve", "--socket", daemon.socket, "--state-dir", str(daemon.state_dir))
    assert done.returncode == 1
    assert done.stderr.strip() == f"awexd serve: another daemon serves {daemon.socket}"


def test_unknown_setting_is_named(daemon: Daemon, tmp_path: Any) -> None:
    file = tmp_path / "awexd.toml"
    file.write_text('sokcet = "/x"\n')
    done = run("awexd", "serve", "--config", str(file))
    assert done.returncode == 1
    assert "unknown setting 'sokcet'" in done.stderr


@pytest.mark.usefixtures("job")
def test_reader_that_has_seen_enough_is_no_failure(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "awexd.ctl", "status", "--socket", daemon.socket]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (0, b"")
