"""Bytes that change on their way, or lie wrong at a source: found, fetched again, or said; never taken for good."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from awexd.peers.arrivals import Arrivals
from awexd.peers.cells import Cells
from awexd_transports.base import Piece
from awexd_transports.errors import IntegrityError
from awexd_transports.layout import Box, Manifest
from awexd_transports.needs import needs
from awexd_transports.ranges import Ranges
from awexd_transports.segment import segment_nbytes
from tests.peers.nodes import ROOT, Node, Segment, fetcher, sealed
from tests.transports.strategies import manifest, one, whole

MiB = 1 << 20
WITHIN = 60.0
Flip = Callable[..., int]


def tensors() -> Manifest:
    """Short rows, odd rows, a row longer than a cell, no dimension, nothing at all; about 15 MiB."""
    shapes = [(1000, 1024), (3, 5), (2, 1 << 21), (), (0, 4), (7, 129, 513), (300, 4096), (64,)]
    dtypes = ["bfloat16", "float32", "bfloat16", "float32", "int8", "int8", "float32", "uint8"]
    entries = [
        one(f"t{number}", shape, whole(shape), dtype, number)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return manifest(*entries)


@pytest.fixture
def flip() -> Iterator[Flip]:
    """Starts proxies; gives their ports."""
    running: list[subprocess.Popen[bytes]] = []

    def start(port: int, places: list[int], times: int = 1_000_000) -> int:
        config = json.dumps({"to": port, "flip": places, "times": times})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.proxy", config], cwd=ROOT, stdout=subprocess.PIPE
        )
        running.append(process)
        assert process.stdout
        return int(process.stdout.readline())

    yield start
    for process in running:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.fixture
def held() -> Iterator[Segment]:
    with sealed(tensors(), 1) as made:
        yield made


@pytest.mark.usefixtures("each_way")
class TestCorruption:
    transport = "tcp"

    async def test_right_bytes_pass_and_what_a_want_touches_comes_whole(
        self, node: Callable[..., Node], segment: Callable[..., Segment], held: Segment
    ) -> None:
        cells, into = Cells(tensors()), segment(held.nbytes)
        source = node("a", {0: held})
        fetch = fetcher(self.transport, {0: into}, {0: Ranges([(5 * MiB + 1, 5 * MiB + 2)])}, cells={0: cells})
        await fetch.run([source.source()], WITHIN)
        low, high = cells.whole(5 * MiB + 1, 5 * MiB + 2)
        assert low < 5 * MiB < high <= low + 3 * MiB
        assert fetch.right(0) == Ranges([(low, high), cells.table])
        fetch = fetcher(self.transport, {0: into}, cells={0: cells}, piece_bytes=MiB + 1, streams=2)
        await fetch.run([source.source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())
        assert fetch.again == 0

    @pytest.mark.parametrize("with_cells", [True, False])
    @pytest.mark.parametrize("place", [200, 400, 3 * MiB, 11 * MiB + 1])
    async def test_flipped_bit_is_seen_and_the_cell_fetched_again(
        self,
        node: Callable[..., Node],
        segment: Callable[..., Segment],
        flip: Flip,
        held: Segment,
        place: int,
        with_cells: bool,
    ) -> None:
        into, source = segment(held.nbytes), node("a", {0: held})
        port = flip(source.port, [place], 1)
        cells = {0: Cells(tensors())} if with_cells else None
        fetch = fetcher(self.transport, {0: into}, cells=cells, piece_bytes=4 * MiB)
        await fetch.run([source.source(port=port)], WITHIN)
        assert np.array_equal(into.copy(), held.copy())
        assert fetch.again <= 8 * MiB
        assert fetch.again or place == 200  # a frame's own header: its connection is given up

    @pytest.mark.parametrize("with_cells", [True, False])
    async def test_bits_that_always_flip_are_said(
        self,
        node: Callable[..., Node],
        segment: Callable[..., Segment],
        flip: Flip,
        held: Segment,
        with_cells: bool,
    ) -> None:
        into, source = segment(held.nbytes), node("a", {0: held})
        port = flip(source.port, [3 * MiB + at * MiB for at in range(100)])
        cells = {0: Cells(tensors())} if with_cells else None
        fetch = fetcher(self.transport, {0: into}, cells=cells, piece_bytes=4 * MiB)
        with pytest.raises(IntegrityError, match=r"me/grpo \(3, 7\) from a"):
            await fetch.run([source.source(port=port)], WITHIN)
        found, there = into.copy(), held.copy()
        for start, end in fetch.right(0):
            assert np.array_equal(found[start:end], there[start:end])
        other = node("b", {0: held})
        await fetch.run([other.source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())

    async def test_source_that_sends_wrong_bytes_is_left_for_another(
        self, node: Callable[..., Node], segment: Callable[..., Segment], flip: Flip, held: Segment
    ) -> None:
        into, sources = segment(held.nbytes), [node(name, {0: held}) for name in "ab"]
        port = flip(sources[0].port, [at * 100_000 for at in range(1, 1000)])
        fetch = fetcher(self.transport, {0: into}, cells={0: Cells(tensors())}, piece_bytes=MiB)
        await fetch.run([sources[0].source(port=port), sources[1].source()], WITHIN)
        assert np.array_equal(into.copy(), held.copy())

    async def test_bytes_that_lie_wrong_at_the_source_are_named(
        self, node: Callable[..., Node], segment: Callable[..., Segment], held: Segment
    ) -> None:
        at = tensors().piece_offsets[6] + 5
        held.memory.view[at] ^= 1
        into, source = segment(held.nbytes), node("a", {0: held})
        fetch = fetcher(self.transport, {0: into}, cells={0: Cells(tensors())})
        with pytest.raises(
            IntegrityError, match=r"from a: t6 \[0:300, 0:4096\] \(rank 0\) is not what its writer stored"
        ):
            await fetch.run([source.source()], WITHIN)
        assert fetch.left <= 3 * MiB

    async def test_rows_are_compared_cell_by_cell_and_come_again(
        self, node: Callable[..., Node], segment: Callable[..., Segment], flip: Flip, held: Segment
    ) -> None:
        of, into = tensors(), segment(held.nbytes)
        reader = manifest(
            one("t0", (1000, 1024), Box((0, 0), (1000, 512))),
            one("t5", (7, 129, 513), Box((2, 0, 0), (3, 129, 100)), "int8"),
            one("t6", (300, 4096), Box((0, 2048), (300, 1024)), "float32"),
        )
        need = needs([of], [reader], [0]).ranks[0]
        rows = [Piece(0, *strip) for strip in need.strips]
        assert len(rows) == 2
        node_a = node("a", {0: held})
        for places, again in (([], False), ([2 * MiB], True)):
            into.fill(0)
            port = flip(node_a.port, places, 1)
            fetch = fetcher(self.transport, {0: into}, {0: need.ranges}, rows={0: rows}, cells={0: Cells(of)})
            await fetch.run([node_a.source(port=port)], WITHIN)
            assert (fetch.again > 0) is again
            found, there = into.copy(), held.copy()
            for start, end in [run for piece in rows for run in piece.runs()] + list(fetch.right(0)):
                assert np.array_equal(found[start:end], there[start:end])
                found[start:end] = 0
            assert not found.any()
        held.memory.view[rows[1].offset + 5] ^= 1
        fetch = fetcher(self.transport, {0: into}, {0: need.ranges}, rows={0: rows}, cells={0: Cells(of)})
        with pytest.raises(IntegrityError, match=r"t6 .* \(rank 0\) is not what its writer stored"):
            await fetch.run([node_a.source()], WITHIN)
        assert fetch.left == rows[1].nbytes


async def test_what_was_not_compared_before_a_second_run_is_not_taken_for_what_will_come(
    segment: Callable[..., Segment], held: Segment
) -> None:
    cells, into = Cells(tensors()), segment(held.nbytes)
    with into.bytes() as found, held.bytes() as there:
        found[:] = there
    arrivals = Arrivals(0, Ranges([(0, held.nbytes)]), into.memory, cells, lambda *_: None)
    table = Piece(0, cells.table[0], cells.table[1] - cells.table[0])
    assert [first for _, first in arrivals.pieces()] == [True, False]
    assert not await arrivals.take(Piece(0, 0, 4 * MiB), "a")
    assert [first for _, first in arrivals.pieces()] == [True, False]
    assert not await arrivals.take(table, "a")
    assert arrivals.right == Ranges([cells.table])
    into.memory.view[0] ^= 1
    (wrong,) = await arrivals.take(Piece(0, 0, 4 * MiB), "a")
    assert wrong.start == 0
    assert arrivals.came_from(wrong) == ["a"]
    assert not any(arrivals.right.within(wrong.start, wrong.end))
    into.memory.view[0] ^= 1
    assert not await arrivals.take(arrivals.again(wrong), "b")
    assert not await arrivals.take(Piece(0, 4 * MiB, table.offset - 4 * MiB), "a")
    assert arrivals.left == 0


def test_tiles_are_every_byte_of_every_piece_once() -> None:
    made = tensors()
    cells = Cells(made)
    tiles = cells.touching(0, segment_nbytes(made))
    found = Ranges((tile.start, tile.end) for tile in tiles)
    assert sum(tile.end - tile.start for tile in tiles) == found.total == made.nbytes
    for offset, nbytes in zip(made.piece_offsets, made.piece_nbytes, strict=True):
        assert found.covers(offset, offset + int(nbytes))
