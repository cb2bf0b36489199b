from __future__ import annotations

import contextlib

import pytest

from awexd.store import Wait
from awexd.store.model import MAX_OPEN_ROUNDS, SegmentState
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict, VersionUnavailable
from tests.awexd.store_clients import JOB, Engine, Trainer, World, check, engines, trainers


def published(*steps: int, keep: int = 2) -> World:
    world = World()
    (trainer,) = trainers(world, 1, keep=keep)
    for step in steps:
        trainer.publish(step)
    return world


def test_update_waits_for_the_first_version_and_says_so() -> None:
    world = World()
    (engine,) = engines(world, 1)
    outcome = engine.try_resolve()
    assert isinstance(outcome, Wait)
    assert "first committed version" in outcome.reason


def test_update_of_a_future_step_waits_naming_it_and_what_is_held() -> None:
    world = published(1)
    (engine,) = engines(world, 1)
    outcome = engine.try_resolve(2)
    assert isinstance(outcome, Wait)
    assert "step 2" in outcome.reason
    assert "held: epoch 1 step 1" in outcome.reason


def test_update_of_a_retired_step_is_refused_naming_what_is_held() -> None:
    world = published(1, 2, 3)
    (engine,) = engines(world, 1)
    with pytest.raises(VersionUnavailable, match=r"step 1 .*held: epoch 1 step 3, epoch 1 step 2"):
        engine.try_resolve(1)


def test_waiting_step_is_refused_at_once_when_the_epoch_changes() -> None:
    world = published(57)
    (engine,) = engines(world, 1)
    assert isinstance(engine.try_resolve(58), Wait)
    world.drain()
    trainers(world, 1, epoch="new")
    with pytest.raises(EpochChanged, match="epoch 2"):
        engine.try_resolve(58)
    assert isinstance(engine.try_resolve(58), Wait), "told once; then it waits in the new epoch"


def test_wait_for_a_step_is_refused_at_once_when_the_epoch_changes() -> None:
    world = published(57)
    (engine,) = engines(world, 1)
    assert isinstance(world.store.newest_since(engine.session, 58), Wait)
    assert world.store.newest_since(engine.session, 57) == (1, 57)
    trainers(world, 1, epoch="new")
    with pytest.raises(EpochChanged) as failure:
        world.store.newest_since(engine.session, 58)
    assert failure.value.details == {"epoch": 2, "step": None}


def test_workers_of_an_engine_get_one_version_while_a_publish_commits() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    first, second = engines(world, 2)
    trainer.publish(1)
    lease = first.resolve()
    trainer.publish(2)
    assert second.update() == (1, 1)
    assert first.confirm(lease) == (1, 1)
    assert (first.update(), second.update()) == ((1, 2), (1, 2))
    check(world)


def test_round_holds_its_version_and_the_one_before_until_the_last_worker_confirms() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    first, second = engines(world, 2)
    trainer.publish(1)
    assert (first.update(), second.update()) == ((1, 1), (1, 1))
    trainer.publish(2)
    assert first.update() == (1, 2)
    trainer.publish(3)
    outcome = trainer.try_begin(4)
    assert isinstance(outcome, Wait), "the second worker runs on step 1 until it gets step 2"
    assert "epoch 1 step 1" in outcome.reason
    assert second.update() == (1, 2)
    assert trainer.publish(4)
    check(world)


def test_worker_that_asks_for_another_step_than_its_round_is_refused() -> None:
    world = published(1, 2)
    first, second = engines(world, 2)
    assert first.update(1) == (1, 1)
    with pytest.raises(VersionConflict, match=r"fixed to step 1.*rank 1 asks for step 2"):
        second.try_resolve(2)
    assert second.update() == (1, 1)


def test_replaced_worker_joins_the_open_round() -> None:
    world = published(1)
    first, second = engines(world, 2)
    assert first.update() == (1, 1)
    second.end()
    trainers_again = Engine(world, 1, 2)
    trainers_again.register()
    assert trainers_again.update() == (1, 1)


