"""Which ranks hold which elements: equal boxes gathered into cells, cells by the set of ranks that hold them.

All names are looked at together. Those whose boxes overlap without being equal, that are tied to others or follow a
layout are left to :mod:`awexd_transports.ragged`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from awexd_transports.boxes import entangled
from awexd_transports.joined import Joined, runs
from awexd_transports.names import Bools, Ints

Ranks = tuple[int, ...]
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Holders:
    """Cells of the names that are regular, over distinct manifests.

    Attributes:
        irregular: shape (names,): names that are left out.
        cell: shape (rows,): the cell that a row is; -1 for rows that are empty or left out.
        row: shape (cells,): the first row of each cell.
        sets: the distinct sets of ranks, each ascending; some may hold no cell.
        set: shape (cells,): which of them holds the cell.
        nbytes: shape (cells,).
    """

    def __init__(self, joined: Joined, ranks: Sequence[Ranks]) -> None:
        self._joined = joined
        self.irregular = np.zeros(len(joined.first), bool)
        self.irregular[joined.row_name[joined.aliased()]] = True
        if joined.atomic.any():
            self.irregular[joined.name[joined.atomic]] = True
        tangled = self._gather()
        if tangled.any():
            self.irregular |= tangled
            self._gather()
        self.nbytes = joined.nbytes[self.row]
        self.set, held_by = self._distinct_sets()
        self.sets = [tuple(sorted(rank for at in members for rank in ranks[at])) for members in held_by]

    def _gather(self) -> Bools:
        """Makes cells of rows; the names among them whose cells overlap."""
        joined = self._joined
        name = joined.row_name
        kept = ~joined.empty
        kept &= ~self.irregular[name]
        lone = (np.bincount(name[kept], minlength=len(joined.first)) == 1)[name]
        alone, rest = np.flatnonzero(kept & lone), np.flatnonzero(kept & ~lone)
        order, begin = together([name[rest], *joined.offset[rest].T, *joined.shape[rest].T])
        self._lone = len(alone)
        self._members = rest[order]
        self._begin = begin
        self._count = np.diff(np.append(begin, len(rest)))
        several = self._members[begin]
        self.row = np.concatenate([alone, several])
        self.cell = np.full(len(name), -1)
        self.cell[alone] = np.arange(len(alone))
        self.cell[self._members] = np.repeat(np.arange(len(alone), len(self.row)), self._count)
        clash = several[entangled(name[several], joined.offset[several], joined.shape[several])]
        tangled = np.zeros(len(joined.first), bool)
        tangled[name[clash]] = True
        return tangled

    def _distinct_sets(self) -> tuple[Ints, list[list[int]]]:
        """For each cell the number of its set of manifests, and those sets: first each manifest alone."""
        joined = self._joined
        which = joined.manifest[self.row]
        held_by = [[at] for at in range(len(joined.manifests))]
        shared = np.flatnonzero(self._count > 1)
        if len(shared):
            of_shared, sets = self._shared_sets(self._begin[shared], self._count[shared])
            which[self._lone + shared] = of_shared + len(held_by)
            held_by += sets
        return which, held_by

    def _shared_sets(self, first: Ints, count: Ints) -> tuple[Ints, list[list[int]]]:
        """The same of cells of several members, which begin at ``first``."""
        members = self._joined.manifest[self._members[runs(first, count)]]
        starts = np.cumsum(count) - count
        order, begin = together([np.add.reduceat(_mixed(members), starts).view(np.int64), count])
        which = np.empty(len(order), np.int64)
        which[order] = np.repeat(np.arange(len(begin)), np.diff(np.append(begin, len(order))))
        model = order[begin]
        held_by = [members[starts[at] : starts[at] + count[at]].tolist() for at in model.tolist()]
        same = members[runs(starts[model[which]], count)] == members
        return (which, held_by) if same.all() else _one_by_one(members.tolist(), starts.tolist(), count.tolist())


def _one_by_one(members: list[int], starts: list[int], counts: list[int]) -> tuple[Ints, list[list[int]]]:
    """The distinct sets of members, where two were mixed to one number."""
    known: dict[tuple[int, ...], int] = {}
    sets = (tuple(members[low : low + many]) for low, many in zip(starts, counts, strict=True))
    which = np.array([known.setdefault(held_by, len(known)) for held_by in sets], np.int64)
    return which, [list(held_by) for held_by in known]


def together(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Rows in an order in which equal ones stand together, ascending among themselves, and where each group begins."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX + column.view(np.uint64)
    order = np.argsort(mixed, kind="stable")
    new = _differ(columns, order)
    if (new[1:] & (np.diff(mixed[order]) == 0)).any():  # different rows were mixed to one number: sort in earnest
        order = np.lexsort(tuple(columns))
        new = _differ(columns, order)
    return order, np.flatnonzero(new)


def _differ(columns: Sequence[Ints], order: Ints) -> Bools:
    """Rows in that order which are not equal to the one before."""
    new = np.zeros(len(order), bool)
    new[:1] = True
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return new


def _mixed(values: Ints) -> npt.NDArray[np.uint64]:
    mixed = (values.view(np.uint64) + np.uint64(1)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))
