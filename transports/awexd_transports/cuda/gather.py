"""One Triton kernel launch for any number of strided copies that a device makes itself.

Its sources are the device's own memory, a peer device's, or host memory registered with CUDA, which it reads over the
link at nearly the rate of DMA whatever the strides, where one copy a row or a tensor costs microseconds each. Host
memory is never written so: stores over the link are ten times slower (measured on one H200: 4 GB/s).

A copy is cut into tiles, each one row of a table: of TILE bytes 16 GB are 500,000, 12 MB.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from awexd_transports.tiles import Loops, loops_of
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

TILE, COARSE = 32 << 10, 256 << 10
"""Bytes of a program's share; of what the link to the host limits: an eighth of the table."""
BLOCK, WHOLE_BLOCK = 2048, 4096
"""Items that a program moves at once: of boxes; of runs, whose tiles are then one block (1 to 2 % faster)."""
NARROW = 128
"""Columns of a tile where the source's are apart: what one read of memory brings serves neighbouring rows too."""
FIELDS = 3
"""Of a tile: addresses of destination and source; items, or (shape << 40) + (rows << 20) + columns."""
FLOATS = {"float32", "bfloat16", "float16"}

Numbers = npt.NDArray[np.int64]
Steps = tuple[int, int, int, int, int]
"""Between rows of destination and source, between columns of both, in items; the bits that number a row's columns."""
FLAT: Steps = (0, 0, 1, 1, 0)


class Tiles(NamedTuple):
    """A part of one copy.

    Attributes:
        of, to: floats that are cast; or both the bytes of an item.
        steps: FLAT where each tile is one row without gaps.
        places: int64 [tiles, 2], addresses of destination and source.
        extents: int64 [tiles, 2], rows and columns.
    """

    of: str
    to: str
    steps: Steps
    places: Numbers
    extents: Numbers


