"""Comparing what has arrived with the checksums that its writer stored, cell by cell, wherever it came from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from awexd_transports.base import Memory, Piece
from awexd_transports.cells import Grid, Tile, grid
from awexd_transports.digest import digest
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.kernel import Jobs, Sums, takes_summed
from awexd_transports.layout import Entry, Manifest
from awexd_transports.segment import CHECKSUM_BYTES, CHECKSUM_OFFSET, first_cells
from awexd_transports.view import View


class Checked(NamedTuple):
    """A tile of cells, which lies at ``start`` to ``end`` of the segment's data without a gap."""

    start: int
    end: int
    piece: int
    tile: Tile


class Cells:
    """The checksums of one rank's segment. Made once for a manifest.

    Attributes:
        table: where in the segment's data the table lies: start and end.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._pieces = manifest.pieces
        self._offsets = manifest.piece_offsets
        self._first = first_cells(manifest)
        self.table = manifest.segment_nbytes, manifest.segment_nbytes + CHECKSUM_BYTES * self._first[-1]
        self._tiles = [tile for number in range(len(self._pieces)) for tile in self._tiles_of(number)]
        self._starts = [tile.start for tile in self._tiles]
        self._ends = [tile.end for tile in self._tiles]

    def touching(self, start: int, end: int) -> list[Checked]:
        """The tiles that have a byte between the two."""
        return self._tiles[bisect_right(self._ends, start) : bisect_left(self._starts, end)]

    def whole(self, start: int, end: int) -> tuple[int, int]:
        """The bytes between the two, and the rest of the tiles that they are of."""
        found = self.touching(start, end)
        return (min(start, found[0].start), max(end, found[-1].end)) if found else (start, end)

    def across(self, rows: Piece) -> list[Checked]:
        """The tiles of a piece of several rows, which are whole rows of cells or the same cells of each."""
        found = []
        for tile in self.touching(rows.offset, rows.end):
            entry = self._pieces[tile.piece]
            size, cells = ITEMSIZE[entry.tensor.dtype], grid(entry.box.shape, ITEMSIZE[entry.tensor.dtype])
            low = (rows.offset - self._offsets[tile.piece]) % (cells.shape[-1] * size) // size
            high = low + rows.run // size
            first, end = low // cells.steps[-1], -(-high // cells.steps[-1])
            places = (*tile.tile.low[:-1], low), (*tile.tile.high[:-1], high)
            taken = Tile(tile.tile.cell + first, end - first, *places, *places)
            right = (cells.shape[-1] - high) * size
            found.append(Checked(tile.start + low * size, tile.end - right, tile.piece, taken))
        return found

    def wrong(self, memory: Memory, tiles: Iterable[Checked]) -> list[Checked]:
        """Those that do not add up to what the table in ``memory`` says. Blocks, without the GIL."""
        native, found = [], []
        for tile in tiles:
            view = self._view(memory, tile)
            if takes_summed(view, view):
                native.append(tile)
            elif not self._adds_up(memory, tile):
                found.append(tile)
        if self._bad(memory, native):
            found += [tile for tile in native if self._bad(memory, [tile])]
        return found

    def names(self, tile: Checked) -> str:
        """Which tensor a tile is of."""
        entry = self._pieces[tile.piece]
        return f"{entry.tensor.name} {entry.box}"

    def _bad(self, memory: Memory, tiles: list[Checked]) -> bool:
        jobs = Jobs([self._job(memory, tile) for tile in tiles])
        jobs.start()()
        return jobs.wrong() is not None

    def _job(self, memory: Memory, tile: Checked) -> tuple[View, View, Sums]:
        """A copy of the tile onto itself, which only sums it."""
        entry, view = self._pieces[tile.piece], self._view(memory, tile)
        whole = View.packed(memory.address + self._offsets[tile.piece], entry.box.shape, entry.tensor.dtype, None)
        table = memory.address + self.table[0] + CHECKSUM_BYTES * self._first[tile.piece]
        low = tile.tile.low if entry.box.shape else ()
        return view, view, Sums(entry.tensor.shape, entry.box.offset, entry.box.shape, low, table, whole)

    def _view(self, memory: Memory, tile: Checked) -> View:
        return self._box(memory, tile.piece, tile.tile.low, tile.tile.high)

    def _box(self, memory: Memory, piece: int, low: tuple[int, ...], high: tuple[int, ...]) -> View:
        entry = self._pieces[piece]
        whole = View.packed(memory.address + self._offsets[piece], entry.box.shape, entry.tensor.dtype, None)
        return whole.sub([slice(a, b) for a, b in zip(low, high, strict=True)]) if entry.box.shape else whole

    def _adds_up(self, memory: Memory, tile: Checked) -> bool:
        entry = self._pieces[tile.piece]
        cells = grid(entry.box.shape, ITEMSIZE[entry.tensor.dtype])
        first = self._first[tile.piece]
        for number in range(tile.tile.cell, tile.tile.cell + tile.tile.cells):
            low, high = cells.cell(number)
            offset = tuple(a + b for a, b in zip(entry.box.offset, low, strict=True)) if entry.box.shape else ()
            found = digest(self._box(memory, tile.piece, low, high), entry.tensor.shape, offset)
            at = self.table[0] + CHECKSUM_BYTES * (first + number)
            stored = int.from_bytes(memory.view[at : at + CHECKSUM_BYTES], "little")
            if (found + CHECKSUM_OFFSET) % (1 << 64) != stored:
                return False
        return True

    def _tiles_of(self, number: int) -> Iterator[Checked]:
        entry: Entry = self._pieces[number]
        size = ITEMSIZE[entry.tensor.dtype]
        cells: Grid = grid(entry.box.shape, size)
        for tile in cells.tiles((0,) * len(cells.shape), cells.shape):
            start, end = _place(cells.shape, tile.low), _place(cells.shape, [n - 1 for n in tile.high]) + 1
            yield Checked(self._offsets[number] + start * size, self._offsets[number] + end * size, number, tile)


def _place(shape: Iterable[int], index: Iterable[int]) -> int:
    """The number of an element, row-major."""
    at = 0
    for n, i in zip(shape, index, strict=True):
        at = at * n + i
    return at
