"""A vLLM server with two tensor-parallel workers, driven over HTTP by a process that has no vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from awexd_client import WeightReader, WeightWriter
from awexd_client.vllm import VLLMServer
from awexd_transports.errors import AwexdError
from tests.daemons import Daemon
from tests.engines.vllm.running import environ, python
from tests.engines.vllm.workers.generation import PROMPT, TOKENS, corrupt, generated

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

START_SECONDS = 200.0
ASIDE = "model.layers.0.self_attn.q_proj.weight"
DIRECT = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def url(models: Path, place: Path) -> Iterator[str]:
    """A running server's; it and its workers are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python(), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(models / "qwen3" / "old"), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--enforce-eager", "--tensor-parallel-size", "2"]
    command += ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    command += ["--weight-transfer-config", '{"backend": "awexd"}']
    log = place / "server.log"
    variables = environ(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    with open(log, "wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)
    try:
        _await_ready(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _await_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    handle = os.pidfd_open(server.pid)
    try:
        for _ in range(int(START_SECONDS / 0.25)):
            ended = select.select([handle], [], [], 0.25)[0]
            if ended:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return
    finally:
        os.close(handle)
    pytest.fail(f"the server did not become ready; its log:\n{log.read_text(errors='replace')[-6000:]}")


class _Sequence:
    """What happens, in order, and what came of it."""

    def __init__(self, url: str, folder: Path, writer: WeightWriter) -> None:
        self.url, self.folder, self.writer = url, folder, writer
        self.server = VLLMServer(url)
        self.held = self.checkpoint("new")
        self.steps: dict[str, dict[str, Any]] = {}

    def run(self, daemon: Daemon) -> None:
        self.writer.register(self.held)
        self.note("start", "old", lambda: None)
        self.server.connect("grpo", "rollout", daemon.socket)
        with WeightReader("grpo", "rollout", self.server, daemon.socket) as reader:
            self.note("update", "new", lambda: reader.update(self.publish(1, "new")))
            self.note("aside", "new", lambda: reader.update(self.corrupted(2, ASIDE)))
            self.note("direct", "new", lambda: reader.update(self.corrupted(3, DIRECT)))
            self.note("late", "new", lambda: reader.update(4, timeout=0.5))
            self.note("by hand", "new", lambda: self.by_hand({"step": 4, "timeout": 0.5}))
            self.note("unknown", "new", lambda: self.by_hand({"steps": 4}))
            self.note("again", "newer", lambda: reader.update(self.publish(5, "newer")))
            self.note("third", "old", lambda: reader.update(self.publish(6, "old")))

    def checkpoint(self, version: str) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / version).glob("*.safetensors")
        return {name: tensor.float() for name, tensor in load_file(file).items()}

    def publish(self, step: int, version: str) -> int:
        for name, tensor in self.checkpoint(version).items():
            self.held[name].copy_(tensor)
        self.writer.publish(step)
        return step

    def corrupted(self, step: int, name: str) -> int:
        for tensor in self.held.values():
            tensor.copy_(torch.randn(tensor.shape))
        self.writer.publish(step)
        corrupt(self.held[name])
        return step

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
            "tokens": self.tokens(),
            "expected": generated(self.folder / version),
            "version": self.server.weight_version,
        }

    def tokens(self) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            tokens: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def steps(url: str, models: Path, served: Daemon) -> dict[str, dict[str, Any]]:
    with WeightWriter("grpo", 0, 1, served.socket, keep=8) as writer:
        sequence = _Sequence(url, models / "qwen3", writer)
        sequence.run(served)
    return sequence.steps


ALL = ["start", "update", "aside", "direct", "late", "by hand", "unknown", "again", "third"]


@pytest.mark.parametrize("step", ALL)
def test_tokens_are_those_of_the_version_that_should_be_live(steps: dict[str, dict[str, Any]], step: str) -> None:
    assert steps[step]["tokens"] == steps[step]["expected"]


def test_server_says_the_version_that_it_runs_on(steps: dict[str, dict[str, Any]]) -> None:
    assert [steps[step]["version"] for step in ALL] == ["default", *["1.1"] * 6, "1.5", "1.6"]


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
