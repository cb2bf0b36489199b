"""Borrowed versions in the store: one at a time of a rank's memory, taken back before it changes, never held."""

from __future__ import annotations

import itertools

import pytest

from awexd.store import Segment, Wait
from awexd.store.ledger import Session
from awexd.store.model import Version
from awexd_transports.errors import VersionConflict, VersionUnavailable
from tests.awexd.store_clients import Engine, Trainer, World, check, engines, trainers

GPU = frozenset({"GPU-0"})


class Lender:
    """A trainer's rank that lends its memory."""

    numbers = itertools.count(1)

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.world = trainer, trainer.world
        self.segment = ""
        self.lend()

    def lend(self) -> None:
        segment = Segment(f"g{next(self.numbers)}", self.trainer.rank, 100, borrowed=True, devices=GPU)
        self.world.store.lend(self.trainer.session, segment)
        self.world.drain()
        self.segment = segment.id

    def try_borrow(self, step: int) -> Wait | Version | int:
        try:
            return self.world.store.borrow(self.trainer.session, step, self.trainer.set, self.segment, False)
        finally:
            self.world.drain()

    def borrow(self, step: int, *, good: bool | None = True) -> int:
        """The attempt's number; affirmed, or not, or (None) left in doubt."""
        outcome = self.try_borrow(step)
        assert not isinstance(outcome, Wait), outcome.reason
        attempt = outcome.attempt if isinstance(outcome, Version) else outcome
        if good is not None:
            self.affirm(step, attempt, good=good)
        return attempt

    def affirm(self, step: int, attempt: int, *, good: bool) -> None:
        self.world.store.affirm(self.trainer.session, step, attempt, good)
        self.world.drain()

    def captured(self, step: int, attempt: int, *, at_once: bool = False) -> Wait | None:
        try:
            return self.world.store.captured(self.trainer.session, 1, step, attempt, at_once)
        finally:
            self.world.drain()


def lenders(world: World, size: int = 1, mode: str = "auto") -> list[Lender]:
    ranks = trainers(world, size)
    for trainer in ranks:
        world.job.writers[trainer.rank].mode = mode
    return [Lender(trainer) for trainer in ranks]


def on_gpu(world: World, size: int = 1, name: str = "e") -> list[Engine]:
    made = engines(world, size, name)
    for engine in made:
        world.job.engines[name].workers[engine.rank].devices = GPU
    return made


@pytest.fixture
def world() -> World:
    return World()


def test_version_is_borrowed_until_every_engine_has_it(world: World) -> None:
    (lender,), (engine, other) = lenders(world), [*on_gpu(world), *on_gpu(world, name="f")]
    attempt = lender.borrow(1)
    assert [(v.key, v.borrowed) for v in world.job.held()] == [((1, 1), True)]
    assert engine.update() == (1, 1)
    waiting = lender.captured(1, attempt)
    assert isinstance(waiting, Wait)
    assert "rank 0 of engine f" in waiting.reason
    other.update()
    assert lender.captured(1, attempt) is None
    assert world.held() == []
    assert lender.captured(1, attempt) is None, "asked again"


def test_borrowed_versions_do_not_displace_held_ones(world: World) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    lender.trainer.publish(1)
    lender.trainer.publish(2)
    for step in range(3, 8):
        attempt = lender.borrow(step)
        assert world.held() == [(1, step), (1, 2), (1, 1)]
        assert engine.update() == (1, step)
        assert lender.captured(step, attempt) is None
    assert world.held() == [(1, 2), (1, 1)]


def test_engine_does_not_go_back_to_a_held_version_by_itself(world: World) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    lender.trainer.publish(1)
    attempt = lender.borrow(2)
    engine.update()
    lender.captured(2, attempt)
    assert isinstance(engine.try_resolve(), Wait)
    (late,) = on_gpu(world, name="late")
    assert late.update() == (1, 1)
    world.store.rollback(world.job, 1)
    assert engine.update() == (1, 1)


def test_worker_that_opens_no_gpu_memory_gets_held_versions_only(world: World) -> None:
    (lender,), (engine,) = lenders(world), engines(world, 1)
    lender.trainer.publish(1)
    attempt = lender.borrow(2)
    assert engine.update() == (1, 1)
    with pytest.raises(VersionUnavailable, match="lent by its trainer"):
        engine.update(2)
    waiting = lender.captured(2, attempt)
    assert isinstance(waiting, Wait)
    assert "an engine on this node's GPUs" in waiting.reason


