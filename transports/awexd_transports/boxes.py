"""Geometry of many boxes: which of them meet a box, which overlap each other, what is left of one. Pure.

Work is near linear for the shardings that occur (slices and grids): boxes are sorted along the dimension that tells
them apart best, and only those whose extent there meets the question are looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product

import numpy as np

from awexd_transports.names import Ints, numbered
from awexd_transports.shard import Box

MAX_PASSES = 24
"""Rounds of cuts before boxes that are still together count as entangled."""


def entangled(group: Ints, offset: Ints, shape: Ints) -> Ints:
    """Rows whose box may share an element with another of its group; boxes of all other rows surely do not.

    Boxes are parted again and again by straight cuts that go through no box, along each dimension in turn: what slices,
    grids, and grids cut further give is told apart; boxes laid around each other like the sails of a windmill are not.

    Args:
        group: shape (n,): numbers >= 0; only boxes of one group are compared.
        offset, shape: (n, dims); no box is empty.
    """
    rows, stale, dims = np.arange(len(group)), 0, offset.shape[1]
    label = numbered(group)
    for turn in range(MAX_PASSES):
        several = np.bincount(label)[label] > 1 if len(label) else np.zeros(0, bool)
        rows, label = rows[several], label[several]
        if not len(rows) or stale >= dims:
            break
        low = offset[rows, turn % dims]
        before = np.count_nonzero(np.bincount(label))
        order, label = _parted(label, low, low + shape[rows, turn % dims])
        rows = rows[order]
        stale = 0 if int(label[-1]) + 1 > before else stale + 1
    return np.sort(rows)


def _parted(label: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Rows by label and ``low``, and their new labels: a new one wherever no interval of the label reaches further."""
    span = int(high.max()) + 1
    if (int(label.max()) + 1) * span >= 1 << 62:
        edges = np.unique(np.concatenate([low, high]))
        label = numbered(label)
        low, high, span = np.searchsorted(edges, low), np.searchsorted(edges, high), len(edges)
    start = label * span + low
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate((label * span + high)[order])
    new = np.ones(len(order), bool)
    new[1:] = start[order][1:] >= reach[:-1]
    return order, np.cumsum(new) - 1


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element (or are the same empty box given twice), or None."""
    if len(boxes) < 2:
        return None
    if len(set(boxes)) < len(boxes):
        twice = next(box for at, box in enumerate(boxes) if box in boxes[:at])
        return twice, twice
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offset)
    for at, box in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if other.offset and other.offset[0] >= box.end[0]:
                break
            if box.intersect(other):
                return box, other
    return None


class BoxIndex:
    """Non-empty boxes of one global tensor, ready to be asked which of them share an element with a box."""

    __slots__ = ("_dim", "_order", "_reach", "_starts", "boxes")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        dims = len(boxes[0].offset) if boxes else 0
        self._dim = max(range(dims), key=lambda d: len({box.offset[d] for box in boxes}), default=-1)
        if self._dim < 0:
            return
        dim = self._dim
        self._order = sorted(range(len(boxes)), key=lambda at: boxes[at].offset[dim])
        self._starts = [boxes[at].offset[dim] for at in self._order]
        # The furthest end so far never falls, so it can be bisected although the ends themselves may not be sorted.
        self._reach = list(accumulate((boxes[at].offset[dim] + boxes[at].shape[dim] for at in self._order), max))

    def hits(self, box: Box) -> list[tuple[int, Box]]:
        """Positions of the boxes that share an element with ``box``, ascending, each with the common box."""
        if not box.numel:
            return []
        if self._dim < 0:
            candidates: Sequence[int] = range(len(self.boxes))
        else:
            start, stop = box.offset[self._dim], box.offset[self._dim] + box.shape[self._dim]
            candidates = self._order[bisect_right(self._reach, start) : bisect_left(self._starts, stop)]
        found = [(at, common) for at in candidates if (common := self.boxes[at].intersect(box))]
        found.sort(key=lambda hit: hit[0])
        return found

    def overlaps(self) -> Iterator[tuple[int, int]]:
        """Pairs ``(a, b)``, ``a < b``, of positions whose boxes share an element."""
        for at, box in enumerate(self.boxes):
            for other, _ in self.hits(box):
                if other > at:
                    yield at, other


def subtract(box: Box, hole: Box) -> list[Box]:
    """``box`` without ``hole`` as disjoint boxes, at most two a dimension."""
    common = box.intersect(hole)
    if common is None:
        return [box] if box.numel else []
    rest: list[Box] = []
    offset, end = list(box.offset), list(box.end)
    for dim, (low, high) in enumerate(zip(common.offset, common.end, strict=True)):
        for first, last in ((offset[dim], low), (high, end[dim])):
            if first < last:
                start, stop = (*offset[:dim], first, *offset[dim + 1 :]), (*end[:dim], last, *end[dim + 1 :])
                rest.append(Box(start, tuple(b - a for a, b in zip(start, stop, strict=True))))
        offset[dim], end[dim] = low, high
    return rest


def subtract_all(box: Box, holes: Sequence[Box]) -> list[Box]:
    """``box`` without any of ``holes``, as disjoint boxes."""
    rest = [box] if box.numel else []
    for hole in holes:
        rest = [part for whole in rest for part in subtract(whole, hole)]
    return rest


def cells(boxes: Sequence[Box]) -> list[tuple[Box, tuple[int, ...]]]:
    """Disjoint cells of the union of non-empty boxes, each with the ascending positions of the boxes that contain it.

    A box that overlaps no different one is a cell. Others are cut along the coordinates of the boundaries of the boxes
    that they overlap, directly or through others; then neighbouring cells in the same boxes are joined again.
    """
    holders: dict[Box, list[int]] = {}
    for at, box in enumerate(boxes):
        holders.setdefault(box, []).append(at)
    distinct = list(holders)
    found: list[tuple[Box, tuple[int, ...]]] = []
    for members in _components(distinct):
        if len(members) == 1:
            box = distinct[members[0]]
            found.append((box, tuple(holders[box])))
        else:
            parts = [distinct[at] for at in members]
            for cell, within in _join(_grid(parts)):
                found.append((cell, tuple(sorted(at for part in within for at in holders[parts[part]]))))
    return found


def _components(boxes: Sequence[Box]) -> list[list[int]]:
    """Positions of boxes that overlap directly or through others, in order of their first member."""
    if len(boxes) == 1:
        return [[0]]
    root = list(range(len(boxes)))

    def find(at: int) -> int:
        while root[at] != at:
            root[at] = root[root[at]]
            at = root[at]
        return at

    for a, b in BoxIndex(boxes).overlaps():
        low, high = sorted((find(a), find(b)))
        root[high] = low
    grouped: dict[int, list[int]] = {}
    for at in range(len(boxes)):
        grouped.setdefault(find(at), []).append(at)
    return list(grouped.values())


def _grid(boxes: Sequence[Box]) -> dict[Box, tuple[int, ...]]:
    """All boxes cut along all their boundaries: cell to the ascending positions of the boxes that contain it."""
    dims = range(len(boxes[0].offset))
    cuts = [sorted({edge for box in boxes for edge in (box.offset[d], box.offset[d] + box.shape[d])}) for d in dims]
    within: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for at, box in enumerate(boxes):
        spans = []
        for d, (low, high) in enumerate(zip(box.offset, box.end, strict=True)):
            inside = cuts[d][bisect_left(cuts[d], low) : bisect_right(cuts[d], high)]
            spans.append(list(pairwise(inside)))
        for cell in product(*spans):
            within.setdefault(cell, []).append(at)
    return {
        Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell)): tuple(held)
        for cell, held in sorted(within.items())
    }


def _join(found: dict[Box, tuple[int, ...]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Neighbours in the same boxes made one, along the last dimension first."""
    current = list(found.items())
    for dim in reversed(range(len(current[0][0].offset))):
        lines: dict[tuple[object, ...], list[tuple[Box, tuple[int, ...]]]] = {}
        for box, held in current:
            across = (held, box.offset[:dim], box.offset[dim + 1 :], box.shape[:dim], box.shape[dim + 1 :])
            line = lines.setdefault(across, [])
            if line and line[-1][0].offset[dim] + line[-1][0].shape[dim] == box.offset[dim]:
                last = line[-1][0]
                shape = (*last.shape[:dim], last.shape[dim] + box.shape[dim], *last.shape[dim + 1 :])
                line[-1] = (Box(last.offset, shape), held)
            else:
                line.append((box, held))
        current = sorted((item for line in lines.values() for item in line), key=lambda item: item[0].offset)
    return current
