"""A transport whose lanes answer an end with an error of their own, as a connection that breaks at that moment does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd_transports.base import Memory, Piece, Source, Subject
from awexd_transports.errors import DaemonUnavailable, DeadlineExceeded
from awexd_transports.ranges import Ranges
from tests.peers.nodes import SUBJECT, Segment


class StuckLane:
    depth = 2
    received = 0

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise DaemonUnavailable("it broke just then") from None

    async def close(self) -> None:
        """Nothing to end."""


class Stuck(Tcp):
    async def connect(self, source: Source, subject: Subject) -> StuckLane:  # type: ignore[override]
        return StuckLane()


@pytest.mark.parametrize("ends", ["deadline", "cancel"])
async def test_end_is_kept_though_a_lane_breaks_at_that_moment(segment: Callable[..., Segment], ends: str) -> None:
    into = segment(4000)
    settings = PeerSettings(piece_bytes=1000)
    fetch = Fetcher(Stuck(), SUBJECT, {0: Ranges([(0, 4000)])}, {0: into.memory}, settings=settings)
    sources = [Source(node, "host", 1, b"", b"") for node in "ab"]
    running = asyncio.create_task(fetch.run(sources, 0.2 if ends == "deadline" else 600.0))
    if ends == "cancel":
        await asyncio.sleep(0.05)
        running.cancel()
    done, _ = await asyncio.wait([running], timeout=30)
    assert done
    if ends == "cancel":
        assert running.cancelled()
    else:
        assert isinstance(running.exception(), DeadlineExceeded)
    assert fetch.left == 4000


class GivingLane(StuckLane):
    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        await asyncio.sleep(0)


class OneGives(Tcp):
    async def connect(self, source: Source, subject: Subject) -> StuckLane:  # type: ignore[override]
        if source.node == "dead":
            raise DaemonUnavailable("dead is dead")
        return GivingLane()


async def test_source_that_fails_keeps_no_other_from_giving_what_it_has(segment: Callable[..., Segment]) -> None:
    into = [segment(4000), segment(64_000)]
    wants = {rank: Ranges([(0, one.memory.nbytes)]) for rank, one in enumerate(into)}
    memories = {rank: one.memory for rank, one in enumerate(into)}
    fetch = Fetcher(OneGives(), SUBJECT, wants, memories, settings=PeerSettings(retries=0, piece_bytes=1000))
    sources = [Source(node, "host", 1, b"", b"", {rank: wants[rank]}) for rank, node in enumerate(("dead", "alive"))]
    with pytest.raises(DaemonUnavailable, match="dead is dead"):
        await fetch.run(sources, 60.0)
    assert [fetch.left_of(rank) for rank in (0, 1)] == [4000, 0]
    assert list(fetch.failed) == ["dead"]
