"""Jobs that are decided elsewhere, in the store: what is known of them, slots for them, and what waiters are told."""

from __future__ import annotations

import pytest

from awexd.store import Segment, Store, Version, Wait
from awexd.store.elsewhere import Listing
from awexd.store.ledger import Session
from awexd.store.mirroring import newest_listed
from awexd.store.model import Job, SegmentState, VersionKey
from awexd_transports.errors import BudgetExceeded, EpochChanged, VersionConflict, VersionUnavailable

NAME = "me/j"
NBYTES = 100


class Node:
    """A store with one mirrored job, one engine of one worker, and what the daemon would do for it."""

    def __init__(self) -> None:
        self.store = Store()
        self.job: Job = self.store.job_for(NAME, 1, 0.0)
        self.session = Session("s1", 10, 1)
        self.store.open_session(self.session)
        self.store.register_worker(self.session, self.job, "e", 0, world_size=1, digest="d")
        self.mirror = self.store.follow(self.job)
        self.made = 0

    def tell(self, *keys: VersionKey, epoch: int = 1, high: int = 0, nodes: tuple[str, ...] = ("a",)) -> bool:
        listed = {key: Listing(key[1], {0: ("d0", NBYTES, True)}, ("a",)) for key in keys}
        local = nodes[0] if nodes else None
        return self.store.mirror(
            self.job, epoch=epoch, world_size=1, keep=2, high=high, nodes=nodes, listed=listed, local=local
        )

    def slot(self) -> Segment | Wait:
        found = self.store.mirror_slot(self.job, 0, NBYTES)
        if found is None:
            self.made += 1
            found = Segment(f"m{self.made}", 0, NBYTES, state=SegmentState.WRITING, mirrored=True)
            self.store.add_segment(self.job, found)
        if isinstance(found, Segment):
            found.digest = "d0"
        return found

    def bring(self, key: VersionKey) -> Version:
        slot = self.slot()
        assert isinstance(slot, Segment)
        return self.store.commit_mirrored(self.job, key, key[1], [slot])

    def resolve(self, step: int | None) -> VersionKey | str:
        """The version, or what is waited for; given up at once."""
        outcome = self.store.resolve(self.session, step, 100.0, False, 0.0)
        if isinstance(outcome, Wait):
            return outcome.reason
        self.store.confirm(self.session, outcome.lease.id, 1.0)
        return outcome.version.key


@pytest.fixture
def node() -> Node:
    return Node()


def test_slots_are_reused_and_never_more_than_a_writers(node: Node) -> None:
    for step in range(1, 10):
        node.tell((1, step), high=step)
        node.bring((1, step))
        assert [version.key for version in node.job.held()] == [(1, s) for s in (step, step - 1) if s]
    assert node.made == 3
    node.store.rest(node.job)
    assert len(node.job.segments) == 2
    assert len(node.job.held()) == 2


def test_listed_step_is_waited_for_and_one_that_is_gone_is_not(node: Node) -> None:
    assert "word of step 4" in str(node.resolve(4))  # nobody has told anything yet
    asked: list[int] = []
    node.mirror.ask = lambda: asked.append(len(node.mirror.asked))
    node.tell((1, 4), (1, 5), high=5)
    node.bring((1, 5))
    assert "step 4 of epoch 1 to be brought here" in str(node.resolve(4))
    assert "step 4 of epoch 1 to be brought here" in str(node.resolve(4))
    assert asked == [1]
    assert "step 6 of epoch 1 to be committed" in str(node.resolve(6))
    with pytest.raises(VersionUnavailable, match="step 3 is not held any more"):
        node.resolve(3)
    node.tell((1, 5), high=5)  # gone there before it could be brought
    with pytest.raises(VersionUnavailable, match="step 4 is not held any more"):
        node.resolve(4)
    assert node.resolve(None) == (1, 5)


def test_failure_reaches_who_waits_until_it_is_tried_again(node: Node) -> None:
    node.tell((1, 1), high=1)
    assert newest_listed(node.job) == (1, 1)
    node.mirror.failed[1, 1] = BudgetExceeded("no room")
    for step in (None, 1):
        with pytest.raises(BudgetExceeded, match="no room"):
            node.resolve(step)
    node.mirror.failed.clear()
    node.bring((1, 1))
    assert node.resolve(1) == (1, 1)


def test_new_epoch_ends_waits_and_withdrawn_attempts_are_good_for_nobody(node: Node) -> None:
    node.tell((1, 1), high=1)
    node.bring((1, 1))
    assert node.resolve(1) == (1, 1)
    assert isinstance(node.resolve(9), str)
    assert node.tell((2, 1), epoch=2, high=1)
    with pytest.raises(EpochChanged):
        node.resolve(9)
    node.bring((2, 1))
    assert node.resolve(None) == (2, 1)
    assert [version.key for version in node.store.withdraw_attempts(node.job, {1})] == [(2, 1), (1, 1)]
    assert set(node.job.withdrawn) == {1}
    assert not node.job.held()


def test_memory_that_other_nodes_fetch_from_stays(node: Node) -> None:
    node.tell((1, 1), high=1)
    served = node.bring((1, 1))
    node.store.serve(served)
    for step in (2, 3):
        node.bring((1, step))
    assert served.retired
    waiting = node.slot()
    assert isinstance(waiting, Wait)
    assert "epoch 1 step 1" in waiting.reason
    node.store.serve_no_more(node.job, served)
    assert (1, 1) not in node.job.versions
    assert isinstance(node.slot(), Segment)


def test_trainer_comes_here_only_once_it_has_left_there(node: Node) -> None:
    node.tell((1, 1), high=1)
    node.bring((1, 1))
    writer = Session("s2", 11, 1)
    node.store.open_session(writer)
    with pytest.raises(VersionConflict, match="its trainer is on node a"):
        node.store.register_writer(writer, node.job, 0, "d", world_size=1, epoch="continue", keep=2)
    node.tell((1, 1), high=1, nodes=())
    node.store.register_writer(writer, node.job, 0, "d", world_size=1, epoch="continue", keep=2)
    assert node.job.mirror is None
    assert (node.job.epoch, node.job.high) == (1, 1)
    assert not any(segment.mirrored for segment in node.job.segments.values())
    assert [version.key for version in node.job.held()] == [(1, 1)]


def test_slot_that_is_given_back_is_cleared_first(node: Node) -> None:
    node.tell((1, 1), high=1)
    slot = node.slot()
    assert isinstance(slot, Segment)
    node.store.to_clear.clear()
    node.store.give_back(node.job, [slot])
    assert slot.state is SegmentState.FREE
    assert slot in node.store.to_clear
    assert node.slot() is slot
