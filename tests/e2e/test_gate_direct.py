"""Lent weights: the daemon or the other side killed, or the connection lost, between any two messages of a client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.clients import restart
from tests.e2e.direct_node import CAPTURED, CREW, PUBLISH, UPDATE, Fork, Node, expected
from tests.e2e.workers.gate import Gate, Stop
from tests.e2e.workers.processes import Process, RemoteError

SIDES = pytest.mark.parametrize("reply", [False, True], ids=["before", "after"])
BROKEN = pytest.mark.parametrize("fault", ["killed", "cut"])
"""The daemon is killed and another one started; or it lives, and only the connection is lost."""

CLOSED = """
import time
end = time.monotonic() + 20
while gpu.opened and time.monotonic() < end: time.sleep(0.01)
result = len(gpu.opened)
"""
LEAVE = "phase.__exit__(None, None, None)"
STANDS = "result = [reader.state, reader.version and list(reader.version), into['a'].tolist(), into['b'].tolist()]"


@pytest.fixture
def node(daemon: Daemon, fork: Fork, tmp_path: Path) -> Node:
    return Node(daemon, fork, tmp_path)


@pytest.fixture
def virtual(node: Node) -> Node:
    """The trainer's memory has no handle: its descriptors are asked for and given."""
    node.driver = "VirtualMemoryDriver"
    return node


@pytest.fixture
def gate(folder: Path, daemon: Daemon) -> Iterator[Gate]:
    with Gate(str(folder / "gate"), daemon.socket) as opened:
        yield opened


def break_off(fault: str, daemon: Daemon, gate: Gate, stop: Stop) -> None:
    """What was held is lost."""
    stop.wait()
    if fault == "killed":
        restart(daemon)
    else:
        gate.cut()
    stop.release(drop=True)


def hand_over(trainer: Process, engine: Process, step: int, times: int, rows: int = 4) -> None:
    """One more step, from its publication to its end; ``times``: the trainer has added so often by then."""
    engine.start(UPDATE.format(step))
    assert trainer.do(PUBLISH.format(step)) == ["direct", ""]
    assert engine.finish() == [step, "direct", "cuda_ipc", 'mode="direct"', expected(times, rows)]
    trainer.do(CAPTURED)


def check_nothing_left(node: Node, *processes: Process) -> None:
    """Once they have ended, nothing of what was lent or handed over is left in the daemon."""
    for process in processes:
        process.kill()
    until(node.daemon.socket, lambda status: status["sessions"] == 1)
    for job in node.daemon.ask("status")["jobs"]:
        assert (job["borrowed"], job["open"]) == ([], [])
    until(node.daemon.socket, lambda _: not lent_descriptors(node.daemon))


def lent_descriptors(daemon: Daemon) -> list[str]:
    """Memory of others that the daemon has open: descriptions, and chunks on their way."""
    folder, found = f"/proc/{daemon.pid}/fd", []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:  # the connection that asks
            continue
    return [target for target in found if "memfd:" in target]


# the trainer's messages


@SIDES
@pytest.mark.parametrize("operation", ["write.lend", "write.borrow", "write.affirm"])
@pytest.mark.parametrize("waits", [True, False], ids=["waited-for", "idle"])
def test_broken_off_while_a_version_is_lent(node: Node, gate: Gate, operation: str, reply: bool, waits: bool) -> None:
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    stop = gate.stop_at(operation, reply=reply)
    if waits:
        engine.start(UPDATE.format(1))
    trainer.start(PUBLISH.format(1))
    break_off("killed", node.daemon, gate, stop)
    assert trainer.finish() == ["direct", ""]
    if not waits:
        engine.start(UPDATE.format(1))
    assert engine.finish() == [1, "direct", "cuda_ipc", 'mode="direct"', expected(1, 4)]
    trainer.do(CAPTURED)
    assert node.job()["borrowed"] == []
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
def test_broken_off_while_it_is_chosen_how_a_version_goes(node: Node, gate: Gate, reply: bool) -> None:
    trainer, engine = node.trainer(mode="auto", socket=gate.path), node.engine()
    engine.start(UPDATE.format(1))
    node.await_engine_waits()
    stop = gate.stop_at("write.choose", reply=reply)
    trainer.start(PUBLISH.format(1))
    break_off("killed", node.daemon, gate, stop)
    mode, reason = trainer.finish()
    # a daemon that has just begun may not know yet who waits
    assert (mode == "direct") == (reason == "")
    assert engine.finish()[:2] == [1, mode]
    trainer.do(CAPTURED)
    engine.start(UPDATE.format(2))
    node.await_engine_waits()
    assert trainer.do(PUBLISH.format(2)) == ["direct", ""]
    assert engine.finish()[-1] == expected(2, 4)
    trainer.do(CAPTURED)
    check_nothing_left(node, trainer, engine)


