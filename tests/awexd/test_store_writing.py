from __future__ import annotations

import pytest

from awexd.store import Segment, Store, Version, Wait
from awexd.store.ledger import Session
from awexd.store.model import REMEMBERED_ATTEMPTS, Job, SegmentState
from awexd.store.slots import Shortfall
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict
from awexd_transports.layout import digest_of
from tests.awexd.store_clients import JOB, NBYTES, Engine, Trainer, World, check, digest, engines, trainers


def test_version_is_visible_only_when_every_rank_has_sealed() -> None:
    world = World()
    ranks = trainers(world, 3)
    begun = [rank.begin(1) for rank in ranks]
    assert [rank.seal(b) for rank, b in zip(ranks[:2], begun[:2], strict=True)] == [None, None]
    assert world.held() == []
    outcome = ranks[0].committed(begun[0])
    assert isinstance(outcome, Wait)
    assert "rank 2 to seal step 1 of epoch 1" in outcome.reason
    version = ranks[2].seal(begun[2])
    assert version
    assert version.key == (1, 1)
    assert version.set_digest == digest_of([digest(f"segment{n}") for n in range(3)])
    assert ranks[0].committed(begun[0]) is None
    check(world)


def test_repeated_seal_is_answered_and_makes_no_second_version() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    begun = trainer.begin(1)
    assert trainer.seal(begun)
    assert trainer.seal(begun) is None
    assert trainer.committed(begun) is None
    assert world.held() == [(1, 1)]


def test_abort_discards_the_attempt_on_every_rank_sealed_ones_too() -> None:
    world = World()
    first, second = trainers(world, 2)
    one, other = first.begin(5), second.begin(5)
    first.seal(one)
    second.abort(other, "out of memory")
    with pytest.raises(VersionConflict, match="rank 1 aborted it: out of memory"):
        first.committed(one)
    retry = first.begin(5)
    assert retry.attempt.number != one.attempt.number
    first.seal(retry)
    assert second.publish(5)
    assert world.job.versions[1, 5].attempt == retry.attempt.number
    check(world)


def test_seal_of_an_aborted_attempt_is_refused_and_its_slot_free() -> None:
    world = World()
    first, second = trainers(world, 2)
    one, other = first.begin(5), second.begin(5)
    second.abort(other)
    with pytest.raises(VersionConflict, match="over"):
        first.seal(one)
    assert all(segment.state is SegmentState.FREE for segment in world.job.segments.values())


@pytest.mark.parametrize("step", [0, 3, 5])
def test_step_that_is_not_after_the_last_is_refused(step: int) -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.publish(5)
    with pytest.raises(VersionConflict, match=f"step {step} is not after step 5 of epoch 1"):
        trainer.begin(step)


def test_restarted_trainer_needs_a_new_epoch_to_start_over() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.publish(57)
    trainer.end()
    (trainer,) = trainers(world, 1)
    with pytest.raises(VersionConflict, match='epoch="new"'):
        trainer.begin(1)
    trainer.end()
    (trainer,) = trainers(world, 1, epoch="new")
    assert trainer.publish(1)
    assert world.held() == [(2, 1), (1, 57)]


def test_rank_that_has_sealed_may_not_begin_the_step_again() -> None:
    world = World()
    first, _ = trainers(world, 2)
    first.publish(5)
    with pytest.raises(VersionConflict, match="rank 0 has sealed step 5 already; rank 1 to seal"):
        first.begin(5)


def test_rank_that_went_back_is_refused_when_another_is_ahead() -> None:
    world = World()
    first, second = trainers(world, 2)
    second.begin(7)
    with pytest.raises(VersionConflict, match="rank 1 went on to step 7 without sealing step 6"):
        first.begin(6)
    first.begin(7)
    check(world)


def test_lone_rank_may_go_back_to_an_earlier_open_step() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.begin(7)
    assert trainer.publish(6)
    assert trainer.publish(7)
    check(world)


def test_writer_that_dies_before_sealing_leaves_its_slot_free_and_the_retry_works_at_once() -> None:
    world = World()
    first, second = trainers(world, 2)
    one, _ = first.begin(5), second.begin(5)
    first.seal(one)
    second.end()
    with pytest.raises(VersionConflict, match=r"it ended \(rank 1, process"):
        first.committed(one)
    assert world.job.slots(1) == []
    second = Trainer(world, 1, 2)
    second.register()
    second.reserve()
    first.publish(5)
    assert second.publish(5)
    check(world)


def test_writer_that_dies_after_sealing_does_not_take_its_part_with_it() -> None:
    world = World()
    first, second = trainers(world, 2)
    first.publish(5)
    first.end()
    assert second.publish(5)
    assert world.held() == [(1, 5)]
    check(world)


