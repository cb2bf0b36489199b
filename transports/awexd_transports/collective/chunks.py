"""What one slot of a ring takes at once: boxes, cut and packed. Pure; both sides of a pair cut alike.

Whoever sends gathers a chunk's parts into a slot, whoever receives scatters them from there: what is large is cut, what
is small shares a chunk with others, whatever the boxes' strides are on either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from awexd_transports.layout import ALIGNMENT

FORMAT = 1
"""Raised whenever the same boxes are cut otherwise."""
TAIL = 8
"""A box is not cut to fill less than one part in so many of a slot."""

Place = tuple[int, ...]


class Part(NamedTuple):
    """A part of box number ``box``, from ``low`` to ``high`` in it, ``at`` so many bytes into the slot."""

    box: int
    low: Place
    high: Place
    at: int


class Chunk(NamedTuple):
    parts: list[Part]
    nbytes: int


def chunks(boxes: Iterable[tuple[Place, int]], room: int) -> Iterator[Chunk]:
    """Boxes, given by shape and bytes of an element, in order, in chunks of at most ``room`` bytes.

    Args:
        room: a multiple of ALIGNMENT, which every part is aligned to.
    """
    parts: list[Part] = []
    used = end = 0
    for number, (shape, itemsize) in enumerate(boxes):
        rest = [((0,) * len(shape), shape)] if math.prod(shape) else []
        while rest:
            low, high = rest.pop()
            nbytes = itemsize * math.prod(b - a for a, b in zip(low, high, strict=True))
            left = room - used
            if nbytes <= left:
                parts.append(Part(number, low, high, used))
                end = used + nbytes
                used = -(-end // ALIGNMENT) * ALIGNMENT
            elif parts and left < max(room // TAIL, itemsize):
                yield Chunk(parts, end)
                parts, used = [], 0
                rest.append((low, high))
            else:
                rest += reversed(_cut(low, high, nbytes, left))
    if parts:
        yield Chunk(parts, end)


def _cut(low: Place, high: Place, nbytes: int, room: int) -> list[tuple[Place, Place]]:
    """A box that does not fit, in two along its first dimension that can be cut: the first fits, or is smaller."""
    dim = next(d for d, (a, b) in enumerate(zip(low, high, strict=True)) if b - a > 1)
    extent = high[dim] - low[dim]
    at = low[dim] + max(1, min(extent - 1, room * extent // nbytes))
    return [(low, (*high[:dim], at, *high[dim + 1 :])), ((*low[:dim], at, *low[dim + 1 :]), high)]
