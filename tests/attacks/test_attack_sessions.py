"""Clients that die, hang, flood or say nothing."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from awexd.protocol import RECEIVE_BYTES, encode
from awexd_transports.errors import DeadlineExceeded, VersionConflict
from tests.attacks.raw import DONE, Raw, RawWriter, reader, until, writer
from tests.daemons import Daemon

HELLO_SECONDS = 0.2

# Registers rank 0 of job j, begins step 1, and (argument "fork") leaves a child that holds the socket; then waits.
_CLIENT = """
import os, signal, sys
from tests.attacks.raw import writer
made = writer(sys.argv[1], nbytes=1 << 20)
made.begin(1)
child = os.fork() if "fork" in sys.argv else -1
if child == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print("ready", flush=True)
print(child, flush=True)
signal.pause()
"""


def _client(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", _CLIENT, daemon.socket, *arguments]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert client.stdout
    assert client.stdout.readline() == "ready\n"
    return client


def _ended(daemon: Daemon) -> None:
    """Within a second (generously: ten) of a writer's death nothing of it is left."""
    status = until(daemon.socket, lambda status: status["sessions"] == 1)
    (job,) = status["jobs"]
    assert (job["writers"], job["open"], job["bytes"]) == ([], [], 0)
    until(daemon.socket, lambda status: not daemon.segments())
    with writer(daemon.socket) as again:
        again.publish(1)


def test_killed_writer_leaves_nothing_and_a_new_one_begins_at_once(daemon: Daemon) -> None:
    with _client(daemon) as client:
        client.kill()
        client.wait()
        _ended(daemon)


def test_session_ends_with_its_process_though_a_forked_child_keeps_the_socket_open(daemon: Daemon) -> None:
    with _client(daemon, "fork") as client:
        assert client.stdout
        child = int(client.stdout.readline())
        client.kill()
        client.wait()
        _ended(daemon)
        assert client.stdin
        client.stdin.close()  # the child ends
        os.waitpid(child, 0)  # it became ours (tests/conftest.py)


def test_closed_connection_of_a_living_process_ends_its_session_and_its_memory_is_not_reused(daemon: Daemon) -> None:
    first = writer(daemon.socket)
    slot = first.begin(1)["segment"]
    with first.opened(slot) as fd:
        first.close()
        until(daemon.socket, lambda status: status["sessions"] == 1)
        with writer(daemon.socket) as second:
            slots = [second.publish(step)["segment"] for step in range(1, 4)]
            os.pwrite(fd, b"late", 4096)
            assert slot not in slots


def test_connection_that_is_reset_with_more_queued_than_one_read_takes_ends_its_session(daemon: Daemon) -> None:
    """Closed with an answer unread, which the kernel tells the other side as an error, not as an end."""
    raw = Raw(daemon.socket)
    raw.ask("status")
    select.select([raw.sock], [], [], 10)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        raw.sock.sendall(struct.pack("<I", 4 * RECEIVE_BYTES) + bytes(2 * RECEIVE_BYTES))  # nothing to be answered
        raw.close()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    until(daemon.socket, lambda status: status["sessions"] == 1)


def test_goodbye_says_that_nothing_is_mapped(daemon: Daemon) -> None:
    first = writer(daemon.socket)
    kept = first.publish(1)["segment"]
    with first.opened(first.begin(2)["segment"]):
        first.call("goodbye")
    first.close()
    until(daemon.socket, lambda status: status["sessions"] == 1)
    with writer(daemon.socket) as second:
        assert kept in [second.publish(step)["segment"] for step in range(2, 6)], "its slot serves again"


def test_newcomer_of_a_rank_is_refused_while_the_first_lives_and_served_once_it_has_ended(daemon: Daemon) -> None:
    first = writer(daemon.socket)
    with RawWriter(daemon.socket) as second:
        with pytest.raises(VersionConflict, match=f"process {os.getpid()}, which lives"):
            second.register()
        first.close()
        until(daemon.socket, lambda status: not status["jobs"] or not status["jobs"][0]["writers"])
        second.register()


def test_stopped_reader_loses_its_lease_and_its_memory_is_not_reused(folder: Path) -> None:
    with Daemon(folder, "--lease-ttl", "0.3") as daemon, writer(daemon.socket) as trainer:
        slot = trainer.publish(1)["segment"]
        with reader(daemon.socket) as stopped:
            lease = stopped.call("read.resolve", step=None, lease_ms=60_000, stage=False)["lease"]
            with RawWriter.opened(stopped, slot):  # type: ignore[arg-type]
                slots = [trainer.publish(step)["segment"] for step in range(2, 7)]
                assert slot not in slots
                assert stopped.refused("read.confirm", lease=lease, **DONE).code == "version_unavailable"


