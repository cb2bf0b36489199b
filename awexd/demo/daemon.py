"""The daemon that the demo starts for itself: when it is ready, and how a job ends whose trainers are gone."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from awexd.demo.children import Child, Children
from awexd_transports.errors import InvalidArgument

READY_SECONDS = 60.0
CLOSE_SECONDS = 10.0
LONGEST_PATH = 107  # sockaddr_un holds 108 bytes, the last of them zero
DATAGRAM_BYTES = 4096


def socket_path(directory: Path) -> Path:
    """Where the daemon's socket goes.

    Raises:
        InvalidArgument: the path is too long for a Unix socket.
    """
    path = directory / "awexd.sock"
    if len(str(path).encode()) > LONGEST_PATH:
        raise InvalidArgument(f"{path} is too long for a Unix socket: set TMPDIR to a shorter path")
    return path


def start(children: Children, directory: Path) -> Child:
    """Starts ``awexd serve`` and returns once it accepts connections at `socket_path`.

    It says so as it would say to systemd: a datagram with ``READY=1`` to ``$NOTIFY_SOCKET``.

    Raises:
        ChildFailed: it ended instead.
        DeadlineExceeded: it did not become ready in time.
    """
    notify = directory / "notify.sock"
    notify.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(notify))
        child = children.start(
            "daemon",
            "awexd",
            ["serve", "--socket", str(socket_path(directory)), "--state-dir", str(directory / "state")],
            environment={"NOTIFY_SOCKET": str(notify)},
        )
        while "READY=1" not in _states(children, ready):
            continue
    return child


def close_job(path: str, job: str) -> None:
    """Ends a job in the place of its trainers, which have failed: its versions and their memory go.

    Raises:
        AwexdError: the daemon does not answer, or refuses. A job that does not exist is none of these.
    """
    from awexd_client import WeightWriter

    with contextlib.closing(WeightWriter(job, rank=0, world_size=1, socket=path)) as writer:
        writer.close_job(timeout=CLOSE_SECONDS)


def _states(children: Children, ready: socket.socket) -> list[str]:
    children.wait_readable(ready, "daemon", "starting the daemon", READY_SECONDS)
    return ready.recv(DATAGRAM_BYTES).decode(errors="replace").splitlines()
