"""Which bytes of the writers' segments some readers read: the union over their plans, in whole cells. Pure.

A reader compares the cells that its copies touch (:mod:`awexd_transports.cells`), so nothing less than a cell is of use
to it. What is whole rows of a piece is given as ranges; cells beside others that nobody reads (of a tensor that is cut
by columns) as strips. Ranges that only padding parts are one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from awexd_transports.cells import Grid, Place, grid
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import ALIGNMENT, Manifest, digest_of
from awexd_transports.moves import Moves
from awexd_transports.names import Bools, Ints
from awexd_transports.plan import plan
from awexd_transports.ranges import Ranges
from awexd_transports.segment import segment_nbytes

NEEDS_VERSION = 1
"""Raised whenever the same manifests give other bytes; part of the digest."""
STRIP_BYTES = 4 << 20
"""Of one strip, unless a block of rows alone has more: it is asked for, arrives and is compared as one."""
MAX_RANGES = 1 << 16
"""Of a rank; where there would be more, the smallest gaps are filled."""


class Strip(NamedTuple):
    """Rows of equal length at equal distances: ``nbytes`` in all, the rows' starts ``stride`` bytes apart."""

    offset: int
    nbytes: int
    rows: int
    stride: int


@dataclass(frozen=True, slots=True)
class Need:
    """Of one rank's segment: bytes of its data, without the table of checksums where it is not all."""

    ranges: Ranges
    strips: tuple[Strip, ...]

    @property
    def nbytes(self) -> int:
        return self.ranges.total + sum(strip.nbytes for strip in self.strips)


@dataclass(frozen=True)
class Needs:
    """Of a set of segments.

    Attributes:
        ranks: those of which something is read.
        digest: the same where, and only where, the bytes are; None: all of them.
        cells: of each rank, which of its cells are read, by number.
    """

    ranks: Mapping[int, Need]
    digest: str | None
    cells: Mapping[int, Bools] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def nbytes(self) -> int:
        return sum(need.nbytes for need in self.ranks.values())


def needs(sources: Sequence[Manifest], readers: Iterable[Manifest], summed: Collection[int]) -> Needs:
    """What of ``sources`` the readers read.

    Args:
        sources: one segment manifest a writer rank.
        readers: of processes that read them, each by its own plan; one that none fits reads nothing.
        summed: writer ranks whose segments have checksums. Of the others whole rows are taken.
    """
    moves = list(_moves(sources, list({reader.digest: reader for reader in readers}.values())))
    read = {rank: _cells_read(manifest, rank, moves) for rank, manifest in enumerate(sources)}
    if all(cells.all() for cells in read.values()):
        return whole(sources)
    some = {rank: cells for rank, cells in read.items() if cells.any()}
    ranks = {rank: _need(sources[rank], cells, summed=rank in summed) for rank, cells in some.items()}
    return Needs(ranks, _digest(sources, ranks), some)


def whole(sources: Sequence[Manifest]) -> Needs:
    """All bytes of them, checksums included."""
    ranks = {rank: Need(Ranges([(0, segment_nbytes(manifest))]), ()) for rank, manifest in enumerate(sources)}
    cells = {rank: np.ones(int(_Cut.of(manifest).first[-1]), bool) for rank, manifest in enumerate(sources)}
    return Needs(ranks, None, cells)


def beyond(sources: Sequence[Manifest], more: Needs, here: Needs, summed: Collection[int]) -> dict[int, Need]:
    """What ``more`` has of the same segments that ``here`` has not; where there are checksums, no byte that is here."""
    found = {}
    for rank, cells in more.cells.items():
        left = cells & ~here.cells.get(rank, np.zeros_like(cells))
        if left.any():
            found[rank] = _need(sources[rank], left, summed=rank in summed)
    return found


def _moves(sources: Sequence[Manifest], readers: Sequence[Manifest]) -> Iterator[Moves]:
    """All that the plans read, also what is only compared."""
    try:
        planned = [plan(sources, readers, partial=True)] if readers else []
    except ManifestMismatch:
        if len(readers) > 1:
            for reader in readers:
                yield from _moves(sources, [reader])
        return
    for one in planned:
        yield one.moves
        yield one.further


