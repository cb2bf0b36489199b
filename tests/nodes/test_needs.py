"""Which readers count, and what is planned for them: without daemons."""

from __future__ import annotations

from typing import Any

import pytest

from awexd.adoption import NAMED_READERS, _part
from awexd.memory import Found
from awexd.nodes.needs import EVERYTHING, SETTLE_SECONDS, STAYS_SECONDS, Planner, Published, Readers
from awexd.store import Store
from awexd.store.ledger import Session
from awexd.store.model import Part
from awexd_transports import needs
from awexd_transports.errors import ProtocolError
from awexd_transports.layout import Box, Manifest
from awexd_transports.segment import segment_nbytes
from tests.transports.strategies import manifest, one


class Here:
    """A job's workers here, and a clock."""

    def __init__(self) -> None:
        self.store, self.now = Store(), 100.0
        self.job = self.store.job_for("me/j", 1, 0.0)
        self.readers = Readers(self.job, lambda: self.now)
        self.sessions: dict[str, Session] = {}

    def comes(self, digest: str, rank: int = 0, size: int = 1, engine: str = "e") -> None:
        session = self.sessions[digest] = Session(f"s{digest}", 10, 1)
        self.store.open_session(session)
        self.store.register_worker(session, self.job, engine, rank, world_size=size, digest=digest)
        self.readers.look()

    def goes(self, digest: str) -> None:
        self.store.end_session(self.sessions[digest].id, unmapped=True, why="", now=0.0)
        self.readers.look()


def test_worker_that_has_gone_counts_for_a_while_and_the_last_one_until_others_come() -> None:
    here = Here()
    here.comes("a", 0, 2)
    here.comes("b", 1, 2)
    here.now += 1000
    here.goes("b")
    here.now += STAYS_SECONDS - 1
    assert here.readers.look() == {"a", "b"}
    here.now += 2
    assert here.readers.look() == {"a"}
    here.goes("a")
    here.now += 1000
    assert here.readers.look() == {"a"}
    here.comes("c", 0, 2)
    assert here.readers.look() == {"c"}


def test_others_of_an_engine_are_waited_for_a_little_and_once() -> None:
    here = Here()
    here.comes("a", 0, 2)
    assert here.readers.settles() == pytest.approx(SETTLE_SECONDS)
    here.now += SETTLE_SECONDS / 2
    assert 0 < here.readers.settles() < SETTLE_SECONDS
    here.comes("b", 1, 2)
    assert here.readers.settles() == 0
    here.comes("c", 0, 2, "other")
    here.now += 1.01 * SETTLE_SECONDS
    assert here.readers.settles() == 0


class Shelved:
    """As much of a shelf as a planner uses."""

    def __init__(self, *manifests: Manifest) -> None:
        self.bodies = {one.digest: one.encoded for one in manifests}

    def body(self, digest: str) -> bytes | None:
        return self.bodies.get(digest)


async def test_planner_plans_once_and_says_what_is_not_here() -> None:
    shape = (1024, 2048)
    source = manifest(one("a", shape), one("b", shape))
    half, all_of_a = manifest(one("a", shape, Box((0, 0), (512, 2048)))), manifest(one("a", shape))
    shelf = Shelved(source, half, all_of_a, Manifest.of(()))
    planner = Planner(shelf)  # type: ignore[arg-type]
    of = Published((source.digest,), frozenset([0]))
    first = await planner.needs(of, frozenset([half.digest]))
    assert first == needs.needs([source], [half], [0])
    assert await planner.needs(of, frozenset([half.digest])) is first
    assert planner.by_digest(first.digest or "") is first
    more = await planner.needs(of, frozenset([half.digest, all_of_a.digest]))
    rest = (await planner.beyond(of, more, first))[0]
    assert list(rest.ranges) == [(shape[0] * shape[1], 2 * shape[0] * shape[1])]
    assert not rest.strips
    everything = await planner.needs(of, frozenset([half.digest, EVERYTHING]))
    assert everything == needs.whole([source])
    assert everything.nbytes == segment_nbytes(source)
    del shelf.bodies[half.digest]
    assert planner.known([half.digest, all_of_a.digest]) == {all_of_a.digest}
    with pytest.raises(ProtocolError, match="is not here any more"):
        await planner.needs(of, frozenset([half.digest, source.digest]))


def test_adopted_part_is_the_largest_that_was_told() -> None:
    def told(*parts: Any, mirrored: bool = True) -> list[Found]:
        return [Found("s", 1, {"part": part, "mirrored": mirrored}, locked=False) for part in parts]

    assert _part(told(None, None)) is None
    assert _part(told(["aa", 10, ["d"]], None)) is None
    both = told(["aa", 10, ["d"]], ["bb", 20, ["d", "e"]])
    assert _part(both) == Part("bb", frozenset("de"), 20)
    assert _part(both + told(None, mirrored=False)) == Part("bb", frozenset("de"), 20)  # written here: all of it
    assert _part(told(None, mirrored=False)) is None
    assert NAMED_READERS * 67 < 2048  # beside the rest in a page
