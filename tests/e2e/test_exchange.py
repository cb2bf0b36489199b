"""Weights sent from trainers to engines, process to process: every sharding, kept groups, and who takes part."""

from __future__ import annotations

import pytest

from tests.daemons import Daemon
from tests.e2e.exchange_node import PUBLISH, STANDS, UPDATE, Crew, Fork
from tests.e2e.workers.processes import RemoteError, together

CREWS = [(1, [1]), (2, [1]), (1, [3]), (3, [2]), (2, [4]), (4, [3]), (4, [4]), (5, [1, 3])]
"""2 to 9 processes."""


@pytest.mark.parametrize(("writers", "engines"), CREWS)
@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_any_number_of_ranks_to_any_other(
    daemon: Daemon, fork: Fork, writers: int, engines: list[int], verify: str
) -> None:
    crew = Crew(daemon, fork, writers, engines, verify=verify)
    made = [crew.hand_over(step) for step in range(1, 5)]
    assert made == [[1] * (writers + sum(engines))] * 4
    crew.close()


@pytest.mark.parametrize("ring", [768, 1 << 16, 1 << 28])
def test_any_ring(daemon: Daemon, fork: Fork, ring: int) -> None:
    crew = Crew(daemon, fork, 2, [3], ring=ring)
    for step in range(1, 4):
        crew.hand_over(step)
    crew.close()


def test_engines_that_come_and_go_have_groups_of_their_own(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 2, [1])
    assert crew.hand_over(1) == [1, 1, 1]
    crew.add("late", 2)
    assert crew.hand_over(2) == [2, 1, 1, 2, 2]
    assert crew.hand_over(3) == [2, 1, 1, 2, 2]
    gone = crew.engines.pop("late")
    gone[0].kill()
    together(gone[1:], ["reader.close()"])
    made = crew.hand_over(4)
    assert made[1:] == [made[1]] * 2
    crew.close()


def test_engine_that_comes_later_gets_the_same_version_in_an_exchange_of_its_own(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 2, [1, 2])
    first, second = crew.engines.values()
    for writer in crew.writers:
        writer.start(PUBLISH.format(step=1, seconds=30))
    assert together(first, [UPDATE.format(step=1, seconds=30)])[0][:2] == [1, []]
    for told in together(second, [UPDATE.format(step=1, seconds=30)] * 2):
        assert told[:2] == [1, []]
    for writer in crew.writers:
        assert writer.finish() == ["direct", 2]
    assert crew.hand_over(2)[0] == 2
    crew.close()


def test_captured_names_the_engine_that_does_not_come(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 1, [1])
    with pytest.raises(RemoteError, match="rank 0 of engine e0") as caught:
        crew.writers[0].do(PUBLISH.format(step=1, seconds=0.3))
    assert caught.value.kind == "DeadlineExceeded"
    crew.writers[0].do("publication.withdraw()")
    crew.hand_over(2)
    crew.close()


def test_update_names_the_sibling_that_does_not_come(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 1, [2])
    one, other = crew.workers
    crew.writers[0].start(PUBLISH.format(step=1, seconds=30))
    with pytest.raises(RemoteError, match="rank 1 of engine e0") as caught:
        one.do(UPDATE.format(step=1, seconds=0.5))
    assert caught.value.kind == "DeadlineExceeded"
    assert one.do("result = [reader.state, reader.version]") == ["empty", None]
    one.start(UPDATE.format(step=1, seconds=30))
    other.start(UPDATE.format(step=1, seconds=30))
    assert [one.finish()[:2], other.finish()[:2]] == [[1, []]] * 2
    crew.writers[0].finish()
    crew.close()


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_other_rings_are_refused_by_name_on_all_sides_and_nothing_is_touched(
    daemon: Daemon, fork: Fork, side: str
) -> None:
    crew = Crew(daemon, fork, 2, [2])
    crew.hand_over(1)
    odd = crew.writers[1] if side == "writer" else crew.workers[1]
    odd.do(f"{side}.close()")
    odd.do(crew.writer(1, 2, ring=4096) if side == "writer" else crew.reader("e0", 1, 2, ring=4096))
    crew.start(2, 10)
    for process in [*crew.writers, *crew.workers]:
        with pytest.raises(RemoteError, match=r"differ in their rings.*(2048 of .*4096|4096 of .*2048) of") as caught:
            process.finish()
        assert caught.value.kind == "InvalidArgument"
    assert crew.workers[0].do(STANDS.format(step=1)) == ["ready", [1, 1], []]
    odd.do(f"{side}.close()")
    odd.do(crew.writer(1, 2) if side == "writer" else crew.reader("e0", 1, 2))
    crew.hand_over(3)
    crew.close()


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_other_plans_are_refused_by_name_on_all_sides_and_nothing_is_touched(
    daemon: Daemon, fork: Fork, odd: int
) -> None:
    crew = Crew(daemon, fork, 2, [2])
    everyone = [*crew.writers, *crew.workers]
    other = "import awexd_transports.plan as planner\nplanner.PLANNER_VERSION = 1000"
    everyone[odd].do(other)
    crew.start(1, 10)
    for process in everyone:
        with pytest.raises(RemoteError, match="different plans") as caught:
            process.finish()
        assert caught.value.kind == "ManifestMismatch"
    assert crew.workers[0].do("result = [reader.state, reader.version]") == ["empty", None]
    crew.close()


def test_other_dtypes_are_refused_before_anything_is_sent(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 1, [])
    worker = fork()
    with pytest.raises(RemoteError, match=r"uneven.*float32.*float16") as caught:
        worker.do(
            'held = weights.Rank("reader", 0, 1)\n'
            "shards = [Shard(s.name, s.tensor.half() if s.name == 'uneven' else s.tensor, s.global_shape, s.offset)"
            " for s in held.shards]\n"
            f'WorkerWeightsReader("grpo", "e0", 0, 1, {daemon.socket!r}, transport="nccl").register(shards)'
        )
    assert caught.value.kind == "ManifestMismatch"
    crew.close()


@pytest.mark.parametrize("mine", ["writer", "reader"])
def test_both_sides_have_to_exchange(daemon: Daemon, fork: Fork, mine: str) -> None:
    trainer, engine = fork(), fork()
    given = {name: ', transport="nccl"' if name == mine else "" for name in ("writer", "reader")}
    trainer.do(
        "live = {'a': torch.ones(3)}\n"
        f'writer = WeightWriter("grpo", 0, 1, {daemon.socket!r}{given["writer"]})\nwriter.register(live)'
    )
    engine.do(
        "into = {'a': torch.zeros(3)}\n"
        f'reader = WorkerWeightsReader("grpo", "e", 0, 1, {daemon.socket!r}{given["reader"]})\nreader.register(into)'
    )
    trainer.do("publication = writer.publish(1)")
    for step in (None, 1):
        with pytest.raises(RemoteError, match='has transport="nccl"; pass that to') as caught:
            engine.do(f"reader.update({step}, timeout=20)")
        assert caught.value.kind == "VersionUnavailable"
    together([trainer, engine], ["writer.close()", "reader.close()"])


def test_casts_and_the_long_form_are_refused(daemon: Daemon, fork: Fork) -> None:
    trainer = fork()
    trainer.do(f'writer = WeightWriter("grpo", 0, 1, {daemon.socket!r}, transport="nccl")')
    trainer.do("writer.register({'a': torch.ones(3)}, dtype=torch.bfloat16)")
    with pytest.raises(RemoteError, match="a cast needs a copy"):
        trainer.do("writer.publish(1)")
    with pytest.raises(RemoteError, match="use publish"):
        trainer.do("writer.begin(1)")
    with pytest.raises(RemoteError, match="ring_bytes"):
        trainer.do(f'WeightWriter("grpo", 0, 1, {daemon.socket!r}, transport="nccl", ring_bytes=700)')
    trainer.do("writer.close()")


def test_parameters_that_change_before_captured_are_found_by_their_checksums(daemon: Daemon, fork: Fork) -> None:
    """The writer's sums are taken first: what changes afterwards is not what they are of."""
    crew = Crew(daemon, fork, 1, [1])
    (trainer,), (engine,) = crew.writers, crew.workers
    trainer.do(
        "from awexd_transports.collective.sockets import SocketGroup\n"
        "whole = SocketGroup.send\n"
        "def send(self, *given):\n    rank.fill(98)\n    return whole(self, *given)\n"
        "SocketGroup.send = send"
    )
    trainer.start(PUBLISH.format(step=1, seconds=30))
    with pytest.raises(RemoteError, match="is not what writer rank 0 sent") as caught:
        engine.do(UPDATE.format(step=1, seconds=20))
    assert caught.value.kind == "IntegrityError"
    assert engine.do("result = [reader.state, reader.version]") == ["dirty", None]
    trainer.start("")
    trainer.kill()


def test_engine_that_is_driven_by_its_control_process(daemon: Daemon, fork: Fork) -> None:
    crew = Crew(daemon, fork, 1, [])
    (trainer,), engine = crew.writers, fork()
    engine.do(
        f"import threading\nheld = [weights.Rank('reader', rank, 2) for rank in range(2)]\n"
        f"readers = [WorkerWeightsReader('grpo', 'e', rank, 2, {daemon.socket!r}, transport='nccl', ring_bytes=2048)"
        " for rank in range(2)]\n"
        "for reader, own in zip(readers, held): reader.register(own.shards)\n"
        f"instance = WeightReader('grpo', 'e', readers, {daemon.socket!r})"
    )
    for step in (1, 2):
        engine.start(
            f"done = instance.update({step}, timeout=20)\n"
            f"result = [done.step, done.transport, *(own.wrong({step}) for own in held)]"
        )
        trainer.do(PUBLISH.format(step=step, seconds=20))
        assert engine.finish() == [step, "nccl", [], []]
    trainer.do("rank.fill(3)\npublication = writer.publish(3)")
    engine.do("readers[0].release(readers[0].stage(3))")  # what is given up before it is applied holds up nobody
    assert engine.do("result = [instance.update(3, timeout=20).step, *(own.wrong(3) for own in held)]") == [3, [], []]
    trainer.do("publication.captured()")
    together([trainer, engine], ["writer.close()", "instance.close()\nfor reader in readers: reader.close()"])
