"""Checksums of a segment's cells: stored while the writer copies them, compared while the reader does.

One u64 a cell, in a table after the pieces (``awexd_transports.cells``, ``.digest``). Against accidents, not attackers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from awexd_client.mappings import Segment
from awexd_transports.boxes import subtract
from awexd_transports.cells import Grid, Place, Tile, grid
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.cuda import gather
from awexd_transports.cuda.checks import item_of
from awexd_transports.cuda.lent import Description
from awexd_transports.cuda.sums import DeviceSums, Summed
from awexd_transports.digest import MASK, Term, parted, terms, total
from awexd_transports.errors import IntegrityError, InvalidArgument
from awexd_transports.kernel import Sums, takes_summed
from awexd_transports.layout import Box, Entry, Manifest
from awexd_transports.segment import CHECKSUM_BYTES, CHECKSUM_OFFSET, first_cells
from awexd_transports.view import array_at

_UNSUMMED = -1
_OFFSET = np.uint64(CHECKSUM_OFFSET).view(np.int64)

Table = npt.NDArray[np.int64]


def table_of(manifest: Manifest, mapping: Segment | Description, count: int | None = None) -> Table:
    """The table in a mapped segment: the very memory. It does not keep the mapping.

    Args:
        count: its cells, where they have been counted.
    """
    count = first_cells(manifest)[-1] if count is None else count
    return array_at(mapping.table(manifest), CHECKSUM_BYTES, (count,), (CHECKSUM_BYTES,))


def summed_rows(row: Row, entry: Entry, table: Table) -> Iterator[Row]:
    """The row, which fills a piece of a segment, tile by tile; each tile's checksums go into the piece's ``table``.

    They are of the bytes in the segment, after a cast.
    """
    source = row.destination if row.source.device is not None else row.source  # in host memory: where it arrives
    summed = replace(row, sums=Sums(entry.tensor.shape, entry.box.offset, entry.box.shape, (), table.ctypes.data))
    if takes_summed(row.destination, source) or item_of(summed):
        yield summed
        return
    whole = grid(entry.box.shape, row.destination.itemsize)
    for tile in whole.tiles((0,) * len(whole.shape), whole.shape):
        to, of = _sub(row.destination, tile.low, tile.high), _sub(row.source, tile.low, tile.high)
        yield Row(to, of, row.label, row.cast, _storing(whole, tile, to, entry, table))


def _storing(whole: Grid, tile: Tile, view: View, entry: Entry, table: Table) -> Callable[[], object]:
    into = table[tile.cell : tile.cell + tile.cells]
    together = parted(view, entry.tensor.shape, _plus(entry.box.offset, tile.low), tile.cells)
    if together:
        return partial(_store_all, together, into)
    found = []
    for number in range(tile.cell, tile.cell + tile.cells):
        low, high = whole.cell(number)
        part = _sub(view, _minus(low, tile.low), _minus(high, tile.low))
        found.append(terms(part, entry.tensor.shape, _plus(entry.box.offset, low)))
    return partial(_store_each, found, into)


def _store_all(sums: Callable[[], Table], into: Table) -> None:
    np.add(sums(), _OFFSET, out=into)


def _store_each(cells: Sequence[Sequence[Term]], into: Table) -> None:
    into.view(np.uint64)[:] = [(total(parts) + CHECKSUM_OFFSET) & MASK for parts in cells]


class OwnSums:
    """Checksums of pieces where they lie, taken anew for each version and stored in their table.

    Args:
        views: where the pieces of ``manifest`` lie, by number.

    Raises:
        InvalidArgument: pieces that no device sums.
    """

    def __init__(self, manifest: Manifest, views: Sequence[View], table: Table) -> None:
        self._table = table
        cells = first_cells(manifest)
        placed = list(zip(manifest.pieces, views, pairwise(cells), strict=True))
        inner = [one for one in placed if one[1].device is None]
        self._host = CopyTable(
            row
            for entry, view, (first, end) in inner
            for row in summed_rows(Row(view, view, entry.tensor.name), entry, table[first:end])
        )
        outer = [one for one in placed if one[1].device is not None and one[1].numel]
        self._device: DeviceSums | None = None
        if outer:
            if not gather.available():
                raise InvalidArgument("checksums of weights on a GPU need Triton")
            self._device = DeviceSums(Summed(view, e.tensor.shape, e.box.offset, e.box.shape) for e, view, _ in outer)
            self._places = np.concatenate([np.arange(first, end) for *_, (first, end) in outer])

    def store(self) -> None:
        self._host.run()
        if self._device is not None:
            self._table[self._places] = self._device.run().view(np.int64) + _OFFSET


class _Sum(NamedTuple):
    """What one tile's copy must add up to, and of what it was a part."""

    rank: int
    first: int
    label: str
    entry: Entry
    tile: Tile
    destination: View
    source: View


