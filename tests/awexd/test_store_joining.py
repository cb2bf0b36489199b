"""Ranks whose fellows are elsewhere, in the store: how they gather, and what is done on the MetaServer's word."""

from __future__ import annotations

import pytest

from awexd.store import Segment, Store, Version, Wait
from awexd.store.elsewhere import Listing
from awexd.store.model import Attempt, Job
from awexd.store.writing import Begun
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict, VersionUnavailable
from tests.awexd.store_clients import JOB, Trainer, World, digest


class Node:
    """A node with ranks 0 and 1 of a trainer of four, as its daemon and the MetaServer would drive it."""

    def __init__(self, *, epoch: int | str = "continue") -> None:
        self.world = World()
        self.store.clustered = True
        self.ranks = [Trainer(self.world, rank, 4) for rank in (0, 1)]
        for rank in self.ranks:
            rank.register(epoch)

    @property
    def store(self) -> Store:
        return self.world.store

    @property
    def job(self) -> Job:
        return self.world.job

    def join(self, epoch: int = 1, *ranks: int) -> None:
        self.store.spread(self.job)
        assert self.job.pending is not None
        writers = [self.job.pending.writers[rank] for rank in ranks or (0, 1)]
        self.store.admit(self.job, epoch, 4, 2, writers)
        self.store.know_ranks(self.job, {rank: digest(f"w{rank}") for rank in range(4)}, ())
        self.world.drain()

    def begin(self, rank: int, step: int, number: int) -> Begun:
        trainer = self.ranks[rank]
        if not trainer.set:
            trainer.reserve()
        slot = trainer.grant()
        begun = self.store.begin_filled(trainer.session, step, trainer.set, slot.id, number)
        assert isinstance(begun, Begun), begun
        return begun

    def seal(self, step: int, number: int) -> Attempt:
        """Both ranks write that step and seal it."""
        for rank in (0, 1):
            assert self.ranks[rank].seal(self.begin(rank, step, number)) is None
        return self.job.attempts[step]

    def commit(self, step: int, number: int) -> Version:
        version = self.store.commit_joined(self.job, self.seal(step, number))
        self.world.drain()
        assert version is not None
        return version

    def committed(self, epoch: int, step: int, number: int) -> bool:
        return self.store.committed(self.ranks[0].session, epoch, step, number) is None


@pytest.fixture
def node() -> Node:
    made = Node()
    made.join()
    return made


def test_ranks_that_are_all_here_are_decided_here_and_nobody_else_is_asked() -> None:
    world = World()
    world.store.clustered = True
    first, second = (Trainer(world, rank, 2) for rank in (0, 1))
    assert not first.register()
    assert (world.job.epoch, world.job.alone) == (0, False)
    waiting = world.store.ready(first.session)
    assert isinstance(waiting, Wait)
    assert "rank 1 of the new epoch's 2 to register" in waiting.reason
    assert second.register()
    assert (world.job.epoch, world.job.alone, world.job.mirror, world.job.joined) == (1, True, None, None)
    for trainer in (first, second):
        trainer.reserve()
    first.seal(first.begin(1))
    assert second.seal(second.begin(1)) is not None
    world.end(first.session)
    again = Trainer(world, 0, 2)
    assert not again.register()  # at once: this node decides
    assert world.job.writers.keys() == {0, 1}


def test_ranks_gather_until_the_others_turn_up() -> None:
    node = Node()
    assert node.job.pending is not None
    assert (node.job.pending.absent, node.job.epoch) == ([2, 3], 0)
    with pytest.raises(VersionConflict, match="its ranks disagree"):
        Trainer(node.world, 2, 5).register()
    with pytest.raises(VersionConflict, match="rank 1 is registered by process"):
        Trainer(node.world, 1, 4).register()
    node.join(3)
    assert (node.job.epoch, sorted(node.job.writers)) == (3, [0, 1])
    assert not node.store.is_pending(node.ranks[0].session)
    ready = node.store.ready(node.ranks[0].session)
    assert ready == (ready[0], [digest(f"w{rank}") for rank in range(4)])
    node.store.know_ranks(node.job, {}, (3,))
    waiting = node.store.ready(node.ranks[0].session)
    assert isinstance(waiting, Wait)
    assert "rank 3 of 4 to register in epoch 3" in waiting.reason


