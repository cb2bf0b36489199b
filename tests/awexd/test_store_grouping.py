"""Exchanges in the store: who takes part, when one begins, what its members must agree on, and what ends it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from awexd.store import Segment, Wait
from awexd.store.exchanging import GROUPS_KEPT, Exchange, Member
from awexd.store.ledger import Session
from awexd.store.model import Lease, Version
from awexd_transports.errors import AwexdError, InvalidArgument, ManifestMismatch, VersionUnavailable
from tests.awexd.store_clients import Engine, Trainer, World, check, digest, engines, trainers

TERMS: dict[str, Any] = {"format": 1, "ring": 512, "plans": {}}


class Offerer:
    """A trainer's rank that exchanges its versions."""

    numbers = itertools.count(1)

    def __init__(self, trainer: Trainer, device: str | None = None) -> None:
        self.trainer, self.world, self.device = trainer, trainer.world, device
        self.world.job.writers[trainer.rank].mode = "nccl"
        self.segment = Segment(f"x{next(self.numbers)}", trainer.rank, 100, borrowed=True, exchanged=True)
        self.world.store.lend(trainer.session, self.segment)
        self.attempt = 0

    @property
    def session(self) -> Session:
        return self.trainer.session

    def offer(self, step: int) -> None:
        found = self.world.store.borrow(self.session, step, self.trainer.set, self.segment.id, False)
        assert not isinstance(found, Wait), found.reason
        self.attempt = found.attempt if isinstance(found, Version) else found
        self.world.store.affirm(self.session, step, self.attempt, good=True)
        self.world.drain()

    def join(self) -> Wait | Exchange | None:
        rank = self.trainer.rank
        member = Member(self.session.id, self.session.pid, "", rank, digest("d"), self.device, True, self.attempt)
        return _joined(self.world, self.session, member)

    def captured(self, step: int, *, at_once: bool = False) -> Wait | None:
        try:
            return self.world.store.captured(self.session, 1, step, self.attempt, at_once)
        finally:
            self.world.drain()


class Taker:
    """An engine's worker that takes them."""

    def __init__(self, engine: Engine, device: str | None = None) -> None:
        self.engine, self.world, self.device = engine, engine.world, device
        self.world.job.engines[engine.name].workers[engine.rank].exchanges = True
        self.lease: Lease | None = None

    @property
    def session(self) -> Session:
        return self.engine.session

    def lease_of(self, step: int, seconds: float = 60.0) -> Lease:
        self.lease = self.engine.resolve(step, seconds)
        return self.lease

    def join(self) -> Wait | Exchange | None:
        assert self.lease is not None
        attempt = self.world.job.versions[self.lease.key].attempt
        place = self.engine.name, self.engine.rank, digest("d"), self.device, True, attempt
        member = Member(self.session.id, self.session.pid, *place, self.lease.id)
        return _joined(self.world, self.session, member)

    def confirm(self) -> None:
        assert self.lease is not None
        self.engine.confirm(self.lease)


def _joined(world: World, session: Session, member: Member) -> Wait | Exchange | None:
    try:
        return world.store.join(session, member)
    finally:
        world.drain()


@pytest.fixture
def world() -> World:
    return World()


def crew(world: World, ranks: int, *workers: int) -> tuple[list[Offerer], list[list[Taker]]]:
    offerers = [Offerer(trainer) for trainer in trainers(world, ranks)]
    return offerers, [
        [Taker(engine) for engine in engines(world, size, f"e{number}")] for number, size in enumerate(workers)
    ]


def running(members: list[Any]) -> Exchange:
    """All join; the exchange that they are told of."""
    for member in members:
        member.join()
    found = [member.join() for member in members[:-1]]
    exchange = found[0]
    assert isinstance(exchange, Exchange)
    assert all(one is exchange for one in found)
    return exchange


def finish(world: World, exchange: Exchange) -> None:
    for member in exchange.members:
        world.store.end_part(world.store.sessions[member.session], exchange.number, None)
    world.drain()


