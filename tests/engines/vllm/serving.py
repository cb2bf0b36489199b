"""A server of vLLM with two tensor-parallel workers, on CPUs, in single precision."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.running import environ, python
from tests.engines.vllm.workers.generation import PROMPT, TOKENS

START_SECONDS = 300.0
PLUGINS = Path(__file__).parent / "plugins"
"""What is in it vLLM finds by its entry points, as if it were installed."""


@dataclass(frozen=True)
class Server:
    """One that runs."""

    url: str

    def ask(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def tokens(self, count: int = TOKENS) -> list[int]:
        """Of greedy decoding."""
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens: list[int] = self.ask("v1/completions", body)["choices"][0]["token_ids"]
        return tokens


@contextlib.contextmanager
def serving(model: Path, folder: Path, *flags: str, plain: bool = False) -> Iterator[Server]:
    """It and its workers are gone afterwards.

    Args:
        folder: for its log.
        flags: further ones, or others than the usual.
        plain: linear layers keep their weights as loaded, as on GPUs, where oneDNN would pack them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python(), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--enforce-eager", "--tensor-parallel-size", "2"]
    command += ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    command += ["--weight-transfer-config", '{"backend": "awexd"}', *flags]
    log, entries = folder / "server.log", set(os.listdir("/dev/shm"))
    variables = environ(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    if plain:
        variables |= {"VLLM_PLUGINS": "awexd,plain", "PYTHONPATH": str(PLUGINS)}
    with open(log, "wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=variables, start_new_session=True)
    try:
        _await_ready(server, f"http://127.0.0.1:{port}", log)
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for name in set(os.listdir("/dev/shm")) - entries:
            if name.startswith("vllm_dist_"):  # its workers' own, which it leaves behind
                os.unlink(f"/dev/shm/{name}")


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