def test_missing_rank_is_named() -> None:
    world = World()
    first = Trainer(world, 0, 3)
    first.register()
    outcome = world.store.ready(first.session)
    assert isinstance(outcome, Wait)
    assert "ranks 1, 2 of 3 to register in epoch 1" in outcome.reason


def test_epoch_opens_when_the_last_rank_has_come_and_older_processes_are_told() -> None:
    world = World()
    old = trainers(world, 2)
    begun = old[0].begin(5)
    ranks = [Trainer(world, rank, 2) for rank in range(2)]
    assert not ranks[0].register("new")
    outcome = world.store.ready(ranks[0].session)
    assert isinstance(outcome, Wait)
    assert "rank 1 of the new epoch's 2 to register" in outcome.reason
    assert world.job.epoch == 1
    assert ranks[1].register("new")
    assert world.job.epoch == 2
    with pytest.raises(EpochChanged, match="epoch 2"):
        old[0].seal(begun)
    with pytest.raises(EpochChanged):
        old[1].begin(6)
    check(world)


def test_rendezvous_is_not_opened_by_a_rank_that_came_and_went() -> None:
    world = World()
    trainers(world, 2)
    first = Trainer(world, 0, 2)
    first.register("new")
    first.end()
    second = Trainer(world, 1, 2)
    assert not second.register("new")
    assert world.job.epoch == 1


def test_ranks_of_a_new_epoch_that_disagree_are_refused() -> None:
    world = World()
    Trainer(world, 0, 2).register("new")
    with pytest.raises(VersionConflict, match="disagree"):
        Trainer(world, 1, 3).register("new")
    with pytest.raises(VersionConflict, match="disagree"):
        Trainer(world, 1, 2, keep=3).register("new")


def test_second_process_of_a_rank_is_refused_and_the_first_still_publishes() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    with pytest.raises(VersionConflict, match=f"rank 0 is registered by process {trainer.session.pid}, which lives"):
        Trainer(world, 0, 1).register()
    assert trainer.publish(1)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (5, 3)])
def test_rank_outside_its_world_is_refused(rank: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"rank {rank} in a world of {size}"):
        Trainer(World(), rank, size).register()


def test_trainer_of_another_size_needs_a_new_epoch() -> None:
    world = World()
    for trainer in trainers(world, 2):
        trainer.end()
    with pytest.raises(VersionConflict, match="has 2 writer ranks, not 3"):
        Trainer(world, 0, 3).register()
    trainers(world, 3, epoch="new")
    check(world)


def test_resuming_by_number_joins_that_epoch_and_no_other() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.publish(1)
    trainer.end()
    again = Trainer(world)
    with pytest.raises(EpochChanged, match="epoch 1 now, not in epoch 2"):
        again.register(2)
    assert not again.register(1)
    again.reserve()
    assert again.publish(2)


def test_registering_again_with_other_tensors_aborts_what_was_open() -> None:
    world = World()
    first, second = trainers(world, 2)
    begun = first.begin(5)
    other = second.begin(5)
    second.seal(other)
    first.register(manifest="other")
    with pytest.raises(VersionConflict, match="rank 0 registered anew"):
        second.committed(other)
    with pytest.raises(VersionConflict, match="manifests have changed") as failure:
        second.begin(5)
    assert failure.value.details == {"set_changed": True}
    with pytest.raises(VersionConflict):
        first.seal(begun)
    check(world)


def test_changed_size_replaces_the_slots_that_no_version_holds() -> None:
    world = World()
    (trainer,) = trainers(world, 1, keep=1)
    trainer.publish(1)
    trainer.nbytes = 2 * NBYTES
    trainer.register(manifest="larger")
    trainer.reserve()
    assert sorted(segment.nbytes for segment in world.job.segments.values()) == [NBYTES, 2 * NBYTES, 2 * NBYTES]
    assert trainer.publish(2)
    assert {segment.nbytes for segment in world.job.segments.values()} == {2 * NBYTES}
    check(world)


def test_begin_says_how_many_slots_are_to_be_made() -> None:
    world = World()
    trainer = Trainer(world, keep=3)
    trainer.register()
    outcome = world.store.ready(trainer.session)
    assert not isinstance(outcome, Wait)
    assert world.store.reserve(trainer.session, outcome[0], digest("x"), 10) == Shortfall(0, 10, 4)
    assert world.store.begin(trainer.session, 1, outcome[0]) == Shortfall(0, 10, 4)


def test_keep_may_be_raised_and_lowered_by_a_lone_rank() -> None:
    world = World()
    (trainer,) = trainers(world, 1, keep=3)
    for step in range(4):
        trainer.publish(step)
    assert len(world.held()) == 3
    trainer.keep = 1
    trainer.register()
    trainer.reserve()
    assert world.held() == [(1, 3)]
    check(world)


def test_keep_of_one_rank_must_be_the_others() -> None:
    world = World()
    first, _ = trainers(world, 2)
    first.keep = 4
    with pytest.raises(VersionConflict, match="rank 1 keeps 2 versions, not 4"):
        first.register()


