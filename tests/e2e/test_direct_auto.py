"""``mode="auto"`` among real processes: several ranks, several engines, and engines that others drive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.clients import restart
from tests.e2e.direct_node import CAPTURED, CREW, PUBLISH, UPDATE, Fork, Node, expected
from tests.e2e.workers.processes import Process, RemoteError, together

WAITED = "every engine waits, on this node's GPUs"


@pytest.fixture
def node(daemon: Daemon, fork: Fork, tmp_path: Path) -> Node:
    return Node(daemon, fork, tmp_path)


def two_ranks(node: Node, mode: str = "auto", refuse: tuple[str, ...] = ()) -> list[Process]:
    """``refuse``: of rank 1."""
    ranks = [node.trainer(rank, 2, rows=3, mode=mode, refuse=refuse if rank else ()) for rank in range(2)]
    for rank in ranks:
        rank.finish()
    return ranks


@pytest.mark.parametrize("first", [0, 1])
def test_first_step_of_two_ranks_is_lent_whichever_comes_first(node: Node, first: int) -> None:
    ranks, engine = two_ranks(node), node.engine(rows=6)
    engine.start(UPDATE.format(1))
    node.await_engine_waits()
    ranks[first].start(PUBLISH.format(1))
    ranks[1 - first].start(PUBLISH.format(1))
    assert [rank.finish() for rank in ranks] == [["direct", ""]] * 2
    assert engine.finish() == [1, "direct", "cuda_ipc", WAITED, expected(1, 6)]
    together(ranks, [CAPTURED] * 2)


@pytest.mark.parametrize("able", ["beside", "last"])
def test_rank_that_cannot_lend_says_so_at_once(node: Node, able: str) -> None:
    ranks, engine = two_ranks(node, refuse=("handle",)), node.engine(rows=6)
    for step in (1, 2):
        engine.start(UPDATE.format(step))
        node.await_engine_waits()
        if able != "last":
            ranks[0].start(PUBLISH.format(step))
        mode, reason = ranks[1].do(PUBLISH.format(step))
        assert mode == "host"
        assert "expandable_segments" in reason
        if able == "last":
            ranks[0].start(PUBLISH.format(step))
        mode, reason = ranks[0].finish()
        assert mode == "host"
        assert "rank 1" in reason
        assert engine.finish()[-1] == expected(step, 6)


def test_rank_that_never_publishes_is_waited_for_only_so_long(node: Node) -> None:
    ranks, engine = two_ranks(node), node.engine(rows=6)
    engine.start(UPDATE.format(1))
    node.await_engine_waits()
    mode, reason = ranks[0].do(
        "publication = writer.publish(1, timeout=1); result = [publication.mode, publication.reason]"
    )
    assert mode == "host"
    assert "rank 1 to declare GPU memory" in reason
    with pytest.raises(RemoteError, match="rank 1 to seal step 1"):
        ranks[0].do("publication.committed(timeout=0.2)")
    assert ranks[1].do("result = writer.publish(1).mode") == "host"
    assert engine.finish()[-1] == expected(0, 6)


def test_rank_that_dies_while_it_is_waited_for_is_named(node: Node) -> None:
    ranks, engine = two_ranks(node), node.engine(rows=6)
    engine.start("result = told(reader.update(1, timeout=60))")
    node.await_engine_waits()
    ranks[0].start("publication = writer.publish(1, timeout=2)")
    until(node.daemon.socket, lambda status: any(s["writers"] == [0, 1] for s in status["jobs"]))
    ranks[1].kill()
    with pytest.raises(RemoteError, match="rank 1 of 2 to register") as caught:
        ranks[0].finish()
    assert caught.value.kind == "DeadlineExceeded"


def test_engine_that_is_driven_waits_where_its_driver_does(node: Node) -> None:
    """Its control process stands in ``update``; its workers are told nothing before there is a version."""
    trainer, engines = node.trainer(mode="auto"), [node.engine(rank, 2) for rank in range(2)]
    driver = node.process((), ())
    driver.do(DRIVER.format(socket=node.daemon.socket))
    for step in (1, 2, 3):
        driver.start(f"result = told(instance.update({step if step < 3 else None}, timeout=20))")
        node.await_engine_waits()
        assert trainer.do(PUBLISH.format(step)) == ["direct", ""]
        for action in ("staged = reader.stage(CALLED, timeout=20)", "reader.apply(staged, timeout=20)"):
            driver.finish()
            together(engines, [action.replace("CALLED", str(step))] * 2)
            driver.tell("done")
        assert driver.finish() == [step, "direct", WAITED]
        trainer.do(CAPTURED)
        assert not node.waiting("e")
    halves = [engine.do("result = into['a'].tolist()") for engine in engines]
    assert halves == [expected(3, 4, slice(0, 3)), expected(3, 4, slice(3, 6))]


DRIVER = """
from awexd_client import WeightReader