def test_update_is_no_success_before_every_rank_has_affirmed(world: World) -> None:
    first, second = lenders(world, 2)
    (engine,) = on_gpu(world)
    attempts = [lender.borrow(1, good=None) for lender in (first, second)]
    lease = engine.resolve()
    assert isinstance(world.store.committed(first.trainer.session, 1, 1, attempts[0]), Wait)
    for lender, attempt, rest in zip((first, second), attempts, (r"ranks 0, 1", r"rank 1"), strict=True):
        outcome = world.store.confirm(engine.session, lease.id, world.now)
        assert isinstance(outcome, Wait)
        assert rest in outcome.reason
        lender.affirm(1, attempt, good=True)
    assert engine.confirm(lease) == (1, 1)
    assert world.store.committed(first.trainer.session, 1, 1, attempts[0]) is None


def test_what_is_not_affirmed_never_was_and_the_step_is_free(world: World) -> None:
    first, second = lenders(world, 2)
    (engine,) = on_gpu(world)
    before = [lender.borrow(1, good=None) for lender in (first, second)]
    lease = engine.resolve()
    first.affirm(1, before[0], good=False)
    assert world.held() == []
    assert world.job.high == -1
    with pytest.raises(VersionUnavailable):
        engine.confirm(lease)
    assert world.job.engines["e"].workers[0].state == "dirty"
    with pytest.raises(VersionConflict) as caught:
        second.captured(1, before[1])
    assert caught.value.details["retry"]
    for lender in (first, second):
        lender.borrow(1)
    assert engine.update() == (1, 1)
    check(world)


def test_rank_that_finds_its_memory_moved_has_the_others_lend_theirs_again(world: World) -> None:
    """Before the last rank has lent its own."""
    first, second, third = lenders(world, 3)
    (engine,) = on_gpu(world)
    before = first.borrow(1)
    second.borrow(1, good=False)
    with pytest.raises(VersionConflict) as caught:
        first.captured(1, before)
    assert caught.value.details["retry"]
    for lender in (second, third, first):
        lender.borrow(1)
    assert engine.update() == (1, 1)
    check(world)


def test_the_next_step_waits_for_readers_of_the_one_before(world: World) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    lender.borrow(1)
    lease = engine.resolve()
    waiting = lender.try_borrow(2)
    assert isinstance(waiting, Wait)
    assert "rank 0 of engine e" in waiting.reason
    with pytest.raises(VersionUnavailable, match="withdrawn"):
        engine.confirm(lease)
    lender.borrow(2)
    assert world.held() == [(1, 2)]


def test_ranks_lend_all_or_none(world: World) -> None:
    first, second = lenders(world, 2)
    first.borrow(1)
    with pytest.raises(VersionConflict, match="lend their memory"):
        second.trainer.begin(1)
    second.borrow(1)
    assert world.held() == [(1, 1)]


@pytest.mark.parametrize("unmapped", [True, False])
def test_trainer_that_ends_takes_its_version_along(world: World, unmapped: bool) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    lender.borrow(1)
    engine.update()
    lender.trainer.end(unmapped=unmapped)
    assert world.held() == []
    assert engine.session.to_drop == {lender.segment}
    assert lender.segment in world.unlinked
    world.store.closed(engine.session, [lender.segment])
    assert world.job.closing == {}


def test_revoke_waits_for_readers_that_have_it_mapped(world: World) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    attempt = lender.borrow(1)
    engine.update()
    lender.captured(1, attempt)
    waiting = world.store.revoke(lender.trainer.session)
    assert isinstance(waiting, Wait)
    assert str(engine.session.pid) in waiting.reason
    engine.end(unmapped=False)
    assert world.store.revoke(lender.trainer.session) is None


def test_expired_reader_does_not_hold_the_trainer(world: World) -> None:
    (lender,), (engine,) = lenders(world), on_gpu(world)
    attempt = lender.borrow(1)
    lease = engine.resolve(seconds=5.0)
    assert isinstance(lender.captured(1, attempt, at_once=True), Wait)
    world.advance(6.0)
    assert lender.captured(1, attempt, at_once=True) is None
    with pytest.raises(VersionUnavailable):
        engine.confirm(lease)


