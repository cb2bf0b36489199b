"""One Triton kernel launch for any number of strided copies that a device makes itself.

Its sources are the device's own memory, or host memory registered with CUDA, which it reads over the link at nearly the
rate of DMA whatever the strides, where one copy a row or a tensor costs microseconds each. Host memory is never written
so: stores over the link are ten times slower (measured on one H200: 4 GB/s).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt

from awexd_transports.tiles import loops_of
from awexd_transports.view import View

TILE = 32 << 10
"""Bytes of a program's share."""
BLOCK = 2048
"""Items that a program moves at once."""
FIELDS = 8
"""Of a tile, all in items: addresses of destination and source, rows, columns, and for each side the steps between
rows and between columns."""

Tiles = npt.NDArray[np.int64]


@cache
def available() -> bool:
    """Whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def tiles_of(destination: View, source: View) -> tuple[int, Tiles]:
    """Bytes of an item, and the tiles of one copy of equal shapes and dtypes."""
    loops = loops_of(destination, source, [(destination.itemsize, 1, 1)])
    run = loops[-1][0]
    steps = (abs(step) for loop in loops[:-1] for step in loop[1:])
    item = math.gcd(8, destination.address, source.address, run, *steps)
    counted = [(n, d // item, s // item) for n, d, s in loops[:-1]]
    if run > item or not counted:
        counted.append((run // item, 1, 1))
    *outer, row, column = [(1, 0, 0)] * (2 - min(2, len(counted))) + counted
    width = min(column[0], TILE // item)
    height = max(1, min(row[0], TILE // item // width))
    offsets = np.zeros((1, 2), np.int64)
    for n, d, s in outer:
        offsets = (offsets[:, None] + np.outer(np.arange(n), (d, s))).reshape(-1, 2)
    cuts = [
        (first, min(height, row[0] - first), left, min(width, column[0] - left))
        for first in range(0, row[0], height)
        for left in range(0, column[0], width)
    ]
    place = np.array(cuts, np.int64)
    moved = np.stack([place[:, 0] * row[side] + place[:, 2] * column[side] for side in (1, 2)], axis=1)
    starts = (offsets[:, None] + moved[None]).reshape(-1, 2) * item + (destination.address, source.address)
    tiles = np.empty((len(starts), FIELDS), np.int64)
    tiles[:, :2] = starts
    tiles[:, 2:4] = np.tile(place[:, [1, 3]], (len(offsets), 1))
    tiles[:, 4:] = (row[1], row[2], column[1], column[2])
    return item, tiles


class Gather:
    """Prepared copies into one device's memory.

    Args:
        pairs: destination, which is in that device's memory, and source.
    """

    def __init__(self, pairs: Iterable[tuple[View, View]], device: int) -> None:
        import torch

        found: dict[tuple[int, bool], list[Tiles]] = {}
        for destination, source in pairs:
            item, tiles = tiles_of(destination, source)
            flat = bool((tiles[:, 2] == 1).all() and (tiles[:, 6:] == 1).all())
            found.setdefault((item, flat), []).append(tiles)
        with torch.inference_mode(False):
            self._tables = [
                (item, flat, torch.from_numpy(np.concatenate(tiles)).to(f"cuda:{device}"))
                for (item, flat), tiles in found.items()
            ]
        self._device = device

    def launch(self) -> None:
        """On the device's current stream."""
        import torch

        from awexd_transports.cuda import kernel

        with torch.cuda.device(self._device):
            for item, flat, table in self._tables:
                kernel.launch(table, item, BLOCK, flat=flat)