def test_nothing_is_a_version_before_the_metaserver_says_so(node: Node) -> None:
    attempt = node.seal(5, 77)
    assert not node.job.versions
    attempt.missing = (3,)
    waiting = node.store.committed(node.ranks[0].session, 1, 5, 77)
    assert isinstance(waiting, Wait)
    assert "rank 3 to seal step 5" in waiting.reason
    version = node.store.commit_joined(node.job, attempt)
    assert version is not None
    assert (version.partial, len(version.segments), node.job.high) == (True, 2, 5)
    assert node.committed(1, 5, 77)
    assert node.store.commit_joined(node.job, attempt) is None  # told twice
    assert node.world.held() == []  # nobody here reads half of it
    assert [one.key for one in node.job.kept()] == [(1, 5)]


def test_attempt_is_not_committed_while_a_rank_here_still_writes(node: Node) -> None:
    node.ranks[0].seal(node.begin(0, 5, 77))
    node.begin(1, 5, 77)
    assert node.store.commit_joined(node.job, node.job.attempts[5]) is None
    assert 5 in node.job.attempts


def test_what_ends_here_is_told_and_what_is_told_ends_here(node: Node) -> None:
    node.ranks[0].seal(node.begin(0, 5, 77))
    node.begin(1, 5, 77)
    node.world.end(node.ranks[1].session)
    assert node.job.joined is not None
    ((epoch, step, number, why),) = node.job.joined.aborts
    assert (epoch, step, number) == (1, 5, 77)
    assert "rank 1" in why
    with pytest.raises(VersionConflict, match="rank 1"):
        node.committed(1, 5, 77)
    node.job.joined.aborts.clear()
    node.begin(0, 6, 78)
    node.store.abort_joined(node.job, node.job.attempts[6], "rank 3 aborted it")
    assert not node.job.joined.aborts
    with pytest.raises(VersionConflict, match="rank 3 aborted it"):
        node.store.check_seal(node.ranks[0].session, 1, 6, 78)


def test_other_attempt_at_a_step_replaces_the_one_here(node: Node) -> None:
    node.begin(0, 5, 77)
    node.begin(1, 5, 90)
    assert node.job.attempts[5].number == 90
    assert node.job.attempts[5].segments.keys() == {1}
    with pytest.raises(VersionConflict, match="attempt 90 came after it"):
        node.store.check_seal(node.ranks[0].session, 1, 5, 77)


def test_slots_are_kept_and_reused(node: Node) -> None:
    for step in range(1, 9):
        node.commit(step, 70 + step)
    assert [version.key for version in node.job.kept()] == [(1, 8), (1, 7)]
    assert len(node.job.segments) == 2 * 3


def test_version_is_whole_once_the_others_segments_are_here(node: Node) -> None:
    version = node.commit(5, 77)
    node.store.follow(node.job).listed[1, 5] = Listing(77, {}, ())
    every = [node.job.segments[segment] for segment in version.segments]
    for rank in (2, 3):
        assert node.store.mirror_slot(node.job, rank, 100) is None
        every.append(_mirrored(node, rank))
    assert node.store.commit_mirrored(node.job, (1, 5), 77, every) is version
    assert (version.partial, len(version.segments), node.world.held()) == (False, 4, [(1, 5)])
    for step in (6, 7, 8):
        node.commit(step, 70 + step)
    assert {segment.rank for segment in node.job.segments.values()} == {0, 1, 2, 3}  # theirs are reused, too