@SIDES
@pytest.mark.parametrize("updated", [True, False], ids=["had", "not-had"])
def test_broken_off_while_its_end_is_waited_for(node: Node, gate: Gate, reply: bool, updated: bool) -> None:
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    trainer.do(PUBLISH.format(1))
    stop = gate.stop_at("write.captured", reply=reply)
    if updated or reply:
        engine.do(UPDATE.format(1))
    trainer.start(CAPTURED)
    break_off("killed", node.daemon, gate, stop)
    if not (updated or reply):
        assert engine.do(UPDATE.format(1))[-1] == expected(1, 4)
    trainer.finish()
    assert node.job()["borrowed"] == []
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
@pytest.mark.parametrize("staged", [True, False], ids=["being-read", "unread"])
def test_broken_off_while_it_is_withdrawn(node: Node, gate: Gate, reply: bool, staged: bool) -> None:
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    trainer.do(PUBLISH.format(1))
    if staged:
        engine.do("staged = reader.stage(timeout=20)")
    stop = gate.stop_at("write.captured", reply=reply)
    trainer.start("publication.withdraw(timeout=20)")
    if staged and reply:
        engine.do("reader.release(staged)")  # it is answered when nobody reads any more
    break_off("killed", node.daemon, gate, stop)
    if staged and not reply:
        with pytest.raises(RemoteError, match=r"taken back|went with its connection"):
            engine.do("reader.apply(staged, timeout=20)")
    trainer.finish()
    assert engine.do(STANDS)[:2] == ["empty", None]
    assert node.job()["borrowed"] == []
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
def test_broken_off_while_the_memory_is_taken_back(node: Node, gate: Gate, reply: bool) -> None:
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    hand_over(trainer, engine, 1, 1)
    stop = gate.stop_at("write.revoke", reply=reply)
    trainer.start("other = torch.arange(5.0); writer.park('optimizer', {'m': other}, timeout=20)")
    break_off("killed", node.daemon, gate, stop)
    trainer.finish()
    assert engine.do(CLOSED) == 0, "what may be freed now is open no more"
    trainer.do("writer.restore('optimizer'); assert other.tolist() == [0, 1, 2, 3, 4]")
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
@pytest.mark.parametrize("operation", ["write.asked", "write.give"])
def test_broken_off_while_the_trainer_hands_its_memory_over(
    virtual: Node, gate: Gate, operation: str, reply: bool
) -> None:
    trainer, engine = virtual.trainer(rows=1000, socket=gate.path), virtual.engine(rows=1000)
    stop = gate.stop_at(operation, reply=reply)
    engine.start(UPDATE.format(1))
    trainer.start(PUBLISH.format(1) + f"\n{CAPTURED}")
    break_off("killed", virtual.daemon, gate, stop)
    assert engine.finish() == [1, "direct", "cuda_ipc", 'mode="direct"', expected(1, 1000)]
    trainer.finish()
    hand_over(trainer, engine, 2, 2, rows=1000)
    check_nothing_left(virtual, trainer, engine)


LENDING = ["write.lend", "write.borrow", "write.affirm", "write.captured", "write.asked", "write.give"]