def test_exchange_begins_once_all_are_there_and_the_next_has_the_same_group(world: World) -> None:
    offerers, (takers,) = crew(world, 2, 2)
    groups = []
    for step in (1, 2):
        for offerer in offerers:
            offerer.offer(step)
        for taker in takers:
            taker.lease_of(step)
        members: list[Offerer | Taker] = [*offerers, *takers]
        for member in members[:-1]:
            waiting = member.join()
            assert isinstance(waiting, Wait)
            assert "rank 1 of engine e0" in waiting.reason or not isinstance(member, Taker)
        exchange = takers[-1].join()
        assert isinstance(exchange, Exchange)
        assert [one.join() for one in members[:-1]] == [exchange] * 3
        assert exchange.fresh == (step == 1)
        assert [str(one).split(" (")[0] for one in exchange.members] == [
            "writer rank 0",
            "writer rank 1",
            "rank 0 of engine e0",
            "rank 1 of engine e0",
        ]
        finish(world, exchange)
        for taker in takers:
            taker.confirm()
        assert [offerer.captured(step) for offerer in offerers] == [None, None]
        assert [offerer.join() for offerer in offerers] == [None, None]
        groups.append(exchange.group.id)
        check(world)
    assert groups[0] == groups[1]


def test_engine_on_its_way_is_waited_for_and_one_that_lacks_a_worker_is_not(world: World) -> None:
    (offerer,), (first, second) = crew(world, 1, 1, 2)
    offerer.offer(1)
    offerer.join()
    for taker in (*first, *second):
        taker.lease_of(1)
    assert isinstance(first[0].join(), Wait)
    second[0].join()
    assert second[1].lease is not None
    second[1].engine.release(second[1].lease)
    exchange = first[0].join()
    assert isinstance(exchange, Exchange)
    assert [one.engine for one in exchange.members] == ["", "e0"]
    assert offerer.join() is exchange
    waiting = second[0].join()
    assert isinstance(waiting, Wait)
    assert "to end" in waiting.reason
    finish(world, exchange)
    first[0].confirm()
    second[1].lease_of(1)
    offerer.join()
    other = second[1].join()
    assert isinstance(other, Exchange)
    assert [one.engine for one in other.members] == ["", "e1", "e1"]


@pytest.mark.parametrize(
    ("devices", "backend"),
    [(("A", "B"), "nccl"), (("A", "A"), "sockets"), (("A", None), "sockets"), ((None, None), "sockets")],
)
def test_nccl_is_for_tensors_on_a_gpu_each(world: World, devices: tuple[str | None, str | None], backend: str) -> None:
    (offerer,), ((taker,),) = crew(world, 1, 1)
    offerer.device, taker.device = devices
    offerer.offer(1)
    taker.lease_of(1)
    assert running([offerer, taker]).group.backend == backend


def _leaves(world: World, taker: Taker) -> None:
    world.end(taker.session)


def _gives_up(world: World, taker: Taker) -> None:
    assert taker.lease is not None
    taker.engine.release(taker.lease, dirty=True)


def _is_late(world: World, taker: Taker) -> None:
    world.advance(61)


def _fails(world: World, taker: Taker) -> None:
    number = next(reversed(world.job.exchanges.recent))
    world.store.end_part(taker.session, number, "its disk is full")
    world.drain()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (_leaves, "has left"),
        (_gives_up, "gave its update up"),
        (_is_late, "gave its update up"),
        (_fails, "disk is full"),
    ],
)
def test_whoever_goes_ends_the_exchange_for_all_and_its_group(world: World, what: Any, why: str) -> None:
    offerers, (takers,) = crew(world, 2, 2)
    for offerer in offerers:
        offerer.offer(1)
    for taker in takers:
        taker.lease_of(1)
    exchange = running([*offerers, *takers])
    assert isinstance(world.store.watch(offerers[0].session, exchange.number), Wait)
    what(world, takers[1])
    for offerer in offerers:
        with pytest.raises(VersionUnavailable, match=f"rank [01] of engine e0.*{why}") as caught:
            world.store.watch(offerer.session, exchange.number)
        assert caught.value.details["exchange"] == exchange.number
    assert not world.job.exchanges.groups
    check(world)


def test_version_that_is_withdrawn_ends_its_exchange(world: World) -> None:
    (offerer,), ((taker,),) = crew(world, 1, 1)
    offerer.offer(1)
    taker.lease_of(1)
    exchange = running([offerer, taker])
    waiting = offerer.captured(1, at_once=True)
    assert isinstance(waiting, Wait)
    with pytest.raises(VersionUnavailable, match="took it back"):
        world.store.watch(taker.session, exchange.number)


