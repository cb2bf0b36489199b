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
        sets: the distinct sets of ranks, each ascending.
        set: shape (cells,): which of them holds the cell.
        nbytes: shape (cells,).
    """

    def __init__(self, joined: Joined, ranks: Sequence[Ranks]) -> None:
        self._joined = joined
        self.irregular = np.zeros(len(joined.first), bool)
        self.irregular[joined.row_name[joined.aliased()]] = True
        self.irregular[joined.name[joined.layout > 0]] = True
        tangled = self._gather()
        if tangled.any():
            self.irregular |= tangled
            self._gather()
        self.nbytes = joined.numel[self.row] * joined.itemsize[joined.place[self.row]]
        self.set, held_by = self._distinct_sets()
        self.sets = [tuple(sorted(rank for at in members for rank in ranks[at])) for members in held_by]

    def _gather(self) -> Bools:
        """Makes cells of rows; the names among them whose cells overlap."""
        joined = self._joined
        rows = np.flatnonzero(~joined.empty & ~self.irregular[joined.row_name])
        lone = (np.bincount(joined.row_name[rows], minlength=len(joined.first)) == 1)[joined.row_name[rows]]
        alone, rest = rows[lone], rows[~lone]
        order, begin = together([joined.row_name[rest], *joined.offset[rest].T, *joined.shape[rest].T])
        rest = rest[order]
        self._members = np.concatenate([alone, rest])
        self._begin = np.concatenate([np.arange(len(alone)), begin + len(alone)])
        self._count = np.diff(np.append(self._begin, len(self._members)))
        self.row = self._members[self._begin]
        self.cell = np.full(len(joined.place), -1)
        self.cell[self._members] = np.repeat(np.arange(len(self.row)), self._count)
        several = self.row[len(alone) :]
        clash = several[entangled(joined.row_name[several], joined.offset[several], joined.shape[several])]
        tangled = np.zeros(len(joined.first), bool)
        tangled[joined.row_name[clash]] = True
        return tangled

    def _distinct_sets(self) -> tuple[Ints, list[list[int]]]:
        """For each cell the number of its set of manifests, and those sets."""
        if not len(self.row):
            return np.zeros(0, np.int64), []
        members = self._joined.manifest[self._members]
        mixed = np.add.reduceat(_mixed(members), self._begin).view(np.int64)
        order, begin = together([mixed, self._count])
        which = np.empty(len(order), np.int64)
        which[order] = np.repeat(np.arange(len(begin)), np.diff(np.append(begin, len(order))))
        model = order[begin]
        same = members[runs(self._begin[model[which]], self._count)] == members[runs(self._begin, self._count)]
        held_by = [members[self._begin[at] : self._begin[at] + self._count[at]].tolist() for at in model.tolist()]
        return (which, held_by) if same.all() else self._sets_one_by_one(members.tolist())

    def _sets_one_by_one(self, members: list[int]) -> tuple[Ints, list[list[int]]]:
        """Where two sets were mixed to one number."""
        known: dict[tuple[int, ...], int] = {}
        begin, count = self._begin.tolist(), self._count.tolist()
        sets = (tuple(members[low : low + many]) for low, many in zip(begin, count, strict=True))
        which = np.array([known.setdefault(members, len(known)) for members in sets], np.int64)
        return which, [list(members) for members in known]


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
