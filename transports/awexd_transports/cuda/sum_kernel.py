"""The kernel of ``sums``. Imports Triton: imported where a device sums only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from awexd_transports import digest
from awexd_transports.cuda.kernel import INTS, OPTIONS, SIZES, cast

if TYPE_CHECKING:
    import torch

_ROWS, _SPANS, _WORDS = (tl.constexpr(key) for key in (digest.ROWS, digest.SPANS, digest.WORDS))
WARPS = 1
"""Of a program. With four, which meet at every reduction, it took twice as long."""
_SPAN_BITS, _IN_SPAN = tl.constexpr(digest.SPAN.bit_length() - 1), tl.constexpr(digest.SPAN - 1)


def launch(table: torch.Tensor, found: torch.Tensor, of: str, to: str, block: tuple[int, int]) -> None:
    """One program a tile, on the current stream of the device that is current; adds to ``found``.

    Args:
        table: int64 [tiles, 8], on the device: see ``sums``. [tiles, 11]: what is summed is copied too.
        found: int64 [cells].
        of, to: floats that are cast first; or both the bytes of an item, which is summed as it is.
        block: rows and columns that a program sums at once.
    """
    tiles, fields = table.shape
    size = SIZES.get(to) or int(to)
    items = (INTS[SIZES.get(kind) or int(kind)] for kind in (of, to))
    _sum[(tiles,)](table, found, *items, of, to, size, fields, *block, num_warps=WARPS, **OPTIONS)


@triton.jit
def _mix(key, number):  # type: ignore[no-untyped-def]
    """``digest.mixes``; uint64."""
    z = number * 0x9E3779B97F4A7C15 + key
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    table,
    found,
    ITEM_OF: tl.constexpr,
    ITEM_TO: tl.constexpr,
    OF: tl.constexpr,
    TO: tl.constexpr,
    SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = table + tl.program_id(0).to(tl.int64) * FIELDS
    of = tl.load(tile).to(tl.pointer_type(ITEM_OF))
    extents = tl.load(tile + 1)
    rows = (extents >> 32).to(tl.int32)
    columns = (extents & 0xFFFFFFFF).to(tl.int32)
    of_row = tl.load(tile + 2)
    of_column = tl.load(tile + 3)
    number = tl.load(tile + 4).to(tl.uint64)
    number_step = tl.load(tile + 5).to(tl.uint64)
    place = tl.load(tile + 6).to(tl.uint64)
    if FIELDS > 8:
        to = tl.load(tile + 8).to(tl.pointer_type(ITEM_TO))
        to_row = tl.load(tile + 9)
        to_column = tl.load(tile + 10)
    total = tl.zeros([WIDE], tl.uint64)
    for left in range(0, columns, WIDE):
        column = left + tl.arange(0, WIDE)
        # A column's words have one weight: their rows' weights are all that each of them is multiplied with.
        each = tl.zeros([HIGH, WIDE], tl.uint64)
        for top in range(0, rows, HIGH):
            row = top + tl.arange(0, HIGH)
            at = row.to(tl.int64)[:, None] * of_row + column.to(tl.int64)[None, :] * of_column
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            held = tl.load(of + at, mask=inside, other=0)
            if OF != TO:
                held = cast(held, OF, TO)
            if FIELDS > 8:
                into = row.to(tl.int64)[:, None] * to_row + column.to(tl.int64)[None, :] * to_column
                tl.store(to + into, held, mask=inside)
            if SIZE == 1:
                bits = held.to(tl.uint8, bitcast=True).to(tl.uint64)
            elif SIZE == 2:
                bits = held.to(tl.uint16, bitcast=True).to(tl.uint64)
            elif SIZE == 4:
                bits = held.to(tl.uint32, bitcast=True).to(tl.uint64)
            else:
                bits = held.to(tl.uint64, bitcast=True)
            weight = _mix(tl.full([HIGH], _ROWS, tl.uint64), number + row.to(tl.uint64) * number_step)
            each += bits * weight[:, None]
        byte = (place + column.to(tl.uint64)) * SIZE
        word = byte >> 3
        span = _mix(tl.full([WIDE], _SPANS, tl.uint64), word >> _SPAN_BITS)
        span *= _mix(tl.full([WIDE], _WORDS, tl.uint64), word & _IN_SPAN)
        total += (tl.sum(each, 0) << ((byte & 7) * 8)) * span
    cell = tl.load(tile + 7)
    tl.atomic_add(found + cell, tl.sum(total, 0).to(tl.int64, bitcast=True))
