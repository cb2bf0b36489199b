from __future__ import annotations

import pytest

from awexd.store.model import SegmentState
from awexd_transports.errors import AwexdError, EpochChanged, VersionConflict
from tests.awexd.store_clients import JOB, Trainer, World, check, digest, trainers


def test_stale_seal_leaves_the_slot_of_the_next_step_alone() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    old = trainer.begin(5)
    new = trainer.begin(6)
    with pytest.raises(VersionConflict, match="over"):
        trainer.seal(old)
    check(world)
    version = trainer.seal(new)
    assert version
    assert version.digests == (digest("segment0"),)


def test_stale_abort_leaves_the_slot_of_the_next_step_alone() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    old = trainer.begin(5)
    new = trainer.begin(6)
    trainer.abort(old)
    check(world)
    version = trainer.seal(new)
    assert version
    assert version.digests == (digest("segment0"),)


def test_new_epoch_is_not_handed_the_slot_that_the_old_process_still_writes() -> None:
    world = World()
    (old,) = trainers(world, 1)
    writing = old.begin(5)
    (new,) = trainers(world, 1, epoch="new")
    slots = [new.begin(step).segment.id for step in range(1, 4)]  # each begin gives up the one before
    assert writing.segment.id not in slots
    check(world)


@pytest.mark.parametrize("how", ["seal", "abort", "end"])
def test_old_process_of_a_rank_does_not_free_the_new_ones_slot(how: str) -> None:
    world = World()
    (old,) = trainers(world, 1)
    stale = old.begin(5)
    (new,) = trainers(world, 1, epoch="new")
    begun = new.begin(1)
    if how == "seal":
        with pytest.raises(EpochChanged):
            old.seal(stale)
    elif how == "abort":
        old.abort(stale)
    else:
        old.end()
    check(world)
    version = new.seal(begun)
    assert version
    assert version.digests == (digest("segment0"),)


def test_slot_of_a_replaced_process_is_free_when_its_session_ends() -> None:
    world = World()
    (old,) = trainers(world, 1)
    stale = old.begin(5)
    trainers(world, 1, epoch="new")
    old.end()
    segment = world.job.segments.get(stale.segment.id)
    assert segment is None or segment.state is SegmentState.FREE


def test_sealed_part_of_a_dead_process_is_not_mixed_with_its_successors() -> None:
    # Rank 0 sealed step 5 and died; its successor recomputes everything. Ranks 0 and 1 must come from one run.
    world = World()
    first, second = trainers(world, 2)
    first.publish(5)
    first.end()
    second.end()
    first, second = trainers(world, 2)
    assert second.publish(5) is None
    assert world.held() == []
    assert first.publish(5)
    check(world)


def test_waiters_of_a_step_are_woken_when_another_rank_goes_past_it() -> None:
    world = World()
    first, second = trainers(world, 2)
    first.begin(5)
    sealed = second.begin(5)
    second.seal(sealed)
    second.begin(7)
    world.drain()
    with pytest.raises(VersionConflict, match="went on to step 7"):
        world.store.begin(first.session, 6, first.set)  # step 5 is over now
    with pytest.raises(AwexdError, match="over"):
        second.committed(sealed)
    assert JOB in world.drain()


def test_rendezvous_forgets_a_process_that_registered_otherwise_meanwhile() -> None:
    world = World()
    trainers(world, 2)[0].end()
    pending = Trainer(world, 0, 2)
    pending.register("new")
    pending.register("continue")
    pending.end()
    assert world.job.pending is None
    Trainer(world, 0, 2).register("new")


def test_new_epoch_publishes_at_once_though_the_old_process_hangs_in_the_middle_of_a_step() -> None:
    world = World()
    (old,) = trainers(world, 1)
    for step in (1, 2):
        old.publish(step)
    hung = old.begin(3)
    (new,) = trainers(world, 1, epoch="new")
    assert new.begin(0).segment.id != hung.segment.id
    old.end(unmapped=False)
    assert hung.segment.id in world.unlinked
    check(world)
