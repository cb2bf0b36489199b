"""Checksums of what lies in devices' memory, taken there: one kernel launch for the cells of any number of views.

What is summed may be copied in the same pass. Cells are those of ``cells``, sums those of ``digest``. A cell's rows are
cut into tiles, each one row of a table that is made once; every program adds its tile's sum to its cell's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from awexd_transports.cells import Grid, Place, grid
from awexd_transports.cuda import gather
from awexd_transports.cuda.streams import stream
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

TILE = 256 << 10
"""Bytes of a program's share."""
BLOCKS = ((4, 64), (4, 16), (1, 256))
"""Rows and columns that a program sums at once: the first with which a tile's are filled best. With more rows at once
it took up to twice as long."""
FIELDS, MOVED = 8, 11
"""Of a tile: address; (rows << 32) + columns; steps between rows and between columns, in items; number of its first row
in the tensor, and by how much the next rows' are larger; place of its first column in the tensor's row, in items; its
cell's place among the sums. Of one that is copied also: where to, and the steps between rows and columns there."""
_CELL = 7

Numbers = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]


class Summed(NamedTuple):
    """A box of a tensor in a device's memory (in Triton's interpreter: in host memory).

    Attributes:
        tensor: its global shape.
        offset: where the piece begins in the tensor. The piece is what is cut into cells.
        shape: of the piece; None: the view is all of it.
        low: where the view begins in the piece.
        dtype: what is summed is the view cast to that one; None: as it is.
        into: of the view's shape, and of what is summed: where that goes, too. Its device does it all; it can read
            the view's.
    """

    view: View
    tensor: Place
    offset: Place
    shape: Place | None = None
    low: Place = ()
    dtype: str | None = None
    into: View | None = None

    @property
    def device(self) -> int | None:
        """Which one sums."""
        return self.view.device if self.into is None else self.into.device


def takes(item: Summed) -> bool:
    """Whether a device sums this."""
    sides = [item.view] if item.into is None else [item.view, item.into]
    if item.dtype not in (None, item.view.dtype):
        return {item.dtype, item.view.dtype} <= gather.FLOATS and all(map(_whole, sides))
    return all(map(_contiguous, sides)) or (item.view.itemsize <= 8 and all(map(_whole, sides)))


class DeviceSums:
    """Prepared sums of all cells of which some views hold elements; only what the views hold is summed.

    Args:
        items: on one device or several. Whoever holds this keeps their memory alive.
        groups: each item's; groups are launched each on their own. None: all are one.

    Attributes:
        first: each item's first place among the sums, and how many sums there are. A view's cells are row-major.

    Raises:
        InvalidArgument: an item that no device sums: see ``takes``.
    """

    def __init__(self, items: Iterable[Summed], groups: Sequence[int] | None = None) -> None:
        import torch

        self.items = list(items)
        self.first = [0]
        found: dict[tuple[int | None, int, str, str, tuple[int, int], int], list[Numbers]] = defaultdict(list)
        for item, group in zip(self.items, groups or [0] * len(self.items), strict=True):
            if not takes(item):
                raise InvalidArgument(f"{item.view}: elements that no device sums; sum them in host memory")
            of, to, tiles, cells = _tiles(item)
            tiles[:, _CELL] += self.first[-1]
            self.first.append(self.first[-1] + cells)
            for block, part in _by_block(tiles):
                found[item.device, group, of, to, block, tiles.shape[1]].append(part)
        self._tables: dict[int, list[_Table]] = defaultdict(list)
        self._sums: dict[int | None, torch.Tensor] = {}
        self._streams: dict[int | None, Any] = {}
        with torch.inference_mode(False):
            for (device, group, of, to, block, _), parts in found.items():
                where = "cpu" if device is None else f"cuda:{device}"
                table = torch.from_numpy(np.concatenate(parts)).to(where)
                self._tables[group].append(_Table(device, table, of, to, block))
                if device not in self._sums:
                    self._sums[device] = torch.zeros(self.first[-1], dtype=torch.int64, device=where)
                    self._streams[device] = None if device is None else stream(device, -1)

    @property
    def nbytes(self) -> int:
        """Of tables and sums, in devices' memory."""
        tables = sum(table.tiles.nbytes for parts in self._tables.values() for table in parts)
        return tables + sum(sums.nbytes for sums in self._sums.values())

    def run(self) -> Digests:
        """All groups, once everything that has been begun on the devices is done.

        Returns:
            One digest a cell (``digest``; nothing is added), in order of items.
        """
        self._synchronize()
        self.clear()
        for group in self._tables:
            self.launch(group)
        return self.result()

    def clear(self) -> None:
        """Begins a run. What was launched before must be done."""
        for device, sums in self._sums.items():
            with self._stream(device):
                sums.zero_()

    def launch(self, group: int, after: Sequence[Any] = ()) -> None:
        """Begins the sums of a group, each device on a stream of its own.

        Args:
            after: events that are waited for.
        """
        from awexd_transports.cuda import sum_kernel

        for table in self._tables.get(group, ()):
            with self._stream(table.device):
                for event in after:
                    event.wait()
                sum_kernel.launch(table.tiles, self._sums[table.device], table.of, table.to, table.block)

    def result(self) -> Digests:
        """As ``run`` gives; waits for what was launched."""
        self._synchronize()
        total = np.zeros(self.first[-1], np.uint64)
        for sums in self._sums.values():
            total += sums.cpu().numpy().view(np.uint64)
        return total

    def _stream(self, device: int | None) -> AbstractContextManager[Any]:
        import torch

        made: AbstractContextManager[Any] = torch.cuda.stream(self._streams[device])
        return made

    def _synchronize(self) -> None:
        import torch

        for device in self._sums:
            if device is not None:
                torch.cuda.synchronize(device)


