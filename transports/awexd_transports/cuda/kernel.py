"""The kernels of ``gather``. Imports Triton: imported where a device copies only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

OPTIONS = {"enable_fp_fusion": False}
"""Triton warns where it is not told whether to fuse; nothing here could be."""
RUN_WARPS, BOX_WARPS = 2, 4
INTS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def launch(
    table: torch.Tensor, shapes: torch.Tensor | None, first: int, count: int, of: str, to: str, block: int
) -> None:
    """One program a tile, on the current stream of the device that is current.

    Args:
        table: int64 [tiles, 3], on the device: see ``gather``.
        shapes: int64 [shapes, 5], of tiles that have gaps or several rows; None: every tile is one row without gaps.
        first, count: the tiles that are moved.
        of, to: floats that are cast; or both the bytes of an item, which is moved as it is.
    """
    item_of, item_to = (INTS[SIZES.get(kind) or int(kind)] for kind in (of, to))
    if shapes is None:
        _move_runs[(count,)](table, first, item_of, item_to, of, to, block, num_warps=RUN_WARPS, **OPTIONS)
    else:
        _move_boxes[(count,)](table, shapes, first, item_of, item_to, of, to, block, num_warps=BOX_WARPS, **OPTIONS)


@triton.jit  # type: ignore[untyped-decorator]
def cast(bits, OF: tl.constexpr, TO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of floats as those of another kind of float: nearest, ties to even; NaN as CUDA's own casts make it.

    To and from bfloat16 by hand: not every GPU casts those, and Triton's interpreter rounds otherwise.
    """
    if OF == "float32":
        wide = bits.to(tl.uint32, bitcast=True)
    elif OF == "float16":
        wide = bits.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    else:
        wide = bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    if TO == "float32":
        made = wide.to(tl.int32, bitcast=True)
    elif TO == "float16":
        made = wide.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    else:
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        nan = (wide & 0x7FFFFFFF) > 0x7F800000
        made = tl.where(nan, 0x7FFF, rounded).to(tl.uint16).to(tl.int16, bitcast=True)
    return made


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _move_runs(  # type: ignore[no-untyped-def]
    table, first, ITEM_OF: tl.constexpr, ITEM_TO: tl.constexpr, OF: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr
):
    tile = table + (first + tl.program_id(0)).to(tl.int64) * 3
    to = tl.load(tile).to(tl.pointer_type(ITEM_TO))
    of = tl.load(tile + 1).to(tl.pointer_type(ITEM_OF))
    items = tl.load(tile + 2).to(tl.int32)
    if items == BLOCK:
        held = tl.load(of + tl.arange(0, BLOCK))
        if OF != TO:
            held = cast(held, OF, TO)
        tl.store(to + tl.arange(0, BLOCK), held)
    else:
        for start in range(0, items, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < items
            held = tl.load(of + at, mask=inside)
            if OF != TO:
                held = cast(held, OF, TO)
            tl.store(to + at, held, mask=inside)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _move_boxes(  # type: ignore[no-untyped-def]
    table,
    shapes,
    first,
    ITEM_OF: tl.constexpr,
    ITEM_TO: tl.constexpr,
    OF: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = table + (first + tl.program_id(0)).to(tl.int64) * 3
    to = tl.load(tile).to(tl.pointer_type(ITEM_TO))
    of = tl.load(tile + 1).to(tl.pointer_type(ITEM_OF))
    packed = tl.load(tile + 2)
    columns = (packed & 0xFFFFF).to(tl.int32)
    rows = ((packed >> 20) & 0xFFFFF).to(tl.int32)
    shape = shapes + (packed >> 40) * 5
    to_row = tl.load(shape)
    of_row = tl.load(shape + 1)
    to_column = tl.load(shape + 2)
    of_column = tl.load(shape + 3)
    shift = tl.load(shape + 4).to(tl.int32)  # rows are counted as if they were a power of two long: no division
    for start in range(0, rows << shift, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = at >> shift
        column = at - (row << shift)
        inside = (row < rows) & (column < columns)
        held = tl.load(of + row.to(tl.int64) * of_row + column.to(tl.int64) * of_column, mask=inside)
        if OF != TO:
            held = cast(held, OF, TO)
        tl.store(to + row.to(tl.int64) * to_row + column.to(tl.int64) * to_column, held, mask=inside)