def _mirrored(node: Node, rank: int) -> Segment:
    segment = Segment(f"mirror{rank}", rank, 100, digest=digest(f"segment{rank}"), mirrored=True)
    node.store.add_segment(node.job, segment)
    return segment


def test_new_epoch_takes_the_ranks_that_asked_and_ends_the_others(node: Node) -> None:
    node.seal(5, 77)
    restarted = Trainer(node.world, 0, 4)
    assert not restarted.register("new")
    assert node.job.epoch == 1
    node.store.open_joined(node.job, 2)
    with pytest.raises(EpochChanged):
        node.committed(1, 5, 99)
    with pytest.raises(EpochChanged):
        node.ranks[0].reserve()
    assert node.job.pending is not None
    node.store.admit(node.job, 2, 4, 2, list(node.job.pending.writers.values()))
    assert (node.job.epoch, node.job.high, list(node.job.writers)) == (2, -1, [0])


def test_rank_that_cannot_take_part_is_told_why() -> None:
    node = Node()
    node.store.spread(node.job)
    assert node.job.pending is not None
    node.store.refuse(node.job, [node.job.pending.writers[0]], VersionConflict("rank 0 is registered on node b"))
    with pytest.raises(VersionConflict, match="on node b"):
        node.store.ready(node.ranks[0].session)
    assert isinstance(node.store.ready(node.ranks[1].session), Wait)


@pytest.mark.parametrize("mode", ["direct", "nccl"])
def test_modes_that_lend_are_refused(mode: str) -> None:
    world = World()
    world.store.clustered = True
    job = world.store.job_for(JOB, 0, 0.0)
    first, second = world.session(), world.session()
    world.store.register_writer(first, job, 0, "d", world_size=4, epoch="continue", keep=2, mode=mode)
    world.store.spread(job)
    with pytest.raises(InvalidArgument, match="on several nodes"):
        world.store.ready(first)
    with pytest.raises(InvalidArgument, match="on several nodes"):
        world.store.register_writer(second, job, 1, "d", world_size=4, epoch="continue", keep=2, mode=mode)


def test_what_is_found_after_a_restart_counts_once_the_metaserver_has_said_so(node: Node) -> None:
    version, other = node.commit(5, 77), node.commit(6, 78)
    for one in (version, other):
        one.unsure = True
    node.job.endings.undo(77)
    node.job.endings.undo(78)
    waiting = node.store.committed(node.ranks[0].session, 1, 6, 78)
    assert isinstance(waiting, Wait)
    assert "whether step 6 was committed" in waiting.reason
    assert isinstance(node.store.check_step(node.ranks[0].session, 7, node.ranks[0].set), Wait)
    assert node.store.confirm_adopted(node.job, {(1, 5): 77, (1, 6): 99}) == [other]
    assert node.committed(1, 5, 77)
    with pytest.raises(VersionConflict, match="restarted before every rank had sealed it"):
        node.committed(1, 6, 78)
    assert [one.key for one in node.job.kept()] == [(1, 5)]
    assert node.store.check_step(node.ranks[0].session, 7, node.ranks[0].set) is None


def test_rolled_back_version_goes_though_only_a_part_of_it_is_here(node: Node) -> None:
    for step in (5, 6):
        node.commit(step, 70 + step)
    assert [one.key for one in node.store.rollback(node.job, 5)] == [(1, 6)]
    assert list(node.job.withdrawn) == [76]
    with pytest.raises(VersionUnavailable):
        node.store.drop(node.job, 6)
    assert [one.key for one in node.store.withdraw_attempts(node.job, {75})] == [(1, 5)]


def test_job_is_any_mirrored_one_once_nothing_of_its_trainer_is_here(node: Node) -> None:
    node.commit(5, 77)
    for rank in node.ranks:
        node.world.end(rank.session)
    assert not node.store.leave_joined(node.job)  # its segments are
    node.store.drop(node.job, None)
    node.world.drain()
    assert node.store.leave_joined(node.job)
    assert node.job.joined is None
    assert node.job.mirror is not None
