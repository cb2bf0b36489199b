"""One strided copy as steps that each stay on the thread that calls them, leave the GIL alone and fit a core's cache.

A copy is brought to its fewest nested loops over the widest items and cut into tiles. Tiles are moved by torch's
vectorised loops. NumPy calls glibc's memmove for each contiguous run, which from 2 KiB to 1 MiB copies by ``rep movsb``
on most x86 machines: where the two sides are not aligned alike that was half as fast (7 GB/s a core, not 12), and rows
of 2 to 4 KiB took 1.2 to 1.3 times as long as torch's; for transposed sides NumPy took 6 to 10 times as long. And torch
takes a list of tiles in one call, during which no thread waits for the GIL: 5,000 tensors, one call a tile, took 1.03
to 1.1 times as long.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from awexd_transports.threads import default_threads
from awexd_transports.view import View, array_at

if TYPE_CHECKING:
    import torch

TILE = 1 << 20
"""Bytes of a tile of a large cast."""
LONG_RUN = 256 << 10
"""Contiguous runs of a strided copy from so many bytes on are moved one by one."""
GRAIN = 32_704
"""Items of one torch copy: torch starts threads of its own from 32,768 on (at::internal::GRAIN_SIZE). A multiple of 64:
the next tile starts on a cache line if this one does."""
BLOCK = 128
"""Extent of a tile along either side's fastest loop where those differ: both sides' cache lines are used whole."""

Loops = list[tuple[int, int, int]]
"""Extent, stride in the destination, stride in the source; bytes; outermost first."""
Step = tuple[Callable[[Any, Any], Any] | None, Any, Any]
"""How to copy (None: torch's ``copy_``, so that steps can be joined in one call), destination, source."""


_PAGE = 4096


def _streamed() -> int:
    """Three quarters of what glibc takes for the shared cache: from there on its memmove writes past the caches."""
    try:
        cache = os.sysconf(194)  # _SC_LEVEL3_CACHE_SIZE in glibc; Python has no name for it
    except (OSError, ValueError):
        cache = 0
    return max(LONG_RUN, cache * 3 // 4) if cache > 0 else sys.maxsize


STREAMED = _streamed()


def copy_steps(destination: View, source: View) -> Iterator[tuple[int, Step]]:
    """Bytes and step of every tile of a copy of equal shapes and dtypes, in order."""
    loops = loops_of(destination, source, [(destination.itemsize, 1, 1)])
    yield from _steps(destination.address, source.address, loops)


def flat_run(destination: View, source: View) -> int:
    """Bytes of the copy where both sides are without gaps in the same order, else 0."""
    loops = loops_of(destination, source, [(destination.itemsize, 1, 1)])
    return loops[0][0] if len(loops) == 1 else 0


def flat_steps(destination: int, source: int, nbytes: int) -> Iterator[tuple[int, Step]]:
    """Bytes and step of every tile of a copy without gaps, given by addresses.

    A long one is cut into as few parts as there are threads, of at least STREAMED bytes: written past the caches, which
    saves reading the destination first, 1 GiB took three quarters of the time on two threads.
    """
    parts = min(default_threads(), nbytes // STREAMED)
    if parts < min(2, default_threads()):
        yield from _steps(destination, source, [(nbytes, 1, 1)])
        return
    step = -(-nbytes // parts // _PAGE) * _PAGE
    for at in range(0, nbytes, step):
        size = min(step, nbytes - at)
        yield size, (np.copyto, array_at(destination + at, 1, (size,), (1,)), array_at(source + at, 1, (size,), (1,)))


def cast_steps(destination: View, source: View) -> Iterator[tuple[int, Step]]:
    """Bytes and step of every tile of a copy to another dtype."""
    size = destination.itemsize
    loops = loops_of(destination, source, []) or [(1, size, source.itemsize)]
    for d, s, tile in _tiles(destination.address, source.address, loops, TILE // size):
        shape = tuple(n for n, _, _ in tile)
        to = View(d, shape, tuple(step for _, step, _ in tile), destination.dtype, destination.owner)
        of = View(s, shape, tuple(step for _, _, step in tile), source.dtype, source.owner)
        yield math.prod(shape) * size, (_cast, to.tensor(), of.tensor())


def same(step: Step) -> bool:
    """Whether the step's destination holds bit by bit what it would copy."""
    copy, destination, source = step
    if copy is _cast:
        return _same_cast(destination, source)
    if copy is None:
        destination, source = destination.numpy(), source.numpy()
    if destination.dtype.kind == "c":
        destination, source = destination.view(np.int64), source.view(np.int64)
    return np.array_equal(destination, source)


def loops_of(destination: View, source: View, element: Loops) -> Loops:
    """The fewest loops, in the destination's order of addresses; ``element`` are those inside one element."""
    loops = [loop for loop in zip(destination.shape, destination.strides, source.strides, strict=True) if loop[0] > 1]
    loops.sort(key=lambda loop: (-abs(loop[1]), -abs(loop[2])))
    merged = element
    for n, d, s in reversed(loops):
        if merged and (d, s) == (merged[0][0] * merged[0][1], merged[0][0] * merged[0][2]):
            merged[0] = (n * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (n, d, s))
    return merged


def _steps(destination: int, source: int, loops: Loops) -> Iterator[tuple[int, Step]]:
    run = loops[-1][0]
    if run >= LONG_RUN and len(loops) > 1:
        extent, d, s = loops[0]
        for at in range(extent):
            yield from _steps(destination + at * d, source + at * s, loops[1:])
        return
    widest = 16 if run > 16 else 8  # items of 16 bytes only where a run has several: others cannot be seen as integers
    unit = math.gcd(widest, destination, source, run, *(abs(step) for loop in loops[:-1] for step in loop[1:]))
    loops = [*loops[:-1], (run // unit, unit, unit)] if run > unit or len(loops) == 1 else loops[:-1]
    for d, s, tile in _tiles(destination, source, loops, GRAIN):
        shape = tuple(n for n, _, _ in tile)
        to = array_at(d, unit, shape, tuple(step for _, step, _ in tile))
        of = array_at(s, unit, shape, tuple(step for _, _, step in tile))
        backwards = any(step < 0 for _, *steps in tile for step in steps)
        yield math.prod(shape) * unit, (np.copyto, to, of) if backwards else _torch_step(to, of)


def _torch_step(destination: Any, source: Any) -> Step:
    import torch

    return None, torch.from_numpy(destination), torch.from_numpy(source)


def _tiles(destination: int, source: int, loops: Loops, limit: int) -> Iterator[tuple[int, int, Loops]]:
    """Addresses and loops of parts of at most ``limit`` items that together are all."""
    extents = _extents(loops, limit)
    for starts in product(*(range(0, n, extent) for (n, _, _), extent in zip(loops, extents, strict=True))):
        d = destination + sum(at * step for at, (_, step, _) in zip(starts, loops, strict=True))
        s = source + sum(at * step for at, (_, _, step) in zip(starts, loops, strict=True))
        tile = zip(starts, extents, loops, strict=True)
        yield d, s, [(min(extent, n - at), to, of) for at, extent, (n, to, of) in tile]


def _extents(loops: Loops, limit: int) -> list[int]:
    """A tile's extents: fastest loops first; a block of both where destination and source differ in their fastest."""
    last = len(loops) - 1
    fastest = min(range(len(loops)), key=lambda at: (abs(loops[at][2]) or math.inf, -at))
    extents = [1] * len(loops)
    room = limit
    for at in dict.fromkeys((last, fastest, *range(last, -1, -1))):
        most = BLOCK if fastest != last and at == last else room
        extents[at] = min(loops[at][0], most)
        room //= extents[at]
    return extents


def _cast(destination: torch.Tensor, source: torch.Tensor) -> None:
    """``destination.copy_(source)`` in parts that torch does on the calling thread."""
    if destination.numel() <= GRAIN:
        destination.copy_(source)
        return
    step = max(1, GRAIN * destination.shape[0] // destination.numel())
    for at in range(0, destination.shape[0], step):
        to, of = destination[at : at + step], source[at : at + step]
        if to.numel() <= GRAIN:
            to.copy_(of)
        else:
            _cast(to[0], of[0])


def _same_cast(destination: torch.Tensor, source: torch.Tensor) -> bool:
    import torch

    # The same strides in the same parts: which NaN a cast gives depends on whether torch took its vectorised loop.
    expected = torch.empty_strided(destination.shape, destination.stride(), dtype=destination.dtype, device="cpu")
    _cast(expected, source)
    return np.array_equal(View.of(destination).bytes_array(), View.of(expected).bytes_array())
