"""A process that dies, freezes or gives up in the middle of an exchange: the others are freed, and go on."""

from __future__ import annotations

import time

import pytest

from tests.daemons import Daemon
from tests.e2e.clients import restart
from tests.e2e.exchange_node import FAULT, PUBLISH, STANDS, UPDATE, Crew, Fork
from tests.e2e.workers.processes import PATIENCE, Process, RemoteError, together

SIZES = [(1, [1]), (2, [2]), (4, [4]), (3, [2, 1])]
DEADLINE = 4.0


def broken_off(
    crew: Crew, victim: Process, call: str, after: int, number: str, step: int
) -> dict[Process, RemoteError]:
    """A step in which the victim gets that signal at its n-th message; what the others raise."""
    victim.do(FAULT.format(call=call, after=after, signal=number))
    crew.start(step, DEADLINE)
    began = time.monotonic()
    raised = {}
    for process in [*crew.writers, *crew.workers]:
        if process is not victim:
            try:
                process.finish()
            except RemoteError as error:
                raised[process] = error
    assert time.monotonic() - began < PATIENCE / 2
    return raised


@pytest.mark.parametrize(("writers", "engines"), SIZES)
@pytest.mark.parametrize("after", [1, 3])
def test_worker_is_killed(daemon: Daemon, fork: Fork, writers: int, engines: list[int], after: int) -> None:
    crew = Crew(daemon, fork, writers, engines)
    crew.hand_over(1)
    victim = crew.engines["e0"][0]
    raised = broken_off(crew, victim, "receive", after, "SIGKILL", 2)
    survivors = [*crew.writers, *crew.engines["e0"][1:]]
    # Its siblings wait for the one in its place; an engine apart gets the version in an exchange without it.
    assert {*raised} <= {*survivors}
    for worker in {*crew.engines["e0"][1:]} - {*raised}:  # it had all of it by then
        assert worker.do(STANDS.format(step=2)) == ["ready", [1, 2], []]
    for worker in crew.engines.get("e1", []):
        assert worker.do(STANDS.format(step=2)) == ["ready", [1, 2], []]
    size = len(crew.engines["e0"])
    crew.engines["e0"][0] = fork()
    crew.engines["e0"][0].do(crew.reader("e0", 0, size))
    crew.recover(3)
    crew.close()


@pytest.mark.parametrize(("writers", "engines"), SIZES)
@pytest.mark.parametrize("after", [1, 3])
def test_writer_is_killed(daemon: Daemon, fork: Fork, writers: int, engines: list[int], after: int) -> None:
    crew = Crew(daemon, fork, writers, engines)
    crew.hand_over(1)
    raised = broken_off(crew, crew.writers[-1], "send", after, "SIGKILL", 2)
    assert {*raised} == {*crew.writers[:-1], *crew.workers}
    for worker in crew.workers:
        state, version, wrong = worker.do(STANDS.format(step=1))
        assert (state, version) in (("dirty", None), ("ready", [1, 1]))
        assert state == "dirty" or not wrong
    crew.writers[-1] = fork()
    crew.writers[-1].do(crew.writer(writers - 1, writers))
    crew.recover(3)
    crew.close()


@pytest.mark.parametrize(("writers", "engines"), SIZES)
@pytest.mark.parametrize("side", ["writer", "worker"])
def test_process_is_frozen_and_goes_on_later(
    daemon: Daemon, fork: Fork, writers: int, engines: list[int], side: str
) -> None:
    crew = Crew(daemon, fork, writers, engines)
    crew.hand_over(1)
    victim, call = (crew.writers[-1], "send") if side == "writer" else (crew.engines["e0"][0], "receive")
    raised = broken_off(crew, victim, call, 2, "SIGSTOP", 2)
    for worker in {*crew.engines["e0"]} - {*raised, victim}:  # it had all of it by then
        assert worker.do(STANDS.format(step=2)) == ["ready", [1, 2], []]
    for error in raised.values():
        assert error.kind in ("DeadlineExceeded", "TakenBack", "VersionConflict", "VersionUnavailable"), error
    before = [worker.do(STANDS.format(step=2)) for worker in crew.workers if worker is not victim]
    victim.resume()
    with pytest.raises(RemoteError):
        victim.finish()
    # What was frozen in the middle writes to nobody any more.
    assert [worker.do(STANDS.format(step=2)) for worker in crew.workers if worker is not victim] == before
    for writer in crew.writers:
        writer.do("publication.withdraw()")
    crew.recover(3)
    crew.close()


