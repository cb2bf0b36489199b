"""An update's copies in waves, each of what arrives at about the same time, and is copied once all of it is there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from awexd_client.holding import Holding
from awexd_client.tables import Segments, Sources, Tables, build, comparison
from awexd_transports.plan import Copy
from awexd_transports.ranges import Ranges
from awexd_transports.turns import turn
from awexd_transports.view import View

WAVE_BYTES = 64 << 20
"""At least so much is copied at once."""
WAVES = 128
"""At most: a launch of copies, and on a GPU the last wave alone, cost what they cost."""

SINGLE_ROWS = 8
"""Of what is cut by columns: so many rows are looked for one by one."""


class Rows(NamedTuple):
    """Bytes of a segment's data: rows of ``run`` bytes, their starts ``stride`` apart; one row has no stride."""

    offset: int
    run: int
    rows: int
    stride: int

    @classmethod
    def of(cls, view: View, base: int) -> Rows:
        """What a view reads that begins so far into memory; where that is no such rows, all between its ends."""
        run, loops = view.itemsize, [(n, step) for n, step in zip(view.shape, view.strides, strict=True) if n > 1]
        while loops and loops[-1][1] == run:
            run *= loops.pop()[0]
        rows, stride = loops.pop() if loops else (1, 0)
        while loops and loops[-1][1] == rows * stride:
            rows *= loops.pop()[0]
        offset = view.address - base
        if not loops:
            return cls(offset, run, rows, stride)
        return cls(offset, run + (rows - 1) * stride + sum((n - 1) * step for n, step in loops), 1, 0)

    @property
    def end(self) -> int:
        return self.offset + self.run + (self.rows - 1) * self.stride


class Here:
    """What has landed of the segments."""

    def __init__(self) -> None:
        self._ranges: defaultdict[int, Ranges] = defaultdict(Ranges)
        self._strips: defaultdict[tuple[int, int], dict[tuple[int, int], Ranges]] = defaultdict(dict)
        """By rank and stride: where in a row the strip's begins, and its length; which rows of that are there."""

    def add(self, rank: int, offset: int, nbytes: int, rows: int, stride: int) -> None:
        """As ``awexd.store.arriving.Landed``."""
        if rows == 1:
            self._ranges[rank].add(offset, offset + nbytes)
            return
        row, column = divmod(offset, stride)
        known = self._strips[rank, stride].setdefault((column, nbytes // rows), Ranges())
        known.add(row, row + rows)

    def has(self, rank: int, wanted: Rows) -> bool:
        if self._ranges[rank].covers(wanted.offset, wanted.end):
            return True
        if wanted.rows == 1:
            return False
        for (column, run), there in self._strips.get((rank, wanted.stride), {}).items():
            row, inside = divmod(wanted.offset - column, wanted.stride)
            if inside + wanted.run <= run and self._rest(rank, wanted, row, there):
                return True
        return self._rest(rank, wanted, 0, Ranges())

    def _rest(self, rank: int, wanted: Rows, first: int, there: Ranges) -> bool:
        """Whether the rows that came in no strip of several, as the last may, came by themselves."""
        missing = list(there.missing(first, first + wanted.rows))
        if sum(end - start for start, end in missing) > SINGLE_ROWS:
            return False
        starts = (wanted.offset + (row - first) * wanted.stride for low, high in missing for row in range(low, high))
        return all(self._ranges[rank].covers(start, start + wanted.run) for start in starts)


class _Read(NamedTuple):
    """A copy, what it reads of its rank's segment, and how many bytes that is."""

    copy: Copy
    rows: Rows
    nbytes: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Copies that go together.

    Attributes:
        needs: by rank, what they read.
    """

    tables: Tables
    needs: tuple[tuple[int, Rows], ...]

    def ready(self, here: Here) -> bool:
        return all(here.has(rank, rows) for rank, rows in self.needs)


def waves(
    holding: Holding, sources: Sources, segments: Segments, summed: Collection[int] | None, pieces: Sequence[int]
) -> tuple[Wave, ...]:
    """The copies into what the engine runs on, in the order in which pieces are fetched: of all ranks in turn.

    Args:
        summed: as of ``tables.prepare``.
        pieces: in how many pieces each rank's bytes come.
    """
    copies = [copy for copy in sources.plan.copies if copy.destination_entry < holding.first_aside]
    read = [_read(copy, sources, segments) for copy in copies]
    count = max(1, min(WAVES, sum(one.nbytes for one in read) // WAVE_BYTES))
    base = comparison(sources, segments, summed)
    made = []
    sizes = [manifest.segment_nbytes for manifest in sources.manifests]
    for part in _dealt(read, sizes, pieces, count):
        sums = base.fresh() if base is not None else None
        made.append(Wave(build(holding, sources, segments, sums, [one.copy for one in part]), tuple(_joined(part))))
    return tuple(made)


def _read(copy: Copy, sources: Sources, segments: Segments) -> _Read:
    manifest = sources.manifests[copy.source]
    piece = manifest.entries[copy.source_entry].piece
    start = sources.piece(copy, segments).address - manifest.piece_offsets[piece]
    view = sources.view(copy, copy.box, segments)
    return _Read(copy, Rows.of(view, start), view.nbytes)


def _dealt(read: Iterable[_Read], sizes: Sequence[int], pieces: Sequence[int], count: int) -> Iterator[Sequence[_Read]]:
    """So many parts of about as many bytes, by when they can be expected (``peers.fetcher``): by the piece that they
    end in, as if a rank's lay evenly in its segment, and its rank's turn; what is read in strips comes after all else.

    Args:
        sizes: bytes of each rank's segment.
    """

    def expected(one: _Read) -> tuple[bool, float, int, int]:
        rank = one.copy.source
        several = max(1, pieces[rank])
        piece = several * (one.rows.end - 1) // max(1, sizes[rank])
        return one.rows.rows > 1, piece / several, turn(rank), one.rows.offset

    order = sorted(read, key=expected)
    room = -(-sum(one.nbytes for one in order) // count)
    part, nbytes = list[_Read](), 0
    for one in order:
        if part and (nbytes >= room or (one.rows.rows > 1) != (part[-1].rows.rows > 1)):
            yield part
            part, nbytes = [], 0
        part.append(one)
        nbytes += one.nbytes
    if part:
        yield part


def _joined(read: Iterable[_Read]) -> Iterator[tuple[int, Rows]]:
    """What they need, by rank; what touches is one."""
    ranges: defaultdict[int, Ranges] = defaultdict(Ranges)
    for copy, rows, _ in read:
        if rows.rows > 1:
            yield copy.source, rows
        else:
            ranges[copy.source].add(rows.offset, rows.end)
    for rank, found in ranges.items():
        yield from ((rank, Rows(start, end - start, 1, 0)) for start, end in found)
