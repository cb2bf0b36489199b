"""Versions of which only a part is here: who may read them, and what others are told."""

from __future__ import annotations

import pytest

from awexd.store import Segment, Version, Wait, parking
from awexd.store.ledger import Session
from awexd.store.model import Part, VersionKey, Writer
from awexd_transports.errors import IntegrityError, VersionUnavailable
from tests.awexd.test_store_mirroring import Node


class Parted(Node):
    """Two engines: what is here was brought for the first (``d``), the second (``late``) reads more."""

    def __init__(self) -> None:
        super().__init__()
        self.late = Session("s2", 11, 1)
        self.store.open_session(self.late)
        self.store.register_worker(self.late, self.job, "e2", 0, world_size=1, digest="late")

    def bring_part(self, key: VersionKey, *readers: str) -> Version:
        slot = self.slot()
        assert isinstance(slot, Segment)
        return self.store.commit_mirrored(self.job, key, key[1], [slot], Part("aa", frozenset(readers), 10))

    def resolve_late(self, step: int | None) -> VersionKey | str:
        outcome = self.store.resolve(self.late, step, 100.0, False, 0.0)
        if isinstance(outcome, Wait):
            return outcome.reason
        self.store.confirm(self.late, outcome.lease.id, 1.0)
        return outcome.version.key


@pytest.fixture
def node() -> Parted:
    return Parted()


@pytest.mark.parametrize("step", [None, 1])
def test_who_reads_more_waits_for_it_and_asks_once(node: Parted, step: int | None) -> None:
    asked: list[int] = []
    node.mirror.ask = lambda: asked.append(1)
    node.mirror.doing = lambda: "5 of 90 bytes are here; waiting for node a"
    node.tell((1, 1), high=1)
    version = node.bring_part((1, 1), "d")
    assert node.resolve(step) == (1, 1)
    for _ in range(2):
        told = str(node.resolve_late(step))
        assert "what rank 0 of engine e2 reads of epoch 1 step 1 to be brought here too: 5 of 90 bytes" in told
    assert (asked, list(node.mirror.lacking)) == ([1], [(1, 1)])
    assert str(node.store.newest_since(node.late, 1)).startswith("Wait")
    node.store.extend(version)
    node.store.extended(node.job, version, Part("bb", frozenset(("d", "late")), 90))
    assert not node.mirror.lacking
    assert node.resolve_late(step) == (1, 1)


def test_round_that_is_fixed_to_a_part_is_not_another_workers_before_it_is_there(node: Parted) -> None:
    node.tell((1, 1), high=1)
    one, other = Session("s3", 12, 1), Session("s4", 13, 1)
    for rank, session in enumerate((one, other)):
        node.store.open_session(session)
        node.store.register_worker(session, node.job, "tp", rank, world_size=2, digest=f"tp{rank}")
    version = node.bring_part((1, 1), "tp0")
    first = node.store.resolve(one, None, 100.0, False, 0.0)
    assert not isinstance(first, Wait)
    second = node.store.resolve(other, None, 100.0, False, 0.0)
    assert isinstance(second, Wait)
    assert "rank 1 of engine tp reads of epoch 1 step 1" in second.reason
    node.store.extended(node.job, version, None)
    second = node.store.resolve(other, None, 100.0, False, 0.0)
    assert not isinstance(second, Wait)
    assert second.version is version


def test_rest_that_cannot_come_is_an_error(node: Parted) -> None:
    node.tell((1, 1), high=1)
    node.bring_part((1, 1), "d")
    node.mirror.failed[1, 1] = IntegrityError("wrong bytes")
    with pytest.raises(IntegrityError, match="wrong bytes"):
        node.resolve_late(1)
    node.mirror.failed.clear()
    node.tell(high=1)
    for step in (None, 1):
        with pytest.raises(VersionUnavailable, match="only what other workers read, without what rank 0 of engine e2"):
            node.resolve_late(step)
    assert node.resolve(1) == (1, 1)


def test_memory_of_a_version_that_grows_stays(node: Parted) -> None:
    node.tell((1, 1), (1, 2), (1, 3), high=3)
    version = node.bring_part((1, 1), "d")
    node.store.extend(version)
    for step in (2, 3):
        node.bring((1, step))
    assert version.retired
    assert isinstance(node.slot(), Wait)
    node.store.extended(node.job, version, version.part)
    assert (1, 1) not in node.job.versions
    assert isinstance(node.slot(), Segment)


def test_part_is_nobodys_only_copy_of_its_weights(node: Parted) -> None:
    node.tell((1, 1), high=1)
    version = node.bring_part((1, 1), "d")
    writer = Writer("s9", 19, 0, "d0")
    with pytest.raises(VersionUnavailable, match="is held in part"):
        parking.pin(node.job, writer, (1, 1))
    node.store.extended(node.job, version, None)
    assert parking.pin(node.job, writer, (1, 1)) is version


def test_older_whole_version_is_read_meanwhile(node: Parted) -> None:
    node.tell((1, 1), (1, 2), high=2)
    node.bring((1, 1))
    node.bring_part((1, 2), "d")
    assert node.resolve(None) == (1, 2)
    assert node.resolve_late(None) == (1, 1)
