"""Index arithmetic against torch's own functions, and against cutting real arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_client.adapters.runs import Run, Split, chunk, held, held_left_to_right, in_order, total

SIZES = [*range(18), 31, 64, 100]


def indices(runs: list[Run]) -> list[int]:
    return [at for start, length in runs for at in range(start, start + length)]


def cut(array: np.ndarray, parts: int, at: int) -> np.ndarray:
    """One piece by torch.chunk's rule, on real indices."""
    step = -(-len(array) // parts)
    return array[at * step : (at + 1) * step]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_chunk_is_torchs_shard(size: int, parts: int) -> None:
    from torch.distributed.tensor import Shard

    for at in range(parts):
        length, offset = Shard.local_shard_size_and_offset(size, parts, at)
        assert chunk(size, parts, at) == (offset, length)


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_lone_strided_shard_is_torchs(parts: int, factor: int) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard, _StridedShardOffsetMode

    placement = _StridedShard(0, split_factor=factor)
    for size, at in itertools.product(SIZES, range(parts)):
        expected = placement.local_shard_size_and_offset(size, parts, at, _StridedShardOffsetMode.ALL)[1]
        assert indices(held_left_to_right(size, [Split(parts, at, factor)])) == expected, (size, at)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 4)])
def test_shards_of_one_dimension_are_torchs(mesh: tuple[int, ...]) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for size, coordinate in itertools.product(SIZES, itertools.product(*map(range, mesh))):
        runs = held(size, [Split(parts, at) for parts, at in zip(mesh, coordinate, strict=True)])
        shape, offset = _compute_local_shape_and_global_offset((size,), mesh, list(coordinate), [Shard(0)] * len(mesh))
        assert [(run.start, run.length) for run in runs] == [(offset[0], shape[0])], (size, coordinate)


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_fsdp_over_tp_is_torchs_where_all_divides(data: int, tensor: int) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
    size = 3 * data * tensor
    for d, t in itertools.product(range(data), range(tensor)):
        shape, offset = _compute_local_shape_and_global_offset((size,), (data, tensor), [d, t], placements)
        assert held(size, [Split(data, d, tensor), Split(tensor, t)]) == [(offset[0], shape[0])]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_fsdp_over_tp_is_what_fsdp_cuts_however_uneven(size: int, data: int, tensor: int, expert: int) -> None:
    for d, t, e in itertools.product(range(data), range(tensor), range(expert)):
        splits = [Split(data, d, tensor * expert), Split(tensor, t), Split(expert, e)]
        expected = cut(cut(cut(np.arange(size), tensor, t), expert, e), data, d)
        assert indices(held(size, splits)) == expected.tolist()


def test_fsdp_over_tp_differs_from_reading_left_to_right() -> None:
    splits = [Split(3, 2, 2), Split(2, 1)]  # 7 rows: TP gives 4 and 3, FSDP 2, 2, 0 and 1, 1, 1
    assert held(7, splits) == [(6, 1)]
    assert held_left_to_right(7, splits) == [(7, 0)]


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 6)), max_size=3))
@settings(max_examples=100, deadline=None)
def test_every_index_is_held_by_exactly_one_rank(size: int, dims: list[tuple[int, int | None]]) -> None:
    for rule in (held, held_left_to_right):
        found: list[int] = []
        for coordinate in itertools.product(*(range(parts) for parts, _ in dims)):
            runs = rule(size, [Split(parts, at, factor) for (parts, factor), at in zip(dims, coordinate, strict=True)])
            assert total(runs) == len(indices(runs))
            assert all(a.start + a.length != b.start for a, b in itertools.pairwise(runs))
            found += indices(runs)
        assert sorted(found) == list(range(size))


def test_nothing_held_starts_at_the_end() -> None:
    assert held(6, [Split(4, 3)]) == [(6, 0)]
    assert held(0, []) == [(0, 0)]


def test_huge_dimension_costs_no_element_array() -> None:
    size = 1 << 50
    runs = held(size, [Split(8, 3), Split(2, 1, 4)])
    assert total(runs) == size // 16
    assert len(runs) == 4


def test_strided_splits_over_several_dimensions_find_their_order() -> None:
    splits = [Split(2, 0, 6), Split(3, 1, 2), Split(2, 1)]
    assert in_order(splits) == [Split(2, 1), Split(3, 1), Split(2, 0)]
    assert in_order([Split(2, 0, 2)]) is None
    assert math.prod(split.parts for split in splits) == 12
