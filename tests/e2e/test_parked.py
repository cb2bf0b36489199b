"""What was put aside outlives its process and the daemon, whenever either is killed; half a parcel leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from awexd_client import DeadlineExceeded, WeightWriter, WorkerWeightsReader
from tests.attacks.raw import Raw, until
from tests.daemons import Daemon
from tests.e2e.clients import Background, restart
from tests.e2e.workers.gate import Gate
from tests.e2e.workers.processes import Process

PATIENCE = 60.0

OPEN = """
state = {{"m": torch.full((50_000,), {value}.), "v": torch.arange(9.)}}
weights = {{"a": torch.full((50_000,), {value}.), "b": torch.full((7,), {value}., dtype=torch.bfloat16)}}
weights["tied"] = weights["a"]
writer = WeightWriter("grpo", 0, 1, {socket!r}, epoch={epoch!r})
writer.register(weights{cast})
"""
EMPTY = "assert not any(t.untyped_storage().nbytes() for t in (*state.values(), *weights.values()))"
WHOLE = """
assert bool((state["m"] == {value}).all()) and bool((state["v"] == torch.arange(9.)).all())
assert all(bool((t == {value}).all()) for t in weights.values())
"""


@pytest.fixture
def gate(folder: Path, daemon: Daemon) -> Iterator[Gate]:
    with Gate(str(folder / "gate"), daemon.socket) as opened:
        yield opened


@pytest.fixture(
    params=["", ', dtype={"a": torch.bfloat16}', ', dtype={"a": torch.bfloat16, "tied": torch.bfloat16}'],
    ids=["pinned", "tied", "parked"],
)
def put_aside(daemon: Daemon, fork: Callable[[], Process], request: pytest.FixtureRequest) -> Process:
    """A trainer that has parked its optimizer's state and offloaded its weights, into a version or a parcel too."""
    trainer = fork()
    trainer.do(OPEN.format(value=5, socket=daemon.socket, epoch="continue", cast=request.param))
    trainer.do("writer.publish(1).committed()")
    trainer.do("writer.park('optimizer', state)")
    trainer.do("writer.offload()")
    trainer.do(EMPTY)
    return trainer


def replace(daemon: Daemon, fork: Callable[[], Process], request: pytest.FixtureRequest, epoch: str) -> Process:
    cast = str(request.node.callspec.params["put_aside"])
    trainer = fork()
    trainer.do(OPEN.format(value=0, socket=daemon.socket, epoch=epoch, cast=cast))
    return trainer


@pytest.mark.parametrize("epoch", ["continue", "new"])
@pytest.mark.parametrize("killed_too", [False, True])
def test_trainer_killed_and_the_next_one_takes_it_back(
    daemon: Daemon,
    fork: Callable[[], Process],
    put_aside: Process,
    request: pytest.FixtureRequest,
    killed_too: bool,
    epoch: str,
) -> None:
    put_aside.kill()
    if killed_too:
        restart(daemon)
    again = replace(daemon, fork, request, epoch)
    again.do("writer.restore('optimizer', state)")
    again.do("writer.restore()")
    again.do(WHOLE.format(value=5))
    status = daemon.ask("status")["jobs"][0]
    assert (status["pinned"], [p for p in status["parked"] if p["state"] == "pinned"]) == ([], [])
    again.do("writer.publish(2).committed()")
    again.do("writer.offload(); writer.restore()")
    again.do(WHOLE.format(value=5))


@pytest.mark.parametrize("way", ["killed", "ended"])
def test_daemon_restarted_and_the_trainer_goes_on(daemon: Daemon, put_aside: Process, way: str) -> None:
    daemon.kill() if way == "killed" else daemon.terminate()
    daemon.start()
    put_aside.do("writer.restore('optimizer')")
    put_aside.do("writer.restore()")
    put_aside.do(WHOLE.format(value=5))
    put_aside.do("writer.park('optimizer', state); writer.offload()")
    put_aside.do(EMPTY)
    put_aside.do("writer.restore(); writer.restore('optimizer')")
    put_aside.do(WHOLE.format(value=5))


def test_daemon_restarted_twice_while_it_is_put_aside(daemon: Daemon, put_aside: Process) -> None:
    restart(daemon)
    restart(daemon)
    put_aside.do("writer.restore(); writer.restore('optimizer')")
    put_aside.do(WHOLE.format(value=5))