@pytest.mark.parametrize("how", ["ends", "withdraws", "goes on"])
def test_rank_that_waits_for_engines_is_told_that_another_took_the_version_back(world: World, how: str) -> None:
    first, second = lenders(world, 2)
    (engine, _) = [*on_gpu(world), *on_gpu(world, name="f")]
    attempts = [lender.borrow(1) for lender in (first, second)]
    engine.update()
    assert isinstance(first.captured(1, attempts[0]), Wait)
    if how == "ends":
        second.trainer.end()
    elif how == "withdraws":
        assert second.captured(1, attempts[1], at_once=True) is None
    else:
        second.borrow(2)
    with pytest.raises(VersionConflict, match="rank 1") as caught:
        first.captured(1, attempts[0])
    assert "before every engine had it" in str(caught.value)
    assert "retry" not in caught.value.details
    assert first.captured(1, attempts[0], at_once=True) is None
    check(world)


def test_rank_whose_sibling_ends_once_every_engine_had_it_is_told_so(world: World) -> None:
    first, second = lenders(world, 2)
    (engine,) = on_gpu(world)
    attempts = [lender.borrow(1) for lender in (first, second)]
    engine.update()
    second.trainer.end()
    assert first.captured(1, attempts[0]) is None


def test_borrowed_memory_is_no_slot(world: World) -> None:
    (lender,) = lenders(world)
    lender.borrow(1)
    for step in range(2, 6):
        lender.trainer.publish(step)
    assert len(world.job.slots(0)) == 3
    world.store.collect()
    assert lender.segment in world.job.segments


