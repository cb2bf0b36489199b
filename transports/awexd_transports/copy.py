"""Runs many strided copies in host memory, prepared once and run every step, on a few threads that leave the GIL alone.

Each row is brought to its fewest nested loops over the widest items, joined with its predecessor where both sides
continue, cut into tiles where large and batched where small. Threads draw batches from one queue. Contiguous tiles are
moved by NumPy, which calls memmove; strided ones by torch, whose loops were 1.1 to 1.8 times as fast as NumPy's memmove
a run, and 6 to 10 times where the two sides are transposed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from awexd_transports.errors import InvalidArgument
from awexd_transports.view import View, array_at, overlapping

if TYPE_CHECKING:
    import torch

__all__ = ["CopyTable", "Difference", "Row", "View", "default_threads", "overlapping", "shut_down_threads"]

TILE = 2 << 20
"""Bytes of a tile of a large row: long enough to hide Python, short enough to spread over threads."""
BATCH = 1 << 20
BATCH_ROWS = 256
INLINE = 256 << 10
"""Below so many bytes handing work to other threads costs more than it saves."""
MAX_THREADS = 64
LONG_RUN = 256 << 10
"""Contiguous runs of a strided row from so many bytes on are moved one by one."""
TINY = 4 << 10
"""Below so many bytes a strided tile goes by NumPy, which is called faster."""
GRAIN = 32_767
"""Items of one torch copy: torch starts threads of its own from 32,768 on (at::internal::GRAIN_SIZE)."""
BLOCK = 128
"""Extent of a tile along either side's fastest loop where those differ: both sides' cache lines are used whole."""

Loops = list[tuple[int, int, int]]
"""Extent, stride in the destination, stride in the source; bytes; outermost first."""
Step = tuple[Callable[[Any, Any], Any], Any, Any]
"""How to copy, destination, source."""


@dataclass(frozen=True, slots=True)
class Row:
    """One copy: same shape on both sides; same dtype, or ``cast`` as torch's ``copy_`` casts. ``label`` names it."""

    destination: View
    source: View
    label: str = ""
    cast: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element of a row, by its index in the row's box, whose bytes are not what was copied."""

    label: str
    index: tuple[int, ...]


class CopyTable:
    """Prepared copies. Keeps the owners of all its views alive; destinations must not overlap (see ``overlapping``).

    Args:
        rows: copies in any order; those without elements vanish.

    Raises:
        InvalidArgument: a row whose sides differ in shape, or in dtype without ``cast``, or whose destination has a
            dimension of stride zero. Nothing is ever broadcast.
    """

    def __init__(self, rows: Iterable[Row | tuple[View, View]]) -> None:
        given = [row if isinstance(row, Row) else Row(*row) for row in rows]
        for row in given:
            _check(row)
        self._rows = [row for row in given if row.destination.numel]
        self.nbytes = sum(row.destination.nbytes for row in self._rows)
        with _plain_tensors():
            self._batches = _batches(_steps(self._rows))

    def run(self, threads: int | None = None) -> None:
        """All copies, in place; returns when every byte is there.

        Args:
            threads: this one included; at most MAX_THREADS. None: the CPUs that this process may use, at most 8.
        """
        self._spread(_run_batch, threads)

    def first_difference(self, threads: int | None = None) -> Difference | None:
        """Compare destinations with sources bit by bit (cast rows: with the cast of their source)."""
        found: list[bool] = []
        self._spread(partial(_compare_batch, found), threads)
        if not found:
            return None
        at = ((row.label, _first_index(row)) for row in self._rows)
        return next((Difference(label, index) for label, index in at if index is not None), None)

    def _spread(self, work: Callable[[list[Step]], None], threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise InvalidArgument(f"threads must be at least 1, not {threads}")
        wanted = min(threads or default_threads(), MAX_THREADS, len(self._batches))
        queue = deque(self._batches)
        if wanted < 2 or self.nbytes < INLINE:
            _drain(queue, work)
            return
        others = _submit(wanted - 1, queue, work)
        try:
            _drain(queue, work)
        finally:
            queue.clear()
            for other in others:
                other.cancel()
        for other in others:
            if not other.cancelled():
                other.result()


def default_threads() -> int:
    """The CPUs that this process may use, at most 8: more do not make one socket's memory faster."""
    return min(len(os.sched_getaffinity(0)), 8)


def shut_down_threads() -> None:
    """End the shared threads once they are idle; the next large copy starts them again."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.shutdown()


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _forget_threads() -> None:
    """In a forked child: its parent's threads do not exist here, and the lock may have been held."""
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


def _submit(count: int, queue: deque[list[Step]], work: Callable[[list[Step]], None]) -> list[Future[None]]:
    global _pool
    others: list[Future[None]] = []
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="awexd-copy")
        try:
            others += [_pool.submit(_drain, queue, work) for _ in range(count)]
        except RuntimeError:  # the interpreter is ending: no new threads, so the caller does all
            return others
    return others


