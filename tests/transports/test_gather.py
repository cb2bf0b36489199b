"""The tiles that a device's kernel moves, carried out here by NumPy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.cuda.gather import FLAT, TILE, Gather, tiles_of
from awexd_transports.view import View, array_at

MOST = {0: 1, 1: 50_000, 2: 300, 3: 50, 4: 16}
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def moved(destination: View, source: View) -> int:
    """Bytes that the tiles of a copy move: by NumPy, item by item."""
    total = 0
    for part in tiles_of(destination, source):
        item = int(part.to)
        to_row, of_row, to_column, of_column, bits = part.steps
        for (to, of), (rows, columns) in zip(part.places.tolist(), part.extents.tolist(), strict=True):
            assert rows * columns * item <= TILE
            assert columns <= 1 << bits or part.steps == FLAT
            assert rows == 1 or part.steps != FLAT
            held = array_at(of, item, (rows, columns), (of_row * item, of_column * item))
            array_at(to, item, (rows, columns), (to_row * item, to_column * item))[...] = held
            total += rows * columns * item
    return total


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
    assert moved(View.of(destination), View.of(source)) == source.nbytes
    assert torch.equal(destination, source)
    assert int((target != 0).sum()) == source.numel(), "a neighbour was written"


@pytest.mark.parametrize(("offset", "items"), [(0, "8"), (8, "8"), (4, "4"), (2, "2"), (1, "1")])
def test_items_are_as_wide_as_both_sides_are_aligned(offset: int, items: str) -> None:
    held, target = torch.zeros(4096 + 16, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    assert [part.to for part in tiles_of(View.of(target), View.of(held[offset : offset + 4096]))] == [items]


def test_only_what_is_left_of_a_run_is_moved_by_narrow_items() -> None:
    held, target = torch.randint(1, 100, (4103,), dtype=torch.uint8), torch.zeros(4104, dtype=torch.uint8)
    parts = list(tiles_of(View.of(target[:4103]), View.of(held)))
    counts = [(part.to, int(part.extents.prod(axis=1).sum())) for part in parts]
    assert counts == [("8", 512), ("4", 1), ("2", 1), ("1", 1)]
    assert moved(View.of(target[:4103]), View.of(held)) == 4103
    assert torch.equal(target[:4103], held)
    assert target[4103] == 0


def test_tables_of_many_tensors_are_small() -> None:
    """17.6 GB of a mixture of experts: nothing is copied, so the memory need not be there."""
    views = [View.packed(at << 24, (4096, 427), "bfloat16", None) for at in range(2 * 5043)]
    pairs = list(zip(views[::2], views[1::2], strict=True))
    table = Gather([pairs], "cpu")
    assert table.nbytes < 16 << 20
    assert table.tiles(0) == 5043 * 107
