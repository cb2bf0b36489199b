"""Checksums of rows that a device sums itself: stored where they go down, compared where they arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from awexd_transports.boxes import subtract
from awexd_transports.cells import Place
from awexd_transports.cuda import gather
from awexd_transports.cuda.sums import DeviceSums, Digests, Summed, cells_of, cut_of, takes, touched
from awexd_transports.digest import Term, terms, total
from awexd_transports.layout import Box
from awexd_transports.segment import CHECKSUM_BYTES, CHECKSUM_OFFSET
from awexd_transports.threads import spread
from awexd_transports.view import View, array_at

if TYPE_CHECKING:
    from awexd_transports.copy import Row
    from awexd_transports.kernel import Sums

_OFFSET = np.uint64(CHECKSUM_OFFSET)


def moved_of(row: Row) -> Summed | None:
    """This row, of which one device reads both sides, as a sum that copies it; None where it is none."""
    sums: Sums | None = row.sums
    if sums is None or sums.piece is None or not gather.available():
        return None
    dtype = None if row.destination.dtype == row.source.dtype else row.destination.dtype
    item = Summed(row.source, sums.tensor, sums.origin, sums.shape, sums.low, dtype, row.destination)
    return item if takes(item) else None


def item_of(row: Row, *, cast: bool = False) -> Summed | None:
    """What of this row a device sums: its source if it goes down, else its destination; None where the host must.

    Args:
        cast: the device's kernel makes the row's cast too: only then are its bytes known to be those that are summed.
    """
    sums: Sums | None = row.sums
    down = row.destination.device is None
    view = row.source if down else row.destination
    if sums is None or view.device is None or down == (sums.piece is not None) or not gather.available():
        return None
    dtype = row.destination.dtype if row.destination.dtype != view.dtype else None
    item = Summed(view, sums.tensor, sums.origin, sums.shape, sums.low, dtype)
    return item if (cast or dtype is None) and takes(item) else None


class DeviceChecks:
    """Prepared.

    Args:
        rows: at least one, with ``sums``; what of it is summed; and the group in which it is (see ``DeviceSums``).
    """

    def __init__(self, rows: Sequence[tuple[Row, Summed, int]]) -> None:
        self._rows = [(row, row.sums, item) for row, item, _ in rows if row.sums]
        items, groups = [item for _, item, _ in rows], [group for *_, group in rows]
        # Of cells of which a row holds a part only: what else is in them, where it is held. In devices' memory:
        others = [
            (number, rest)
            for number, (_, sums, item) in enumerate(self._rows)
            if sums.piece and sums.piece.device is not None and not touched(item).whole.all()
            for rest in _others(sums.piece, item)
        ]
        items += [rest for _, rest in others]
        self._sums = DeviceSums(items, groups + [groups[number] for number, _ in others])
        self._more = [
            (self._sums.first[number] + np.searchsorted(touched(items[number]).numbers, touched(rest).numbers), at)
            for at, (number, rest) in enumerate(others, len(self._rows))
        ]
        self._found: Digests | None = None
        # and in host memory:
        self._rest: list[tuple[int, list[Term]]] = []
        addresses, compared = [], []
        for (_, sums, item), first in zip(self._rows, self._sums.first, strict=False):
            cells = touched(item)
            addresses.append(sums.table + CHECKSUM_BYTES * cells.numbers)
            compared.append(np.full(len(cells.numbers), sums.piece is not None))
            if sums.piece and sums.piece.device is None and not cells.whole.all():
                self._rest += [(first + at, rest) for at, rest in _rests(sums.piece, item)]
        self._compared = np.concatenate(compared)
        places = np.concatenate(addresses)
        low = int(places.min())
        self._places = (places - low) // CHECKSUM_BYTES
        # One array over all tables: what lies between them is never touched.
        self._tables = array_at(low, CHECKSUM_BYTES, (int(self._places.max()) + 1,), (CHECKSUM_BYTES,))

    def begin(self) -> None:
        """Before each run: a sum that is not taken again must not pass."""
        self._found = None
        self._sums.clear()

    def launch(self, group: int, after: Sequence[Any] = ()) -> None:
        self._sums.launch(group, after)

    def rest(self, threads: int) -> list[int]:
        """What ``finish`` wants: the sums that are taken in host memory, meanwhile."""
        found = [0] * len(self._rest)

        def take(at: int) -> None:
            found[at] = total(self._rest[at][1])

        spread(range(len(found)), take, threads)
        return found

    def finish(self, rest: Sequence[int]) -> None:
        """After all: stores what is to be stored."""
        every = self._sums.result()
        for into, at in self._more:  # each of its cells once
            every[into] += every[self._sums.first[at] : self._sums.first[at + 1]]
        found = every[: self._sums.first[len(self._rows)]]
        np.add.at(found, np.array([at for at, _ in self._rest], np.int64), np.array(rest, np.uint64))
        found += _OFFSET
        stores = ~self._compared
        self._tables[self._places[stores]] = found[stores].view(np.int64)
        self._found = found

    def wrong(self) -> tuple[Row, int] | None:
        """After a run: the first row that does not add up to what is stored, and which of its tiles: ``Jobs.wrong``."""
        if self._found is None:
            return next(((row, 0) for row, sums, _ in self._rows if sums.piece), None)
        stored = self._tables[self._places].view(np.uint64)
        differ = np.flatnonzero((stored != self._found) & self._compared)
        if not len(differ):
            return None
        number = int(np.searchsorted(self._sums.first, differ[0], side="right")) - 1
        row, _, item = self._rows[number]
        return row, _tile(item, int(differ[0]) - self._sums.first[number])


def _tile(item: Summed, cell: int) -> int:
    """Which tile of ``Grid.tiles`` has the item's so many-th cell: a tile's cells follow each other."""
    cut, low, high = cut_of(item)
    ends = accumulate(tile.cells for tile in cut.tiles(low, high))
    return next(at for at, end in enumerate(ends) if cell < end)


def _others(piece: View, item: Summed) -> Iterator[Summed]:
    """The same of all its cells together, to be summed in a device's memory."""
    cut, low, high = cut_of(item)
    begin = tuple(a // step * step for a, step in zip(low, cut.steps, strict=True))
    ends = zip(high, cut.steps, cut.shape, strict=True)
    end = tuple(min(n, -(-b // step) * step) for b, step, n in ends)
    for rest in subtract(_box(begin, end), _box(low, high)):
        part = piece.sub([slice(a, b) for a, b in zip(rest.offset, rest.end, strict=True)])
        yield Summed(part, item.tensor, item.offset, item.shape or item.view.shape, rest.offset)


def _rests(piece: View, item: Summed) -> Iterator[tuple[int, list[Term]]]:
    """What of the item's cells, by their place among its own, the item has not."""
    for at, (_, low, high, begin, end) in enumerate(cells_of(item)):
        found: list[Term] = []
        for rest in subtract(_box(low, high), _box(begin, end)):
            part = piece.sub([slice(a, b) for a, b in zip(rest.offset, rest.end, strict=True)])
            found += terms(part, item.tensor, tuple(o + a for o, a in zip(item.offset, rest.offset, strict=True)))
        if found:
            yield at, found


def _box(low: Place, high: Place) -> Box:
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
