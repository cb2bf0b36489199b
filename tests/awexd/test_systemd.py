from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from awexd.systemd import Notifier, inherited_socket, keep_watchdog, watchdog_interval
from awexd_transports.errors import InvalidArgument

DEADLINE = 10.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(DEADLINE)
        end.bind(str(tmp_path / "notify"))
        yield end


def _notifier(manager: socket.socket) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": manager.getsockname()})


def _fill(manager: socket.socket) -> int:
    """Datagrams that fit until the manager's queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for count in range(1_000_000):
            try:
                sender.sendto(b"X=1", manager.getsockname())
            except BlockingIOError:
                return count
    pytest.fail("the queue never filled")


def test_ready_sends_status_in_the_same_message(manager: socket.socket) -> None:
    _notifier(manager).ready("2 jobs")
    assert manager.recv(4096) == b"READY=1\nSTATUS=2 jobs"


def test_ready_without_a_status_leaves_the_old_one(manager: socket.socket) -> None:
    _notifier(manager).ready()
    assert manager.recv(4096) == b"READY=1"


def test_each_message_is_a_datagram(manager: socket.socket) -> None:
    notifier = _notifier(manager)
    notifier.status("1 job")
    notifier.watchdog()
    notifier.stopping()
    assert [manager.recv(4096) for _ in range(3)] == [b"STATUS=1 job", b"WATCHDOG=1", b"STOPPING=1"]


def test_status_with_a_line_break_stays_one_assignment(manager: socket.socket) -> None:
    _notifier(manager).status("job a\nMAINPID=1\r\n")
    assert manager.recv(4096) == b"STATUS=job a MAINPID=1"


def test_notify_to_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(DEADLINE)
        manager.bind("")  # autobind: the kernel picks a free abstract name
        name = manager.getsockname()
        assert name[0] == 0
        Notifier({"NOTIFY_SOCKET": "@" + name[1:].decode()}).ready()
        assert manager.recv(4096) == b"READY=1"


def test_notify_without_a_manager_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({})
    notifier.ready("x")
    notifier.watchdog()
    notifier.stopping()
    assert not caplog.records


def test_notify_to_a_manager_that_is_gone_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "READY" in caplog.text


def test_ready_to_a_full_queue_goes_out_with_the_next_message(manager: socket.socket) -> None:
    queued = _fill(manager)
    notifier = _notifier(manager)
    notifier.ready("starting")
    for _ in range(queued):
        assert manager.recv(4096) == b"X=1"
    notifier.status("running")
    assert manager.recv(4096) == b"READY=1\nSTATUS=running"
    notifier.status("still running")
    assert manager.recv(4096) == b"STATUS=still running"


@pytest.mark.parametrize("name", ["vsock:2:1234", "relative/path"])
def test_notify_socket_of_an_unknown_kind_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="NOTIFY_SOCKET"):
        Notifier({"NOTIFY_SOCKET": name})


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "1"}, 0.5e-6),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
    ],
)
def test_watchdog_interval(environ: dict[str, str], interval: float | None) -> None:
    assert watchdog_interval(environ, 42) == interval


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1_000", "soon", " 7", "٣"])
def test_watchdog_interval_of_a_malformed_value_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match="WATCHDOG_USEC"):
        watchdog_interval({"WATCHDOG_USEC": value}, 42)


async def test_keep_watchdog_pings_until_cancelled(manager: socket.socket) -> None:
    manager.setblocking(False)
    task = asyncio.create_task(keep_watchdog(_notifier(manager), 0.001))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE):
        pings = [await loop.sock_recv(manager, 4096) for _ in range(5)]
    assert pings == [b"WATCHDOG=1"] * 5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# The inherited fds start at 3, which is taken in this process: a child of its own takes the socket over.
_CHILD = """
import os, sys
from awexd.systemd import inherited_socket
from awexd_transports.errors import InvalidArgument