def test_worker_replaced_after_it_confirmed_joins_the_round_of_its_siblings_next_update() -> None:
    # Rank 1 confirms round 0 and dies; its successor has nothing yet. From then on an update by each is one round.
    world = World()
    (trainer,) = trainers(world, 1)
    first, second = engines(world, 2)
    trainer.publish(1)
    lease = first.resolve()
    second.update()
    second.end()
    second = Engine(world, 1, 2)
    second.register()
    second.register()
    first.confirm(lease)
    world.drain()
    got = second.update()
    trainer.publish(2)
    if got == (1, 1):  # it has caught up: the next update of each is one round
        assert (first.update(), second.update()) == ((1, 2), (1, 2))
    workers = world.job.engines["e"].workers
    assert {worker.version for worker in workers.values()} == {(1, 2)}
    assert {worker.round for worker in workers.values()} == {workers[0].round}
    check(world)


def test_replaced_worker_and_its_sibling_get_one_version_in_their_next_update() -> None:
    # As above, but a publish commits between the two updates of what must be one round.
    world = World()
    (trainer,) = trainers(world, 1)
    first, second = engines(world, 2)
    trainer.publish(1)
    lease = first.resolve()
    second.update()
    second.end()
    second = Engine(world, 1, 2)
    second.register()
    second.register()
    first.confirm(lease)
    trainer.publish(2)
    second_got = second.update()
    trainer.publish(3)
    if second_got == (1, 1):
        second_got = second.update()
    assert first.update() == second_got


def test_lone_worker_whose_lease_ran_out_gets_the_newest_version_next() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    (engine,) = engines(world, 1)
    trainer.publish(1)
    lease = engine.resolve(seconds=10)
    trainer.publish(2)
    world.advance(11)
    with pytest.raises(VersionUnavailable, match="run out"):
        engine.confirm(lease)
    engine.release(lease, dirty=True)  # what the client sends after any failure
    assert engine.update() == (1, 2)
    check(world)


def test_lone_worker_whose_lease_ran_out_may_ask_for_another_step() -> None:
    world = published(1)
    (engine,) = engines(world, 1)
    lease = engine.resolve(1, seconds=10)
    world.advance(11)
    engine.release(lease, dirty=True)
    (trainer,) = _rejoin(world)
    trainer.publish(2)
    assert engine.update(2) == (1, 2)


def _rejoin(world: World) -> list[Trainer]:
    for session in list(world.store.sessions.values()):
        if session.writer:
            world.end(session)
    return trainers(world, 1)


def test_round_whose_version_is_gone_frees_a_worker_that_asks_for_another_step() -> None:
    # Rank 0 confirmed step 1; step 1 is dropped; rank 1 asks for step 2: told once that step 1 is gone, then served.
    world = published(1, 2)
    first, second = engines(world, 2)
    first.update(1)
    world.store.drop(world.job, 1)
    world.drain()
    try:
        got = second.update(2)
    except VersionUnavailable:
        got = second.update(2)
    assert got == (1, 2)


def test_release_after_the_only_attempt_lets_the_retry_have_the_newest() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    (engine,) = engines(world, 1)
    trainer.publish(1)
    engine.release(engine.resolve())
    trainer.publish(2)
    assert engine.update() == (1, 2)


def test_expired_lease_makes_its_memory_unsafe_and_it_is_never_handed_out_again() -> None:
    world = World()
    (trainer,) = trainers(world, 1, keep=1)
    (engine,) = engines(world, 1)
    trainer.publish(1)
    lease = engine.resolve(seconds=5)
    (slot,) = world.job.versions[1, 1].segments
    world.advance(6)
    handed = trainer.begin(2)
    assert trainer.seal(handed)
    assert slot not in (handed.segment.id, trainer.begin(3).segment.id)
    assert slot in world.unlinked
    with pytest.raises(VersionUnavailable):
        engine.confirm(lease)
    assert world.job.engines["e"].workers[0].state == "dirty"
    check(world)


def test_leased_version_is_not_handed_out_until_it_is_released() -> None:
    world = World()
    (trainer,) = trainers(world, 1, keep=1)
    (engine,) = engines(world, 1)
    trainer.publish(1)
    lease = engine.resolve()
    trainer.publish(2)
    outcome = trainer.try_begin(3)
    assert isinstance(outcome, Wait)
    assert "readers' leases on epoch 1 step 1 (rank 0 of engine " in outcome.reason
    engine.confirm(lease)
    assert trainer.publish(3)
    check(world)