def test_lease_makes_a_writer_wait_until_its_deadline_naming_the_version(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, reader(daemon.socket) as slow:
        trainer.publish(1)
        slow.call("read.resolve", step=None, lease_ms=60_000, stage=False)
        for step in (2, 3):
            trainer.publish(step)
        number = trainer.ask("write.begin", step=4, set=trainer.set, deadline_ms=50)
        with pytest.raises(DeadlineExceeded, match="readers' leases on epoch 1 step 1"):
            trainer.answer(number)
        slow.close()
        assert trainer.publish(4)


def test_waiting_requests_of_a_closed_connection_end_with_it(daemon: Daemon) -> None:
    with reader(daemon.socket) as waiting:
        for step in range(1, 200):
            waiting.ask("read.wait", step=step, deadline_ms=3_600_000)
    until(daemon.socket, lambda status: status["sessions"] == 1)
    daemon.terminate()  # at once, not after an hour


def test_flood_of_waits_is_bounded_and_others_are_served(daemon: Daemon) -> None:
    with reader(daemon.socket) as flooding, suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(5000):
            flooding.ask("read.wait", step=1, deadline_ms=3_600_000)
        until(daemon.socket, lambda status: True)
        assert "bye" in flooding.end()


def test_client_that_never_reads_its_replies_is_ended_or_bounded(daemon: Daemon) -> None:
    with Raw(daemon.socket) as deaf:
        deaf.sock.setblocking(False)
        frame = encode({"id": 1, "op": "status", "args": {}, "deadline_ms": 1000}) * 500
        start = _resident_bytes(daemon)
        end = time.monotonic() + 10
        sent = 0
        try:
            while sent < 40 << 20 and time.monotonic() < end:
                if not select.select([], [deaf.sock], [], 0.5)[1]:
                    break  # it reads no more from a client that does not read
                sent += deaf.sock.send(frame)
        except (BrokenPipeError, ConnectionResetError):
            pass
        daemon.ask("status")
        assert _resident_bytes(daemon) - start < 256 << 20


def _resident_bytes(daemon: Daemon) -> int:
    pages = Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_descriptors_that_are_never_received_do_not_starve_others(folder: Path) -> None:
    limited = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"')
    with Daemon(folder, wrapper=limited) as daemon, writer(daemon.socket) as deaf:
        segment = deaf.begin(1)["segment"]
        deaf.sock.setblocking(False)
        message = {"op": "segment.open", "args": {"ids": [segment] * 100}, "deadline_ms": 1000}
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            for number in range(1000, 1200):
                deaf.sock.send(encode(message | {"id": number}))
        with Raw(daemon.socket) as other, writer(daemon.socket, "other") as trainer:
            other.call("status")
            with trainer.opened(trainer.begin(1)["segment"]):
                pass
        assert "cannot accept" not in daemon.log()


def test_many_connections_are_served_and_all_are_gone_afterwards(daemon: Daemon) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(Raw(daemon.socket)) for _ in range(300)]
        for client in clients:
            client.call("status")
        assert clients[-1].call("status")["sessions"] == 300
    until(daemon.socket, lambda status: status["sessions"] == 1)


def test_connections_beyond_the_limit_of_descriptors_are_served_once_others_have_gone(folder: Path) -> None:
    limited = ("sh", "-c", 'ulimit -n 64; exec "$0" "$@"')
    with Daemon(folder, wrapper=limited) as daemon:
        with ExitStack() as stack:
            for _ in range(100):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.connect(daemon.socket)
        daemon.ask("status")


def test_client_that_says_nothing_is_ended_and_told(folder: Path) -> None:
    with Daemon(folder) as daemon:
        program = f"import awexd.daemon, awexd.cli; awexd.daemon.HELLO_SECONDS = {HELLO_SECONDS}; awexd.cli.main()"
        start = daemon.command.index("-m")
        daemon.command[start : start + 2] = ["-c", program]
        daemon.restart()
        with Raw(daemon.socket, greet=False) as silent:
            daemon.ask("status")
            assert silent.end()["bye"]["code"] == DeadlineExceeded.code


def test_client_that_connects_and_leaves_at_once_leaves_nothing(daemon: Daemon) -> None:
    for _ in range(50):
        Raw(daemon.socket, greet=False).close()
    until(daemon.socket, lambda status: status["sessions"] == 1)


def test_crossing_requests_of_one_writer_make_no_more_slots_than_it_may_have(daemon: Daemon) -> None:
    with RawWriter(daemon.socket, nbytes=1 << 20) as trainer:
        trainer.register()
        trainer.set = trainer.call("write.ready")["set"]
        numbers = [
            trainer.ask("write.reserve", body=b"segment", set=trainer.set, nbytes=trainer.nbytes) for _ in range(8)
        ]
        numbers += [trainer.ask("write.begin", step=1, set=trainer.set) for _ in range(8)]
        assert {trainer.receive()["id"] for _ in numbers} == set(numbers)
        assert len(daemon.segments()) == 3


def test_session_that_was_refused_a_registration_does_not_take_the_daemon_with_it(daemon: Daemon) -> None:
    with reader(daemon.socket, rank=1, size=2) as first:
        first.refused("read.register", body=b"x", job="j", engine="e", rank=1, world_size=1)
        with Raw(daemon.socket) as second, suppress(VersionConflict):
            second.call("read.register", body=b"x", job="j", engine="e", rank=0, world_size=1)
    until(daemon.socket, lambda status: status["sessions"] == 1)
    assert daemon.running


def test_killed_daemon_is_followed_by_one_that_serves_the_same_version(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        slot = trainer.publish(1)["segment"]
        trainer.begin(2)
        daemon.kill()
    daemon.start()
    assert [name for name in daemon.segments() if name.endswith(slot)] == daemon.segments()
    with reader(daemon.socket) as worker:
        assert worker.call("read.resolve", step=None, lease_ms=1000, stage=False)["step"] == 1


def test_process_of_an_older_epoch_cannot_open_the_new_ones_slot_nor_the_other_way_round(daemon: Daemon) -> None:
    with writer(daemon.socket) as old, RawWriter(daemon.socket) as new:
        stale = old.begin(1)["segment"]
        new.register("new")
        new.reserve()
        fresh = new.begin(1)["segment"]
        assert fresh != stale
        assert old.refused("segment.open", ids=[fresh]).code == "access_denied"
        assert new.refused("segment.open", ids=[stale]).code == "access_denied"
        with new.opened(fresh):
            pass


def test_sigint_is_an_orderly_end_too(daemon: Daemon) -> None:
    assert daemon.terminate(signal.SIGINT) == -signal.SIGINT
