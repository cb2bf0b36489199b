from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from awexd_client.adapters.buffers import HostBuffers
from awexd_client.adapters.rules import Run, split, stacked
from awexd_client.adapters.sglang.parts import Part, arrange


def _part(path: str, runs: list[Run], tensor: torch.Tensor | None = None, **more: Any) -> Part:
    rows = sum(run.length for run in runs)
    live = torch.zeros(rows, 2) if tensor is None else tensor
    return Part(path, live, (rows, 2), runs, **more)


def _no_load(_: object) -> None:
    raise AssertionError("nothing is to be loaded")


def test_plain_parts_are_written_in_place() -> None:
    part = _part("fused", stacked([("gate", 6), ("up", 6)], 1, 2))
    weights, buffers = arrange([part], _no_load, None)
    assert buffers is None
    assert (weights.aside, weights.load, weights.reasons) == ((), None, {})
    assert [(s.name, s.global_shape, s.offset) for s in weights.direct] == [
        ("gate", (6, 2), (3, 0)),
        ("up", (6, 2), (3, 0)),
    ]
    assert weights.direct[1].tensor.data_ptr() == part.tensor[3:].data_ptr()


@pytest.mark.parametrize(
    ("tensor", "more", "reason"),
    [
        (None, {"reason": "packed"}, "packed"),
        (torch.zeros(2, 6), {}, r"[2, 6] in memory, [6, 2] by its rule"),
        (torch.zeros(2, 6).t(), {}, "not contiguous in memory"),
        (torch.zeros(6, 2), {"dtype": torch.bfloat16}, "torch.float32 in memory, torch.bfloat16 in checkpoints"),
    ],
)
def test_part_that_is_not_plain_goes_through_the_loader(
    tensor: torch.Tensor | None, more: dict[str, Any], reason: str
) -> None:
    fused = _part("fused", stacked([("gate", 12), ("up", 12)], 0, 4), tensor, **more)
    plain = _part("other", split("other", 4, 0, 1))
    given: list[tuple[str, torch.Tensor]] = []
    weights, _ = arrange([fused, plain], lambda tensors: given.extend((n, t.clone()) for n, t in tensors), None)
    assert [shard.name for shard in weights.direct] == ["other"]
    assert weights.reasons == {"gate": reason, "up": reason}
    assert [(s.name, s.global_shape, s.tensor.shape) for s in weights.aside] == [
        (name, (12, 2), (12, 2)) for name in ("gate", "up")
    ]
    for value, shard in enumerate(weights.aside):
        shard.tensor.fill_(value)
    assert weights.load is not None
    weights.load()
    assert [(name, sorted(set(tensor.flatten().tolist()))) for name, tensor in given] == [("gate", [0]), ("up", [1])]
    assert {tensor.dtype for _, tensor in given} == {more.get("dtype", torch.float32)}
    assert not any(shard.tensor.any() for shard in weights.aside), "their memory is given back"


def test_what_shares_a_tensor_with_another_is_loaded_with_it() -> None:
    parts = [
        _part("a", stacked([("x", 2), ("y", 2)]), reason="packed"),
        _part("b", stacked([("y", 2), ("z", 2)])),
        _part("c", split("z", 2, 0, 1)),
        _part("d", split("w", 2, 0, 1)),
    ]
    weights, _ = arrange(parts, _no_load, None)
    assert [shard.name for shard in weights.direct] == ["w"]
    assert weights.reasons == {"x": "packed", "y": "packed", "z": "is part of b, which is loaded whole"}


def test_tied_name_has_the_same_memory_and_is_loaded_once() -> None:
    tied = torch.zeros(4, 2)
    parts = [
        _part("embed", split("embed", 4, 0, 1), tied, reason="packed"),
        _part("embed", split("head", 4, 0, 1), tied, reason="packed", alias=True),
    ]
    names: list[str] = []
    weights, _ = arrange(parts, lambda tensors: names.extend(name for name, _ in tensors), None)
    assert [shard.name for shard in weights.aside] == ["embed", "head"]
    assert len({shard.tensor.data_ptr() for shard in weights.aside}) == 1
    assert weights.load is not None
    weights.load()
    assert names == ["embed"]


def test_what_is_derived_is_computed_after_loading() -> None:
    order: list[str] = []
    parts = [_part("a", split("a", 2, 0, 1), reason="packed")]
    weights, _ = arrange(parts, lambda _: order.append("load"), lambda: order.append("refresh"))
    assert weights.load is not None
    weights.load()
    assert order == ["load", "refresh"]


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_buffers_take_memory_only_while_they_are_filled() -> None:
    buffers = HostBuffers(
        {"a": ((64 << 20,), torch.uint8), "none": ((0, 3), torch.float32), "b": ((5,), torch.bfloat16)}
    )
    assert {name: tuple(t.shape) for name, t in buffers.tensors.items()} == {
        "a": (64 << 20,),
        "none": (0, 3),
        "b": (5,),
    }
    before, address = _resident(), buffers.tensors["a"].data_ptr()
    for _ in range(2):
        buffers.tensors["a"].fill_(1)
        buffers.tensors["b"].fill_(2)
        assert _resident() - before > 60 << 20
        buffers.clear()
        assert _resident() - before < 8 << 20
        assert not buffers.tensors["b"].any()
    assert buffers.tensors["a"].data_ptr() == address
