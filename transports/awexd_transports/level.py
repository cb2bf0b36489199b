"""How much each holder of replicated bytes takes, and where a box is cut. Pure, in plain integers.

Elements held by one rank are its load from the start; the rest, gathered by the set of ranks that hold it, is filled
like water over the lowest loads of that set, smallest sets first and again until nothing moves (block-coordinate
descent of the sum of squared loads, whose minimum also has the lowest maximum).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from awexd_transports.shard import Box

MAX_SWEEPS = 64


def fill(sets: Mapping[tuple[int, ...], int], loads: list[int]) -> dict[tuple[int, ...], list[int]]:
    """Bytes of each set for each of its ranks; ``loads`` comes back with them added."""
    quotas = {holders: [0] * len(holders) for holders in sorted(sets, key=lambda holders: (len(holders), holders))}
    for _ in range(MAX_SWEEPS):
        moved = 0
        for holders, before in quotas.items():
            for rank, quota in zip(holders, before, strict=True):
                loads[rank] -= quota
            after = _level([loads[rank] for rank in holders], sets[holders])
            for rank, quota in zip(holders, after, strict=True):
                loads[rank] += quota
            moved += sum(abs(a - b) for a, b in zip(after, before, strict=True))
            quotas[holders] = after
        if moved * 1000 <= max(loads, default=0):
            break
    return quotas


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """``amount`` poured over ``loads`` so that the lowest rise to one level."""
    order = sorted(range(len(loads)), key=lambda at: loads[at])
    below = 0
    for count, at in enumerate(order, start=1):
        below += loads[at]
        if count == len(order) or amount + below <= loads[order[count]] * count:
            break
    level, over = divmod(amount + below, count)
    poured = [0] * len(loads)
    for place, at in enumerate(order[:count]):
        poured[at] = level + (place < over) - loads[at]
    return poured


def split(box: Box, count: int, slack: int) -> tuple[list[Box], list[Box]]:
    """``box`` in two: its first ``count`` elements, give or take ``slack``, and the others.

    Cut between rows of the first dimension that has more than one; inside a row only where ``slack`` is exceeded.
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return ([box], []) if count > 0 else ([], [box])
    rows, over = divmod(count, box.numel // box.shape[dim])
    row = box.numel // box.shape[dim]
    if min(over, row - over) <= slack or row == 1:
        rows += 2 * over > row
        return _rows(box, dim, 0, rows), _rows(box, dim, rows, box.shape[dim])
    head, tail = split(_rows(box, dim, rows, rows + 1)[0], over, slack)
    return _rows(box, dim, 0, rows) + head, tail + _rows(box, dim, rows + 1, box.shape[dim])


def _rows(box: Box, dim: int, low: int, high: int) -> list[Box]:
    low, high = max(low, 0), min(high, box.shape[dim])
    if low >= high:
        return []
    offset = (*box.offset[:dim], box.offset[dim] + low, *box.offset[dim + 1 :])
    return [Box(offset, (*box.shape[:dim], high - low, *box.shape[dim + 1 :]))]
