"""How even loads can be at best: replicas are the only freedom, and some bytes are held by few ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from awexd_transports.holders import Holders
from awexd_transports.joined import Joined, classes
from awexd_transports.layout import Manifest
from awexd_transports.level import fill
from awexd_transports.names import Ints
from awexd_transports.plan import Plan
from awexd_transports.ragged import ragged_cells

Ranks = tuple[int, ...]
Sets = dict[Ranks, int]
"""Bytes by the set of ranks that hold them."""


class Holdings:
    """Which ranks of a trainer hold what."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._distinct, self._of_rank = classes(manifests)
        self._joined = Joined(self._distinct)
        members: list[list[int]] = [[] for _ in self._distinct]
        for rank, at in enumerate(self._of_rank.tolist()):
            members[at].append(rank)
        self._ranks = [tuple(each) for each in members]
        self._holders = Holders(self._joined, self._ranks)

    def held(self) -> Sets:
        """Each element once."""
        counted = np.zeros(len(self._holders.sets), np.int64)
        np.add.at(counted, self._holders.set, self._holders.nbytes)
        sets = _summed(self._holders.sets, counted)
        for cell in ragged_cells(self._joined, self._holders.irregular, self._ranks):
            sets[cell.ranks] = sets.get(cell.ranks, 0) + cell.nbytes
        return sets

    def read(self, segments: Sequence[Manifest], plans: Iterable[tuple[Plan, int]]) -> Sets:
        """Each element as often as it is read; of a name that a rank has in several parts, all that hold any of them.

        Args:
            segments: what each rank writes.
            plans: from these segments, and how many engines follow each.
        """
        sets, of_place = self._sets_of_places()
        joined = Joined([*self._distinct, *segments])
        names = len(joined.first)
        places = len(of_place)
        key = self._joined_manifest() * names + joined.name[:places]
        order = np.argsort(key)
        counted = np.zeros(len(sets), np.int64)
        for made, engines in plans:
            moves = made.moves
            place = joined.place[joined.row_start[len(self._distinct) + moves.source] + moves.source_entry]
            wanted = self._of_rank[moves.source] * names + joined.name[place]
            found = of_place[order[np.searchsorted(key, wanted, sorter=order)]]
            np.add.at(counted, found, moves.nbytes * np.bincount(made.destinations)[moves.destination] * engines)
        return _summed(sets, counted)

    def _joined_manifest(self) -> Ints:
        """The manifest of each place."""
        return np.repeat(np.arange(len(self._distinct)), np.diff(self._joined.place_start))

    def _sets_of_places(self) -> tuple[list[Ranks], Ints]:
        """Sets of ranks, and which of them holds what a manifest has of a name, by place."""
        holders, joined = self._holders, self._joined
        sets = [*holders.sets, tuple(range(len(self._of_rank)))]  # all of them: of what is irregular
        rows = np.flatnonzero(holders.cell >= 0)
        place, own = joined.place[rows], holders.set[holders.cell[rows]]
        low, high = np.full(len(joined.name), len(sets)), np.full(len(joined.name), -1)
        np.minimum.at(low, place, own)
        np.maximum.at(high, place, own)
        found = np.where(high < 0, len(holders.sets), high)
        several = np.flatnonzero((low != high) & (high >= 0))
        if len(several):
            pairs = np.unique(np.column_stack([place, own])[np.isin(place, several)], axis=0)
            known: dict[Ranks, int] = {}
            for at, start, end in _groups(pairs[:, 0]):
                union = tuple(sorted({rank for one in pairs[start:end, 1].tolist() for rank in sets[one]}))
                if union not in known:
                    known[union] = len(sets)
                    sets.append(union)
                found[at] = known[union]
        return sets, found


def lower_bound(sets: Sets, ranks: int) -> float:
    """Bytes that some rank must carry, whoever shares out.

    What only the ranks of a group hold, they carry among them: the mean of any group is a bound. Tried are all ranks,
    each set, and the most loaded ranks of a level sharing out, for each number of them.
    """
    loads = [0] * ranks
    fill(sets, loads)
    masks = [(_mask(held), nbytes) for held, nbytes in sets.items()]
    groups = {_mask(held) for held in sets} | {_mask(range(ranks))}
    group = 0
    for rank in sorted(range(ranks), key=lambda rank: -loads[rank]):
        group |= 1 << rank
        groups.add(group)
    return max(
        (sum(nbytes for mask, nbytes in masks if not mask & ~group) / group.bit_count() for group in groups if group),
        default=0.0,
    )


def _summed(sets: Sequence[Ranks], counted: Ints) -> Sets:
    found: Sets = {}
    for held, nbytes in zip(sets, counted.tolist(), strict=True):
        if nbytes:
            found[held] = found.get(held, 0) + nbytes
    return found


def _groups(sorted_values: Ints) -> Iterable[tuple[int, int, int]]:
    """Each value with where it begins and ends."""
    values, starts = np.unique(sorted_values, return_index=True)
    return zip(values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(sorted_values)], strict=True)


def _mask(ranks: Iterable[int]) -> int:
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask
