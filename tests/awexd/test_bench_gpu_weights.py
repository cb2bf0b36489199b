"""The sets of the GPU's figures, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from awexd.bench.gpu.weights import CHUNK, Cut, Marks, Part, Tensor, Weights, fill, holds, parts_of


@pytest.mark.parametrize(("kind", "tensors", "gigabytes"), [("dense", 399, 16.4), ("moe", 5043, 17.6)])
def test_sets_are_those_of_real_models(kind: str, tensors: int, gigabytes: float) -> None:
    weights = Weights(kind)  # type: ignore[arg-type]
    found = weights.tensors()
    assert len({one.name for one in found}) == len(found) == tensors
    assert weights.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_set_is_the_same_on_the_other_side_of_a_link() -> None:
    weights = Weights("rows", width=512, size=1 << 20, moving=True)
    assert Weights(**asdict(weights)).tensors() == weights.tensors()
    assert weights.nbytes == 1 << 20


@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (1, 2), (1, 3)])
def test_cuts_cover_each_tensor_once(dim: int, parts: int) -> None:
    weights = Weights("dense", shrink=32, layers=1)
    for one in weights.tensors():
        held = [box for own in range(parts) for box in Cut(dim, parts, own).boxes(one.shape)]
        if dim < len(one.shape) and one.shape[dim] % parts == 0:
            count = torch.zeros(one.shape)
            for offset, shape in held:
                count[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))] += 1
            assert bool((count == 1).all())
            assert list(Cut(dim, parts).boxes(one.shape)) == held
        else:
            assert held == [((0,) * len(one.shape), one.shape)] * parts, "whole in each"


def test_rows_of_halves_have_the_width() -> None:
    part = parts_of(Weights("rows", width=512, size=1 << 20), Cut(1, 2))[1]
    assert part.shape[1] * 2 == 512
    assert part.offset == (0, 256)


Damage = Callable[[torch.Tensor], object]
DAMAGES: dict[str, Damage] = {
    "an element": lambda bits: bits[-1, -1].add_(1),
    "rows that are exchanged": lambda bits: bits[:2].copy_(bits[:2].flip(0).clone()),
    "columns that are exchanged": lambda bits: bits[:, 1:3].copy_(bits[:, 1:3].flip(1).clone()),
    "an older step": lambda bits: bits.view(-1)[0].sub_(1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_part_does_not_hold_is_seen(damage: str) -> None:
    part = Part(3, Tensor("w", (6, 8)), (0, 0), (6, 8))
    tensor = torch.zeros(part.shape, dtype=torch.bfloat16)
    fill(part, tensor, 0, moving=False)
    Marks([(part, tensor)]).set(5)
    assert holds(part, tensor, 5, moving=False)
    assert not holds(part, tensor, 6, moving=False)
    DAMAGES[damage](tensor.view(torch.int16))
    assert not holds(part, tensor, 5, moving=False)


def test_parts_hold_what_the_whole_does_where_they_lie() -> None:
    whole = Part(1, Tensor("w", (6, 8)), (0, 0), (6, 8))
    half = Part(1, whole.whole, (2, 4), (3, 4))
    tensor, part = torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)
    fill(whole, tensor, 7, moving=True)
    fill(half, part, 7, moving=True)
    assert torch.equal(part.view(torch.int16), tensor.view(torch.int16)[2:5, 4:])
    assert not holds(half, part, 8, moving=True)


def test_elements_of_a_step_are_all_others_than_those_of_the_next() -> None:
    part = Part(1, Tensor("w", (64, 64)), (0, 0), (64, 64))
    first, second = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    fill(part, first, 1, moving=True)
    fill(part, second, 2, moving=True)
    assert bool((first.view(torch.int16) != second.view(torch.int16)).all())


def test_large_tensor_is_filled_in_chunks() -> None:
    rows = CHUNK // 1024 + 3
    part = Part(0, Tensor("w", (rows, 1024)), (0, 0), (rows, 1024))
    tensor = torch.zeros(part.shape, dtype=torch.bfloat16)
    fill(part, tensor, 0, moving=True)
    assert holds(part, tensor, 0, moving=True)
    tensor.view(torch.int16)[-1, 0] += 1
    assert not holds(part, tensor, 0, moving=True)