@SIDES
@pytest.mark.parametrize("operation", LENDING)
@pytest.mark.parametrize("waits", [True, False], ids=["waited-for", "idle"])
def test_trainer_that_loses_its_connection_is_told_what_went_with_it(
    virtual: Node, gate: Gate, operation: str, reply: bool, waits: bool
) -> None:
    """Its version went with the session, unless it had not begun or is over: it succeeds or is told, and so are all."""
    trainer, engine = virtual.trainer(rows=1000, socket=gate.path), virtual.engine(rows=1000)
    stop = gate.stop_at(operation, reply=reply)
    waits = waits or operation in ("write.asked", "write.give") or (operation, reply) == ("write.captured", True)
    if waits:
        engine.start(UPDATE.format(1))
    trainer.start(PUBLISH.format(1) + f"\n{CAPTURED}")
    break_off("cut", virtual.daemon, gate, stop)
    if not waits:
        engine.start(UPDATE.format(1))
    told = []
    for process in (engine, trainer):
        try:
            process.finish()
        except RemoteError as error:
            told.append(error.kind)
    stands = engine.do(STANDS)
    if told:
        assert set(told) <= {"VersionConflict", "VersionUnavailable", "TakenBack"}
    else:
        assert stands[:3] == ["ready", [1, 1], expected(1, 1000)]
    assert stands[0] != "ready" or stands[2] == expected(1, 1000), "never a part"
    hand_over(trainer, engine, 2, 2, rows=1000)
    check_nothing_left(virtual, trainer, engine)


# the engine's messages

READER = ["read.resolve", "read.sources", "segment.open", "read.confirm"]


@SIDES
@BROKEN
@pytest.mark.parametrize("operation", READER)
def test_broken_off_while_an_engine_updates(node: Node, gate: Gate, operation: str, reply: bool, fault: str) -> None:
    engine, trainer = node.engine(socket=gate.path), node.trainer()
    trainer.do(PUBLISH.format(1))
    stop = gate.stop_at(operation, reply=reply)
    engine.start(UPDATE.format(None))
    break_off(fault, node.daemon, gate, stop)
    trainer.start(CAPTURED)
    assert engine.finish() == [1, "direct", "cuda_ipc", 'mode="direct"', expected(1, 4)]
    trainer.finish()
    assert engine.do(STANDS)[:2] == ["ready", [1, 1]]
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
@BROKEN
def test_broken_off_while_an_engine_asks_for_chunks(virtual: Node, gate: Gate, reply: bool, fault: str) -> None:
    trainer, engine = virtual.trainer(rows=1000), virtual.engine(rows=1000, socket=gate.path)
    trainer.do(PUBLISH.format(1))
    stop = gate.stop_at("segment.chunks", reply=reply)
    engine.start(UPDATE.format(None))
    break_off(fault, virtual.daemon, gate, stop)
    trainer.start(CAPTURED)
    assert engine.finish() == [1, "direct", "cuda_ipc", 'mode="direct"', expected(1, 1000)]
    trainer.finish()
    hand_over(trainer, engine, 2, 2, rows=1000)
    check_nothing_left(virtual, trainer, engine)


@SIDES
@BROKEN
@pytest.mark.parametrize("operation", ["segment.dropped", "segment.closed"])
def test_broken_off_while_an_engine_closes_what_is_wanted_back(
    node: Node, gate: Gate, operation: str, reply: bool, fault: str
) -> None:
    trainer, engine = node.trainer(), node.engine(socket=gate.path)
    stop = gate.stop_at(operation, reply=reply)
    park = "other = torch.arange(5.0); writer.park('optimizer', {'m': other}, timeout=20)"
    if (operation, reply) == ("segment.dropped", False):  # asked from its first borrowed version on
        trainer.do(PUBLISH.format(1))
        engine.do(UPDATE.format(1))
        trainer.start(f"{CAPTURED}\n{park}")
    else:
        hand_over(trainer, engine, 1, 1)
        trainer.start(park)
    break_off(fault, node.daemon, gate, stop)
    trainer.finish()
    assert engine.do(CLOSED) == 0
    trainer.do("writer.restore('optimizer')")
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
@BROKEN
def test_broken_off_while_an_engine_gives_an_update_up(node: Node, gate: Gate, reply: bool, fault: str) -> None:
    """It tells the daemon with ``read.release`` that its copy was touched; the answer is nobody's concern."""
    trainer, engine = node.trainer(), node.engine(socket=gate.path)
    trainer.do(PUBLISH.format(1) + "; live['a'][1, 2] += 1")
    stop = gate.stop_at("read.release", reply=reply)
    engine.start(UPDATE.format(1))
    break_off(fault, node.daemon, gate, stop)
    with pytest.raises(RemoteError, match="the bytes that are held are not those that rank 0 wrote"):
        engine.finish()
    assert engine.do(STANDS)[:2] == ["dirty", None]
    trainer.do("live['a'][1, 2] -= 1")
    trainer.start(CAPTURED)
    assert engine.do(UPDATE.format(1))[-1] == expected(1, 4)
    trainer.finish()
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