def test_registering_a_worker_anew_leaves_no_lease_of_its_round() -> None:
    world = published(1)
    (engine,) = engines(world, 1)
    engine.resolve(seconds=600)
    engine.register()
    held = [lease for lease in world.store.leases.values() if lease.session not in (engine.session.id,)]
    assert held == [], "nobody can end these: they block their version's slot until they expire"


def test_registration_that_is_refused_leaves_the_worker_registered() -> None:
    world = published(1)
    _, second = engines(world, 2)
    second.size = 1
    with pytest.raises(InvalidArgument):
        second.register()
    assert sorted(world.job.engines["e"].workers) == [0, 1]


def test_session_whose_registration_was_refused_ends_after_its_engine_has_gone() -> None:
    world = published(1)
    refused = Engine(world, 1, 2)
    refused.register()
    refused.size = 1
    with pytest.raises(InvalidArgument):
        refused.register()
    other = Engine(world, 0, 1)
    with contextlib.suppress(VersionConflict):  # right as well: the first registration stands
        other.register()
    other.end()
    refused.end()
    assert "e" not in world.job.engines


def test_round_that_is_left_behind_by_many_others_leaves_no_lease() -> None:
    world = published(1)
    first, second = engines(world, 2)
    for _ in range(MAX_OPEN_ROUNDS + 10):
        first.update()
    first.end()
    second.end()
    assert world.store.leases == {}


def test_round_with_a_worker_in_its_middle_stays_open_whatever_others_leave_behind() -> None:
    # Else a third worker could open the same round for another version.
    world = published(1)
    first, second, _ = engines(world, 3)
    lease = second.resolve()
    for _ in range(MAX_OPEN_ROUNDS + 10):
        first.update()
    assert 0 in world.job.engines["e"].rounds
    assert len(world.job.engines["e"].rounds) == MAX_OPEN_ROUNDS + 1
    assert second.confirm(lease) == (1, 1)
    assert second.session.worker
    assert second.session.worker[1].round == 1


@pytest.mark.parametrize("waits", [False, True])
def test_update_of_a_version_withdrawn_before_the_daemon_heard_of_it_counts_until_its_worker_says_otherwise(
    waits: bool,
) -> None:
    # A worker that looked before the rollback does not wait for this answer: it runs on that version.
    world = published(1, 2)
    first, second = engines(world, 2)
    lease = first.resolve()
    world.store.rollback(world.job, 1)
    world.drain()
    with pytest.raises(VersionUnavailable, match="withdrawn during this update"):
        first.confirm(lease)
    assert first.session.worker
    worker = first.session.worker[1]
    assert (worker.state, worker.version, worker.round) == ("ready", (1, 2), 1)
    if waits:
        first.release(lease, dirty=True)
        assert (worker.state, worker.version) == ("dirty", None)
    assert first.update() == (1, 1)
    with contextlib.suppress(VersionUnavailable):  # told that its first round's version is gone
        second.update()
    assert second.update() == (1, 1)
    check(world)


def test_update_that_is_told_late_of_a_lease_not_ended_yet_counts_until_its_worker_says_otherwise() -> None:
    world = published(1)
    (engine,) = engines(world, 1)
    lease = engine.resolve(seconds=10)
    world.now += 11  # the daemon was held up: it has not looked for leases since
    with pytest.raises(VersionUnavailable, match="run out"):
        engine.confirm(lease)
    assert engine.session.worker
    worker = engine.session.worker[1]
    assert (worker.state, worker.version, worker.round) == ("ready", (1, 1), 1)
    engine.release(lease, dirty=True)
    assert (worker.state, worker.version) == ("dirty", None)
    assert engine.update() == (1, 1)
    check(world)


@pytest.mark.parametrize("to", [1, 3])
def test_worker_whose_update_failed_goes_to_another_version_once_its_siblings_are_through(to: int) -> None:
    # Their confirmations may still be on the way when it asks.
    world = published(1)
    (trainer,) = _rejoin(world)
    first, second = engines(world, 2)
    first.update()
    second.update()
    trainer.publish(2)
    sibling, failing = first.resolve(), second.resolve()
    second.release(failing, dirty=True)
    if to == 3:
        trainer.publish(3)
    outcome = second.try_resolve(to)
    assert isinstance(outcome, Wait)
    assert "rank 0 of engine e to end their update to epoch 1 step 2" in outcome.reason
    assert first.confirm(sibling) == (1, 2)
    assert second.update(to) == (1, to)
    assert first.update(to) == (1, to)
    check(world)