def _drain(queue: deque[list[Step]], work: Callable[[list[Step]], None]) -> None:
    while True:
        try:
            batch = queue.popleft()
        except IndexError:
            return
        work(batch)


def _run_batch(batch: list[Step]) -> None:
    for copy, destination, source in batch:
        copy(destination, source)


def _compare_batch(found: list[bool], batch: list[Step]) -> None:
    if found:
        return
    for step in batch:
        if not _same(*step):
            found.append(True)
            return


def _same(copy: Callable[[Any, Any], Any], destination: Any, source: Any) -> bool:
    if copy is _cast:
        return _same_cast(destination, source)
    if copy is not np.copyto:
        destination, source = destination.numpy(), source.numpy()
    if destination.dtype.kind == "c":
        destination, source = destination.view(np.int64), source.view(np.int64)
    return np.array_equal(destination, source)


def _plain_tensors() -> AbstractContextManager[object]:
    """vLLM's workers run in inference mode; tensors made there could not be written by the other threads."""
    torch = sys.modules.get("torch")
    return torch.inference_mode(False) if torch else nullcontext()


def _check(row: Row) -> None:
    destination, source = row.destination, row.source
    name = row.label or "a row"
    if destination.shape != source.shape:
        raise InvalidArgument(
            f"{name}: shape {list(source.shape)} cannot go to shape {list(destination.shape)}; nothing is broadcast"
        )
    if destination.dtype != source.dtype and not row.cast:
        raise InvalidArgument(f"{name}: {source.dtype} cannot go to {destination.dtype}: no cast was asked for")
    repeats = any(n > 1 and not step for n, step in zip(destination.shape, destination.strides, strict=True))
    if destination.numel and repeats:
        raise InvalidArgument(f"{name}: several elements of the destination share memory (a stride of zero)")


def _steps(rows: Iterable[Row]) -> Iterator[tuple[int, Step]]:
    """Bytes and step of every tile, in order."""
    waiting: tuple[int, int, int] | None = None  # destination, source and bytes of a flat copy that may still grow
    for row in rows:
        if row.cast and row.destination.dtype != row.source.dtype:
            yield from _cast_steps(row)
            continue
        destination, source = row.destination.address, row.source.address
        loops = _loops(row, [(row.destination.itemsize, 1, 1)])
        if len(loops) > 1:
            yield from _copy_steps(destination, source, loops)
            continue
        nbytes = loops[0][0]
        if waiting and (destination, source) == (waiting[0] + waiting[2], waiting[1] + waiting[2]):
            waiting = (waiting[0], waiting[1], waiting[2] + nbytes)
            continue
        if waiting:
            yield from _copy_steps(waiting[0], waiting[1], [(waiting[2], 1, 1)])
        waiting = (destination, source, nbytes)
    if waiting:
        yield from _copy_steps(waiting[0], waiting[1], [(waiting[2], 1, 1)])