@cache
def available() -> bool:
    """Whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def castable(destination: View, source: View) -> bool:
    """Whether the kernel copies between these dtypes: the same, or two that it casts as torch does."""
    if destination.dtype == source.dtype:
        return True
    sides = (destination, source)
    whole = all(not place % view.itemsize for view in sides for place in (view.address, *view.strides))
    return whole and all(view.dtype in FLOATS for view in sides)


def tiles_of(destination: View, source: View, size: int = TILE) -> Iterator[Tiles]:
    """The tiles of at most so many bytes of one copy of equal shapes, of dtypes that are ``castable``."""
    if destination.dtype != source.dtype:
        sizes = destination.itemsize, source.itemsize
        loops = [(n, d // sizes[0], s // sizes[1]) for n, d, s in loops_of(destination, source, [])]
        yield _tiles((source.dtype, destination.dtype), sizes, loops, destination.address, source.address, size)
        return
    loops = loops_of(destination, source, [(destination.itemsize, 1, 1)])
    to, of, run = destination.address, source.address, loops[-1][0]
    if len(loops) > 1:
        item = math.gcd(8, to, of, run, *(abs(step) for loop in loops[:-1] for step in loop[1:]))
        outer = [(n, d // item, s // item) for n, d, s in loops[:-1]]
        inner = [(run // item, 1, 1)] if run > item else []
        yield _tiles((str(item),) * 2, (item, item), [*outer, *inner], to, of, size)
        return
    done, item = 0, math.gcd(8, to, of)
    while done < run:  # what is left after the widest items is moved by narrower ones
        part = (run - done) // item * item
        if part:
            yield _tiles((str(item),) * 2, (item, item), [(part // item, 1, 1)], to + done, of + done, size)
            done += part
        item //= 2


def _tiles(kinds: tuple[str, str], sizes: tuple[int, int], loops: Loops, to: int, of: int, size: int) -> Tiles:
    """Loops in items."""
    offsets, extents, steps = _cut(tuple(loops), size // max(sizes))
    return Tiles(*kinds, steps, offsets * sizes + (to, of), extents)


@lru_cache(maxsize=4096)
def _cut(loops: tuple[tuple[int, int, int], ...], room: int) -> tuple[Numbers, Numbers, Steps]:
    """Where tiles of at most ``room`` items begin, their rows and columns, and the steps. The same for many tensors."""
    *outer, row, column = [(1, 0, 0)] * (2 - min(2, len(loops))) + list(loops)
    width = min(column[0], room if column[2] in (0, 1) else max(NARROW, room // row[0]))
    height = max(1, min(row[0], room // width))
    offsets = np.zeros((1, 2), np.int64)
    for n, d, s in outer:
        offsets = (offsets[:, None] + np.outer(np.arange(n), (d, s))).reshape(-1, 2)
    first, left = (axis.reshape(-1) for axis in np.mgrid[0 : row[0] : height, 0 : column[0] : width])
    moved = np.stack([first * row[side] + left * column[side] for side in (1, 2)], axis=1)
    places = (offsets[:, None] + moved).reshape(-1, 2)
    each = np.stack([np.minimum(height, row[0] - first), np.minimum(width, column[0] - left)], axis=1)
    extents = np.tile(each, (len(offsets), 1))
    if height == 1 and column[1:] == (1, 1):
        return places, extents, FLAT
    return places, extents, (*row[1:], *column[1:], (width - 1).bit_length())


class _Table(NamedTuple):
    """Tiles of one kind, group after group.

    Attributes:
        bounds: of each group; one more than there are groups.
        shapes: int64 [shapes, 5]; None: all are FLAT.
    """

    of: str
    to: str
    tiles: torch.Tensor
    bounds: Sequence[int]
    shapes: torch.Tensor | None


class Gather:
    """Prepared copies into one device's memory, in groups that are launched each on its own.

    Args:
        groups: destination, which is in that device's memory, and source.
        device: as torch names it.
        tile: bytes of a program's share, at most.
    """

    def __init__(self, groups: Iterable[Iterable[tuple[View, View]]], device: str, tile: int = TILE) -> None:
        import torch

        shapes: dict[Steps, int] = {}
        found: dict[tuple[str, str, bool], list[list[Numbers]]] = defaultdict(list)
        count = 0
        for pairs in groups:
            count += 1
            for part in (part for destination, source in pairs for part in tiles_of(destination, source, tile)):
                flat = part.steps == FLAT
                parts = found[part.of, part.to, flat]
                parts += ([] for _ in range(count - len(parts)))
                rows, columns = part.extents.T
                shape = 0 if flat else shapes.setdefault(part.steps, len(shapes))
                packed = columns if flat else (shape << 40) + (rows << 20) + columns
                parts[-1].append(np.column_stack([part.places, packed]))
        with torch.inference_mode(False):
            steps = np.array(list(shapes), np.int64).reshape(-1, len(FLAT))
            held = torch.from_numpy(steps).to(device)
            self._tables = []
            for (of, to, flat), parts in found.items():
                table = np.concatenate([tiles for group in parts for tiles in group])
                counts = [sum(map(len, group)) for group in parts] + [0] * (count - len(parts))
                bounds = np.cumsum([0, *counts]).tolist()
                tiles = torch.from_numpy(table).to(device)
                self._tables.append(_Table(of, to, tiles, bounds, None if flat else held))

    @property
    def nbytes(self) -> int:
        """Of the tables, in the device's memory."""
        return sum(table.tiles.nbytes + (0 if table.shapes is None else table.shapes.nbytes) for table in self._tables)

    def tiles(self, group: int) -> int:
        return sum(table.bounds[group + 1] - table.bounds[group] for table in self._tables)

    def launch(self, group: int = 0) -> None:
        """On the device's current stream. Nothing where there is no such group."""
        import torch

        from awexd_transports.cuda import kernel

        for table in self._tables:
            first, end = (table.bounds[min(at, len(table.bounds) - 1)] for at in (group, group + 1))
            if end > first:
                with torch.cuda.device_of(table.tiles):  # type: ignore[no-untyped-call]
                    block = WHOLE_BLOCK if table.shapes is None else BLOCK
                    kernel.launch(table.tiles, table.shapes, first, end - first, table.of, table.to, block)
