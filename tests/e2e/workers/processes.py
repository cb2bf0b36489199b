"""Real processes for tests: each runs the source that it is sent, with torch and awexd_client at hand."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that any step of a process may take."""
ROOT = Path(__file__).parents[3]


class RemoteError(Exception):
    """What a process raised; ``kind`` is the exception's class name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class Process:
    """One process. Everything it has goes when it is killed; a context manager that kills it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)
        self._link = link
        self._stream = link.makefile("rwb")

    def do(self, source: str) -> Any:
        """Runs it to its end; what it left in ``result``."""
        self.start(source)
        return self.finish()

    def start(self, source: str) -> None:
        self.tell(source)

    def tell(self, value: object) -> None:
        self._stream.write(json.dumps(value).encode() + b"\n")
        self._stream.flush()

    def finish(self) -> Any:
        """The next answer: ``result`` of what was started, or what it said.

        Raises:
            RemoteError: it raised.
            EOFError: it has ended.
        """
        self._link.settimeout(PATIENCE)
        try:
            line = self._stream.readline()
        except ConnectionResetError:  # killed with something unread
            line = b""
        if not line:
            raise EOFError(f"process {self.pid} has ended")
        answer = json.loads(line)
        if "kind" in answer:
            raise RemoteError(answer["kind"], answer["message"], answer["trace"])
        return answer["value"]

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.signal(signal.SIGSTOP)
        self.await_stop()

    def await_stop(self) -> None:
        """Returns when it stands still, whoever has stopped it."""
        end = time.monotonic() + PATIENCE
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} does not stop")
            os.sched_yield()

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self.await_end()

    def await_end(self) -> None:
        if not select.select([self._handle], [], [], PATIENCE)[0]:
            raise TimeoutError(f"process {self.pid} does not end")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self.kill()
        self._stream.close()
        self._link.close()
        os.close(self._handle)


class Nursery:
    """The process that forks them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), str(ROOT / "client"), str(ROOT / "transports"), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.workers.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environ,
                cwd=ROOT,
            )
        self._link = ours
        ours.settimeout(PATIENCE)
        if ours.recv(1) != b"+":
            raise EOFError("the nursery did not start")

    def fork(self) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._link, [b"."], [theirs.fileno()])
        return Process(int.from_bytes(self._link.recv(4), "little"), ours)

    def close(self) -> None:
        self._link.close()
        self._process.wait(PATIENCE)


def together(processes: Iterable[Process], sources: Iterable[str]) -> list[Any]:
    """Each process runs its source, all at the same time; their results."""
    started = []
    for process, source in zip(processes, sources, strict=True):
        process.start(source)
        started.append(process)
    return [process.finish() for process in started]
