"""A vLLM server with two tensor-parallel workers, driven over HTTP by a process that has no vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awexd_client import WeightReader, WeightWriter
from awexd_client.vllm import VLLMServer
from awexd_transports.errors import AwexdError
from tests.daemons import Daemon
from tests.engines.vllm.serving import Server, serving
from tests.engines.vllm.workers.generation import generated
from tests.engines.vllm.workers.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ASIDE = "model.layers.0.self_attn.q_proj.weight"
DIRECT = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def server(models: Path, place: Path) -> Iterator[Server]:
    with serving(models / "qwen3" / "old", place) as started:
        yield started


class _Sequence:
    """What happens, in order, and what came of it."""

    def __init__(self, server: Server, folder: Path, writer: WeightWriter) -> None:
        self.running, self.folder, self.writer = server, folder, writer
        self.server = VLLMServer(server.url)
        self.steps: dict[str, dict[str, Any]] = {}

    def run(self, daemon: Daemon) -> None:
        trainer = Trainer(self.writer, self.folder)
        self.note("start", "old", lambda: None)
        self.server.connect("grpo", "rollout", daemon.socket)
        with WeightReader("grpo", "rollout", self.server, daemon.socket) as reader:
            self.note("update", "new", lambda: reader.update(trainer.publish(1, "new")))
            self.note("aside", "new", lambda: reader.update(trainer.corrupted(2, ASIDE)))
            self.note("direct", "new", lambda: reader.update(trainer.corrupted(3, DIRECT)))
            self.note("late", "new", lambda: reader.update(4, timeout=0.5))
            self.note("by hand", "new", lambda: self.by_hand({"step": 4, "timeout": 0.5}))
            self.note("unknown", "new", lambda: self.by_hand({"steps": 4}))
            self.note("again", "newer", lambda: reader.update(trainer.publish(5, "newer")))
            self.note("third", "old", lambda: reader.update(trainer.publish(6, "old")))
            self.note("verified", "old", lambda: reader.verify(self.folder / "old"))
            self.note("other", "old", lambda: reader.verify(self.folder / "new"))

    def by_hand(self, info: dict[str, Any]) -> None:
        """vLLM's own routes, none of our driver's."""
        for route, body in (
            ("start_weight_update", None),
            ("update_weights", {"update_info": info}),
            ("finish_weight_update", {"weight_version": "by hand"}),
        ):
            self.server._request("POST", route, body, 60)

    def note(self, name: str, version: str, act: Callable[[], Any]) -> None:
        error, result = None, None
        try:
            result = act()
        except AwexdError as raised:
            error = raised
        self.steps[name] = {
            "error": error,
            "notes": getattr(error, "__notes__", []),
            "result": result,
            "tokens": self.running.tokens(),
            "expected": generated(self.folder / version),
            "version": self.server.weight_version,
        }


@pytest.fixture(scope="module")
def steps(server: Server, models: Path, served: Daemon) -> dict[str, dict[str, Any]]:
    with WeightWriter("grpo", 0, 1, served.socket, keep=8) as writer:
        sequence = _Sequence(server, models / "qwen3", writer)
        sequence.run(served)
    return sequence.steps


ALL = ["start", "update", "aside", "direct", "late", "by hand", "unknown", "again", "third", "verified", "other"]


@pytest.mark.parametrize("step", ALL)
def test_tokens_are_those_of_the_version_that_should_be_live(steps: dict[str, dict[str, Any]], step: str) -> None:
    assert steps[step]["tokens"] == steps[step]["expected"]


def test_server_says_the_version_that_it_runs_on(steps: dict[str, dict[str, Any]]) -> None:
    assert [steps[step]["version"] for step in ALL] == ["default", *["1.1"] * 6, "1.5", *["1.6"] * 3]


def test_each_worker_has_a_result(steps: dict[str, dict[str, Any]]) -> None:
    result = steps["update"]["result"]
    assert len(result.workers) == 2
    assert all(worker.bytes > 0 for worker in result.workers)


@pytest.mark.parametrize(("step", "name"), [("aside", ASIDE), ("direct", DIRECT)])
def test_corrupted_byte_is_found_by_name(steps: dict[str, dict[str, Any]], step: str, name: str) -> None:
    error = steps[step]["error"]
    assert type(error).__name__ == "IntegrityError"
    assert name in str(error)
    assert steps[step]["notes"] == (["rollout runs on epoch 1 step 1 again"] if name == DIRECT else [])


def test_step_that_does_not_come_is_told_by_its_name(steps: dict[str, dict[str, Any]]) -> None:
    assert type(steps["late"]["error"]).__name__ == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("step", "cause"), [("by hand", "step 4 of epoch 1 to be committed"), ("unknown", "unexpected keyword")]
)
def test_failure_by_vllms_own_routes_is_an_http_error_with_its_cause(
    steps: dict[str, dict[str, Any]], step: str, cause: str
) -> None:
    assert "HTTP 500" in str(steps[step]["error"])
    assert cause in str(steps[step]["error"])


def test_live_weights_are_compared_with_a_checkpoint(steps: dict[str, dict[str, Any]]) -> None:
    found = steps["verified"]["result"]
    assert found.tensors > 10
    assert all("repacked after loading" in why for why in found.aside.values())
    assert steps["verified"]["error"] is None
    assert "tensors are not the checkpoint's: model.embed_tokens.weight[1, 0] is" in str(steps["other"]["error"])


def test_live_weights_are_compared_by_a_command(
    steps: dict[str, dict[str, Any]], server: Server, models: Path, served: Daemon
) -> None:
    arguments = ["--job", "grpo", "--engine", "rollout", "--vllm", server.url]
    told = _verify(served, *arguments, "--checkpoint", str(models / "qwen3" / "old"))
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("epoch 1 step 6: ")
    assert "none differ" in told.stdout
    assert "not compared: model.layers.0.self_attn.q_proj.weight and 5 more: weight was repacked" in told.stdout
    assert _verify(served, *arguments, "--checkpoint", str(models / "qwen3" / "new")).returncode == 1


def _verify(served: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "awexd.ctl", "verify", "--socket", served.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
