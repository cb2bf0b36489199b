"""A daemon for one benchmark, in the care of a process that outlives a killed benchmark and tidies up."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from awexd.bench.link import END_SECONDS, Answer, Side, serve
from awexd_client.session import Connection
from awexd_transports.errors import AwexdError, InvalidArgument

READY_SECONDS = 60.0
CLOSE_SECONDS = 10.0


@contextlib.contextmanager
def daemon(*arguments: str) -> Iterator[str]:
    """The socket of a daemon of its own, whose state is in a temporary folder; both go at the end, with all jobs."""
    keeper = [sys.executable, "-m", "awexd.bench.daemon"]
    with Side("the daemon's keeper", keeper, patience=END_SECONDS) as side:
        yield str(side.ask("start", arguments=arguments)["socket"])


def close_job(path: str, job: str) -> None:
    """Ends a job, whoever opened it; that it does not exist is no error."""
    with contextlib.suppress(AwexdError), contextlib.closing(Connection(path)) as connection:
        connection.call("job.close", {"job": job}, timeout=CLOSE_SECONDS)


class _Keeper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = str(folder / "s")
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        """What it would say to systemd; kept open, since it also tells when it stops."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, arguments: list[str]) -> Answer:
        notify = str(self.folder / "n")
        self.notices.bind(notify)
        command = [sys.executable, "-m", "awexd", "serve", "--socket", self.socket, "--log-level", "WARNING"]
        self.process = subprocess.Popen(
            [*command, "--state-dir", str(self.folder / "state"), *arguments],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"NOTIFY_SOCKET": notify},
        )
        handle = os.pidfd_open(self.process.pid)
        try:
            self._await(handle)
        finally:
            os.close(handle)
        return {"socket": self.socket}

    def _await(self, handle: int) -> None:
        while True:
            readable, _, _ = select.select([self.notices.fileno(), handle], [], [], READY_SECONDS)
            if self.notices.fileno() in readable and b"READY=1" in self.notices.recv(4096):
                return
            if not readable or handle in readable:
                raise InvalidArgument("the daemon did not become ready")

    def end(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(AwexdError), contextlib.closing(Connection(self.socket)) as connection:
            for job in connection.call("status", {}, timeout=CLOSE_SECONDS)[0]["jobs"]:
                connection.call("job.close", {"job": job["job"]}, timeout=CLOSE_SECONDS)
        self.process.terminate()
        self.process.wait()
        self.notices.close()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="awexd-b") as folder:
        keeper = _Keeper(Path(folder))
        try:
            serve(int(sys.argv[1]), {"start": keeper.start})
        finally:
            keeper.end()


if __name__ == "__main__":
    main()