environ = {"HOME": "/"} | dict(pair.split("=", 1) for pair in sys.argv[1:])
if environ.get("LISTEN_PID") == "self":
    environ["LISTEN_PID"] = str(os.getpid())
try:
    taken = inherited_socket(environ)
except InvalidArgument as error:
    print("refused", error)
else:
    print("none" if taken is None else f"fd {taken.fileno()} {taken.getsockname()} {taken.get_inheritable()}")
try:
    state = "inheritable" if os.get_inheritable(3) else "close-on-exec"
except OSError:
    state = "closed"
print(sorted(environ), state)
"""


def _take_over(*fds: int, names: str | None = "awexd", pid: str = "self", count: int | None = None) -> tuple[str, str]:
    """What a child that inherits ``fds`` from 3 on says, and what is left of its environment."""
    variables = [f"LISTEN_FDS={len(fds) if count is None else count}", f"LISTEN_PID={pid}"]
    if names is not None:
        variables.append(f"LISTEN_FDNAMES={names}")
    # Out of the way of 3 and up first; then the shell moves each to its place.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
    script = "".join(f"exec {3 + index}<&{fd} {fd}<&-\n" for index, fd in enumerate(high)) + 'exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-c", _CHILD, *variables]
    try:
        done = subprocess.run(command, pass_fds=high, capture_output=True, text=True, timeout=60, check=True)
    finally:
        for fd in high:
            os.close(fd)
    said, left = done.stdout.splitlines()
    return said, left


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "awexd.sock"))
        server.listen()
        yield server


def test_inherited_socket_is_taken_and_closed_on_exec(listener: socket.socket) -> None:
    said, left = _take_over(listener.fileno())
    assert said == f"fd 3 {listener.getsockname()} False"
    assert left == "['HOME'] close-on-exec"


def test_inherited_socket_is_found_by_name(listener: socket.socket) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        said, _ = _take_over(other.fileno(), listener.fileno(), names="metrics:awexd")
    assert said == f"fd 4 {listener.getsockname()} False"


def test_inherited_socket_without_a_name_is_taken_when_alone(listener: socket.socket) -> None:
    assert _take_over(listener.fileno(), names=None)[0] == f"fd 3 {listener.getsockname()} False"


def test_inherited_socket_of_another_process_is_left(listener: socket.socket) -> None:
    said, left = _take_over(listener.fileno(), pid="1")
    assert said == "none"
    assert left.startswith("['HOME']")


def test_inherited_socket_without_systemd_is_none() -> None:
    assert inherited_socket({}) is None
    assert inherited_socket({"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid())}) is None


@pytest.mark.parametrize(
    ("names", "count", "message"),
    [
        ("other", None, "named other: want one named awexd"),
        ("awexd:awexd", None, "LISTEN_FDNAMES has 2 names for 1 fds"),
        ("awexd", 200, "LISTEN_FDS counts 200 fds, but fd"),
        ("awexd", -1, "LISTEN_FDS is '-1'"),
    ],
)
def test_inherited_socket_with_variables_that_disagree_is_refused(
    listener: socket.socket, names: str, count: int | None, message: str
) -> None:
    said, left = _take_over(listener.fileno(), names=names, count=count)
    assert said.startswith("refused")
    assert message in said
    assert left.startswith("['HOME']")


def test_inherited_socket_named_twice_is_refused(listener: socket.socket) -> None:
    assert "want one named awexd" in _take_over(listener.fileno(), listener.fileno(), names="awexd:awexd")[0]


def test_inherited_socket_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        datagram.bind(str(tmp_path / "datagram"))
        assert "not a Unix stream socket" in _take_over(tcp.fileno())[0]
        assert "not a Unix stream socket" in _take_over(datagram.fileno())[0]


def test_inherited_socket_that_does_not_listen_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(tmp_path / "bound"))
        assert "does not listen" in _take_over(bound.fileno())[0]


def test_inherited_fd_that_is_a_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert "is not a socket" in _take_over(file.fileno())[0]