def test_versions_retire_beyond_keep_oldest_first_and_across_epochs() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    for step in (1, 2, 3):
        trainer.publish(step)
    assert world.held() == [(1, 3), (1, 2)]
    trainer.end()
    (trainer,) = trainers(world, 1, epoch="new")
    trainer.publish(0)
    assert world.held() == [(2, 0), (1, 3)]
    check(world)


def test_commit_is_remembered_for_as_long_as_the_version_is_held() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    first = trainer.begin(1)
    trainer.seal(first)
    for number in range(REMEMBERED_ATTEMPTS + 1):
        trainer.abort(trainer.begin(2 + number))
    assert world.held() == [(1, 1)]
    assert trainer.committed(first) is None


def test_session_that_ends_unmapped_or_not_leaves_nothing_behind() -> None:
    for unmapped in (True, False):
        world = World()
        first, second = trainers(world, 2)
        (engine,) = engines(world, 1)
        for step in (1, 2):
            first.publish(step)
            second.publish(step)
        engine.resolve(1)
        first.begin(3)
        for client in (first, second, engine):
            client.end(unmapped=unmapped)
        assert world.store.sessions == {}
        assert world.store.leases == {}
        assert world.job.writers == {}
        assert world.job.engines == {}
        assert {segment.state for segment in world.job.segments.values()} == {SegmentState.HELD}
        assert {segment.unsafe for segment in world.job.segments.values()} == {not unmapped}
        check(world)


def test_ended_process_that_may_still_write_takes_its_slot_out_of_use() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    begun = trainer.begin(1)
    trainer.end(unmapped=False)
    (trainer,) = trainers(world, 1)
    assert trainer.begin(1).segment.id != begun.segment.id
    assert begun.segment.id in world.unlinked


@pytest.mark.parametrize("refused", ["writer's world", "writer's epoch", "reader's world"])
def test_registration_that_is_refused_makes_no_job(refused: str) -> None:
    world = World()
    if refused == "reader's world":
        client: Trainer | Engine = Engine(world, 3, 2)
        with pytest.raises(InvalidArgument):
            client.register()
    else:
        client = Trainer(world, 3, 2) if refused == "writer's world" else Trainer(world)
        with pytest.raises((InvalidArgument, EpochChanged)):
            client.register(7 if refused == "writer's epoch" else "continue")
    client.end()
    assert world.store.jobs == {}, "a job that nobody is in and no time limit ends"


def test_grants_outlive_a_reader_that_comes_before_the_trainer() -> None:
    world = World()
    job = world.store.job_for(JOB, 0, 0.0)
    job.uids.add(1234)
    (engine,) = engines(world, 1)
    engine.end()
    assert world.store.jobs.get(JOB, Job(JOB, 0)).uids == {1234}


def test_adopted_version_is_held_and_its_memory_never_reused() -> None:
    store = Store()
    world = World(store)
    job = Job(JOB, 0, epoch=3, world_size=1, keep=1, high=4)
    store.jobs[JOB] = job
    segment = Segment("old", 0, NBYTES, digest=digest("segment0"))
    store.adopt(job, Version((3, 5), 9, ("old",), (digest("segment0"),), digest("set"), NBYTES), [segment])
    world.drain()
    assert world.held() == [(3, 5)]
    (trainer,) = trainers(world, 1, keep=1)
    with pytest.raises(VersionConflict, match="not after step 5"):
        trainer.begin(5)
    assert store.check_seal(trainer.session, 3, 5, 9) is None, "the reply to this seal was lost with the daemon"
    trainer.publish(6)
    assert "old" in world.unlinked
    check(world)


def test_session_may_not_write_two_ranks() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.rank = 1
    trainer.size = 2
    with pytest.raises(VersionConflict, match="writes root/j as rank 0 already"):
        trainer.register()


def test_call_without_registration_is_refused() -> None:
    store = Store()
    session = Session("s", 1, 0)
    store.open_session(session)
    with pytest.raises(InvalidArgument, match="no registered writer"):
        store.ready(session)
    with pytest.raises(InvalidArgument, match="no registered reader"):
        store.siblings(session)


def test_idle_job_is_named_after_its_time_and_not_while_it_is_used() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.publish(1)
    world.advance(1000)
    assert world.store.idle_jobs(world.now, 100) == []
    trainer.end()
    world.advance(99)
    assert world.store.idle_jobs(world.now, 100) == []
    world.advance(1)
    assert world.store.idle_jobs(world.now, 100) == [world.job]


def test_dropping_what_an_ended_trainer_left_gives_its_memory_back() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    trainer.publish(1)
    trainer.end()
    assert world.held() == [(1, 1)]
    world.store.drop(world.job, None)
    world.drain()
    assert world.job.segments == {}