def _loops(row: Row, element: Loops) -> Loops:
    """The row's fewest loops, in the destination's order of addresses; ``element`` are those inside one element."""
    shape, destination, source = row.destination.shape, row.destination.strides, row.source.strides
    loops = [loop for loop in zip(shape, destination, source, strict=True) if loop[0] > 1]
    loops.sort(key=lambda loop: (-abs(loop[1]), -abs(loop[2])))
    merged = element
    for n, d, s in reversed(loops):
        if merged and (d, s) == (merged[0][0] * merged[0][1], merged[0][0] * merged[0][2]):
            merged[0] = (n * merged[0][0], *merged[0][1:])
        else:
            merged.insert(0, (n, d, s))
    return merged


def _copy_steps(destination: int, source: int, loops: Loops) -> Iterator[tuple[int, Step]]:
    run = loops[-1][0]
    if len(loops) == 1:
        unit = math.gcd(8, destination, source, run)
        for at in range(0, run, TILE):
            size = min(TILE, run - at)
            shape, strides = (size // unit,), (unit,)
            to, of = array_at(destination + at, unit, shape, strides), array_at(source + at, unit, shape, strides)
            yield size, (np.copyto, to, of)
    elif run >= LONG_RUN:
        extent, d, s = loops[0]
        for at in range(extent):
            yield from _copy_steps(destination + at * d, source + at * s, loops[1:])
    else:
        yield from _strided_steps(destination, source, loops)


def _strided_steps(destination: int, source: int, loops: Loops) -> Iterator[tuple[int, Step]]:
    import torch

    run = loops[-1][0]
    widest = 16 if run > 16 else 8  # items of 16 bytes only where a run has several: others cannot be seen as integers
    unit = math.gcd(widest, destination, source, run, *(abs(step) for loop in loops[:-1] for step in loop[1:]))
    loops = [*loops[:-1], (run // unit, unit, unit)] if run > unit else loops[:-1]
    for d, s, tile in _tiles(destination, source, loops, GRAIN):
        shape = tuple(n for n, _, _ in tile)
        to = array_at(d, unit, shape, tuple(step for _, step, _ in tile))
        of = array_at(s, unit, shape, tuple(step for _, _, step in tile))
        size = math.prod(shape) * unit
        if size < TINY or any(step < 0 for _, *steps in tile for step in steps):
            yield size, (np.copyto, to, of)
        else:
            yield size, (torch.Tensor.copy_, torch.from_numpy(to), torch.from_numpy(of))


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


def _cast_steps(row: Row) -> Iterator[tuple[int, Step]]:
    size = row.destination.itemsize
    loops = _loops(row, []) or [(1, size, row.source.itemsize)]
    for d, s, tile in _tiles(row.destination.address, row.source.address, loops, TILE // size):
        shape = tuple(n for n, _, _ in tile)
        to = View(d, shape, tuple(step for _, step, _ in tile), row.destination.dtype, row.destination.owner)
        of = View(s, shape, tuple(step for _, _, step in tile), row.source.dtype, row.source.owner)
        yield math.prod(shape) * size, (_cast, to.tensor(), of.tensor())


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


def _first_index(row: Row) -> tuple[int, ...] | None:
    destination, source = row.destination, row.source
    if row.cast and source.dtype != destination.dtype:
        into = destination.tensor()
        expected = source.tensor().to(into.dtype)
        differs = (destination.bytes_array() != View.of(expected).bytes_array()).any(axis=-1)
        differs &= ~(_is_nan(into) & _is_nan(expected))
    else:
        differs = (destination.bytes_array() != source.bytes_array()).any(axis=-1)
    if not differs.any():
        return None
    return tuple(int(at) for at in np.unravel_index(int(differs.argmax()), differs.shape))


def _is_nan(tensor: torch.Tensor) -> Any:
    import torch

    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide).isnan().numpy()


def _batches(steps: Iterable[tuple[int, Step]]) -> Sequence[list[Step]]:
    batches: list[list[Step]] = []
    room = 0
    for nbytes, step in steps:
        if not batches or room < nbytes or len(batches[-1]) == BATCH_ROWS:
            batches.append([])
            room = BATCH
        batches[-1].append(step)
        room -= nbytes
    return batches