@SIDES
@BROKEN
def test_broken_off_while_whoever_drives_an_engine_waits(node: Node, gate: Gate, reply: bool, fault: str) -> None:
    trainer, engine = node.trainer(), node.engine()
    engine.do(f"socket = {gate.path!r}" + CREW)
    stop = gate.stop_at("read.await", reply=reply)
    engine.start("result = told(instance.update(1, timeout=20))")
    trainer.start(PUBLISH.format(1) + f"\n{CAPTURED}")
    break_off(fault, node.daemon, gate, stop)
    assert engine.finish() == [1, "direct", "cuda_ipc", 'mode="direct"', expected(1, 4)]
    trainer.finish()
    hand_over(trainer, engine, 2, 2)
    check_nothing_left(node, trainer, engine)


# taking turns


@SIDES
@pytest.mark.parametrize("operation", ["phase.enter", "phase.leave"])
@pytest.mark.parametrize("fault", ["killed", "cut"])
def test_broken_off_while_a_phase_is_entered_or_left(
    node: Node, gate: Gate, operation: str, reply: bool, fault: str
) -> None:
    """No two phases at a time, and whoever waits comes in."""
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    stop = gate.stop_at(operation, reply=reply)
    trainer.start("phase = writer.phase('train', gpus=['GPU-0']); phase.__enter__(); say('in'); hear(); " + LEAVE)
    if operation == "phase.enter":
        break_off(fault, node.daemon, gate, stop)
    assert trainer.finish() == "in"
    engine.start("phase = reader.phase('rollout', gpus=['GPU-0'])\nwith phase: say('in')")
    until(node.daemon.socket, lambda status: [len(gpu["waiting"]) for gpu in status["phases"]] == [1])
    trainer.tell("leave")
    if operation == "phase.leave":
        break_off(fault, node.daemon, gate, stop)
    trainer.finish()
    assert engine.finish() == "in"
    engine.finish()
    until(node.daemon.socket, lambda status: status["phases"] == [])
    hand_over(trainer, engine, 1, 1)
    check_nothing_left(node, trainer, engine)


# the other side's death


@SIDES
@pytest.mark.parametrize("operation", ["read.resolve", "segment.open", "read.confirm"])
def test_trainer_killed_between_two_messages_of_an_update(node: Node, gate: Gate, operation: str, reply: bool) -> None:
    trainer, engine = node.trainer(), node.engine(socket=gate.path)
    trainer.do(PUBLISH.format(1))
    stop = gate.stop_at(operation, reply=reply)
    engine.start(UPDATE.format(None))
    stop.wait()
    trainer.kill()
    until(node.daemon.socket, lambda status: status["jobs"][0]["writers"] == [])
    stop.release()
    heir = node.trainer()
    heir.do(PUBLISH.format(2))
    step, *_, values = engine.finish()
    assert step in (1, 2)
    assert values == expected(1, 4), "of the one or of the other, each of which had added once"
    assert engine.do(STANDS)[:2] == ["ready", [1, step]]
    if step == 1:
        engine.do(UPDATE.format(2))
    heir.do(CAPTURED)
    hand_over(heir, engine, 3, 2)
    check_nothing_left(node, heir, engine)