class _Whole(NamedTuple):
    """A row of which the library sums all tiles, from ``low`` to ``high`` of a piece."""

    rank: int
    label: str
    entry: Entry
    source: View
    low: Place
    high: Place


class Comparison:
    """Sums what a reader copied, while it copies, and compares with what the writers stored.

    A tile of which only a part is copied has its rest summed in the source: so every byte that is copied is part of a
    comparison, whatever the two shardings are.

    Args:
        manifests: of the segments, by writer rank.
        segments: those that are read, by writer rank.
    """

    def __init__(self, manifests: Sequence[Manifest], segments: Mapping[int, Segment]) -> None:
        self._segments = segments
        self._cells = {rank: first_cells(manifests[rank]) for rank in segments}
        self._tables = {
            rank: table_of(manifests[rank], mapping, self._cells[rank][-1]) for rank, mapping in segments.items()
        }
        self._sums: list[_Sum] = []
        self._found: list[int] = []
        self._wholes: dict[int, tuple[Sums, _Whole]] = {}

    @property
    def ranks(self) -> Collection[int]:
        """The writer ranks whose segments these are."""
        return self._tables.keys()

    def fresh(self) -> Comparison:
        """One without rows, over the same segments."""
        other = copy.copy(self)
        other._sums, other._found, other._wholes = [], [], {}
        return other

    def takes(self, row: Row, rank: int, entry: Entry, whole: View, low: Place) -> bool:
        """Whether ``rows`` can sum it. It always can, but for what only devices see and none of them sums."""
        if whole.device is None:
            return True
        return item_of(replace(row, sums=self._sums_of(rank, entry, whole, low or (0,)))) is not None

    def rows(self, row: Row, rank: int, entry: Entry, whole: View, low: Place) -> Iterator[Row]:
        """The row, which copies a part of a piece of that rank, tile by tile.

        Args:
            entry: the piece's own (the first of its aliases: the one whose coordinates its checksums have).
            whole: where all of the piece lies.
            low: where in the piece the row's box begins.
        """
        low = low or (0,)
        high = _plus(low, row.destination.shape or (1,))
        sums = self._sums_of(rank, entry, whole, low)
        summed = replace(row, sums=sums)
        if whole.device is not None or takes_summed(_summed_side(row), row.source) or item_of(summed):
            self._wholes[id(sums)] = sums, _Whole(rank, row.label, entry, whole, low, high)
            yield summed
            return
        for tile in grid(entry.box.shape, whole.itemsize).tiles(low, high):
            part = _minus(tile.taken_low, low), _minus(tile.taken_high, low)
            to, of = _sub(row.destination, *part), _sub(row.source, *part)
            first = self._cells[rank][entry.piece] + tile.cell
            at = len(self._sums)
            self._sums.append(_Sum(rank, first, row.label, entry, tile, to, whole))
            self._found.append(_UNSUMMED)
            after = partial(self._sum, at, _all_terms(self._sums[at], of if to.device is not None else to))
            yield Row(to, of, row.label, False, after)

    def _sums_of(self, rank: int, entry: Entry, whole: View, low: Place) -> Sums:
        table = self._tables[rank][self._cells[rank][entry.piece] :].ctypes.data
        return Sums(entry.tensor.shape, entry.box.offset, entry.box.shape, low, table, whole)

    def forget(self) -> None:
        """Before each run: a sum that is not taken again must not pass."""
        self._found[:] = [_UNSUMMED] * len(self._found)

    def check(self, wrong: tuple[Row, int] | None = None) -> None:
        """After each run.

        Args:
            wrong: what ``CopyTable.wrong`` of these rows says.

        Raises:
            IntegrityError: names the tensor, the rank that wrote it, and the cell.
        """
        if wrong:
            row, number = wrong
            rank, label, entry, whole, low, high = self._wholes[id(row.sums)][1]
            tile = next(islice(grid(entry.box.shape, whole.itemsize).tiles(low, high), number, None))
            first = self._cells[rank][entry.piece] + tile.cell
            raise IntegrityError(self._told(_Sum(rank, first, label, entry, tile, row.destination, whole)))
        expected = self._expected()
        if expected == self._found:
            return
        at = next(at for at, value in enumerate(self._found) if value != expected[at])
        raise IntegrityError(self._told(self._sums[at]))

    def _sum(self, at: int, parts: Sequence[Term]) -> None:
        self._found[at] = total(parts)

    def _expected(self) -> list[int]:
        if not self._sums:
            return []
        ranks = sorted({one.rank for one in self._sums})
        stored = np.concatenate([*(self._tables[rank].view(np.uint64) for rank in ranks), np.zeros(1, np.uint64)])
        bases = dict(zip(ranks, np.cumsum([0, *(len(self._tables[rank]) for rank in ranks)]).tolist(), strict=False))
        starts = np.array([bases[one.rank] + one.first for one in self._sums])
        counts = np.array([one.tile.cells for one in self._sums])
        sums = np.add.reduceat(stored, np.stack([starts, starts + counts], axis=1).reshape(-1))[::2]
        expected: list[int] = (sums - counts.astype(np.uint64) * np.uint64(CHECKSUM_OFFSET)).tolist()
        return expected

    def _told(self, one: _Sum) -> str:
        """What is wrong with a tile, as closely as can be said now."""
        cells = grid(one.entry.box.shape, one.source.itemsize)
        stored = self._tables[one.rank].view(np.uint64)
        held = one.source if one.source.device is None else View.of(one.source.tensor().cpu())
        places = [(one.first + at, *cells.cell(one.tile.cell + at)) for at in range(one.tile.cells)]
        for number, low, high in places:
            parts = terms(_sub(held, low, high), one.entry.tensor.shape, _plus(one.entry.box.offset, low))
            if (total(parts) + CHECKSUM_OFFSET) & MASK != int(stored[number]):
                where = _box(one.entry, low, high)
                return f"{one.label} {where}: the bytes that are held are not those that rank {one.rank} wrote"
        taken = _box(one.entry, one.tile.taken_low, one.tile.taken_high)
        return f"{one.label} {taken}: differs after the copy from what rank {one.rank} wrote and is held"


