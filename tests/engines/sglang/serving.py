"""A server of SGLang with two tensor ranks, on CPUs, in single precision."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from awexd_client.sglang.control import LOADER, pickled
from tests.engines.sglang.conftest import PYTHON, environment

RANKS = 2
START_SECONDS = 150.0
PROMPT = [10, 20, 30, 40, 50]


class Server:
    """``python -m sglang.launch_server`` of checkpoint 0, in single precision, with our loader and the tests' own.

    Args:
        flags: further ones, or others than the usual.
    """

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        options = {
            "model-path": model,
            "device": "cpu",
            "attention-backend": "torch_native",
            "dtype": "float32",
            "tp-size": RANKS,
            "host": "127.0.0.1",
            "port": self.port,
            "weight-version": "before",
            "mem-fraction-static": 0.2,
            "max-total-tokens": 2048,
            "max-running-requests": 4,
        }
        command = [str(PYTHON), "-m", "sglang.launch_server"]
        command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        command += ["--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup"]
        command += ["--custom-weight-loader", LOADER, "probe.load", *flags]
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.ask("model_info")
            except OSError:
                select.select([], [], [], 0.2)  # nobody tells when it listens
            else:
                return
        pytest.fail(f"the server did not start:\n{self.log()[-6000:]}", pytrace=False)

    def ask(self, route: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def tokens(self) -> list[int]:
        """Of greedy decoding."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        said = self.ask("generate", {"input_ids": PROMPT, "sampling_params": sampling})
        output: list[int] = said["output_ids"]
        return output

    def version(self) -> str:
        return str(self.ask("model_info")["weight_version"])

    def probe(self, **asked: object) -> None:
        payload = base64.b64encode(pickled(json.dumps(asked).encode())).decode()
        self.ask("begin_weight_update", {"selector": "target"})
        body = {"serialized_named_tensors": [payload] * RANKS, "load_format": "probe.load", "flush_cache": False}
        self.ask("update_weights_from_tensor", body)
        self.ask("end_weight_update", {})

    def digests(self) -> list[dict[str, str]]:
        """Of each rank's parameters and buffers."""
        self.probe(digests=str(self._folder))
        return [json.loads((self._folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    def state(self) -> dict[str, Any]:
        """All that an update changes, but for the version's name."""
        digests = self.digests()
        return {"tokens": self.tokens(), "digests": digests}

    def loads_itself(self, checkpoint: Path) -> dict[str, Any]:
        self.ask("update_weights_from_disk", {"model_path": str(checkpoint)})
        return self.state()

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def end(self) -> None:
        """In order, so that it cleans up; then whatever of it is left."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self._process.pid:
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