@dataclass(frozen=True)
class _Cut:
    """The cells of a segment's pieces (p), by piece number.

    Attributes:
        steps, counts: shape (p, dims): of each piece's grid, filled up with 1.
        first: shape (p + 1,): the number of each piece's first cell, and of all.
    """

    steps: Ints
    counts: Ints
    first: Ints

    @classmethod
    def of(cls, manifest: Manifest) -> _Cut:
        columns = manifest.columns
        lead, dims = columns.leading, max(1, columns.shape.shape[1])
        name = columns.name[lead]
        rows = np.column_stack([columns.ndim[name], columns.itemsize[name], columns.shape[lead]])
        distinct, which = np.unique(rows, axis=0, return_inverse=True)
        grids = [grid(tuple(row[2 : 2 + row[0]]), row[1]) for row in distinct.tolist()]
        steps = np.array([(*one.steps, *(1,) * (dims - len(one.steps))) for one in grids], np.int64)
        counts = np.array([(*one.counts, *(1,) * (dims - len(one.counts))) for one in grids], np.int64)
        steps, counts = (table.reshape(-1, dims)[which.reshape(-1)] for table in (steps, counts))
        return cls(steps, counts, np.concatenate([[0], np.cumsum(counts.prod(axis=1))]))


def _cells_read(manifest: Manifest, rank: int, moves: Sequence[Moves]) -> Bools:
    """Which cells the copies from that rank touch, by number."""
    cut, columns = _Cut.of(manifest), manifest.columns
    read = np.zeros(int(cut.first[-1]), bool)
    dims = columns.offset.shape[1]
    for part in moves:
        mine = part[np.flatnonzero(part.source == rank)]
        if not len(mine):
            continue
        entry = mine.source_entry
        piece = columns.piece[entry]
        low = np.zeros((len(mine), cut.steps.shape[1]), np.int64)
        high = np.ones_like(low)
        low[:, :dims] = mine.offset[:, :dims] - columns.offset[entry]
        high[:, :dims] = low[:, :dims] + mine.shape[:, :dims]
        first, end = low // cut.steps[piece], -(-high // cut.steps[piece])
        read[_numbers(cut.first[piece], cut.counts[piece], first, end)] = True
    return read


def _numbers(base: Ints, counts: Ints, first: Ints, end: Ints) -> Ints:
    """The cells of boxes of cells, ``first`` to ``end`` each, row-major from ``base`` on in grids of ``counts``."""
    extent = end - first
    total = extent.prod(axis=1)
    which = np.repeat(np.arange(len(base)), total)
    rest = np.arange(len(which)) - np.repeat(np.cumsum(total) - total, total)
    numbers, weight = base[which], np.ones(len(which), np.int64)
    for dim in reversed(range(extent.shape[1])):
        rest, at = np.divmod(rest, extent[which, dim])
        numbers = numbers + (first[which, dim] + at) * weight
        weight *= counts[which, dim]
    return numbers


def _need(manifest: Manifest, read: Bools, *, summed: bool) -> Need:
    if read.all():
        return Need(Ranges([(0, segment_nbytes(manifest))]), ())
    first = _Cut.of(manifest).first
    before = np.concatenate([[0], np.cumsum(read)])
    taken = np.diff(before[first])
    offsets = np.array(manifest.piece_offsets, np.int64)
    full = np.flatnonzero((taken == np.diff(first)) & (taken > 0))
    bounds = [np.column_stack([offsets[full], offsets[full] + manifest.piece_nbytes[full]])]
    strips: list[Strip] = []
    columns = manifest.columns
    for piece in np.flatnonzero((taken > 0) & (taken < np.diff(first))).tolist():
        row = int(columns.leading[piece])
        name = int(columns.name[row])
        shape = tuple(columns.shape[row, : columns.ndim[name]].tolist())
        size = ITEMSIZE[columns.dtypes[columns.dtype[name]]]
        ranges, found = _parts(shape, size, summed, read[first[piece] : first[piece + 1]].tobytes())
        at = int(offsets[piece])
        bounds.append(np.array(ranges, np.int64).reshape(-1, 2) + at)
        strips += [strip._replace(offset=strip.offset + at) for strip in found]
    return Need(_ranges(np.concatenate(bounds)), tuple(strips))


