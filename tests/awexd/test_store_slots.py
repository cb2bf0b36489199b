"""Slots that are granted before a step is begun: whose they are, what they become, and when they are free again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from awexd.store import Wait
from awexd.store.model import SegmentState
from awexd.store.writing import Begun
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict
from tests.awexd.store_clients import JOB, NBYTES, Engine, Trainer, World, check, digest, engines, trainers


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    check(made)


def states(world: World) -> dict[str, int]:
    counts = {state.value: 0 for state in SegmentState}
    for segment in world.job.segments.values():
        counts[segment.state.value] += 1
    return counts


def test_grant_is_the_same_until_it_is_used_and_no_attempt_knows_of_it(world: World) -> None:
    (trainer,) = trainers(world, 1)
    slot = trainer.grant()
    assert trainer.grant() is slot
    assert (slot.state, slot.digest, slot.session) == (SegmentState.GRANTED, digest("segment0"), trainer.session.id)
    assert world.job.attempts == {}
    begun = trainer.try_publish_filled(1, slot.id)
    assert isinstance(begun, Begun)
    assert begun.segment is slot
    assert world.held() == [(1, 1)]
    assert trainer.grant() is not slot


def test_begin_takes_the_granted_slot(world: World) -> None:
    (trainer,) = trainers(world, 1)
    slot = trainer.grant()
    begun = trainer.begin(1)
    assert begun.segment is slot
    assert states(world) == {"free": 2, "granted": 0, "writing": 1, "sealed": 0, "held": 0}


def test_steps_of_one_message_each_go_on_for_ever(world: World) -> None:
    (trainer,) = trainers(world, 1, keep=1)
    (engine,) = engines(world, 1)
    for step in range(1, 9):
        trainer.publish_filled(step)
        assert engine.update() == (1, step)
    assert len(world.job.segments) == 2


def test_repeated_request_is_found_done_in_the_open_attempt_and_in_the_version(world: World) -> None:
    first, second = trainers(world, 2)
    slot = first.grant().id
    begun = first.try_publish_filled(1, slot)
    assert isinstance(begun, Begun)
    assert first.try_publish_filled(1, slot) == begun.attempt.number
    second.publish_filled(1)
    assert first.try_publish_filled(1, slot) == begun.attempt.number
    assert world.held() == [(1, 1)]


def test_refusals_of_begin_hold_for_what_was_filled_and_leave_the_slot(world: World) -> None:
    first, second = trainers(world, 2)
    first.publish_filled(1)
    second.publish_filled(1)
    slot = first.grant().id
    with pytest.raises(VersionConflict, match="step 1 is not after step 1"):
        first.try_publish_filled(1, slot)
    second.begin(3)
    with pytest.raises(VersionConflict, match="rank 1 went on to step 3 without sealing step 2"):
        first.try_publish_filled(2, slot)
    with pytest.raises(VersionConflict, match="manifests have changed") as refused:
        world.store.begin_filled(first.session, 2, digest("other"), slot)
    assert refused.value.details == {"set_changed": True}
    assert first.grant().id == slot
    first.publish_filled(3)
    with pytest.raises(VersionConflict, match="rank 0 has sealed step 3 already; rank 1 to seal"):
        first.publish_filled(3)
    check(world)


def test_slot_that_is_not_granted_is_refused_and_may_be_written_again_after_a_restart(world: World) -> None:
    (trainer,) = trainers(world, 1)
    with pytest.raises(VersionConflict, match="the daemon restarted") as lost:
        trainer.try_publish_filled(1, "from an earlier daemon")
    assert lost.value.details == {"retry": True}
    free = next(iter(world.job.segments))
    with pytest.raises(VersionConflict):
        trainer.try_publish_filled(1, free)
    assert world.job.attempts == {}


def test_slot_whose_attempt_another_rank_has_aborted_is_not_written_again_unasked(world: World) -> None:
    first, second = trainers(world, 2)
    slot = first.grant().id
    first.try_publish_filled(1, slot)
    second.abort(second.begin(1), "out of memory")
    with pytest.raises(VersionConflict, match="rank 1 aborted it: out of memory") as over:
        first.try_publish_filled(1, slot)
    assert over.value.details == {"retry": False}
    assert first.grant().id == slot, "once it is granted again, that is forgotten"
    first.reserve()
    with pytest.raises(VersionConflict) as lost:
        first.try_publish_filled(1, slot)
    assert lost.value.details == {"retry": True}


def test_grant_waits_for_a_slot_and_says_who_holds_them(world: World) -> None:
    (trainer,) = trainers(world, 1, keep=1)
    (engine,) = engines(world, 1)
    trainer.publish_filled(1)
    lease = engine.resolve()
    trainer.publish_filled(2)
    waiting = trainer.try_grant()
    assert isinstance(waiting, Wait)
    assert waiting.job == JOB
    assert "rank 0 (all 2 in use); readers' leases on epoch 1 step 1" in waiting.reason
    engine.confirm(lease)
    trainer.grant()


def test_first_rank_to_seal_is_granted_its_next_slot_when_the_others_have(world: World) -> None:
    first, second = trainers(world, 2, keep=1)
    for trainer in (first, second):
        trainer.publish_filled(1)
    first.publish_filled(2)
    waiting = first.try_grant()
    assert isinstance(waiting, Wait)
    assert "the seal of step 2 by rank 1" in waiting.reason
    second.publish_filled(2)
    first.grant()


def test_rank_that_is_killed_while_it_fills_its_slot_never_meets_the_others_parts(world: World) -> None:
    first, second = trainers(world, 2)
    sealed = first.publish_filled(1)
    second.grant()
    second.end(unmapped=False)
    assert states(world)["granted"] == 0
    assert isinstance(first.committed(sealed), Wait)
    back = Trainer(world, 1, 2)
    back.register()
    with pytest.raises(VersionConflict, match="rank 1 was started anew"):
        first.committed(sealed)
    back.reserve()
    for trainer in (first, back):
        trainer.publish_filled(1)
    assert world.held() == [(1, 1)]


def test_filled_slot_waits_for_an_absent_rank_and_is_published_when_it_is_back(world: World) -> None:
    first, second = trainers(world, 2)
    slot = first.grant().id
    second.end()
    waiting = first.try_publish_filled(1, slot)
    assert isinstance(waiting, Wait)
    assert "rank 1 of 2 to register" in waiting.reason
    back = Trainer(world, 1, 2)
    back.register()
    back.reserve()
    assert isinstance(first.try_publish_filled(1, slot), Begun)
    back.publish_filled(1)
    assert world.held() == [(1, 1)]


@pytest.mark.parametrize("unmapped", [True, False])
def test_granted_slot_of_an_ended_session_is_free_or_replaced(world: World, unmapped: bool) -> None:
    (trainer,) = trainers(world, 1)
    trainer.publish_filled(1)
    slot = trainer.grant().id
    trainer.end(unmapped=unmapped)
    assert slot in world.unlinked, "nobody could use it"
    assert states(world) == {"free": 0, "granted": 0, "writing": 0, "sealed": 0, "held": 1}


def test_registering_again_gives_the_granted_slot_back(world: World) -> None:
    (trainer,) = trainers(world, 1)
    slot = trainer.grant().id
    trainer.register()
    assert world.job.segments[slot].state is SegmentState.FREE
    with pytest.raises(VersionConflict, match="has reserved no memory"):
        trainer.try_grant()
    trainer.reserve()
    trainer.grant()


def test_reserving_another_layout_replaces_the_granted_slot(world: World) -> None:
    (trainer,) = trainers(world, 1)
    slot = trainer.grant().id
    trainer.nbytes *= 2
    trainer.reserve()
    assert slot in world.unlinked
    assert trainer.grant().nbytes == trainer.nbytes
    with pytest.raises(VersionConflict):
        trainer.try_publish_filled(1, slot)


def test_new_epoch_never_gets_the_slot_that_the_old_ones_process_may_be_filling(world: World) -> None:
    (old,) = trainers(world, 1)
    slot = old.grant()
    (new,) = trainers(world, 1, epoch="new")
    assert slot.unsafe
    for step in range(1, 6):
        assert new.publish_filled(step).segment is not slot
    with pytest.raises(EpochChanged):
        old.try_publish_filled(6, slot.id)
    assert slot.id in world.unlinked, "it was told, and writes no more"
    with pytest.raises(EpochChanged):
        old.try_grant()
    assert world.held() == [(2, 5), (2, 4)]


def test_granted_slot_that_a_reader_left_mapped_without_a_word_is_replaced(world: World) -> None:
    (trainer,) = trainers(world, 1, keep=1)
    reader = Engine(world)
    reader.register()
    slot = trainer.publish_filled(1).segment
    reader.update()
    for step in (2, 3):
        if trainer.grant() is slot:
            break
        trainer.publish_filled(step)
    assert trainer.grant() is slot
    reader.end(unmapped=False)
    assert trainer.grant() is not slot
    assert slot.id in world.unlinked


def test_lowered_keep_and_garbage_collection_leave_what_is_granted(world: World) -> None:
    (trainer,) = trainers(world, 1, keep=3)
    slot = trainer.grant().id
    world.store.collect()
    world.drain()
    assert slot in world.job.segments
    trainer.keep = 1
    trainer.register()
    trainer.reserve()
    assert len(world.job.segments) == 2
    trainer.publish_filled(1)


def test_closed_job_takes_its_granted_slots_along(world: World) -> None:
    (trainer,) = trainers(world, 1)
    slot = trainer.grant().id
    world.store.close_job(world.job)
    world.drain()
    assert slot in world.unlinked
    for act in (trainer.try_grant, lambda: trainer.try_publish_filled(1, slot)):
        with pytest.raises(InvalidArgument, match="its job was closed"):
            act()


def test_rolled_back_steps_are_refused_to_what_was_filled(world: World) -> None:
    (trainer,) = trainers(world, 1)
    for step in (1, 2):
        trainer.publish_filled(step)
    slot = trainer.grant().id
    world.store.rollback(world.job, 1)
    world.drain()
    with pytest.raises(VersionConflict, match="step 2 is not after step 2"):
        trainer.try_publish_filled(2, slot)
    assert isinstance(trainer.try_publish_filled(3, slot), Begun)


def test_abort_without_a_number_discards_the_attempt_at_that_step(world: World) -> None:
    """A rank that fails while it fills a granted slot has begun nothing, and the others must learn of it."""
    first, second = trainers(world, 2)
    sealed = first.publish_filled(1)
    slot = second.grant()
    world.store.abort(second.session, 1, None, "no such tensor")
    world.drain()
    with pytest.raises(VersionConflict, match="rank 1 aborted it: no such tensor"):
        first.committed(sealed)
    assert second.grant() is slot
    for trainer in (first, second):
        trainer.publish_filled(1)
    assert world.held() == [(1, 1)]


def test_abort_without_a_number_by_a_process_of_an_older_epoch_does_nothing(world: World) -> None:
    old, _ = trainers(world, 2)
    new = trainers(world, 2, epoch="new")
    new[0].publish_filled(1)
    world.store.abort(old.session, 1, None, "too late")
    new[1].publish_filled(1)
    assert world.held() == [(2, 1)]


def test_progress_is_of_the_sessions_own_unsealed_segment_and_only_grows(world: World) -> None:
    first, second = trainers(world, 2)
    begun = first.begin(1)
    where = (1, 1, begun.attempt.number)
    _, attempt = world.store.progress(first.session, *where, 0, True)
    assert world.drain() == {JOB}
    world.store.progress(first.session, *where, NBYTES, True)
    assert world.drain() == set()  # nobody waits for more than the first word
    assert attempt.written == {0: NBYTES}
    for nbytes, checksums in ((NBYTES - 1, True), (NBYTES + 1, True), (NBYTES, False)):
        with pytest.raises(InvalidArgument, match="rank 0 tells of"):
            world.store.progress(first.session, *where, nbytes, checksums)
    with pytest.raises(VersionConflict, match="is over"):
        world.store.progress(second.session, *where, 0, True)  # it has not begun
    with pytest.raises(VersionConflict, match="is over"):
        world.store.progress(first.session, 1, 1, begun.attempt.number + 1, NBYTES, True)
    first.seal(begun)
    with pytest.raises(VersionConflict, match="has sealed step 1"):
        world.store.progress(first.session, *where, NBYTES, True)


def test_slot_that_other_nodes_fetch_from_is_filled_anew_only_when_they_are_done(world: World) -> None:
    (trainer,) = trainers(world, 1, keep=2)
    for step in (1, 2):
        trainer.publish(step)
    begun = trainer.begin(3)
    world.store.offer(begun.segment)
    trainer.abort(begun)
    assert begun.segment.state is SegmentState.FREE
    assert isinstance(trainer.try_begin(3), Wait)
    world.store.offer_no_more(world.job, [begun.segment])
    assert world.drain() == {JOB}
    assert trainer.begin(3).segment is begun.segment


def test_rank_that_begins_a_step_anew_after_it_told_of_it_discards_it_for_all(world: World) -> None:
    first, second = trainers(world, 2)
    begun, other = first.begin(1), second.begin(1)
    world.store.progress(first.session, 1, 1, begun.attempt.number, 16, False)
    again = first.begin(1)
    assert again.attempt.number > begun.attempt.number
    with pytest.raises(VersionConflict, match="rank 0 began it anew"):
        second.seal(other)