def test_last_worker_that_has_it_does_not_break_what_its_writers_have_not_said_to_be_done(world: World) -> None:
    (offerer,), ((taker,),) = crew(world, 1, 1)
    offerer.offer(1)
    taker.lease_of(1)
    exchange = running([offerer, taker])
    world.store.end_part(taker.session, exchange.number, None)
    taker.confirm()
    assert offerer.captured(1) is None
    world.store.end_part(offerer.session, exchange.number, None)
    assert exchange.error is None
    assert exchange.over


@pytest.mark.parametrize(
    ("odd", "terms", "error"),
    [
        (0, {"ring": 1024}, InvalidArgument),
        (2, {"format": 2}, InvalidArgument),
        (1, {"plans": {"2": "b" * 64}}, ManifestMismatch),
        (2, {"plans": {}}, ManifestMismatch),
    ],
)
def test_members_that_disagree_are_all_told(
    world: World, odd: int, terms: dict[str, Any], error: type[AwexdError]
) -> None:
    offerers, ((taker,),) = crew(world, 2, 1)
    for offerer in offerers:
        offerer.offer(1)
    taker.lease_of(1)
    exchange = running([*offerers, taker])
    agreed = TERMS | {"plans": {"2": "a" * 64}}
    sessions = [offerers[0].session, offerers[1].session, taker.session]
    given = [agreed | (terms if at == odd else {}) for at in range(3)]
    assert isinstance(world.store.agree(sessions[0], exchange.number, given[0]), Wait)
    waiting = world.store.agree(sessions[1], exchange.number, given[1])
    assert isinstance(waiting, Wait)
    assert "rank 0 of engine e0" in waiting.reason
    for at in (2, 1, 0):
        with pytest.raises(error, match="nothing was moved"):
            world.store.agree(sessions[at], exchange.number, given[at])
        with pytest.raises(error):
            world.store.watch(sessions[at], exchange.number)


def test_members_that_agree_go_on(world: World) -> None:
    (offerer,), ((taker,),) = crew(world, 1, 1)
    offerer.offer(1)
    taker.lease_of(1)
    number = running([offerer, taker]).number
    world.store.publish_address(taker.session, number, "1")
    assert isinstance(world.store.addresses(taker.session, number), Wait)
    world.store.publish_address(offerer.session, number, "0")
    assert world.store.addresses(taker.session, number) == ["0", "1"]
    assert isinstance(world.store.agree(taker.session, number, TERMS), Wait)
    assert world.store.agree(offerer.session, number, TERMS) is None
    assert world.store.agree(taker.session, number, TERMS) is None


def test_strangers_are_told_nothing(world: World) -> None:
    (offerer,), ((taker,), (other,)) = crew(world, 1, 1, 1)
    offerer.offer(1)
    taker.lease_of(1)
    number = running([offerer, taker]).number
    for call in (world.store.watch, world.store.addresses):
        with pytest.raises(InvalidArgument, match="takes part in no exchange"):
            call(other.session, number)


def test_only_so_many_groups_are_kept(world: World) -> None:
    (offerer,), all_takers = crew(world, 1, *[1] * (GROUPS_KEPT + 2))
    offerer.offer(1)
    for (taker,) in all_takers:
        offerer.join()
        taker.lease_of(1)
        exchange = taker.join()
        assert isinstance(exchange, Exchange)
        offerer.join()
        finish(world, exchange)
        taker.confirm()
    assert len(world.job.exchanges.groups) == GROUPS_KEPT


def test_what_is_exchanged_is_for_those_that_exchange_and_the_rest_for_the_others(world: World) -> None:
    (offerer,), ((taker,), (other,)) = crew(world, 1, 1, 1)
    world.job.engines["e1"].workers[0].exchanges = False
    offerer.offer(1)
    with pytest.raises(VersionUnavailable, match='its trainer has transport="nccl"'):
        other.engine.try_resolve(1)
    with pytest.raises(VersionUnavailable, match='its trainer has transport="nccl"'):
        other.engine.try_resolve()
    taker.lease_of(1)
    world.job.writers[0].mode = "host"
    taker.engine.release(taker.lease) if taker.lease else None
    offerer.captured(1, at_once=True)
    with pytest.raises(VersionUnavailable, match="pass that to its WeightWriter too"):
        taker.engine.try_resolve()
