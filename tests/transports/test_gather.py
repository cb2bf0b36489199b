"""The tiles that a device's kernel moves, carried out here by NumPy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.cuda.gather import TILE, tiles_of
from awexd_transports.view import View, array_at

MOST = {0: 1, 1: 50_000, 2: 300, 3: 50, 4: 16}
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_tiles_are_the_copy_and_fit(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 4))
    shape = [data.draw(st.integers(1, MOST[dims])) for _ in range(dims)]
    order = data.draw(st.permutations(range(dims)))
    dtype = data.draw(st.sampled_from(DTYPES))
    held = torch.randint(1, 100, [n + 3 for n in shape]).to(dtype)
    target = torch.zeros([shape[axis] + 2 for axis in order], dtype=dtype)
    source = held[tuple(slice(2, 2 + n) for n in shape)].permute(order)
    destination = target[tuple(slice(1, 1 + shape[axis]) for axis in order)]
    item, tiles = tiles_of(View.of(destination), View.of(source))
    assert int((tiles[:, 2] * tiles[:, 3]).max()) * item <= TILE
    for to, of, rows, columns, to_row, of_row, to_column, of_column in tiles.tolist():
        moved = array_at(of, item, (rows, columns), (of_row * item, of_column * item))
        array_at(to, item, (rows, columns), (to_row * item, to_column * item))[...] = moved
    assert torch.equal(destination, source)
    assert int((target != 0).sum()) == source.numel(), "a neighbour was written"


@pytest.mark.parametrize(("offset", "item"), [(0, 8), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_items_are_as_wide_as_both_sides_are_aligned(offset: int, item: int) -> None:
    held, target = torch.zeros(4096 + 16, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    assert tiles_of(View.of(target), View.of(held[offset : offset + 4096]))[0] == item
