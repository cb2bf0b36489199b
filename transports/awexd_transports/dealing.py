"""Cells dealt out to the ranks that hold them, bytes balanced: most of them whole, a few cut where a quota ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate

import numpy as np

from awexd_transports.layout import Box
from awexd_transports.level import fill, split
from awexd_transports.names import Bools, Ints

SLACK = 128
"""No cut is made for less than the fullest rank's load divided by this (and by the sets that a rank is in)."""

Cut = tuple[int, int, Box]
"""A rank, a cell, and the part of the cell that the rank writes."""


class Dealing:
    """Cells by number, in the order in which they are dealt out, and the sets of ranks that hold them.

    ``loads`` are bytes that each rank writes anyhow.

    Attributes:
        owner: shape (cells,): the rank that writes the cell; -1 where it is cut.
        cuts: the parts of those that are.
    """

    def __init__(
        self,
        loads: Sequence[int],
        sets: Sequence[tuple[int, ...]],
        held_by: Ints,
        nbytes: Ints,
        itemsize: Ints,
        whole: Bools,
        box_of: Callable[[int], Box],
    ) -> None:
        self._sets = sets
        self._held_by = held_by
        self._nbytes = nbytes
        self._itemsize = itemsize
        self._box_of = box_of
        self.owner = np.full(len(nbytes), -1)
        self.cuts: list[Cut] = []
        single = np.array([len(holders) == 1 for holders in sets], bool)[held_by]
        self.owner[single] = np.array([holders[0] for holders in sets], np.int64)[held_by[single]]
        self._loads = list(loads)
        for rank, load in zip(self.owner[single].tolist(), nbytes[single].tolist(), strict=True):
            self._loads[rank] += load
        self._give_whole(np.flatnonzero(whole & ~single))
        self._give_quotas(np.flatnonzero(~whole & ~single))

    def _give_whole(self, cells: Ints) -> None:
        """The largest first, each to the rank that has least."""
        loads = self._loads
        cells = cells[np.argsort(-self._nbytes[cells], kind="stable")]
        columns = (column[cells].tolist() for column in (self._held_by, self._nbytes))
        for cell, at, nbytes in zip(cells.tolist(), *columns, strict=True):
            rank = min(self._sets[at], key=loads.__getitem__)
            loads[rank] += nbytes
            self.owner[cell] = rank

    def _give_quotas(self, cells: Ints) -> None:
        if not len(cells):
            return
        cells = cells[np.argsort(self._held_by[cells], kind="stable")]
        numbers, begin = np.unique(self._held_by[cells], return_index=True)
        held = {self._sets[at]: some for at, some in zip(numbers.tolist(), np.split(cells, begin[1:]), strict=True)}
        quotas = fill({holders: int(self._nbytes[some].sum()) for holders, some in held.items()}, self._loads)
        crowd = np.bincount([rank for holders in held for rank in holders])
        slack = max(self._loads, default=0) // (SLACK * int(crowd.max(initial=1)))
        for holders, some in held.items():
            shares = [(rank, quota) for rank, quota in zip(holders, quotas[holders], strict=True) if quota > 0]
            self.cuts += self._deal(some, shares, slack)

    def _deal(self, cells: Ints, shares: Sequence[tuple[int, int]], slack: int) -> Iterator[Cut]:
        """One set's cells in order; a cell is cut where a quota ends, unless that is within ``slack`` of its edge."""
        ends: list[int] = np.cumsum(self._nbytes[cells]).tolist()
        due = list(accumulate(quota for _, quota in shares))
        turn = at = 0
        while at < len(cells):
            # All that ends within what this rank is due; the last rank takes all.
            last = turn + 1 == len(shares)
            stop = len(cells) if last else bisect_right(ends, due[turn])
            if stop > at:
                self.owner[cells[at:stop]] = shares[turn][0]
                at = stop
                continue
            given = ends[at - 1] if at else 0
            if due[turn] - given <= slack:
                turn += 1
            elif ends[at] <= due[turn] + slack:
                self.owner[cells[at]] = shares[turn][0]
                at += 1
            else:
                turn = yield from self._cut(int(cells[at]), given, turn, shares, due, slack)
                at += 1

    def _cut(
        self, cell: int, given: int, turn: int, shares: Sequence[tuple[int, int]], due: Sequence[int], slack: int
    ) -> Generator[Cut, None, int]:
        """One cell's parts, ``given`` bytes of its set having been dealt out before; returns whose turn it is then."""
        size = int(self._itemsize[cell])
        rest = [self._box_of(cell)]
        while rest:
            box = rest.pop()
            nbytes = box.numel * size
            while turn + 1 < len(shares) and due[turn] - given <= slack and due[turn] - given < nbytes:
                turn += 1
            if turn + 1 == len(shares) or nbytes <= due[turn] - given + slack:
                given += nbytes
                yield shares[turn][0], cell, box
                continue
            head, tail = split(box, (due[turn] - given + size // 2) // size, slack // size)
            given += sum(part.numel for part in head) * size
            yield from ((shares[turn][0], cell, part) for part in head)
            rest += reversed(tail)
            turn += 1
        return turn
