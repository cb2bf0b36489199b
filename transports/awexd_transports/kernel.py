"""Copies and their checksums by ``native/copy.c``: rows become jobs, which its threads cut into tiles without the GIL.

What it does not take (casts, elements apart from each other on either side, more than DIMS dimensions) goes by
``tiles``, as everything does where the library is missing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from awexd_transports.cells import grid
from awexd_transports.digest import ROWS, SPANS, kept_words, mixes
from awexd_transports.native import load
from awexd_transports.segment import CHECKSUM_OFFSET
from awexd_transports.tiles import Loops, loops_of
from awexd_transports.view import View

DIMS = 8
TILE = 1 << 20
"""Bytes that a thread copies at once."""
STREAM = 4 << 20
"""Tables of so many bytes are written past the caches, which saves reading the destination first."""
SHORT_RUN = 64
"""Bytes: copies of shorter runs go by torch, which is the faster at transposed sides."""

_COPY, _STORE, _COMPARE = range(3)
_FIELDS = ("destination", "source", "piece", "table")
_NUMBERS = ("mode", "ndim", "itemsize", "together", "row", "column", "tiles", "first", "wrong")
_ARRAYS = ("low", "high", "shape", "step", "into", "from", "rows")
JOB = np.dtype(
    [
        *((name, np.uint64) for name in _FIELDS),
        *((name, np.int64) for name in _NUMBERS),
        *((name, np.int64, (DIMS,)) for name in _ARRAYS),
    ]
)
"""``struct job`` of ``native/copy.c``."""

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """That a row's checksums are taken: stored, or compared with those that are stored.

    Attributes:
        tensor: global shape.
        origin: where in the tensor the piece begins.
        shape: of the piece.
        low: where in the piece the row begins.
        table: address of the stored checksum of the piece's first cell.
        piece: compared: where all of the piece lies, packed. None: stored; the row is a whole piece.
    """

    tensor: Place
    origin: Place
    shape: Place
    low: Place
    table: int
    piece: View | None = None


def takes(destination: View, source: View) -> bool:
    """Whether the library copies this; both sides are of one dtype."""
    if load() is None:
        return False
    loops = _loops(destination, source)
    return len(loops) <= DIMS and loops[-1][0] >= SHORT_RUN and loops[-1][1:] == (1, 1)


def takes_summed(destination: View, source: View) -> bool:
    """Whether the library copies this and takes its checksums."""
    if load() is None or destination.dtype != source.dtype or len(destination.shape) > DIMS:
        return False
    apart = destination.shape and destination.shape[-1] > 1
    return not apart or destination.strides[-1] == source.strides[-1] == destination.itemsize


class _Run(ctypes.Structure):
    """``struct run`` of ``native/copy.c``."""

    _fields_ = (("next", ctypes.c_int64), ("done", ctypes.c_int64), ("wrong", ctypes.c_int64))


class Jobs:
    """Prepared rows that the library takes, in their order. Whoever holds it keeps the memory alive."""

    def __init__(self, rows: Sequence[tuple[View, View, Sums | None]]) -> None:
        self._jobs = np.zeros(len(rows), JOB)
        for at, (destination, source, sums) in enumerate(rows):
            self._jobs[at] = _plain(destination, source) if sums is None else _summed(destination, source, sums)
        self._jobs["wrong"] = -1
        self._run = _Run()
        self._jobs["first"] = np.cumsum(self._jobs["tiles"]) - self._jobs["tiles"]
        self.tiles = int(self._jobs["tiles"].sum())
        nbytes = sum(destination.nbytes for destination, _, _ in rows)
        self._words = kept_words()
        first = int(mixes(SPANS, np.zeros(1, np.uint64)).view(np.uint64)[0])
        self._keys = np.array([self._words.ctypes.data, ROWS, SPANS, CHECKSUM_OFFSET, first], np.uint64)
        self._before = [ctypes.c_int64(number) for number in (self._jobs.ctypes.data, len(self._jobs))]
        self._after = [ctypes.c_int64(number) for number in (self._keys.ctypes.data, int(nbytes >= STREAM))]

    def start(self) -> Callable[[], None]:
        """Begins a run: what each thread that takes part calls. It returns when no tile is left to begin."""
        library = load()
        run = self._run = _Run()
        if library is None:
            return lambda: None

        def work() -> None:
            library.awexd_run(*self._before, ctypes.byref(run), *self._after)

        return work

    def wrong(self) -> tuple[int, int] | None:
        """After a run: a row with sums, and a tile of it, that does not add up to what is stored, or was left out."""
        if self._run.done == self.tiles and not self._run.wrong:
            return None
        found = np.flatnonzero(self._jobs["wrong"] >= 0)
        if not len(found):
            return next(((int(at), 0) for at in np.flatnonzero(self._jobs["mode"] == _COMPARE)), None)
        row, tile = int(found[0]), int(self._jobs["wrong"][found[0]])
        self._jobs["wrong"] = -1
        return row, tile


def _loops(destination: View, source: View) -> Loops:
    return loops_of(destination, source, [(destination.itemsize, 1, 1)])


def _plain(destination: View, source: View) -> tuple[object, ...]:
    """Merged loops, in bytes: a "piece" of one-byte elements."""
    loops = _loops(destination, source)
    shape = [n for n, _, _ in loops]
    steps, room = [], TILE
    for n in reversed(shape):
        steps.append(max(1, min(n, room)))
        room //= steps[-1]
    steps.reverse()
    into, out = [step for _, step, _ in loops], [step for _, _, step in loops]
    tiles = math.prod(-(-n // step) for n, step in zip(shape, steps, strict=True))
    lists = ([0] * len(shape), shape, shape, steps, into, out, [0] * len(shape))
    return (destination.address, source.address, 0, 0, _COPY, len(shape), 1, 0, 0, 0, tiles, 0, 0, *_filled(lists))


def _summed(destination: View, source: View, sums: Sums) -> tuple[object, ...]:
    size = destination.itemsize
    cells = grid(sums.shape, size)
    shape = cells.shape  # one dimension where the tensor has none
    extent, low = destination.shape or (1,), sums.low or (0,) * len(shape)
    into, out = destination.strides or (size,), source.strides or (size,)
    tensor, origin = sums.tensor or (1,), sums.origin or (0,)
    high = [a + n for a, n in zip(low, extent, strict=True)]
    rows, step = [0] * len(shape), 1
    for d in reversed(range(len(shape) - 1)):
        rows[d], step = step, step * tensor[d]
    row = sum(at * by for at, by in zip(origin, rows, strict=True))
    counts = [-(-b // step) - a // step for a, b, step in zip(low, high, cells.steps, strict=True)]
    tiles = math.prod(counts[:-1]) * (1 if cells.together else counts[-1])
    addresses = (destination.address, source.address, sums.piece.address if sums.piece else 0, sums.table)
    mode = _COMPARE if sums.piece else _STORE
    numbers = (mode, len(shape), size, int(cells.together), row, origin[-1] * size, tiles, 0, 0)
    return (*addresses, *numbers, *_filled((low, high, shape, cells.steps, into, out, rows)))


def _filled(lists: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    return [(*numbers, *(0,) * (DIMS - len(numbers))) for numbers in lists]