class TestChoice:
    def choose(self, lender: Lender, step: int) -> tuple[bool, str]:
        chosen = lender.world.store.choose(lender.trainer.session, step, lender.trainer.set, lender.world.now)
        assert not isinstance(chosen, Wait)
        return chosen.borrowed, chosen.reason

    def waits(self, world: World, name: str = "e") -> None:
        for worker in world.job.engines[name].workers.values():
            worker.waiting_until = world.now + 10

    def test_lent_where_every_worker_waits(self, world: World) -> None:
        (lender,), _ = lenders(world), on_gpu(world, 2)
        assert self.choose(lender, 1) == (False, "rank 0 of engine e does not wait for it")
        self.waits(world)
        assert self.choose(lender, 1)[0] is False, "decided already, for all ranks"
        assert self.choose(lender, 2)[0] is True

    def test_first_rank_decides_for_all(self, world: World) -> None:
        first, second = lenders(world, 2)
        on_gpu(world)
        assert self.choose(first, 1)[0] is False
        self.waits(world)
        assert self.choose(second, 1)[0] is False

    def test_reasons(self, world: World) -> None:
        (lender,) = lenders(world)
        assert self.choose(lender, 1) == (False, "no engine is registered")
        (engine, _) = on_gpu(world, 2)
        self.waits(world)
        world.job.engines["e"].workers[1].devices = frozenset({"GPU-7"})
        assert self.choose(lender, 2) == (False, "rank 1 of engine e cannot open memory of GPU-0")
        engine.end()
        assert self.choose(lender, 3) == (False, "rank 0 of engine e not registered")
        lender.trainer.world.store.revoke(lender.trainer.session)
        world.job.writers[0].lends = False
        assert self.choose(lender, 4) == (False, "rank 0 cannot lend its GPU memory")

    def test_ranks_that_mean_to_declare_their_memory_are_waited_for(self, world: World) -> None:
        ranks = trainers(world, 2)
        for trainer in ranks:
            world.job.writers[trainer.rank].lends = True
        on_gpu(world)
        self.waits(world)
        first = Lender(ranks[0])
        waiting = world.store.choose(ranks[0].session, 1, ranks[0].set, world.now)
        assert isinstance(waiting, Wait)
        assert waiting.reason == "root/j: rank 1 to declare GPU memory"
        Lender(ranks[1])
        assert self.choose(first, 1)[0] is True

    @pytest.mark.parametrize("why", ["engine", "rank", "refusal", "long form"])
    def test_nobody_is_waited_for_where_it_goes_through_host_memory_anyway(self, world: World, why: str) -> None:
        ranks = trainers(world, 2)
        world.job.writers[1].lends = why != "rank"
        on_gpu(world)
        if why != "engine":
            self.waits(world)
        first = Lender(ranks[0])
        if why == "refusal":
            refused = world.store.choose(ranks[1].session, 1, ranks[1].set, world.now, "rank 1: of no handle")
            assert refused == (1, False, "rank 1: of no handle")
        elif why == "long form":
            ranks[1].begin(1)
        reasons = {
            "engine": "rank 0 of engine e does not wait for it",
            "rank": "rank 1 cannot lend its GPU memory",
            "refusal": "rank 1: of no handle",
            "long form": "as its other ranks",
        }
        assert self.choose(first, 1) == (False, reasons[why])
        if why == "refusal":
            assert self.choose(first, 2) == (False, "rank 1 cannot lend its GPU memory"), "not waited for again"

    def test_rank_that_has_waited_long_enough_decides_for_all_unless_that_is_done(self, world: World) -> None:
        ranks = trainers(world, 2)
        world.job.writers[1].lends = True
        on_gpu(world)
        self.waits(world)
        first = Lender(ranks[0])
        late = "waited 15 s for rank 1"
        assert world.store.choose(ranks[0].session, 1, ranks[0].set, world.now, late) == (1, False, late)
        second = Lender(ranks[1])
        assert self.choose(second, 1) == (False, late)
        assert self.choose(second, 2)[0] is True
        decided = world.store.choose(ranks[0].session, 2, ranks[0].set, world.now, late)
        assert not isinstance(decided, Wait)
        assert decided.borrowed
        assert self.choose(first, 3)[0] is True

    def test_rank_that_can_lend_no_more_discards_what_others_have_lent(self, world: World) -> None:
        first, second = lenders(world, 2)
        on_gpu(world)
        self.waits(world)
        assert self.choose(first, 1)[0] is True
        attempt = first.borrow(1)
        world.store.revoke(second.trainer.session)
        world.store.choose(second.trainer.session, 1, second.trainer.set, world.now, "rank 1: moved")
        with pytest.raises(VersionConflict, match="rank 1: moved"):
            first.captured(1, attempt)
        assert self.choose(first, 1) == (False, "rank 1: moved")
        assert [trainer.publish(1) is not None for trainer in (second.trainer, first.trainer)] == [False, True]
        check(world)

    def test_engine_waits_where_whoever_drives_it_does(self, world: World) -> None:
        (lender,), workers = lenders(world), on_gpu(world, 2)
        driver, stranger = world.session(), world.session()
        stranger.uid = 7

        def awaits(session: Session, step: int | None, until: float = 10.0) -> Wait | None:
            return world.store.await_version(session, world.job, "e", step, world.now + until)

        assert isinstance(awaits(stranger, 1), Wait)
        assert self.choose(lender, 1) == (False, "rank 0 of engine e does not wait for it"), "another user's word"
        assert isinstance(awaits(driver, 2), Wait)
        assert self.choose(lender, 2)[0] is True
        attempt = lender.borrow(2)
        assert awaits(driver, 2) is None
        assert self.choose(lender, 3)[0] is False
        for worker in workers:
            worker.update(2)
        assert lender.captured(2, attempt) is None
        assert awaits(driver, 2) is None, "the workers say that it is over"
        waiting = awaits(driver, None)
        assert isinstance(waiting, Wait)
        assert "its next version" in waiting.reason
        assert self.choose(lender, 4)[0] is True
        assert isinstance(awaits(driver, 9, 5.0), Wait)
        world.now += 6
        assert self.choose(lender, 5)[0] is False, "its wait has run out"
        assert isinstance(awaits(driver, 9), Wait)
        world.end(driver)
        assert self.choose(lender, 6)[0] is False

    def test_driver_is_told_of_a_new_epoch_by_its_workers(self, world: World) -> None:
        (lender,), _ = lenders(world), on_gpu(world)
        driver = world.session()
        lender.trainer.publish(58)
        assert isinstance(world.store.await_version(driver, world.job, "e", 59, 2000.0), Wait)
        lender.trainer.end()
        trainers(world, 1, epoch="new")
        assert world.store.await_version(driver, world.job, "e", 59, 2000.0) is None

    def test_wait_that_is_over_does_not_count(self, world: World) -> None:
        (lender,), _ = lenders(world), on_gpu(world)
        self.waits(world)
        world.now += 11
        assert self.choose(lender, 1)[0] is False
