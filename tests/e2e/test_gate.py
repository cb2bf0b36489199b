"""The daemon killed, or another rank at work, between any two messages of a client."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from awexd_client import DaemonUnavailable, UpdateResult, VersionConflict, WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon
from tests.e2e.clients import Background, Pair, await_granted, check_nothing_orphaned, publish_all, restart
from tests.e2e.workers.gate import Gate


@pytest.fixture
def gate(folder: Path, daemon: Daemon) -> Iterator[Gate]:
    with Gate(str(folder / "gate"), daemon.socket) as opened:
        yield opened


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    with contextlib.ExitStack() as stack:
        yield lambda *sockets: stack.enter_context(contextlib.closing(Pair("grpo", *sockets)))


@pytest.fixture
def make_writers(daemon: Daemon) -> Iterator[Callable[..., list[WeightWriter]]]:
    """Writers of one rank each, over these sockets, registered with their tensor."""
    with contextlib.ExitStack() as stack:

        def make(sockets: Sequence[str], weights: Sequence[torch.Tensor]) -> list[WeightWriter]:
            made = []
            for rank, path in enumerate(sockets):
                made.append(stack.enter_context(WeightWriter("grpo", rank, len(sockets), path)))
                made[-1].register({f"w{rank}": weights[rank]})
            return made

        yield make


SIDES = pytest.mark.parametrize("reply", [False, True], ids=["before", "after"])


GRANTED = pytest.mark.parametrize("granted", [True, False], ids=["granted", "begun"])


@SIDES
@pytest.mark.parametrize(
    ("operation", "granted"),
    [
        ("write.publish", True),
        ("write.begin", False),
        ("write.seal", False),
    ],
)
def test_daemon_killed_while_a_version_is_published(
    daemon: Daemon, gate: Gate, operation: str, granted: bool, reply: bool, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(gate.path, daemon.socket)
    pair.register()
    pair.publish(1)
    pair.prepare(granted=granted)
    stop = gate.stop_at(operation, reply=reply)
    publishing = Background(lambda: pair.publish(2))
    stop.wait()
    restart(daemon)
    sealed = operation in ("write.seal", "write.publish") and reply
    assert daemon.ask("versions", job=None)["versions"][0]["step"] == (2 if sealed else 1)
    stop.release(drop=True)
    publishing.result()
    steps = [version["step"] for version in daemon.ask("versions", job=None)["versions"]]
    assert steps == [2, 1], "one version, not two: the lost reply's request was repeated"
    assert pair.reader.update().step == 2
    assert pair.values() == {2.0}
    pair.publish(3)
    assert pair.reader.update().step == 3
    assert pair.values() == {3.0}
    check_nothing_orphaned(daemon)


@SIDES
def test_daemon_killed_while_a_slot_is_granted_ahead(
    daemon: Daemon, gate: Gate, reply: bool, make_pair: Callable[..., Pair]
) -> None:
    """Which is asked for where none was free when the last one was sealed."""
    pair = make_pair(gate.path, daemon.socket)
    pair.register()
    pair.publish(1)
    staged = pair.reader.stage()
    pair.publish(2)
    stop = gate.stop_at("write.slot", reply=reply)
    pair.publish(3)
    if reply:
        pair.reader.release(staged)
    stop.wait()
    publishing = Background(lambda: pair.publish(4))
    restart(daemon)
    stop.release(drop=True)
    publishing.result()
    assert pair.reader.update().step == 4
    assert pair.values() == {4.0}
    pair.publish(5)
    assert pair.reader.update().step == 5
    assert pair.values() == {5.0}
    check_nothing_orphaned(daemon)


def test_daemon_killed_between_two_publications_of_granted_slots(
    daemon: Daemon, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(daemon.socket, daemon.socket)
    pair.register()
    for step in range(1, 9):
        pair.publish(step)
        if step % 2:
            restart(daemon)
        assert pair.reader.update().step == step
        assert pair.values() == {float(step)}
    check_nothing_orphaned(daemon)


@SIDES
@pytest.mark.parametrize("operation", ["write.register", "write.ready", "write.reserve", "segment.open"])
def test_daemon_killed_while_a_writer_registers(
    daemon: Daemon, gate: Gate, operation: str, reply: bool, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(gate.path, daemon.socket)
    stop = gate.stop_at(operation, reply=reply)
    registering = Background(pair.register)
    stop.wait()
    restart(daemon)
    stop.release(drop=True)
    registering.result()
    pair.publish(1)
    assert pair.reader.update().step == 1
    assert pair.values() == {1.0}
    check_nothing_orphaned(daemon)


@SIDES
@pytest.mark.parametrize("operation", ["read.resolve", "segment.open", "read.confirm", "read.sources", "read.register"])
def test_daemon_killed_while_a_reader_updates(
    daemon: Daemon, gate: Gate, operation: str, reply: bool, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(daemon.socket, gate.path)
    stop = gate.stop_at(operation, reply=reply)

    def from_the_start() -> UpdateResult:
        pair.register()
        pair.publish(1)
        return pair.reader.update()

    updating = Background(from_the_start)
    stop.wait()
    restart(daemon)
    stop.release(drop=True)
    result = updating.result()
    assert (result.step, pair.reader.state, pair.reader.version) == (1, "ready", (1, 1))
    assert pair.values() == {1.0}
    pair.publish(2)
    assert pair.reader.update().step == 2
    assert pair.values() == {2.0}
    check_nothing_orphaned(daemon)


def test_daemon_killed_while_a_reader_waits(daemon: Daemon, gate: Gate, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(daemon.socket, gate.path)
    pair.register()
    pair.publish(1)
    stop = gate.stop_at("read.wait", reply=False)
    waiting = Background(lambda: pair.reader.wait(2))
    stop.wait()
    stop.release()
    restart(daemon)
    pair.publish(2)
    assert waiting.result() == (1, 2)


def test_daemon_killed_while_a_rank_waits_for_the_commit(
    daemon: Daemon, gate: Gate, make_writers: Callable[..., list[WeightWriter]]
) -> None:
    """The other rank had not sealed: the attempt is lost, told as such, and the step is free for all ranks."""
    weights = [torch.zeros(9), torch.zeros(9)]
    writers = make_writers([gate.path] * 2, weights)
    first = writers[0].publish(1)
    stop = gate.stop_at("write.committed", reply=False)
    waiting = Background(lambda: first.committed(20))
    stop.wait()
    stop.release()
    restart(daemon)
    with pytest.raises(VersionConflict, match="publish it again"):
        waiting.result()
    publish_all(writers, 1)
    assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [1]
    check_nothing_orphaned(daemon)


@GRANTED
def test_case_17_seal_sent_to_a_stopped_daemon_that_is_then_killed(
    daemon: Daemon, gate: Gate, granted: bool, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(gate.path, daemon.socket)
    pair.register()
    pair.publish(1)
    pair.prepare(granted=granted)
    stop = gate.stop_at("write.publish" if granted else "write.seal", reply=False)
    publishing = Background(lambda: pair.publish(2))
    stop.wait()
    os.kill(daemon.pid, signal.SIGSTOP)
    stop.release()
    restart(daemon)
    publishing.result()
    assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [2, 1]
    assert pair.reader.update().step == 2
    assert pair.values() == {2.0}
    check_nothing_orphaned(daemon)


@GRANTED
def test_case_17_reply_to_a_seal_is_lost_and_the_client_repeats_it(
    daemon: Daemon, gate: Gate, granted: bool, make_pair: Callable[..., Pair]
) -> None:
    """The connection breaks, the daemon lives."""
    pair = make_pair(gate.path, daemon.socket)
    pair.register()
    pair.publish(1)
    pair.prepare(granted=granted)
    stop = gate.stop_at("write.publish" if granted else "write.seal", reply=True)
    publishing = Background(lambda: pair.publish(2))
    stop.wait()
    pair.writer._connection._sock.shutdown(2)
    stop.release(drop=True)
    publishing.result()
    assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [2, 1]
    pair.publish(3)
    assert pair.reader.update().step == 3
    assert pair.values() == {3.0}


def test_publication_that_never_reached_the_daemon_is_written_again(
    daemon: Daemon, gate: Gate, make_pair: Callable[..., Pair]
) -> None:
    """The connection breaks with the message on it, the daemon lives: the slot went with the session."""
    pair = make_pair(gate.path, daemon.socket)
    pair.register()
    pair.publish(1)
    pair.prepare(granted=True)
    stop = gate.stop_at("write.publish", reply=False)
    publishing = Background(lambda: pair.publish(2))
    stop.wait()
    pair.writer._connection._sock.shutdown(2)
    stop.release(drop=True)
    publishing.result()
    assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [2, 1]
    assert pair.reader.update().step == 2
    assert pair.values() == {2.0}


def test_reply_to_a_publication_is_lost_and_another_rank_aborts_it_meanwhile(
    daemon: Daemon, gate: Gate, make_writers: Callable[..., list[WeightWriter]]
) -> None:
    """Rank 0 has sealed step 2 but does not know; its bytes must not meet what rank 1 publishes after its abort."""
    weights = [torch.ones(9), torch.ones(9)]
    writers = make_writers([gate.path, daemon.socket], weights)
    publish_all(writers, 1)
    await_granted(writers[0])
    stop = gate.stop_at("write.publish", reply=True)
    publishing = Background(lambda: writers[0].publish(2))
    stop.wait()
    with pytest.raises(ZeroDivisionError), writers[1].begin(2):
        raise ZeroDivisionError
    writers[0]._connection._sock.shutdown(2)
    stop.release(drop=True)
    with pytest.raises(VersionConflict, match="rank 1 aborted"):
        publishing.result()
    publish_all(writers, 2)


def test_case_68_abort_by_another_rank_is_told_and_never_mixed(
    daemon: Daemon, gate: Gate, make_writers: Callable[..., list[WeightWriter]]
) -> None:
    """Rank 0 is about to seal step 5 when rank 1 aborts it; both then publish step 5 anew."""
    weights = [torch.zeros(9), torch.zeros(9)]
    writers = make_writers([gate.path, daemon.socket], weights)
    for tensor in weights:
        tensor.fill_(1)
    stop = gate.stop_at("write.seal", reply=False)
    sealing = Background(lambda: writers[0].publish(5))
    with pytest.raises(ZeroDivisionError), writers[1].begin(5):  # noqa: PT012 - the block is what is tested
        stop.wait()
        raise ZeroDivisionError
    stop.release()
    with pytest.raises(VersionConflict, match="rank 1 aborted"):
        sealing.result()
    for tensor in weights:
        tensor.fill_(2)
    publish_all(writers, 5)
    into = {f"w{rank}": torch.zeros(9) for rank in range(2)}
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        reader.register(into)
        reader.update()
    assert {value for tensor in into.values() for value in tensor.tolist()} == {2.0}


def test_case_68_sealed_rank_learns_of_a_later_abort(
    daemon: Daemon, make_writers: Callable[..., list[WeightWriter]]
) -> None:
    weights = [torch.ones(9), torch.ones(9)]
    writers = make_writers([daemon.socket] * 2, weights)
    sealed = writers[0].publish(5)
    with pytest.raises(ZeroDivisionError), writers[1].begin(5):
        raise ZeroDivisionError
    with pytest.raises(VersionConflict, match="rank 1 aborted"):
        sealed.committed(20)
    publish_all(writers, 5)
    with pytest.raises(VersionConflict):
        sealed.committed(20)


def test_daemon_gone_for_good_is_told_within_a_bounded_time(daemon: Daemon, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(daemon.socket, daemon.socket)
    pair.register()
    pair.publish(1)
    pair.reader.update()
    daemon.kill()
    updating = Background(lambda: pair.reader.update(timeout=0.5))
    with pytest.raises(DaemonUnavailable):
        updating.result()
    with pytest.raises(DaemonUnavailable):
        pair.writer.publish(2, timeout=0.5)
    assert (pair.reader.state, pair.reader.version, pair.values()) == ("ready", (1, 1), {1.0})
    daemon.start()
    pair.publish(2)
    assert pair.reader.update().step == 2