@SIDES
def test_trainer_killed_while_an_engine_asks_for_chunks(virtual: Node, gate: Gate, reply: bool) -> None:
    trainer, engine = virtual.trainer(rows=1000), virtual.engine(rows=1000, socket=gate.path)
    trainer.do(PUBLISH.format(1))
    stop = gate.stop_at("segment.chunks", reply=reply)
    engine.start(UPDATE.format(None))
    stop.wait()
    trainer.kill()
    until(virtual.daemon.socket, lambda status: status["jobs"][0]["writers"] == [])
    stop.release()
    heir = virtual.trainer(rows=1000)
    heir.do(PUBLISH.format(2))
    assert engine.finish()[::4] == [2, expected(1, 1000)]
    heir.do(CAPTURED)
    hand_over(heir, engine, 3, 2, rows=1000)
    check_nothing_left(virtual, heir, engine)


@SIDES
@pytest.mark.parametrize("operation", ["write.borrow", "write.affirm", "write.captured", "write.revoke"])
def test_engine_killed_between_two_messages_of_the_trainer(node: Node, gate: Gate, operation: str, reply: bool) -> None:
    trainer, engine = node.trainer(socket=gate.path), node.engine()
    hand_over(trainer, engine, 1, 1)
    engine.start(UPDATE.format(2))
    node.await_engine_waits()
    stop = gate.stop_at(operation, reply=reply)
    trainer.start(PUBLISH.format(2) + f"\n{CAPTURED}\nother = torch.ones(3); writer.park('m', [other], timeout=20)")
    stop.wait()
    engine.kill()
    until(node.daemon.socket, lambda status: status["jobs"][0]["engines"] == [])
    heir = node.engine()
    stop.release()
    if operation != "write.revoke" and (operation, reply) != ("write.captured", True):
        assert heir.do(UPDATE.format(2))[-1] == expected(2, 4)
    trainer.finish()
    trainer.do("writer.restore('m')")
    hand_over(trainer, heir, 3, 3)
    check_nothing_left(node, trainer, heir)


@SIDES
@pytest.mark.parametrize("operation", ["write.asked", "write.give"])
def test_engine_killed_while_the_trainer_hands_its_memory_over(
    virtual: Node, gate: Gate, operation: str, reply: bool
) -> None:
    """The daemon closes what was given and nobody takes."""
    trainer, engine = virtual.trainer(rows=1000, socket=gate.path), virtual.engine(rows=1000)
    stop = gate.stop_at(operation, reply=reply)
    engine.start(UPDATE.format(1))
    trainer.start(PUBLISH.format(1))
    stop.wait()
    engine.kill()
    until(virtual.daemon.socket, lambda status: status["jobs"][0]["engines"] == [])
    heir = virtual.engine(rows=1000)
    stop.release()
    trainer.finish()
    assert heir.do(UPDATE.format(1))[-1] == expected(1, 1000)
    trainer.do(CAPTURED)
    hand_over(trainer, heir, 2, 2, rows=1000)
    check_nothing_left(virtual, trainer, heir)


def test_waits_of_both_sides_end_with_an_error_that_names_whom(virtual: Node) -> None:
    """The trainer stands still while a reader asks it for its memory."""
    trainer, engine = virtual.trainer(rows=1000), virtual.engine(rows=1000)
    trainer.do(PUBLISH.format(1))
    trainer.stop()
    engine.start("result = told(reader.update(timeout=1))")
    with pytest.raises(RemoteError, match="rank 0 to hand over its GPU memory") as caught:
        engine.finish()
    assert caught.value.kind == "DeadlineExceeded"
    assert engine.do(STANDS)[:2] == ["empty", None]
    trainer.resume()
    with pytest.raises(RemoteError, match=r"rank 0 of engine e .*to update to step 1 of epoch 1") as caught:
        trainer.do("publication.captured(timeout=0.5)")
    assert caught.value.kind == "DeadlineExceeded"
    assert engine.do(UPDATE.format(1))[-1] == expected(1, 1000)
    trainer.do(CAPTURED)
    check_nothing_left(virtual, trainer, engine)
