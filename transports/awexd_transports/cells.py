"""How a stored piece is cut into cells, each with a checksum of its own. A function of shape and element size alone.

A row (all elements along the last dimension) is cut into 8, 4 or 2 equal parts where those have whole words of 64 bits
and at least PART bytes; a row of more than BLOCK bytes is cut further. The other dimensions are cut, outermost last,
into blocks of at most BLOCK bytes, and of at most an eighth of the piece where that is more than LEAST: into 2, 4, or a
multiple of 8 blocks, so that what is cut in halves, quarters or eighths by a reader's sharding is made of whole cells,
without which a node would bring more than its readers read. Cells are numbered row-major.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

BLOCK = 2 << 20
"""Bytes of whole rows that are copied, then summed while they still are in the shared cache: with less, the calls and
the waits for the GIL between them took up to a fifth longer."""
LEAST = 256 << 10
PART = 512
PARTS = 8

Place = tuple[int, ...]


class Tile(NamedTuple):
    """Neighbouring cells, and what of them was asked for: both from ``low`` to ``high``, in the piece's coordinates."""

    cell: int
    cells: int
    low: Place
    high: Place
    taken_low: Place
    taken_high: Place


class Grid(NamedTuple):
    """The cells of a piece of a shape (no dimension: one of extent 1).

    Attributes:
        steps: extents of a cell; the last one along a dimension may be shorter.
        counts: cells along each dimension.
        together: whether the cells side by side along the last dimension are one tile.
    """

    shape: Place
    steps: Place
    counts: Place
    together: bool

    @property
    def cells(self) -> int:
        return math.prod(self.counts)

    def tiles(self, low: Place, high: Place) -> Iterator[Tile]:
        """The tiles that hold an element of the box from ``low`` to ``high``; each covers as few cells as it can."""
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return
        dims = range(len(self.shape))
        first = [a // step for a, step in zip(low, self.steps, strict=True)]
        end = [-(-b // step) for b, step in zip(high, self.steps, strict=True)]
        ranges: list[Sequence[int]] = [range(a, b) for a, b in zip(first, end, strict=True)]
        width = 1
        if self.together:
            ranges[-1], width = first[-1:], end[-1] - first[-1]
        for at in product(*ranges):
            cell = 0
            for index, count in zip(at, self.counts, strict=True):
                cell = cell * count + index
            counts = (*(1 for _ in at[1:]), width)
            begin = tuple(at[d] * self.steps[d] for d in dims)
            stop = tuple(min(self.shape[d], (at[d] + counts[d]) * self.steps[d]) for d in dims)
            taken = tuple(map(max, begin, low)), tuple(map(min, stop, high))
            yield Tile(cell, width, begin, stop, *taken)

    def cell(self, number: int) -> tuple[Place, Place]:
        """From where to where that cell is, in the piece's coordinates."""
        at: list[int] = []
        for count in reversed(self.counts):
            number, index = divmod(number, count)
            at.append(index)
        low = tuple(index * step for index, step in zip(reversed(at), self.steps, strict=True))
        return low, tuple(min(n, a + step) for n, a, step in zip(self.shape, low, self.steps, strict=True))


@lru_cache(maxsize=4096)
def grid(shape: Place, itemsize: int) -> Grid:
    """The cells of a piece; none where it is empty."""
    shape = shape or (1,)
    if not math.prod(shape):
        return Grid(shape, (1,) * len(shape), (0,) * len(shape), True)
    steps = [_row_step(shape[-1], itemsize)]
    row, rows = shape[-1] * itemsize, math.prod(shape[:-1])
    room = max(1, min(BLOCK // row, max(LEAST // row, -(-rows // PARTS))))
    for n in reversed(shape[:-1]):
        count = _rounded(-(-n // room)) if n > room else 1
        steps.append(-(-n // count))
        room = room // steps[-1] if count == 1 else 1
    steps.reverse()
    counts = tuple(-(-n // step) for n, step in zip(shape, steps, strict=True))
    return Grid(shape, tuple(steps), counts, shape[-1] * itemsize <= BLOCK)


def _row_step(extent: int, itemsize: int) -> int:
    nbytes = extent * itemsize
    if nbytes > BLOCK:
        count = -(-nbytes // BLOCK // PARTS) * PARTS
        word = max(1, 8 // itemsize)
        return -(-extent // count // word) * word
    for parts in (PARTS, PARTS // 2, PARTS // 4):
        step, rest = divmod(extent, parts)
        if not rest and step * itemsize >= PART and not step * itemsize % 8:
            return step
    return extent


def _rounded(count: int) -> int:
    """Up to 2, 4 or a multiple of 8."""
    return next((few for few in (2, 4) if count <= few), -(-count // 8) * 8)