def test_worker_whose_update_failed_may_not_go_back_to_just_any_version() -> None:
    world = published(1, 2)
    (trainer,) = _rejoin(world)
    first, second = engines(world, 2)
    first.update(2)
    second.update(2)
    trainer.publish(3)
    first.update()
    second.release(second.resolve(), dirty=True)
    with pytest.raises((VersionConflict, VersionUnavailable)):
        second.try_resolve(1)
    assert second.update(2) == (1, 2), "all workers had that one"


def test_release_of_no_lease_gives_up_no_update() -> None:
    world = published(1)
    (engine,) = engines(world, 1)
    lease = engine.resolve()
    world.store.release(engine.session, "l999", False)
    assert engine.confirm(lease) == (1, 1)


def test_prefetch_lease_cannot_be_confirmed_into_another_version_than_the_rounds() -> None:
    world = World()
    (trainer,) = trainers(world, 1)
    first, second = engines(world, 2)
    trainer.publish(1)
    first.update()
    trainer.publish(2)
    staged = second.resolve(stage=True)
    with pytest.raises((VersionUnavailable, VersionConflict, InvalidArgument)):
        second.confirm(staged)


def test_rollback_withdraws_the_newer_versions_and_their_steps_are_never_used_again() -> None:
    world = published(1, 2)
    (trainer,) = _rejoin(world)
    withdrawn = world.store.rollback(world.job, 1)
    assert [version.key for version in withdrawn] == [(1, 2)]
    assert world.held() == [(1, 1)]
    with pytest.raises(VersionConflict, match="not after step 2"):
        trainer.begin(2)
    assert trainer.publish(3)
    check(world)


def test_update_under_way_fails_when_its_version_is_withdrawn() -> None:
    world = published(1, 2)
    (engine,) = engines(world, 1)
    lease = engine.resolve()
    world.store.rollback(world.job, 1)
    with pytest.raises(VersionUnavailable, match="withdrawn"):
        engine.confirm(lease)
    assert engine.session.leases == set()
    check(world)


@pytest.mark.parametrize("step", [None, 3])
def test_update_that_came_to_nothing_for_all_is_the_same_one_when_they_try_again(step: int | None) -> None:
    """One that hears of it first does not go on to the next while its sibling begins that one anew."""
    world = published(1, 2)
    first, second = engines(world, 2)
    leases = first.resolve(), second.resolve()
    world.store.rollback(world.job, 1)
    first.release(leases[0], dirty=True)
    assert isinstance(first.try_resolve(step), Wait)  # the other is in the middle of it
    second.release(leases[1])
    (trainer,) = _rejoin(world)
    trainer.publish(3)
    for engine in (first, second):
        assert engine.update(step) == (1, 3)
    trainer.publish(4)
    for engine in (second, first):
        assert engine.update(4) == (1, 4)
    check(world)


def test_dropping_all_leaves_nothing_held_and_readers_wait() -> None:
    world = published(1, 2)
    (engine,) = engines(world, 1)
    world.store.drop(world.job, None)
    world.drain()
    assert isinstance(engine.try_resolve(), Wait)
    with pytest.raises(VersionUnavailable, match="step 2 is not held"):
        world.store.drop(world.job, 2)
    assert {segment.state for segment in world.job.segments.values()} == {SegmentState.FREE}
    check(world)


def test_closing_a_job_frees_everything_and_its_clients_are_told() -> None:
    world = published(1, 2)
    (engine,) = engines(world, 1)
    engine.resolve()
    slots = set(world.job.segments)
    world.store.close_job(world.job)
    assert JOB in world.drain()
    assert slots <= set(world.unlinked)
    assert world.store.leases == {}
    with pytest.raises(InvalidArgument, match="closed"):
        engine.try_resolve()
    engine.end()
    assert world.store.jobs == {}
