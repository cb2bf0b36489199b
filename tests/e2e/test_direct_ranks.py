"""Lent weights of several ranks to several engines, of which some are late, move, leave or die."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.clients import restart
from tests.e2e.direct_node import CAPTURED, PUBLISH, UPDATE, Fork, Node, expected
from tests.e2e.workers.processes import Process, RemoteError, together


@pytest.fixture
def node(daemon: Daemon, fork: Fork, tmp_path: Path) -> Node:
    return Node(daemon, fork, tmp_path)


def trainer_of(node: Node, size: int, rows: int = 2, mode: str = "direct") -> list[Process]:
    ranks = [node.trainer(rank, size, rows=rows, mode=mode) for rank in range(size)]
    for rank in ranks:
        rank.finish()
    return ranks


def hand_over(ranks: list[Process], engines: list[Process], step: int, rows: int) -> None:
    for engine in engines:
        engine.start(UPDATE.format(step))
    for rank in ranks:
        rank.start(f"{PUBLISH.format(step)}\n{CAPTURED}")
    assert [engine.finish()[-1] for engine in engines] == [expected(step, rows)] * len(engines)
    assert [rank.finish() for rank in ranks] == [["direct", ""]] * len(ranks)


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize("how", ["all", "one"])
def test_rank_of_three_whose_tensors_were_rebound_makes_none_fail(node: Node, moved: int, how: str) -> None:
    ranks, engine = trainer_of(node, 3), node.engine(rows=6)
    hand_over(ranks, [engine], 1, 6)
    names = "live" if how == "all" else "['a']"
    for step in (2, 3):
        ranks[moved].do(f"moved = gpu.tensors(live)\nfor name in {names}: live[name].data = moved[name]")
        hand_over(ranks, [engine], step, 6)


@pytest.mark.parametrize("sealed", [1, 2])
@pytest.mark.parametrize("how", ["captured", "committed"])
def test_rank_finds_its_tensors_rebound_after_others_have_lent_theirs(node: Node, sealed: int, how: str) -> None:
    ranks, engine = trainer_of(node, 3), node.engine(rows=6)
    hand_over(ranks, [engine], 1, 6)
    engine.start(UPDATE.format(2))
    for rank in ranks[:sealed]:
        rank.do(PUBLISH.format(2))
        rank.start(f"publication.{how}(timeout=20)")
    ranks[sealed].do("moved = gpu.tensors(live)\nfor name in live: live[name].data = moved[name]")
    for rank in ranks[sealed:]:
        rank.do(PUBLISH.format(2))
        rank.start(f"publication.{how}(timeout=20)")
    assert engine.finish()[-1] == expected(2, 6)
    for rank in ranks:
        rank.finish()
        rank.do(CAPTURED)
    hand_over(ranks, [engine], 3, 6)


def test_daemon_killed_when_one_rank_has_lent_and_the_other_has_not(node: Node) -> None:
    ranks, engines = trainer_of(node, 2), [node.engine(rows=4), node.engine(rows=4, name="f")]
    hand_over(ranks, engines, 1, 4)
    for engine in engines:
        engine.start(UPDATE.format(2))
    ranks[0].do(PUBLISH.format(2))
    ranks[0].start(CAPTURED)
    restart(node.daemon)
    ranks[1].do(PUBLISH.format(2))
    ranks[1].start(CAPTURED)
    assert [engine.finish()[-1] for engine in engines] == [expected(2, 4)] * 2
    for rank in ranks:
        rank.finish()
    hand_over(ranks, engines, 3, 4)


@pytest.mark.parametrize("who", ["had", "had-not"])
def test_daemon_killed_while_one_engine_has_it_and_the_other_has_not(node: Node, who: str) -> None:
    ranks, engines = trainer_of(node, 2), [node.engine(rows=4), node.engine(rows=4, name="f")]
    hand_over(ranks, engines, 1, 4)
    together(ranks, [PUBLISH.format(2)] * 2)
    engines[0].do(UPDATE.format(2))
    if who == "had":
        for rank in ranks:
            rank.start(CAPTURED)
    restart(node.daemon)
    if who == "had-not":
        for rank in ranks:
            rank.start(CAPTURED)
    assert engines[1].do(UPDATE.format(2))[-1] == expected(2, 4)
    for rank in ranks:
        rank.finish()
    # the one that has it and asks for nothing comes back by itself; until then nobody knows that it is to be waited for
    until(node.daemon.socket, lambda status: len(status["jobs"][0]["engines"]) == 2)
    hand_over(ranks, engines, 3, 4)


def test_rank_that_dies_is_named_to_the_one_that_waits_for_engines(node: Node) -> None:
    ranks, engine = trainer_of(node, 2), node.engine(rows=4)
    hand_over(ranks, [engine], 1, 4)
    together(ranks, [PUBLISH.format(2)] * 2)
    ranks[0].start(CAPTURED)
    ranks[1].kill()
    with pytest.raises(RemoteError, match=r"before every engine had it: .*rank 1") as caught:
        ranks[0].finish()
    assert caught.value.kind == "VersionConflict"
    with pytest.raises(RemoteError, match="not held any more"):
        engine.do(UPDATE.format(2))
    ranks[0].do("writer.close()")
    again = trainer_of(node, 2)
    for rank in again:
        rank.do("for tensor in live.values(): tensor.add_(2000)")
    hand_over(again, [engine], 3, 4)


def test_worker_of_an_engine_dies_in_mid_update_and_is_replaced(node: Node) -> None:
    ranks = trainer_of(node, 2)
    alone, pair = node.engine(rows=4), [node.engine(rank, 2, rows=4, name="pair") for rank in range(2)]
    together(ranks, [PUBLISH.format(1)] * 2)
    for rank in ranks:
        rank.start(CAPTURED)
    pair[1].do("staged = reader.stage(timeout=20)")
    together([alone, pair[0]], [UPDATE.format(1)] * 2)
    pair[1].kill()
    until(node.daemon.socket, lambda status: sum(len(e["workers"]) for e in status["jobs"][0]["engines"]) == 2)
    pair[1] = node.engine(1, 2, rows=4, name="pair")
    # whoever waits may have been told meanwhile: nobody that is registered lacked it
    with contextlib.suppress(RemoteError):
        assert pair[1].do("result = told(reader.update(timeout=2))")[-1] == expected(1, 4, slice(3, 6))
    for rank in ranks:
        rank.finish()
    for engine in [alone, *pair]:
        engine.start(UPDATE.format(2))
    together(ranks, [PUBLISH.format(2)] * 2)
    halves = [expected(2, 4, part) for part in (slice(0, 6), slice(0, 3), slice(3, 6))]
    assert [engine.finish()[-1] for engine in [alone, *pair]] == halves
    together(ranks, [CAPTURED] * 2)


def test_rank_parks_what_the_other_still_lends(node: Node) -> None:
    ranks, engine = trainer_of(node, 2), node.engine(rows=4)
    hand_over(ranks, [engine], 1, 4)
    together(ranks, [PUBLISH.format(2)] * 2)
    ranks[0].start(CAPTURED)
    ranks[1].do("other = torch.ones(3); writer.park('m', [other], timeout=20)")
    with pytest.raises(RemoteError, match="rank 1 took its memory back"):
        ranks[0].finish()
    ranks[1].do("writer.restore('m')")
    hand_over(ranks, [engine], 3, 4)


def test_one_rank_withdraws_for_all(node: Node) -> None:
    ranks, engine = trainer_of(node, 2), node.engine(rows=4)
    together(ranks, [PUBLISH.format(1)] * 2)
    ranks[1].do("publication.withdraw(timeout=20)")
    with pytest.raises(RemoteError, match="rank 1 withdrew it"):
        ranks[0].do(CAPTURED)
    ranks[0].do("publication.withdraw(timeout=20)")
    hand_over(ranks, [engine], 2, 4)


def test_auto_goes_back_and_forth_with_two_ranks_and_two_engines(node: Node) -> None:
    ranks, engines = trainer_of(node, 2, mode="auto"), [node.engine(rows=4), node.engine(rows=4, name="f")]
    for step in range(1, 7):
        waiting = engines if step % 2 else engines[:1]
        for engine, name in zip(waiting, "ef", strict=False):
            engine.start(UPDATE.format(step))
            node.await_engine_waits(name)
        modes = {tuple(answer) for answer in together(ranks, [PUBLISH.format(step)] * 2)}
        if step % 2:
            assert modes == {("direct", "")}
        else:
            assert modes == {("host", "rank 0 of engine f does not wait for it")}
            engines[1].start(UPDATE.format(step))
        assert [engine.finish()[-1] for engine in engines] == [expected(step, 4)] * 2
        together(ranks, [CAPTURED] * 2)