def _summed_side(row: Row) -> View:
    """Where a copy is summed: at its destination, where that is not a device's memory."""
    return row.source if row.destination.device is not None else row.destination


def _all_terms(one: _Sum, destination: View) -> list[Term]:
    """Of what is copied, where it arrives, and of the rest of its cells, where it is held."""
    shape, origin, tile = one.entry.tensor.shape, one.entry.box.offset, one.tile
    found = terms(destination, shape, _plus(origin, tile.taken_low))
    cells, taken = _span(tile.low, tile.high), _span(tile.taken_low, tile.taken_high)
    for rest in subtract(cells, taken) if cells != taken else ():
        found += terms(_sub(one.source, rest.offset, rest.end), shape, _plus(origin, rest.offset))
    return found


def _box(entry: Entry, low: Place, high: Place) -> Box:
    """In the tensor's coordinates, to be shown."""
    if not entry.box.offset:
        return entry.box
    return _span(_plus(entry.box.offset, low), _plus(entry.box.offset, high))


def _span(low: Place, high: Place) -> Box:
    return Box(low, _minus(high, low))


def _sub(view: View, low: Place, high: Place) -> View:
    """That part of a view; of one without dimensions, all."""
    return view.sub([slice(a, b) for a, b in zip(low, high, strict=True)]) if view.shape else view


def _plus(place: Place, by: Iterable[int]) -> Place:
    return tuple(a + b for a, b in zip(place, by, strict=False))


def _minus(place: Place, by: Iterable[int]) -> Place:
    return tuple(a - b for a, b in zip(place, by, strict=False))
