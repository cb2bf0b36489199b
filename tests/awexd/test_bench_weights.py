from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from awexd.bench.weights import Weights, destination_shards, fill, mark, source_tensors, unmark, wrong

NBYTES = 1 << 20


def _memory() -> mmap.mmap:
    return mmap.mmap(-1, NBYTES)


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def weights(request: pytest.FixtureRequest) -> Weights:
    return Weights(7, NBYTES, columns=256, cut=request.param)


def _copied(weights: Weights, step: int) -> mmap.mmap:
    """A reader's memory after it got what a trainer had at ``step``."""
    source, target = _memory(), _memory()
    fill(source)
    mark(weights, source, step)
    tensors = source_tensors(weights, source)
    for shard in destination_shards(weights, target):
        shard.tensor.copy_(tensors[shard.name][shard.box.relative_to((0, 0))])
    return target


def test_shapes_fill_the_size_exactly(weights: Weights) -> None:
    shapes = weights.shapes()
    assert len(shapes) == weights.tensors
    assert sum(rows * columns * 2 for rows, columns in shapes) == NBYTES
    assert max(shapes)[0] - min(shapes)[0] <= 1


def test_size_that_gives_no_whole_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="not rows of"):
        Weights(4, NBYTES + 1).shapes()


def test_destination_covers_every_element_once(weights: Weights) -> None:
    target = _memory()
    shards = list(destination_shards(weights, target))
    assert sum(shard.tensor.numel() for shard in shards) * 2 == NBYTES
    for shard in shards:
        assert not shard.tensor.any()
        shard.tensor.fill_(1)
    assert len(shards) == weights.tensors + (4 if weights.cut else 0)


def test_wrong_finds_nothing_in_a_true_copy(weights: Weights) -> None:
    assert wrong(weights, _copied(weights, 3), 3) == []


def test_wrong_finds_an_older_step(weights: Weights) -> None:
    assert len(wrong(weights, _copied(weights, 2), 3)) == weights.tensors


def test_wrong_finds_one_byte_and_two_rows_exchanged(weights: Weights) -> None:
    target = _copied(weights, 1)
    at, rows, columns = weights.places()[2]
    held = np.frombuffer(target, np.uint16, rows * columns, at).reshape(-1, 128)
    held[[5, 6]] = held[[6, 5]]
    last = np.frombuffer(target, np.uint8)
    last[-1] ^= 1
    assert wrong(weights, target, 1) == ["layers.2.weight", "layers.6.weight"]


def test_source_tensors_are_storages_of_their_own() -> None:
    tensors = source_tensors(Weights(7, NBYTES, columns=256), _memory())
    assert {tensor.untyped_storage().nbytes() for tensor in tensors.values()} == {
        tensor.numel() * 2 for tensor in tensors.values()
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())


def test_unmark_undoes_mark(weights: Weights) -> None:
    memory, untouched = _memory(), _memory()
    fill(untouched)
    fill(memory)
    mark(weights, memory, 5)
    assert memory[:] != untouched[:]
    unmark(weights, memory)
    assert memory[:] == untouched[:]
