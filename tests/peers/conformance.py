"""What every transport between nodes must do. A test module makes a class of it that names its ``transport``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awexd.peers.fetcher import Fetcher
from awexd_transports.base import Memory, Piece
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolError,
    VersionUnavailable,
)
from awexd_transports.ranges import Ranges
from awexd_transports.registry import find
from tests.peers.nodes import FILL, SUBJECT, Bytes, Fetching, Node, Segment, fetcher

MiB = 1 << 20
WITHIN = 60.0
NodeMaker = Callable[..., Node]
SegmentMaker = Callable[..., Segment]


def check(into: Segment, of: Segment, wanted: Ranges) -> None:
    """What was wanted is there; not a byte beside it was touched."""
    with into.bytes() as found, of.bytes() as held:
        for start, end in wanted:
            assert np.array_equal(found[start:end], held[start:end]), (start, end)
        for start, end in wanted.missing(0, into.nbytes):
            assert (found[start:end] == FILL).all(), (start, end)


async def stays(into: Segment) -> None:
    """Nothing is written late: rewritten memory stays as it is."""
    into.fill(FILL)
    for _ in range(10):
        await asyncio.sleep(0.02)
        with into.bytes() as found:
            assert (found == FILL).all()


async def settles(source: Node, before: dict[str, int]) -> None:
    """Its descriptors and tasks are as many as before."""
    for _ in range(500):
        after = source.ask("status")
        if (after["fds"], after["tasks"]) == (before["fds"], before["tasks"]):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"{before} before, {after} after")


class Conformance:
    """Real processes on both ends of every connection."""

    transport: ClassVar[str]

    @pytest.mark.parametrize("verify", [True, False])
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, MiB + 1, 256 * MiB])
    async def test_bits_are_equal(self, node: NodeMaker, segment: SegmentMaker, nbytes: int, verify: bool) -> None:
        held, into = segment(nbytes, 1), segment(nbytes)
        source = node("a", {0: held})
        fetch = fetcher(self.transport, {0: into}, verify=verify)
        await fetch.run([source.source()], WITHIN)
        check(into, held, Ranges([(0, nbytes)]))
        assert fetch.delivered.total() == nbytes
        assert fetch.again == fetch.left == 0

    def test_bits_of_any_ranges_are_equal(self, node: NodeMaker, segment: SegmentMaker) -> None:
        nbytes = 3 * MiB + 5
        held = {rank: segment(nbytes, rank) for rank in range(2)}
        into = {rank: segment(nbytes) for rank in range(2)}
        source = node("a", held)
        place = st.integers(0, nbytes)
        ranges = st.lists(st.tuples(place, place), max_size=6).map(Ranges)

        @given(
            wants=st.fixed_dictionaries({0: ranges, 1: ranges}),
            piece_bytes=st.sampled_from([1000, 65537, MiB, 32 * MiB]),
            streams=st.integers(1, 4),
            verify=st.booleans(),
        )
        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        def fetched(wants: dict[int, Ranges], piece_bytes: int, streams: int, verify: bool) -> None:
            if piece_bytes == 1000:
                wants = {rank: Ranges((a, min(b, a + 40_000)) for a, b in wanted) for rank, wanted in wants.items()}
            for one in into.values():
                one.fill(FILL)
            fetch = fetcher(self.transport, into, wants, verify=verify, piece_bytes=piece_bytes, streams=streams)
            uvloop.run(fetch.run([source.source()], WITHIN))
            for rank, one in into.items():
                check(one, held[rank], wants[rank])
                assert fetch.right(rank) == wants[rank]

        fetched()

    @pytest.mark.parametrize("verify", [True, False])
    async def test_bits_of_rows_are_equal(self, node: NodeMaker, segment: SegmentMaker, verify: bool) -> None:
        """Short and long rows, beside each other and among ranges; from several sources."""
        nbytes = 24 * MiB
        held, into = segment(nbytes, 1), segment(nbytes)
        rows = [
            Piece(0, 5, 3 * 7, 7, 11),
            Piece(0, MiB, 1500 * 512, 1500, 4096),
            Piece(0, MiB + 512, 1500 * 1024, 1500, 4096),
            Piece(0, 8 * MiB, 3 * (2 * MiB - 1), 3, 2 * MiB),
            Piece(0, 16 * MiB, 2 * 3 * MiB, 2, 4 * MiB),
        ]
        wants = Ranges([(100, 5000), (15 * MiB, 15 * MiB + 1)])
        everything = Ranges([*wants, *(run for piece in rows for run in piece.runs())])
        arrived: list[Piece] = []
        fetch = fetcher(
            self.transport, {0: into}, {0: wants}, rows={0: rows}, rows_arrived=arrived.append, verify=verify
        )
        assert fetch.left == everything.total
        await fetch.run([node(name, {0: held}).source() for name in "ab"], WITHIN)
        check(into, held, everything)
        assert sorted(arrived) == sorted(rows)
        assert fetch.delivered.total() == everything.total
        assert fetch.again == fetch.left == 0

    async def test_rows_of_a_source_that_is_killed_come_from_another(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(64 * MiB, 1), segment(64 * MiB)
        rows = [Piece(0, at * MiB + half * 2048, MiB // 2, 256, 4096) for at in range(64) for half in range(2)]
        dies, lives = node("a", {0: held}), node("b", {0: held})

        def arrived(piece: Piece) -> None:
            dies.send_signal(signal.SIGKILL)

        fetch = fetcher(self.transport, {0: into}, {0: Ranges()}, rows={0: rows[::2]}, rows_arrived=arrived)
        with contextlib.suppress(DaemonUnavailable):  # unless all of it was under way
            await fetch.run([dies.source()], WITHIN)
        assert fetch.left < 32 * MiB  # something had come
        await fetch.run([lives.source()], WITHIN)
        check(into, held, Ranges(run for piece in rows[::2] for run in piece.runs()))

    async def test_rows_are_served_on_as_they_arrive_and_nothing_that_was_not_promised(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source, piece = node("a", {0: held}), Piece(0, 4096, 64 * 512, 64, 4096)
        source.ask("withdraw")
        source.ask("offer", arrived={"0": []})
        source.ask("promise", ranges={"0": [[0, 100]]}, rows=[piece])
        running = asyncio.create_task(
            fetcher(self.transport, {0: into}, {0: Ranges()}, rows={0: [piece]}).run([source.source()], WITHIN)
        )
        done, _ = await asyncio.wait([running], timeout=0.3)
        assert not done
        source.ask("extend_rows", piece=piece)
        await running
        check(into, held, Ranges(piece.runs()))
        other = Piece(0, 4096, 32 * 512, 32, 4096)
        for wants, rows in ((Ranges([(0, 101)]), []), (Ranges([(4096, 4097)]), []), (Ranges(), [other])):
            fetch = fetcher(self.transport, {0: into}, {0: wants}, rows={0: rows})
            with pytest.raises(VersionUnavailable, match="only a part of"):
                await fetch.run([source.source()], WITHIN)

    @pytest.mark.parametrize("milliseconds", [0, 1, 3, 10, 30, 100])
    async def test_after_a_cancel_nothing_is_written(
        self, node: NodeMaker, segment: SegmentMaker, milliseconds: int
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held})
        running = asyncio.create_task(
            fetcher(self.transport, {0: into}, streams=2, piece_bytes=4 * MiB).run([source.source()], WITHIN)
        )
        await asyncio.sleep(milliseconds / 1000)
        running.cancel()
        await asyncio.wait([running])
        await stays(into)

    async def test_cancelled_piece_ends_its_lane(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held})
        lane = await find(self.transport)().connect(source.source(), SUBJECT)
        pieces = [Piece(0, at, 64 * MiB) for at in (0, 64 * MiB)]
        first, second = (asyncio.create_task(lane.fetch(piece, into.memory, summed=False)) for piece in pieces)
        for _ in range(1000):
            await asyncio.sleep(0)
            if lane.received:
                break
        first.cancel()
        with pytest.raises(AwexdError, match="me/grpo"):
            await second
        assert first.cancelled()
        await stays(into)
        await lane.close()

    async def test_after_a_deadline_nothing_is_written(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held})
        with pytest.raises(DeadlineExceeded, match=r"me/grpo \(3, 7\): \d+ bytes have not come within .* from a"):
            await fetcher(self.transport, {0: into}).run([source.source()], 0.02)
        await stays(into)

    async def test_pieces_are_told_once_and_when_they_are_there(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(20 * MiB, 1), segment(20 * MiB)
        source = node("a", {0: held})
        told: list[tuple[int, int, bool]] = []

        def arrived(rank: int, start: int, end: int) -> None:
            with into.bytes() as found, held.bytes() as there:
                told.append((start, end, bool(np.array_equal(found[start:end], there[start:end]))))

        await fetcher(self.transport, {0: into}, arrived=arrived, piece_bytes=MiB).run([source.source()], WITHIN)
        assert all(right for _, _, right in told)
        assert sum(end - start for start, end, _ in told) == Ranges((a, b) for a, b, _ in told).total == 20 * MiB
        assert len(told) >= 20

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    async def test_two_sources_of_which_one_fails_in_the_middle(
        self, node: NodeMaker, segment: SegmentMaker, fault: signal.Signals
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        sources = [node(name, {0: held}) for name in "ab"]

        def arrived(rank: int, start: int, end: int) -> None:
            if fetch.delivered["a"] > 8 * MiB:
                sources[0].send_signal(fault)

        fetch = fetcher(self.transport, {0: into}, arrived=arrived, piece_bytes=MiB, stall=1.0, first_byte=1.0)
        await fetch.run([one.source() for one in sources], WITHIN)
        check(into, held, Ranges([(0, held.nbytes)]))
        assert fetch.delivered["a"] < 256 * MiB
        assert fetch.delivered.total() == 256 * MiB

    async def test_only_source_that_is_killed_is_told_and_named(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held})
        fetch = fetcher(
            self.transport, {0: into}, arrived=lambda *_: source.send_signal(signal.SIGKILL), piece_bytes=MiB
        )
        with pytest.raises(DaemonUnavailable, match=r"me/grpo \(3, 7\) from a \(.*\), (fetch|connect)"):
            await fetch.run([source.source()], WITHIN)
        await stays(into)

    async def test_only_source_that_is_stopped_ends_by_the_watchdog(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        source = node("a", {0: held})
        stop = lambda *_: source.send_signal(signal.SIGSTOP)  # noqa: E731
        limits: dict[str, Any] = {"stall": 0.3, "first_byte": 0.3, "handshake": 0.3, "retries": 1}
        fetch = fetcher(self.transport, {0: into}, arrived=stop, piece_bytes=MiB, **limits)
        with pytest.raises(DeadlineExceeded, match=r"me/grpo \(3, 7\) from a \(.*\), (fetch|handshake).*0.3 s"):
            await fetch.run([source.source()], WITHIN)
        into.fill(FILL)
        source.send_signal(signal.SIGCONT)
        await stays(into)

    async def test_failed_fetch_goes_on_from_another_source_with_what_is_missing(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(64 * MiB, 1), segment(64 * MiB)
        first, second = (node(name, {0: held}) for name in "ab")

        def arrived(rank: int, start: int, end: int) -> None:
            if fetch.left < 32 * MiB:
                first.send_signal(signal.SIGKILL)

        fetch = fetcher(self.transport, {0: into}, arrived=arrived, piece_bytes=MiB)
        with pytest.raises(DaemonUnavailable):
            await fetch.run([first.source()], WITHIN)
        left, right = fetch.left, fetch.right(0)
        assert 0 < left < 32 * MiB
        check_part(into, held.copy(), right)
        await fetch.run([second.source()], WITHIN)
        check(into, held, Ranges([(0, held.nbytes)]))
        assert fetch.delivered["b"] == left

    async def test_sources_that_hold_parts_are_asked_for_those(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(30 * MiB + 1, 1), segment(30 * MiB + 1)
        sources = [node(name, {0: held}) for name in "abc"]
        parts = [Ranges([(0, 11 * MiB + 3)]), Ranges([(11 * MiB + 3, 20 * MiB)]), Ranges([(15 * MiB, held.nbytes)])]
        fetch = fetcher(self.transport, {0: into}, piece_bytes=2 * MiB)
        await fetch.run([one.source({0: part}) for one, part in zip(sources, parts, strict=True)], WITHIN)
        check(into, held, Ranges([(0, held.nbytes)]))
        for one, part in zip(sources, parts, strict=True):
            assert 0 < fetch.delivered[one.name] <= part.total

    async def test_bytes_that_nobody_holds_are_said(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held})
        with pytest.raises(VersionUnavailable, match="no source holds rank 0, bytes 1000 to 1048576"):
            await fetcher(self.transport, {0: into}).run([source.source({0: Ranges([(0, 1000)])})], WITHIN)
        with pytest.raises(VersionUnavailable, match="no source"):
            await fetcher(self.transport, {0: into}).run([], WITHIN)

    async def test_segment_that_still_arrives_is_served_on(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(8 * MiB, 1), segment(8 * MiB)
        source = node("a", {0: held}, offer=False)
        source.ask("offer", arrived={0: [[0, MiB]]})
        told: asyncio.Queue[int] = asyncio.Queue()
        fetch = fetcher(
            self.transport, {0: into}, arrived=lambda rank, start, end: told.put_nowait(end), piece_bytes=MiB
        )
        running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        for number in range(1, 9):
            assert await told.get() == number * MiB
            assert fetch.left == (8 - number) * MiB
            if number < 8:
                source.ask("extend", rank=0, start=number * MiB, end=(number + 1) * MiB)
        await running
        check(into, held, Ranges([(0, held.nbytes)]))

    async def test_source_that_waits_itself_is_not_taken_for_a_silent_one(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held}, offer=False)
        source.ask("offer", arrived={})
        fetch = fetcher(self.transport, {0: into}, first_byte=1.6, stall=1.6, retries=0)
        running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        await asyncio.sleep(2.5)
        source.ask("extend", rank=0, start=0, end=MiB)
        await running
        other = node("b", {0: held}, offer=False)
        other.ask("offer", arrived={})
        with pytest.raises(DeadlineExceeded, match=r"1048576 bytes have not come within 0\.5 s from b"):
            await fetcher(self.transport, {0: into}).run([other.source()], 0.5)

    async def test_withdrawn_version_is_given_up_and_its_memory_free(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        before = held.copy()
        source = node("a", {0: held})
        halfway = asyncio.Event()
        fetch = fetcher(self.transport, {0: into}, arrived=lambda *_: halfway.set(), piece_bytes=MiB, streams=2)
        running = asyncio.create_task(fetch.run([source.source()], WITHIN))
        await halfway.wait()
        source.ask("withdraw")
        held.fill(0)
        with pytest.raises(VersionUnavailable, match=r"me/grpo \(3, 7\) from a"):
            await running
        right = fetch.right(0)
        assert right
        check_part(into, before, right)
        with pytest.raises(VersionUnavailable, match="is not served here"):
            await fetcher(self.transport, {0: into}).run([source.source()], WITHIN)

    @pytest.mark.parametrize("grace", [0.0, 30.0])
    async def test_idle_target_is_told_of_the_withdrawal(
        self, node: NodeMaker, segment: SegmentMaker, grace: float
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held})
        lane = await find(self.transport)().connect(source.source(), SUBJECT)
        await lane.fetch(Piece(0, 0, 1000), into.memory, summed=True)
        source.ask("withdraw", grace=grace)
        with pytest.raises((VersionUnavailable, DaemonUnavailable), match="me/grpo"):
            await lane.fetch(Piece(0, 1000, 1000), into.memory, summed=True)
        await lane.close()

    @pytest.mark.parametrize(
        "changes",
        [
            {"key": b"x" * 32},
            {"source": "b"},
            {"target": ""},
            {"run": "run-0"},
            {"expires": 1},
            {"target": "a"},
        ],
        ids=["key", "source", "target", "run", "expired", "itself"],
    )
    async def test_wrong_ticket_is_refused(
        self, node: NodeMaker, segment: SegmentMaker, changes: dict[str, Any]
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held})
        with pytest.raises(AccessDenied, match=r"me/grpo \(3, 7\) from a \(.*\), handshake"):
            await fetcher(self.transport, {0: into}).run([source.source(**changes)], WITHIN)
        await stays(into)
        assert source.ask("status")["refused"] >= 1
        await fetcher(self.transport, {0: into}).run([source.source()], WITHIN)

    @pytest.mark.parametrize("changes", [{"job": "me/other"}, {"step": 8}, {"epoch": 4}, {"attempt": 12}])
    async def test_ticket_opens_its_own_version_only(
        self, node: NodeMaker, segment: SegmentMaker, changes: dict[str, Any]
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held})
        with pytest.raises(VersionUnavailable, match="is not served here"):
            await fetcher(self.transport, {0: into}).run([source.source(**changes)], WITHIN)
        await stays(into)

    @pytest.mark.parametrize(
        "piece", [Piece(0, MiB - 1, 2), Piece(1, 0, 1), Piece(0, 1 << 63, 1), Piece(0, 0, 1 << 40)]
    )
    async def test_bytes_out_of_range_end_the_connection(
        self, node: NodeMaker, segment: SegmentMaker, piece: Piece
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        source = node("a", {0: held})
        lane = await find(self.transport)().connect(source.source(), SUBJECT)
        with pytest.raises((ProtocolError, DaemonUnavailable), match="from a"):
            await lane.fetch(piece, into.memory, summed=False)
        with pytest.raises(AwexdError):
            await lane.fetch(Piece(0, 0, 1), into.memory, summed=False)
        await lane.close()
        await fetcher(self.transport, {0: into}).run([source.source()], WITHIN)

    async def test_segment_that_its_writer_truncates_harms_no_daemon(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        held, into = segment(16 * MiB, 1), segment(16 * MiB)
        source = node("a", {0: held})
        os.ftruncate(held.fd, 8 * MiB)
        for verify in (True, False):
            with pytest.raises(AwexdError, match=r"me/grpo \(3, 7\) from a"):
                await fetcher(self.transport, {0: into}, verify=verify).run([source.source()], WITHIN)
        os.ftruncate(held.fd, 4096 + 16 * MiB)
        await fetcher(self.transport, {0: into}).run([source.source()], WITHIN)

    async def test_nothing_is_left_in_the_source(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(64 * MiB, 1), segment(64 * MiB)
        source = node("a", {0: held})
        before = source.ask("status")
        for round in range(12):
            fetch = fetcher(self.transport, {0: into}, streams=3, piece_bytes=MiB)
            running = asyncio.create_task(fetch.run([source.source()], WITHIN))
            if round % 3:
                await asyncio.sleep(0.002 * round)
                running.cancel()
            await asyncio.wait([running])
        await settles(source, before)

    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    async def test_target_that_fails_in_the_middle_holds_nothing_of_the_source(
        self, node: NodeMaker, segment: SegmentMaker, fetching: Callable[..., Fetching], fault: signal.Signals
    ) -> None:
        held, into, other = segment(256 * MiB, 1), segment(256 * MiB), segment(256 * MiB)
        source = node("a", {0: held}, stall=0.3, idle=1.0)
        before = source.ask("status")
        target = fetching({0: into}, [(source.source(), None)], piece_bytes=MiB)
        target.line()
        target.send_signal(fault)
        await fetcher(self.transport, {0: other}).run([source.source()], WITHIN)
        await settles(source, before)
        source.ask("withdraw", grace=30.0)
        held.fill(0)

    async def test_withdrawal_does_not_wait_for_a_target_that_is_stopped(
        self, node: NodeMaker, segment: SegmentMaker, fetching: Callable[..., Fetching]
    ) -> None:
        held, into = segment(256 * MiB, 1), segment(256 * MiB)
        before, source = held.copy(), node("a", {0: held}, stall=1000.0)
        target = fetching({0: into}, [(source.source(), None)], piece_bytes=32 * MiB)
        target.line()
        target.send_signal(signal.SIGSTOP)
        source.ask("withdraw")
        held.fill(0)
        target.send_signal(signal.SIGCONT)
        result = target.result()
        assert result["error"] == "version_unavailable", result
        found = into.copy()
        pieces = (slice(at, at + 32 * MiB) for at in range(0, held.nbytes, 32 * MiB))
        whole = sum(32 * MiB for piece in pieces if np.array_equal(found[piece], before[piece]))
        assert whole >= held.nbytes - result["left"]

    async def test_call_itself_is_checked(self, segment: SegmentMaker) -> None:
        into = segment(MiB)
        with pytest.raises(InvalidArgument, match="rank 1 is wanted"):
            fetcher(self.transport, {0: into}, {1: Ranges([(0, 1)])})
        with pytest.raises(InvalidArgument, match="more is wanted"):
            fetcher(self.transport, {0: into}, {0: Ranges([(0, MiB + 1)])})
        with pytest.raises(InvalidArgument, match="bytes a piece"):
            fetcher(self.transport, {0: into}, piece_bytes=0)
        read = Memory(into.fd, MiB)
        with pytest.raises(InvalidArgument, match="rank 0 is wanted"):
            Fetcher(find(self.transport)(), SUBJECT, {0: Ranges([(0, 1)])}, {0: read})
        read.close()
        with pytest.raises(InvalidArgument, match="an object of"):
            Memory(into.fd, 2 * MiB)


def check_part(into: Segment, held: Bytes, right: Ranges) -> None:
    with into.bytes() as found:
        for start, end in right:
            assert np.array_equal(found[start:end], held[start:end])
