"""The kernel of ``gather``. Imports Triton: imported where a device copies only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

_KINDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def launch(table: torch.Tensor, item: int, block: int, *, flat: bool) -> None:
    """One program a tile.

    Args:
        table: tiles, int64 [tiles, FIELDS], on the device.
        item: bytes.
        flat: every tile is one row without gaps on either side.
    """
    _move[(len(table),)](table, _KINDS[item], flat, block, num_warps=4)


def _move_tile(table, KIND: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = table + tl.program_id(0).to(tl.int64) * 8
    to = tl.load(tile).to(tl.pointer_type(KIND))
    of = tl.load(tile + 1).to(tl.pointer_type(KIND))
    rows = tl.load(tile + 2).to(tl.int32)
    columns = tl.load(tile + 3).to(tl.int32)
    if FLAT:
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < columns
            tl.store(to + at, tl.load(of + at, mask=inside), mask=inside)
    else:
        to_row = tl.load(tile + 4)
        of_row = tl.load(tile + 5)
        to_column = tl.load(tile + 6)
        of_column = tl.load(tile + 7)
        for start in range(0, rows * columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < rows * columns
            row = (at // columns).to(tl.int64)
            column = (at % columns).to(tl.int64)
            held = tl.load(of + row * of_row + column * of_column, mask=inside)
            tl.store(to + row * to_row + column * to_column, held, mask=inside)


_move = triton.jit(_move_tile)
