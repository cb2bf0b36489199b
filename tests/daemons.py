"""A real daemon for tests: ``python -m awexd serve`` in a folder of its own, and a check that it leaves nothing."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from awexd.protocol import Message
from awexd_client.session import Connection

START_SECONDS = 30.0
STOP_SECONDS = 30.0
_IDENTITY_KEY_BYTES, _NAMESPACE_BYTES = 32, 6  # the identity file: first the key, then the namespace (awexd.journal)


class Daemon:
    """``awexd serve`` in ``folder``; ``arguments`` are added to its command line. A context manager: starts and ends.

    Leaving it closes every job, ends the daemon by SIGTERM, and fails if a process, shared memory, the socket or a
    traceback in the log is left. A daemon that is dead by then is started again for that.

    Args:
        wrapper: a command that runs the daemon's, such as ``("unshare", "-m", ...)``; it must exec it.
        environ: variables to add to this process's own.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        wrapper: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.socket = str(folder / "s")
        self.state_dir = folder / "state"
        self._log = folder / "log"
        serve = ("-m", "awexd", "serve", "--socket", self.socket, "--state-dir", str(self.state_dir))
        self.command = [*wrapper, sys.executable, *serve, *arguments]
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith("AWEXD_")}
        self.environ |= environ or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._namespaces: set[str] = set()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the daemon is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Returns once it serves: it says so as it would say to systemd."""
        notify = self.folder / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(notify))
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environ | {"NOTIFY_SOCKET": str(notify)},
                )
            self._await_ready(ready)
        self.segments()  # learns its namespace while it runs
        return self

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._end(signal.SIGKILL)

    def terminate(self, number: int = signal.SIGTERM) -> int:
        """Ends it in order; its exit status, as subprocess gives it (negative: by that signal)."""
        return self._end(number)

    def restart(self) -> Self:
        """SIGTERM if it runs, then a new one on the same socket and folder."""
        if self.running:
            self.terminate()
        return self.start()

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        if self._process is None:
            raise RuntimeError("the daemon is not running")
        status = self._process.wait(STOP_SECONDS)
        self._process = None
        return status

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def segments(self) -> list[str]:
        """Names of this daemon's entries in /dev/shm."""
        if self.running:
            # As the daemon sees it: its wrapper may have given it a folder of its own.
            seen = Path(f"/proc/{self.pid}/root{self.state_dir}")
            identities = [path.read_bytes() for path in seen.glob("*/identity")]
            self._namespaces |= {body[_IDENTITY_KEY_BYTES:][:_NAMESPACE_BYTES].hex() for body in identities}
        entries = sorted(os.listdir("/dev/shm"))
        return [entry for entry in entries if any(entry.startswith(f"awexd-{name}-") for name in self._namespaces)]

    def await_segments(self, count: int) -> None:
        """Returns once there are so many: the daemon unlinks the others in threads of its own."""
        end = time.monotonic() + START_SECONDS
        while len(found := self.segments()) != count:
            assert time.monotonic() < end, f"{len(found)} segments where {count} should be: {found}"
            select.select([], [], [], 0.01)

    def ask(self, operation: str, *, timeout: float = STOP_SECONDS, **arguments: object) -> Message:
        """One request on a connection of its own."""
        connection = Connection(self.socket)
        try:
            result, fds = connection.call(operation, dict(arguments), timeout=timeout)
            for fd in fds:
                os.close(fd)
            return result
        finally:
            connection.goodbye()

    def close_jobs(self) -> None:
        for job in self.ask("status")["jobs"]:
            self.ask("job.close", job=job["job"])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check_end()
        finally:
            if self._process is not None:
                self.kill()
            for name in self.segments():
                os.unlink(f"/dev/shm/{name}")
        if error is not None:
            error.add_note(f"the daemon's log:\n{self.log()[-8000:]}")

    def _check_end(self) -> None:
        if not self.running:
            self.start()
        self.close_jobs()
        status = self.terminate()
        left = [f"/dev/shm/{name}" for name in self.segments()]
        left += [path for path in (self.socket, f"{self.socket}.lock") if os.path.lexists(path)]
        if left or status != -signal.SIGTERM or "Traceback" in self.log():
            pytest.fail(f"the daemon ended with {status} and left {left}; its log:\n{self.log()[-8000:]}")

    def _await_ready(self, ready: socket.socket) -> None:
        handle = os.pidfd_open(self.pid)
        try:
            while True:
                readable, _, _ = select.select([ready.fileno(), handle], [], [], START_SECONDS)
                if ready.fileno() in readable and b"READY=1" in ready.recv(4096):
                    return
                if not readable or handle in readable:
                    status = self.terminate()
                    pytest.fail(f"the daemon did not become ready (status {status}); its log:\n{self.log()[-8000:]}")
        finally:
            os.close(handle)

    def _end(self, number: int) -> int:
        if self._process is None:
            raise RuntimeError("the daemon is not running")
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            pytest.fail(f"the daemon did not end within {STOP_SECONDS:g} s; its log:\n{self.log()[-8000:]}")
        finally:
            self._process = None


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short path: a Unix socket's address holds 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="awexd-t"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    """A running daemon; ended and checked after the test."""
    with Daemon(folder) as running:
        yield running