class _Blocks(NamedTuple):
    """A grid's rows of cells: rows of elements that each begins with, and has; the same of its columns."""

    row: list[int]
    rows: list[int]
    column: list[int]
    columns: list[int]


@lru_cache(maxsize=4096)
def _blocks(cells: Grid) -> _Blocks:
    """Cells of one row of a grid lie between the same rows of elements, whatever the dimensions."""
    starts, heights, inner = np.zeros(1, np.int64), np.ones(1, np.int64), 1
    for n, step, count in reversed(list(zip(cells.shape[:-1], cells.steps[:-1], cells.counts[:-1], strict=True))):
        at = np.arange(count) * step
        starts = (at[:, None] * inner + starts).reshape(-1)
        heights = (np.minimum(step, n - at)[:, None] * heights).reshape(-1)
        inner *= n
    column = np.arange(cells.counts[-1]) * cells.steps[-1]
    columns = np.minimum(cells.steps[-1], cells.shape[-1] - column)
    return _Blocks(starts.tolist(), heights.tolist(), column.tolist(), columns.tolist())


@lru_cache(maxsize=4096)
def _parts(shape: Place, size: int, summed: bool, read: bytes) -> tuple[list[tuple[int, int]], list[Strip]]:
    """Bytes of a piece of which not all cells are read, from its start on."""
    cells = grid(shape, size)
    blocks, width = _blocks(cells), cells.shape[-1] * size
    taken = np.frombuffer(read, bool).reshape(-1, cells.counts[-1])
    if not summed:
        taken = np.repeat(taken.any(axis=1, keepdims=True), taken.shape[1], axis=1)
    ranges: list[tuple[int, int]] = []
    strips: list[Strip] = []
    changes = np.flatnonzero((taken[1:] != taken[:-1]).any(axis=1)) + 1
    for low, high in zip([0, *changes.tolist()], [*changes.tolist(), len(taken)], strict=True):
        if taken[low].all():
            ranges.append((blocks.row[low] * width, (blocks.row[high - 1] + blocks.rows[high - 1]) * width))
            continue
        for begin, end in _runs(taken[low]):
            left = blocks.column[begin] * size
            across = (blocks.column[end - 1] + blocks.columns[end - 1]) * size - left
            for at, rows in _grouped(blocks, low, high, max(1, STRIP_BYTES // across)):
                start = at * width + left
                if rows == 1 or not cells.together:
                    ranges += [(start + n * width, start + n * width + across) for n in range(rows)]
                else:
                    strips.append(Strip(start, rows * across, rows, width))
    return ranges, strips


def _runs(taken: Bools) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], taken, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _grouped(blocks: _Blocks, low: int, high: int, most: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of neighbouring blocks, together as long as they have no more than ``most``."""
    at, rows = blocks.row[low], 0
    for block in range(low, high):
        if rows and rows + blocks.rows[block] > most:
            yield at, rows
            at, rows = blocks.row[block], 0
        rows += blocks.rows[block]
    yield at, rows


def _ranges(bounds: Ints) -> Ranges:
    """Joined where less than an alignment parts them, which is padding; and until they are few enough."""
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    if not len(bounds):
        return Ranges()
    gaps = bounds[1:, 0] - bounds[:-1, 1]
    kept = gaps >= ALIGNMENT
    if np.count_nonzero(kept) >= MAX_RANGES:
        kept &= gaps > np.partition(gaps, -MAX_RANGES)[-MAX_RANGES]
    starts = bounds[np.concatenate([[True], kept]), 0]
    ends = bounds[np.concatenate([kept, [True]]), 1]
    return Ranges(zip(starts.tolist(), ends.tolist(), strict=True))


def _digest(sources: Sequence[Manifest], ranks: Mapping[int, Need]) -> str:
    state = hashlib.sha256(f"awexd needs {NEEDS_VERSION}\n{digest_of(m.digest for m in sources)}\n".encode())
    for rank, need in ranks.items():
        numbers = np.array([bound for both in need.ranges for bound in both], "<i8")
        strips = np.array(need.strips, "<i8")
        state.update(np.array([rank, len(numbers), len(need.strips)], "<i8").tobytes())
        state.update(numbers.tobytes() + strips.tobytes())
    return state.hexdigest()