class _Table(NamedTuple):
    """Tiles of one kind, on one device."""

    device: int | None
    tiles: torch.Tensor
    of: str
    to: str
    block: tuple[int, int]


def _by_block(tiles: Numbers) -> Iterable[tuple[tuple[int, int], Numbers]]:
    rows, columns = tiles[:, 1] >> 32, tiles[:, 1] & 0xFFFFFFFF
    steps = [-(-rows // high) * -(-columns // wide) * (high * wide) for high, wide in BLOCKS]
    best = np.argmin(np.array(steps).reshape(len(BLOCKS), -1), axis=0)
    for number, block in enumerate(BLOCKS):
        part = tiles[best == number]
        if len(part):
            yield block, part


class Cells(NamedTuple):
    """Those of which a view holds something.

    Attributes:
        numbers: int64, among the piece's.
        whole: bool, whether the view holds all of it.
    """

    numbers: Numbers
    whole: npt.NDArray[np.bool_]


def touched(item: Summed) -> Cells:
    """An item's cells, in order of the sums. Remembered, as many tensors have the same."""
    return _touched(item.shape, item.low, item.view.shape, item.dtype or item.view.dtype)


@lru_cache(maxsize=4096)
def _touched(shape: Place | None, low: Place, extent: Place, dtype: str) -> Cells:
    found = list(cells_of(Summed(View.packed(0, extent, dtype, None), (), (), shape, low)))
    numbers = np.array([number for number, *_ in found], np.int64)
    return Cells(numbers, np.array([(begin, end) == (a, b) for _, begin, end, a, b in found], bool))


def cells_of(item: Summed) -> Iterable[tuple[int, Place, Place, Place, Place]]:
    """Each cell of which the view holds something, in order of the sums.

    Yields:
        Its number among the piece's; from where to where it is, and what of it is in the view; in the piece's
        coordinates.
    """
    cut, low, high = cut_of(item)
    ranges = [range(a // step, -(-b // step)) for a, b, step in zip(low, high, cut.steps, strict=True)]
    for at in product(*ranges):
        number = 0
        for index, count in zip(at, cut.counts, strict=True):
            number = number * count + index
        begin = tuple(index * step for index, step in zip(at, cut.steps, strict=True))
        end = tuple(min(n, a + step) for n, a, step in zip(cut.shape, begin, cut.steps, strict=True))
        yield number, begin, end, tuple(map(max, begin, low)), tuple(map(min, end, high))


def cut_of(item: Summed) -> tuple[Grid, Place, Place]:
    """The piece's cells, and from where to where the view is in it."""
    cut = grid(item.shape or item.view.shape, ITEMSIZE[item.dtype or item.view.dtype])
    low = item.low or (0,) * len(cut.shape)
    return cut, low, tuple(a + n for a, n in zip(low, item.view.shape or (1,), strict=True))


def _whole(view: View) -> bool:
    return not any(place % view.itemsize for place in (view.address, *view.strides))


def _contiguous(view: View) -> bool:
    return not view.shape or view.shape[-1] == 1 or view.strides[-1] == view.itemsize


def _tiles(item: Summed) -> tuple[str, str, Numbers, int]:
    """What is read and summed, as the kernel's kinds; the tiles, cells counted from 0; and how many cells there are."""
    view, into = item.view, item.into
    sides = [view] if into is None else [view, into]
    if not view.numel:
        return "8", "8", np.empty((0, FIELDS if into is None else MOVED), np.int64), 0
    cut, low, _ = cut_of(item)
    of = to = ""
    size, unit = ITEMSIZE[item.dtype or view.dtype], 0
    if item.dtype not in (None, view.dtype):
        of, to = view.dtype, str(item.dtype)
        unit = size
    elif all(map(_contiguous, sides)):
        offset = item.offset[-1] if item.offset else 0
        row = (offset, low[-1], (view.shape or (1,))[-1], cut.steps[-1] if cut.counts[-1] > 1 else 0)
        unit = math.gcd(8, *(n * size for n in row))
        for side in sides:
            steps = [step for n, step in zip(side.shape[:-1], side.strides[:-1], strict=True) if n > 1]
            unit = math.gcd(unit, side.address, *steps)
    else:
        unit = size
    places = (item.shape or view.shape, low, item.tensor or (1,), item.offset or (0,), view.shape or (1,))
    strides = [side.strides or (side.itemsize,) for side in sides]
    tiles, cells = _template(places, strides[0], size, unit, view.itemsize if of else unit, *strides[1:])
    tiles = tiles.copy()
    tiles[:, 0] += view.address
    if into is not None:
        tiles[:, FIELDS] += into.address
    return of or str(unit), to or str(unit), tiles, cells


@lru_cache(maxsize=4096)
def _template(
    places: tuple[Place, Place, Place, Place, Place],
    strides: Place,
    size: int,
    unit: int,
    held: int,
    into: Place | None = None,
) -> tuple[Numbers, int]:
    """Tiles of a view at address 0: the same for many tensors.

    Args:
        places: shape of the piece, where the view begins in it; shape of the tensor, where the piece begins in it;
            shape of the view.
        size: bytes of an element, as it is summed; ``unit``: of an item, which several elements, or one, or a part of
            one may be; ``held``: of an item where it lies.
        into: strides of where it is copied, at address 0 too.
    """
    shape, low, tensor, offset, extent = places
    last = len(extent) - 1
    moved = into is not None
    into = into or (0,) * len(extent)
    steps = (strides[last] // held, into[last] // unit) if unit == size else (1, 1)
    numbers, number = [0] * last, 1
    for d in reversed(range(last)):
        numbers[d], number = number, number * tensor[d]
    first = sum((o + a) * n for o, a, n in zip(offset[:last], low[:last], numbers, strict=True))
    item = Summed(View(0, extent, strides, _NAMES[size]), tensor, offset, shape, low)
    found: list[Numbers] = []
    cells = 0
    for _, _, _, begin, end in cells_of(item):
        at = [a - b for a, b in zip(begin, low, strict=True)]
        extents = (b - a for a, b in zip(begin[:last], end[:last], strict=True))
        loops = [(n, by) for n, *by in zip(extents, strides[:last], numbers, into[:last], strict=True)]
        row = first + sum(a * n for a, n in zip(at[:last], numbers, strict=True))
        address, to = (sum(a * step for a, step in zip(at, side, strict=True)) for side in (strides, into))
        column = (offset[last] + begin[last]) * size // unit
        columns = (end[last] - begin[last]) * size // unit
        found.append(_cell(loops, (address, row, to), column, columns, (held, unit), steps, cells))
        cells += 1
    return np.concatenate(found)[:, : MOVED if moved else FIELDS], cells


_NAMES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64", 16: "complex128"}


def _cell(
    loops: Sequence[tuple[int, Sequence[int]]],
    start: tuple[int, int, int],
    column: int,
    columns: int,
    sizes: tuple[int, int],
    steps: tuple[int, int],
    cell: int,
) -> Numbers:
    """The tiles of one cell.

    Args:
        loops: its rows': extent; steps of the address in bytes, of the row's number, and of where it is copied to.
        start: the same three of its first row.
        sizes: bytes of an item where it lies, and where it is copied to; ``steps``: between columns, in items.
    """
    merged: list[tuple[int, list[int]]] = []
    for n, by in reversed(loops):
        if n == 1:
            continue
        if merged and list(by) == [merged[0][0] * inner for inner in merged[0][1]]:
            merged[0] = (n * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (n, list(by)))
    *outer, (rows, (stride, number, into)) = merged or [(1, [0, 0, 0])]
    starts = np.array([start], np.int64)
    for n, by in outer:
        starts = (starts[:, None] + np.outer(np.arange(n), by)).reshape(-1, 3)
    width = min(columns, max(1, TILE // sizes[0]))
    height = max(1, min(rows, TILE // sizes[0] // width))
    top, left = (axis.reshape(-1) for axis in np.mgrid[0:rows:height, 0:columns:width])
    tiles = np.empty((len(starts), len(top), MOVED), np.int64)
    tiles[..., 0] = starts[:, :1] + top * stride + left * (steps[0] * sizes[0])
    tiles[..., 1] = (np.minimum(height, rows - top) << 32) + np.minimum(width, columns - left)
    tiles[..., 2:4] = stride // sizes[0], steps[0]
    tiles[..., 4] = starts[:, 1:2] + top * number
    tiles[..., 5] = number
    tiles[..., 6] = column + left
    tiles[..., _CELL] = cell
    tiles[..., FIELDS] = starts[:, 2:] + top * into + left * (steps[1] * sizes[1])
    tiles[..., FIELDS + 1 :] = into // sizes[1], steps[1]
    return tiles.reshape(-1, MOVED)
