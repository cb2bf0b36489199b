"""Parcels and pins in the store: whose they are, what ends them, and what they keep."""

from __future__ import annotations

import pytest

from awexd.store import Segment, parking
from awexd.store.ledger import Session
from awexd.store.model import Job, ParcelState
from awexd_transports.errors import VersionConflict, VersionUnavailable
from tests.awexd.store_clients import JOB, Trainer, World


@pytest.fixture
def world() -> World:
    return World()


class Parker:
    """A session that parks, and the memory that a daemon would make for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.session: Session = world.session()
        self.session.parks.add(JOB)

    @property
    def job(self) -> Job:
        return self.world.store.job_for(JOB, 0, 0.0)

    def begin(self, nbytes: int = 100, *, segment: str = "p1") -> str:
        store = self.world.store
        parcel = parking.begin(store, self.job, self.session, 0, "optimizer", nbytes)
        if parcel is None:
            made = Segment(segment, 0, nbytes)
            parcel = parking.add(store, self.job, self.session, 0, "optimizer", made)
            store.opened(self.session, made)
        return parcel.segment.id

    def seal(self, segment: str = "p1") -> None:
        parking.to_seal(self.job, self.session, 0, "optimizer", segment).state = ParcelState.PINNED

    def drop(self, *, keep: bool, segment: str | None = None) -> bool:
        kept = parking.drop(self.world.store, self.job, self.session, 0, "optimizer", segment, keep)
        self.world.drain()
        return kept


def test_pinned_parcel_outlives_its_session_and_an_open_one_does_not(world: World) -> None:
    first, second = Parker(world), Parker(world)
    first.begin(segment="p1")
    world.end(first.session)
    assert world.unlinked == ["p1"]
    second.begin(segment="p2")
    second.seal("p2")
    world.end(second.session)
    third = Parker(world)
    assert parking.find(third.job, third.session, 0, "optimizer").segment.id == "p2"
    assert world.unlinked == ["p1"]
    with pytest.raises(VersionUnavailable, match="nothing as 'other'; parked: 'optimizer'"):
        parking.find(third.job, third.session, 0, "other")
    with pytest.raises(VersionUnavailable, match="rank 1"):
        parking.find(third.job, third.session, 1, "optimizer")


def test_name_is_taken_by_a_pinned_parcel_and_by_whoever_fills_one(world: World) -> None:
    first, second = Parker(world), Parker(world)
    first.begin()
    with pytest.raises(VersionConflict, match="is parking 'optimizer'"):
        second.begin()
    first.seal()
    with pytest.raises(VersionConflict, match="has parked 'optimizer' already"):
        first.begin()


def test_begin_again_by_the_same_session_is_the_same_memory_if_it_fits(world: World) -> None:
    parker = Parker(world)
    assert parker.begin(100, segment="p1") == "p1"
    assert parker.begin(100, segment="p2") == "p1"
    assert parker.begin(200, segment="p3") == "p3"
    world.drain()
    assert world.unlinked == ["p1"]
    assert parker.session.to_drop == {"p1"}


def test_spare_is_its_sessions_and_given_up_when_memory_is_short(world: World) -> None:
    parker = Parker(world)
    parker.begin()
    parker.seal()
    assert parker.drop(keep=True)
    assert world.cleared == ["p1"]
    assert parker.begin(segment="p2") == "p1"
    parker.seal()
    assert parker.drop(keep=True)
    assert parking.give_up_spares(world.store)
    assert not parking.give_up_spares(world.store)
    world.drain()
    assert world.unlinked == ["p1"]


def test_spare_goes_with_its_session(world: World) -> None:
    parker = Parker(world)
    parker.begin()
    parker.seal()
    parker.drop(keep=True)
    world.end(parker.session)
    assert world.unlinked == ["p1"]
    assert JOB not in world.store.jobs


def test_drop_of_another_segment_does_nothing(world: World) -> None:
    parker = Parker(world)
    parker.begin()
    parker.seal()
    assert not parker.drop(keep=False, segment="p0")
    assert world.unlinked == []
    assert not parker.drop(keep=False, segment="p1")
    assert world.unlinked == ["p1"]
    assert not parker.drop(keep=False)


def test_seal_of_what_is_gone_may_be_tried_anew(world: World) -> None:
    first, second = Parker(world), Parker(world)
    first.begin()
    for who, segment in ((first, "p0"), (second, "p1")):
        with pytest.raises(VersionConflict) as caught:
            who.seal(segment)
        assert caught.value.details == {"retry": True}
    first.seal()
    first.seal()  # a repetition


def test_memory_for_whoever_has_gone_is_not_taken(world: World) -> None:
    parker = Parker(world)
    job = parker.job
    world.end(parker.session)
    with pytest.raises(VersionConflict, match="went away"):
        parking.add(world.store, job, parker.session, 0, "optimizer", Segment("p1", 0, 100))


def test_close_job_ends_all(world: World) -> None:
    parker = Parker(world)
    parker.begin()
    parker.seal()
    world.store.close_job(parker.job)
    world.drain()
    assert world.unlinked == ["p1"]


def published(world: World, *steps: int, keep: int = 1) -> Trainer:
    trainer = Trainer(world, keep=keep)
    trainer.register()
    trainer.reserve()
    for step in steps:
        trainer.seal(trainer.begin(step))
    return trainer


def test_pinned_version_stays_beyond_keep_and_others_go_on(world: World) -> None:
    trainer = published(world, 1)
    version = parking.pin(world.job, world.job.writers[0], (1, 1))
    for step in range(2, 8):
        trainer.seal(trainer.begin(step))
    assert world.held() == [(1, 7)]
    assert world.job.versions[1, 1] is version
    assert not set(version.segments) & set(world.unlinked)
    assert parking.pin(world.job, world.job.writers[0], (1, 1)) is version
    with pytest.raises(VersionConflict, match="has offloaded into epoch 1 step 1 already"):
        parking.pin(world.job, world.job.writers[0], (1, 7))
    assert parking.unpin(world.store, world.job, 0)
    assert (1, 1) not in world.job.versions
    assert not parking.unpin(world.store, world.job, 0)


def test_pinned_version_is_not_withdrawn(world: World) -> None:
    published(world, 1, 2, keep=2)
    parking.pin(world.job, world.job.writers[0], (1, 2))
    told = "epoch 1 step 2 is the only copy of the weights of rank 0"
    with pytest.raises(VersionConflict, match=told):
        world.store.rollback(world.job, 1)
    with pytest.raises(VersionConflict, match=told):
        world.store.drop(world.job, None)
    assert world.held() == [(1, 2), (1, 1)]
    assert [str(version) for version in world.store.drop(world.job, 1)] == ["epoch 1 step 1"]


def test_only_what_is_held_is_pinned(world: World) -> None:
    published(world, 1)
    with pytest.raises(VersionUnavailable, match="step 5 is not held; held: epoch 1 step 1"):
        parking.pin(world.job, world.job.writers[0], (1, 5))