def test_trainer_killed_while_it_parks_leaves_nothing(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.call("park.begin", job="j", rank=0, name="optimizer", nbytes=1 << 20)
        assert len(daemon.segments()) == 1
        with Raw(daemon.socket) as other:
            error = other.refused("park.begin", job="j", rank=0, name="optimizer", nbytes=1 << 20)
            assert "is parking 'optimizer'" in str(error)
    until(daemon.socket, lambda status: status["jobs"] == [])
    daemon.await_segments(0)


def test_daemon_killed_while_a_trainer_parks_leaves_nothing(daemon: Daemon) -> None:
    with Raw(daemon.socket) as raw:
        raw.call("park.begin", job="j", rank=0, name="optimizer", nbytes=1 << 20)
        restart(daemon)
        assert daemon.segments() == []


SIDES = pytest.mark.parametrize("reply", [False, True], ids=["before", "after"])


@SIDES
@pytest.mark.parametrize("operation", ["park.begin", "park.open", "park.seal"])
def test_daemon_killed_between_any_two_messages_of_a_park(
    daemon: Daemon, gate: Gate, operation: str, reply: bool
) -> None:
    tensors = [torch.arange(50_000.0), torch.ones(3)]
    with WeightWriter("grpo", 0, 1, gate.path) as writer:
        stop = gate.stop_at(operation, reply=reply)
        parking = Background(lambda: writer.park("optimizer", tensors, PATIENCE))
        stop.wait()
        restart(daemon)
        stop.release(drop=True)
        parking.result()
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
        assert len(daemon.segments()) == 1
        writer.restore("optimizer", keep=False)
        assert torch.equal(tensors[0], torch.arange(50_000.0))
        assert daemon.segments() == []


@SIDES
def test_daemon_killed_while_a_restore_is_told(daemon: Daemon, gate: Gate, reply: bool) -> None:
    tensors = [torch.arange(50_000.0)]
    with WeightWriter("grpo", 0, 1, gate.path) as writer:
        writer.park("optimizer", tensors)
        stop = gate.stop_at("park.drop", reply=reply)
        restoring = Background(lambda: writer.restore("optimizer"))
        stop.wait()
        restart(daemon)
        stop.release(drop=True)
        restoring.result()
        assert torch.equal(tensors[0], torch.arange(50_000.0))
        assert daemon.segments() == []
        writer.park("optimizer", tensors)
        writer.restore("optimizer")


@SIDES
@pytest.mark.parametrize("operation", ["park.pin", "read.sources", "park.unpin"])
def test_daemon_killed_between_any_two_messages_of_an_offload(
    daemon: Daemon, gate: Gate, operation: str, reply: bool
) -> None:
    live = {"a": torch.full((50_000,), 3.0), "b": torch.ones(4)}
    with WeightWriter("grpo", 0, 1, gate.path) as writer:
        writer.register(live)
        writer.publish(1).committed()
        stop = gate.stop_at(operation, reply=reply)

        def there_and_back() -> None:
            writer.offload(PATIENCE)
            writer.restore(timeout=PATIENCE)

        moving = Background(there_and_back)
        stop.wait()
        restart(daemon)
        stop.release(drop=True)
        moving.result()
        assert bool((live["a"] == 3).all())
        assert daemon.ask("status")["jobs"][0]["pinned"] == []


def test_failed_park_gives_everything_back(daemon: Daemon, gate: Gate) -> None:
    tensors = [torch.arange(50_000.0)]
    with WeightWriter("grpo", 0, 1, gate.path) as writer:
        stop = gate.stop_at("park.seal", reply=False)
        parking = Background(lambda: writer.park("optimizer", tensors, 0.5))
        stop.wait()
        with pytest.raises(DeadlineExceeded):
            parking.result()
        assert torch.equal(tensors[0], torch.arange(50_000.0))
        stop.release(drop=True)
        daemon.await_segments(0)


def test_what_is_parked_and_an_update_move_at_the_same_time(daemon: Daemon, gate: Gate) -> None:
    """The daemon serves an engine while a park is in the middle of its copy."""
    live, into = {"w": torch.full((1000,), 2.0)}, {"w": torch.zeros(1000)}
    state = [torch.ones(100_000)]
    with (
        WeightWriter("grpo", 0, 1, gate.path) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        writer.publish(1).committed()
        reader.register(into)
        stop = gate.stop_at("park.seal", reply=False)
        parking = Background(lambda: writer.park("optimizer", state, PATIENCE))
        stop.wait()
        assert reader.update().step == 1
        assert bool((into["w"] == 2).all())
        stop.release()
        parking.result()
        writer.restore("optimizer")
