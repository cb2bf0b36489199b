"""Versions that readers copy while they arrive, in the store: who may, what holds their memory, and what is good."""

from __future__ import annotations

import pytest

from awexd.store import Segment, Version, Wait
from awexd.store.arriving import QUANTUM, Arrival, ArrivalState, Landed
from awexd.store.ledger import Session
from awexd.store.model import SegmentState, set_digest_of
from tests.awexd.test_store_mirroring import Node


class Arriving(Node):
    """And versions that arrive."""

    def begin(self, step: int, covers: frozenset[str] | None = None) -> Arrival:
        slot = self.slot()
        assert isinstance(slot, Segment)
        return self.store.arrive(self.job, (1, step), step, [slot], covers, [4], 4 * QUANTUM)

    def end(self, arrival: Arrival, until: float = 100.0) -> Version:
        version = self.store.commit_mirrored(self.job, arrival.key, arrival.attempt, list(arrival.segments))
        self.store.arrived(self.job, arrival, version, until)
        return version

    def lose(self, arrival: Arrival) -> None:
        self.store.arrived(self.job, arrival, None, 100.0)
        self.store.give_back(self.job, arrival.segments)

    def mappable(self) -> list[str]:
        return [segment.id for segment in self.store.arriving_segments(self.session)]


@pytest.fixture
def node() -> Arriving:
    made = Arriving()
    made.tell((1, 1), high=1)
    return made


@pytest.mark.parametrize("step", [None, 1])
def test_whoever_waits_for_it_may_copy_it_and_is_held_to_what_it_copied(node: Arriving, step: int | None) -> None:
    assert isinstance(node.store.take_part(node.session, step), Wait)
    arrival = node.begin(1)
    assert node.store.take_part(node.session, step) is arrival
    assert node.mappable() == [arrival.segments[0].id]
    assert node.store.taking_part(node.session, arrival.number) is arrival
    version = node.end(arrival)
    assert node.store.taking_part(node.session, arrival.number) is arrival
    assert (arrival.state, version.arrival) == (ArrivalState.HERE, arrival.number)
    assert len(version.leases) == 1  # its slot is not used again meanwhile
    for later in (2, 3):
        node.tell((1, later), high=later)
        node.end(node.begin(later))
    assert node.job.segments[arrival.segments[0].id].state is SegmentState.HELD
    node.store.leave_arrivals(node.session.id)
    assert not version.leases
    assert node.slot() is arrival.segments[0]
    assert node.store.taking_part(node.session, arrival.number) is None
    assert node.resolve(3) == (1, 3)


def test_memory_of_one_that_is_lost_is_not_used_again_while_somebody_may_copy_it(node: Arriving) -> None:
    arrival = node.begin(1)
    assert node.store.take_part(node.session, 1) is arrival
    node.lose(arrival)
    assert arrival.segments[0].id not in node.job.segments
    assert arrival.segments[0] in node.store.to_unlink
    assert node.mappable() == []
    assert node.store.taking_part(node.session, arrival.number) is None  # nothing of it counts
    again = node.begin(1)
    assert again.segments[0].id != arrival.segments[0].id
    assert node.store.taking_part(node.session, again.number) is None  # it has not taken part in that one
    node.lose(again)
    assert node.job.segments[again.segments[0].id].state is SegmentState.FREE  # nobody copied out of it


def test_a_hold_that_has_run_out_makes_what_was_copied_worthless(node: Arriving) -> None:
    arrival = node.begin(1)
    assert node.store.take_part(node.session, 1) is arrival
    version = node.end(arrival, until=50.0)
    node.store.expire(50.0)
    assert not version.leases
    assert node.store.taking_part(node.session, arrival.number) is None
    assert arrival.segments[0].unsafe


def test_session_that_ends_holds_nothing(node: Arriving) -> None:
    arrival = node.begin(1)
    assert node.store.take_part(node.session, 1) is arrival
    node.store.opened(node.session, arrival.segments[0])
    version = node.end(arrival)
    node.store.end_session(node.session.id, unmapped=True, why="killed", now=1.0)
    assert not version.leases
    assert not arrival.segments[0].unsafe
    other = Session("s2", 11, 1)
    node.store.open_session(other)
    node.store.register_worker(other, node.job, "e", 0, world_size=1, digest="d")
    node.tell((1, 2), high=2)
    second = node.begin(2)
    assert node.store.take_part(other, 2) is second
    node.store.opened(other, second.segments[0])
    node.store.end_session(other.id, unmapped=False, why="its process lives", now=2.0)
    node.end(second)
    assert second.segments[0].unsafe


def test_only_what_the_update_would_get(node: Arriving) -> None:
    node.end(node.begin(1))
    assert node.store.take_part(node.session, None) is None  # it is here: to be asked for now
    assert node.store.take_part(node.session, 1) is None
    node.tell((1, 1), (1, 2), high=2)
    arrival = node.begin(2, covers=frozenset(["another"]))
    assert node.store.take_part(node.session, None) is None
    assert isinstance(node.store.take_part(node.session, 2), Wait)  # it is not brought for this worker
    node.lose(arrival)
    newer = node.begin(2, covers=frozenset(["d", "another"]))
    assert node.store.take_part(node.session, None) is newer
    assert node.store.take_part(node.session, 1) is None
    assert not newer.readers  # it takes part in none
    assert isinstance(node.store.take_part(node.session, 3), Wait)


def test_worker_whose_engine_is_in_a_round_asks_for_that(node: Arriving) -> None:
    first, other = Session("s2", 11, 1), Session("s3", 12, 1)
    for rank, session in enumerate((first, other)):
        node.store.open_session(session)
        node.store.register_worker(session, node.job, "two", rank, world_size=2, digest="d")
    node.end(node.begin(1))
    assert not isinstance(node.store.resolve(first, None, 100.0, False, 0.0), Wait)
    node.tell((1, 1), (1, 2), high=2)
    arrival = node.begin(2)
    assert node.store.take_part(other, None) is None
    assert node.store.take_part(node.session, None) is arrival  # another engine's


def test_readers_are_told_of_a_quantum_and_of_no_less(node: Arriving) -> None:
    arrival = node.begin(1)
    half = QUANTUM // 2
    assert [arrival.land(Landed(0, at * half, half, 1, 0)) for at in range(5)] == [False, True, False, True, False]
    assert [arrival.beyond(known) for known in range(6)] == [5 * half, 4 * half, 3 * half, 2 * half, half, 0]


def test_manifests_of_what_arrives_are_found(node: Arriving) -> None:
    arrival = node.begin(1)
    assert node.store.find_set(node.job, None) is None  # it is no version yet
    assert node.store.find_set(node.job, set_digest_of(arrival.digests)) == ["d0"]
