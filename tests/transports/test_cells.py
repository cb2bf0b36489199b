from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.cells import BLOCK, Grid, Place, grid
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Box, Entry, TensorSpec
from awexd_transports.segment import checksums_at, first_cells, segment_nbytes
from tests.transports.strategies import manifest, whole

SHAPES = st.lists(st.sampled_from((0, 1, 2, 3, 7, 8, 64, 129, 1000, 4096, 100_003)), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("shape", "itemsize", "counts", "steps"),
    [
        ((), 4, (1,), (1,)),
        ((5,), 2, (1,), (5,)),
        ((4096,), 2, (8,), (512,)),
        ((1024,), 1, (2,), (512,)),
        ((4096, 4096), 2, (16, 8), (256, 512)),
        ((1001, 1001), 4, (8, 1), (126, 1001)),
        ((1024, 2048), 2, (8, 8), (128, 256)),
        ((512, 256), 2, (1, 1), (512, 256)),
        ((128, 768, 2048), 2, (128, 2, 8), (1, 384, 256)),
        ((1000, 3, 64), 2, (2, 1, 1), (500, 3, 64)),
        ((3, 1 << 20), 4, (3, 8), (1, 1 << 17)),
        ((1 << 28,), 1, (128,), (1 << 21,)),
        ((0, 4), 2, (0, 0), (1, 1)),
    ],
)
def test_grid_is_what_the_format_says(shape: Place, itemsize: int, counts: Place, steps: Place) -> None:
    """Golden: both sides and both ends of a connection must agree for ever."""
    found = grid(shape, itemsize)
    assert (found.counts, found.steps) == (counts, steps)


@given(SHAPES, st.sampled_from((1, 2, 4, 8, 16)))
def test_no_tile_is_much_larger_than_a_block(shape: Place, itemsize: int) -> None:
    found = grid(shape, itemsize)
    width = min(1, found.cells) * (found.shape[-1] if found.together else found.steps[-1])
    assert math.prod(found.steps[:-1]) * width * itemsize <= BLOCK + 64


@settings(deadline=None)
@given(st.data())
def test_tiles_hold_the_box_once_and_the_fewest_cells(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    steps = tuple(data.draw(st.integers(1, n)) for n in shape)
    counts = tuple(-(-n // step) for n, step in zip(shape, steps, strict=True))
    cells = Grid(shape, steps, counts, data.draw(st.booleans()))
    spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    low, high = tuple(a for a, _ in spans), tuple(b for _, b in spans)
    held: list[Place] = []
    for tile in cells.tiles(low, high):
        covered = [cells.cell(number) for number in range(tile.cell, tile.cell + tile.cells)]
        points = [point for cell in covered for point in inside(*cell)]
        assert sorted(points) == sorted(inside(tile.low, tile.high))
        taken = inside(tile.taken_low, tile.taken_high)
        assert all(any(point in set(inside(*cell)) for point in taken) for cell in covered)
        assert set(taken) == set(points) & set(inside(low, high))
        held += taken
    assert sorted(held) == sorted(inside(low, high))


def inside(low: Place, high: Place) -> list[Place]:
    return list(product(*(range(a, b) for a, b in zip(low, high, strict=True))))


def test_table_follows_the_pieces_and_its_size_follows_from_the_manifest() -> None:
    held = manifest(
        Entry(TensorSpec("a", (8192, 4096), "bfloat16"), Box((4096, 0), (4096, 4096)), 0),
        Entry(TensorSpec("b", (0, 3), "float32"), whole((0, 3)), 0),
        Entry(TensorSpec("c", (), "float32"), whole(()), 0),
    )
    assert first_cells(held) == [0, 128, 128, 129]
    assert segment_nbytes(held) == 16 * BLOCK + 256 + 8 * 129
    assert checksums_at(held) == 4096 + 16 * BLOCK + 256
    assert set(ITEMSIZE.values()) == {1, 2, 4, 8, 16}
