"""What each writer rank writes, when several hold the same elements: every element once, bytes balanced. Pure.

Replicas of a box are the only freedom. Ranks with equal manifests are looked at once; elements that the same ranks
hold are gathered (:mod:`awexd_transports.holders`); how much each rank takes of each such set is levelled
(:mod:`awexd_transports.level`); then each set's boxes are dealt out in order, cut by rows where a rank's quota ends
(:mod:`awexd_transports.dealing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from awexd_transports.columns import describe, in_order
from awexd_transports.dealing import Dealing
from awexd_transports.errors import ManifestMismatch
from awexd_transports.holders import Holders, Ranks
from awexd_transports.joined import Joined, classes
from awexd_transports.layout import Box, Manifest
from awexd_transports.names import Ints
from awexd_transports.ragged import Cell, ragged_cells

_Part = tuple[int, Box]
"""A row and the part of its box that is written."""


def share(manifests: Sequence[Manifest]) -> Shares:
    """Each rank's segment manifest: the part of what it holds that it writes.

    Every element that any rank holds is in exactly one segment. Each box lies inside one entry of that rank's own
    manifest, in whose order it stands; where nothing is replicated and nothing empty, the manifests come back as they
    are. Parts that a rank stores once under several names stay so.

    Args:
        manifests: what each writer rank registered, in rank order.

    Returns:
        The segment manifests by rank, each made when it is asked for.

    Raises:
        ManifestMismatch: ranks disagree on a name's dtype, global shape or layout, or on the boxes of a layout.
    """
    distinct, of_rank = classes(manifests)
    joined = Joined(distinct)
    ranks = _ranks_of(of_rank.tolist(), len(distinct))
    _check_agreement(joined, ranks)
    holders = Holders(joined, ranks)
    ragged = ragged_cells(joined, holders.irregular, ranks)
    return Shares(joined, ranks, of_rank, holders, ragged)


class Shares(Sequence[Manifest]):
    """Segment manifests by rank. A rank's is made when it is first asked for."""

    def __init__(
        self, joined: Joined, ranks: Sequence[Ranks], of_rank: Ints, holders: Holders, ragged: Sequence[Cell]
    ) -> None:
        self._joined = joined
        self._of_rank: list[int] = of_rank.tolist()
        self._made: dict[int, Manifest] = {}
        self._cell = holders.cell
        alone = [held_by[0] if len(held_by) == 1 else -1 for held_by in holders.sets]
        self._owner = np.array(alone, np.int64)[holders.set]
        self._parts: dict[int, list[_Part]] = {}
        self._deal(holders, ragged)
        self._give_elementless(ranks)

    def __len__(self) -> int:
        return len(self._of_rank)

    @overload
    def __getitem__(self, at: int) -> Manifest: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Manifest, ...]: ...
    def __getitem__(self, at: int | slice) -> Manifest | tuple[Manifest, ...]:
        if isinstance(at, slice):
            return tuple(self[rank] for rank in range(len(self))[at])
        rank = range(len(self))[at]
        if rank not in self._made:
            self._made[rank] = self._segment(rank)
        return self._made[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _deal(self, holders: Holders, ragged: Sequence[Cell]) -> None:
        joined = self._joined
        loads = np.zeros(len(self) + 1, np.int64)
        np.add.at(loads, self._owner, holders.nbytes)  # what several ranks hold (-1) comes last
        shared = np.flatnonzero(self._owner < 0)
        rows, regular = holders.row[shared], len(shared)
        sets: dict[Ranks, int] = {members: at for at, members in enumerate(holders.sets)}
        held_by = np.array([sets.setdefault(cell.ranks, len(sets)) for cell in ragged], np.int64)
        held_by = np.concatenate([holders.set[shared], held_by])
        nbytes = np.concatenate([holders.nbytes[shared], np.array([cell.nbytes for cell in ragged], np.int64)])
        row_place = joined.place[rows]
        itemsize = np.concatenate(
            [joined.itemsize[row_place], np.array([cell.tensor.itemsize for cell in ragged], np.int64)]
        )
        first = np.concatenate(
            [joined.first[joined.name[row_place]], np.array([cell.tensor.place for cell in ragged], np.int64)]
        )
        whole = nbytes == itemsize
        whole[regular:] |= np.array([cell.tensor.atomic for cell in ragged], bool)
        order = np.lexsort((np.concatenate([rows, np.arange(len(ragged))]), first))

        def box_of(cell: int) -> Box:
            at = int(order[cell])
            return joined.box(int(rows[at])) if at < regular else ragged[at - regular].box

        dealing = Dealing(
            loads[:-1].tolist(), list(sets), held_by[order], nbytes[order], itemsize[order], whole[order], box_of
        )
        owner = np.empty_like(dealing.owner)
        owner[order] = dealing.owner
        self._owner[shared] = owner[:regular]
        for cell, rank in zip(ragged, owner[regular:].tolist(), strict=True):
            if rank >= 0:
                self._give(rank, cell.rows(joined, self._of_rank[rank]), cell.box)
        for rank, number, box in dealing.cuts:
            at, manifest = int(order[number]), self._of_rank[rank]
            if at < regular:
                low = int(joined.row_start[manifest])
                own = self._cell[low : int(joined.row_start[manifest + 1])]
                self._give(rank, [low + int(np.flatnonzero(own == shared[at])[0])], box)
            else:
                self._give(rank, ragged[at - regular].rows(joined, manifest), box)

    def _give(self, rank: int, rows: Sequence[int], box: Box) -> None:
        self._parts.setdefault(rank, []).extend((row, box) for row in rows)

    def _give_elementless(self, ranks: Sequence[Ranks]) -> None:
        """Tensors without elements stay known: the first rank that declares one keeps it."""
        joined = self._joined
        for place in joined.first[joined.elementless[joined.first]].tolist() if joined.elementless.any() else ():
            row = int(np.flatnonzero(joined.place == place)[0])
            self._give(ranks[int(joined.manifest[row])][0], [row], joined.box(row))

    def _segment(self, rank: int) -> Manifest:
        """The rank's parts in its own order; equal parts of one piece stay one piece."""
        joined, at = self._joined, self._of_rank[rank]
        low, high = int(joined.row_start[at]), int(joined.row_start[at + 1])
        manifest, columns = joined.manifests[at], joined.manifests[at].columns
        cell = self._cell[low:high]
        rows = np.flatnonzero((cell >= 0) & (self._owner[cell] == rank)) if len(self._owner) else cell[:0]
        offset, shape = columns.offset[rows], columns.shape[rows]
        parts = self._parts.get(rank, ())
        if parts:
            dims = offset.shape[1]
            rows = np.concatenate([rows, np.array([row - low for row, _ in parts])])
            offset = np.concatenate([offset, _filled([box.offset for _, box in parts], dims, 0)])
            shape = np.concatenate([shape, _filled([box.shape for _, box in parts], dims, 1)])
            order = np.lexsort((*reversed(offset.T), rows))
            rows, offset, shape = rows[order], offset[order], shape[order]
        whole = np.array_equal(offset, columns.offset) and np.array_equal(shape, columns.shape)
        if whole and np.array_equal(rows, np.arange(len(manifest))):
            return manifest
        return Manifest(columns.take(rows, offset, shape, _pieces(manifest, rows, offset, shape)))


def _pieces(manifest: Manifest, rows: Ints, offset: Ints, shape: Ints) -> Ints:
    """New numbers of pieces: one for each part, and the same for equal parts of one piece."""
    columns = manifest.columns
    aliased = columns.aliased()[rows] if len(rows) else np.zeros(0, bool)
    if not aliased.any():
        return np.arange(len(rows))
    piece = np.arange(len(rows))
    tied = np.flatnonzero(aliased)
    known: dict[tuple[int, ...], int] = {}
    place = np.column_stack([columns.piece[rows], offset - columns.offset[rows], shape])[tied]
    for at, key in zip(tied.tolist(), map(tuple, place.tolist()), strict=True):
        piece[at] = known.setdefault(key, at)
    return in_order(piece)[1]


def _filled(rows: Sequence[tuple[int, ...]], dims: int, fill: int) -> Ints:
    return np.array([(*row, *(fill,) * (dims - len(row))) for row in rows], np.int64).reshape(len(rows), dims)


def _ranks_of(of_rank: Sequence[int], count: int) -> list[Ranks]:
    """For each distinct manifest the ranks that have it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, at in enumerate(of_rank):
        found[at].append(rank)
    return [tuple(ranks) for ranks in found]


def _check_agreement(joined: Joined, ranks: Sequence[Ranks]) -> None:
    wrong: dict[int, str] = {}
    for place in joined.unlike_first().tolist():
        name = int(joined.name[place])
        first, at = int(joined.first[name]), joined.manifest_of_place(place)
        one, other = describe(joined.entry_at(first)), describe(joined.entry_at(place))
        text = f"rank {ranks[joined.manifest_of_place(first)][0]} has {one}, rank {ranks[at][0]} has {other}"
        wrong.setdefault(name, text)
    if wrong:
        mismatched = {joined.text(name): text for name, text in wrong.items()}
        raise ManifestMismatch.between("the writer's ranks contradict each other", mismatched=mismatched)