class Crew:
    def stage(self, step, timeout): say("stage"); hear()
    def apply(self, epoch, step, timeout): say("apply"); hear()
    def abandon(self): pass
    def verify(self, checkpoint_dir, token, timeout): pass

instance = WeightReader("grpo", "e", Crew(), {socket!r})
def told(result): return [result.step, result.mode, result.reason]
"""


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_driver_that_waits_is_gone_with_its_process_and_comes_back_to_the_next_daemon(node: Node, how: str) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    driver = node.process((), ())
    driver.do(DRIVER.format(socket=node.daemon.socket))
    driver.start("result = told(instance.update(timeout=20))")
    node.await_engine_waits()
    if how == "killed":
        driver.kill()
        until(node.daemon.socket, lambda _: not node.waiting("e"))
        assert trainer.do(PUBLISH.format(1)) == ["host", "rank 0 of engine e does not wait for it"]
        return
    restart(node.daemon)
    trainer.start(PUBLISH.format(1))
    assert driver.finish() == "stage"
    engine.do("staged = reader.stage(timeout=20)")
    driver.tell("done")
    assert driver.finish() == "apply"
    engine.do("reader.apply(staged, timeout=20)")
    driver.tell("done")
    assert driver.finish()[0] == 1
    trainer.finish()


def test_driver_of_an_engine_in_one_process_with_it(node: Node) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    engine.do(f"socket = {node.daemon.socket!r}" + CREW)
    for step in (1, 2):
        engine.start(f"result = told(instance.update({step}, timeout=20))")
        node.await_engine_waits()
        assert trainer.do(PUBLISH.format(step)) == ["direct", ""]
        assert engine.finish() == [step, "direct", "cuda_ipc", WAITED, expected(step, 4)]
        trainer.do(CAPTURED)


def test_bare_wait_may_be_of_an_engine_that_generates(node: Node) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    engine.start("result = reader.wait(1, timeout=20)")
    assert trainer.do(PUBLISH.format(1)) == ["host", "rank 0 of engine e does not wait for it"]
    assert engine.finish() == [1, 1]


def test_update_that_was_refused_waits_no_more(node: Node) -> None:
    trainer, engine = node.trainer(mode="auto"), node.engine()
    trainer.do(PUBLISH.format(1))
    engine.do(UPDATE.format(1))
    engine.start("result = told(reader.update(9, timeout=60))")
    node.await_engine_waits()
    trainer.kill()
    heir = node.process(("GPU-0",), ())
    heir.do(f"writer = WeightWriter('grpo', 0, 1, {node.daemon.socket!r}, epoch='new')")
    heir.do("live = gpu.tensors({'a': torch.ones(4, 6), 'b': torch.ones(5, dtype=torch.int16)}); writer.register(live)")
    with pytest.raises(RemoteError, match="is in epoch 2 now"):
        engine.finish()
    assert not node.waiting("e")
    heir.do("publication = writer.publish(1)")
    assert heir.do("result = publication.reason") == "rank 0 of engine e does not wait for it"