def test_frozen_while_groups_are_connected(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 2, [2])
    raised = broken_off(crew, crew.workers[0], "connect", 1, "SIGSTOP", 1)
    assert {*raised} == {*crew.writers, crew.workers[1]}
    assert crew.workers[1].do("result = [reader.state, reader.version]") == ["empty", None]
    crew.workers[0].resume()
    with pytest.raises(RemoteError):
        crew.workers[0].finish()
    crew.recover(2)
    crew.close()


def test_worker_that_gives_up_frees_the_others(daemon: Daemon, fork: Fork) -> None:
    """The writer is frozen; one worker has a shorter deadline than the other, which is not held up beyond its own."""
    crew = Crew(daemon, fork, 1, [1, 1])
    crew.hand_over(1)
    crew.writers[0].do(FAULT.format(call="send", after=2, signal="SIGSTOP"))
    one, other = crew.workers
    one.start(UPDATE.format(step=2, seconds=2))
    other.start(UPDATE.format(step=2, seconds=5))
    crew.writers[0].start(PUBLISH.format(step=2, seconds=30))
    for worker in (one, other):
        with pytest.raises(RemoteError, match="writer rank 0"):
            worker.finish()
    crew.writers[0].resume()
    together([one, other], [UPDATE.format(step=2, seconds=30)] * 2)
    assert crew.writers[0].finish()[0] == "direct"
    crew.recover(3)
    crew.close()


def test_version_is_withdrawn_in_the_middle(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 1, [1])
    crew.hand_over(1)
    (writer,), (worker,) = crew.writers, crew.workers
    worker.do(FAULT.format(call="receive", after=3, signal="SIGSTOP"))
    worker.start(UPDATE.format(step=2, seconds=30))
    writer.do("rank.fill(2)\npublication = writer.publish(2)")
    worker.await_stop()
    with pytest.raises(RemoteError) as caught:
        writer.do("publication.withdraw(timeout=2)")
    assert caught.value.kind == "DeadlineExceeded"
    worker.resume()
    writer.do("publication.withdraw()\nrank.fill(99)")
    writer.start(PUBLISH.format(step=3, seconds=30))
    with pytest.raises(RemoteError, match="step 2"):
        worker.finish()
    assert worker.do(UPDATE.format(step=3, seconds=30))[:2] == [3, []]
    writer.finish()
    crew.recover(4)
    crew.close()


def test_daemon_is_killed_in_the_middle(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 2, [2])
    crew.hand_over(1)
    victim = crew.workers[1]
    victim.do(FAULT.format(call="receive", after=3, signal="SIGSTOP"))
    crew.start(2)
    victim.await_stop()
    restart(daemon)
    victim.resume()
    other = crew.workers[0]
    assert other.finish()[:4] == [2, [], "nccl", "ready"]
    with pytest.raises(RemoteError, match="step 3"):  # had it all of step 2 by then, its next call is what tells so
        other.do("reader.wait(3, timeout=1)")
    assert victim.finish()[:4] == [2, [], "nccl", "ready"]
    for writer in crew.writers:
        assert writer.finish()[0] == "direct"
    crew.recover(3)
    crew.close()


def test_offload_takes_back_what_is_being_sent(daemon: Daemon, fork: Fork) -> None:
    """Memory that is given back is sent to nobody any more."""
    trainer, engine = fork(), fork()
    given = f'{daemon.socket!r}, transport="nccl", ring_bytes=1536'
    trainer.do(
        "live = {name: torch.full((3000,), 2.0) for name in 'ab'}\n"
        f'writer = WeightWriter("grpo", 0, 1, {given})\nwriter.register(live)'
    )
    engine.do(
        "into = {name: torch.zeros(3000) for name in 'ab'}\n"
        f'reader = WorkerWeightsReader("grpo", "e", 0, 1, {given})\nreader.register(into)'
    )
    engine.do(FAULT.format(call="receive", after=5, signal="SIGSTOP"))
    engine.start("reader.update(2, timeout=20)")
    trainer.do("publication = writer.publish(2)")
    engine.await_stop()
    assert trainer.do("writer.offload()\nresult = live['a'].untyped_storage().nbytes()") == 0
    engine.resume()
    with pytest.raises(RemoteError, match="step 2"):
        engine.finish()
    assert engine.do("result = reader.state") == "dirty"
    trainer.do("writer.restore()\npublication = writer.publish(3)")
    engine.do("reader.update(3, timeout=20)\nassert all((one == 2.0).all() for one in into.values())")
    trainer.do("publication.captured()")
    together([trainer, engine], ["writer.close()", "reader.close()"])
