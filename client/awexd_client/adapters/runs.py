"""Which indices of one tensor dimension a rank holds: pure integer arithmetic on runs, no torch.

Rules are DTensor's (``torch.chunk`` semantics): ``Shard`` over ``parts`` ranks cuts ``n`` elements into pieces of
``ceil(n / parts)``, so that trailing ranks may hold less, or nothing. ``_StridedShard`` with ``factor`` cuts into
``factor`` pieces first and each of those over the ranks; a rank holds its part of every piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive indices: the first, and how many."""

    start: int
    length: int


class Split(NamedTuple):
    """One mesh dimension's cut of a tensor dimension.

    Attributes:
        parts: ranks along the mesh dimension.
        at: this rank's coordinate along it.
        factor: None for ``Shard``, else the split factor of a ``_StridedShard``.
    """

    parts: int
    at: int
    factor: int | None = None


def chunk(size: int, parts: int, index: int) -> Run:
    """The ``index``-th piece that ``torch.chunk`` semantics give; an empty one starts at ``size``."""
    step = -(-size // parts)
    start = min(size, index * step)
    return Run(start, min(size, start + step) - start)


def total(runs: Iterable[Run]) -> int:
    return sum(run.length for run in runs)


def held(size: int, splits: Sequence[Split]) -> list[Run]:
    """What FSDP2 (over any TP) leaves on a rank: one split after another, strided ones after those they stand over.

    FSDP2 shards each TP part, yet its mesh dimension comes first; DTensor writes that as ``_StridedShard(factor=tp)``
    followed by the TP ``Shard``. Applying TP first and FSDP as a plain cut is what really happened. Reading the
    placements from left to right gives the same indices where all divides evenly; elsewhere it may give others.

    Args:
        size: global elements along the dimension.
        splits: in mesh order, those that cut this dimension.

    Returns:
        Global runs in the order in which local memory holds them, merged; ``[(size, 0)]`` where there is none.
    """
    order = in_order(splits)
    return held_left_to_right(size, splits if order is None else order)


def in_order(splits: Sequence[Split]) -> list[Split] | None:
    """The splits as plain cuts in the order in which they were made; None if a strided one stands over no others."""
    order: list[Split] = []
    for split in reversed(splits):
        if split.factor is None:
            order.insert(0, split)
            continue
        below = _completing(order, split.factor)
        if below is None:
            return None
        order.insert(below, Split(split.parts, split.at))
    return order


def held_left_to_right(size: int, splits: Iterable[Split]) -> list[Run]:
    """What DTensor's own ``distribute_tensor`` leaves on a rank; arguments and result as of :func:`held`."""
    runs = [Run(0, size)]
    for split in splits:
        runs = _cut(runs, split)
    return runs or [Run(size, 0)]


def _completing(order: Sequence[Split], factor: int) -> int | None:
    """How many leading splits of ``order`` together make ``factor`` parts; None if no number of them does."""
    return next((n for n in range(len(order) + 1) if math.prod(s.parts for s in order[:n]) == factor), None)


def _cut(runs: list[Run], split: Split) -> list[Run]:
    size = total(runs)
    if split.factor is None:
        return _take(runs, chunk(size, split.parts, split.at))
    kept: list[Run] = []
    for piece in range(split.factor):
        start, length = chunk(size, split.factor, piece)
        if not length:
            break
        offset, length = chunk(length, split.parts, split.at)
        kept += _take(runs, Run(start + offset, length))
    return _merged(kept)


def _take(runs: Iterable[Run], window: Run) -> list[Run]:
    """The part of ``runs`` that lies in a window of their concatenation."""
    kept, at = [], 0
    for start, length in runs:
        low, high = max(at, window.start), min(at + length, window.start + window.length)
        if low < high:
            kept.append(Run(start + low - at, high - low))
        at += length
    return kept


def _merged(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].start + merged[-1].length == run.start:
            merged[-1] = Run(merged[-1].start, merged[-1].length + run.length)
        else:
            merged.append(run)
    return merged
