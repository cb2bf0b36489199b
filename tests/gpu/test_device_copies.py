"""Tables of copies between host memory and a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from awexd_transports.copy import CopyTable, Difference, Row, View
from awexd_transports.cuda import gather
from awexd_transports.cuda.copies import BATCH
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument

Cut = Callable[[torch.Tensor], torch.Tensor]
CUTS: dict[str, Cut] = {
    "whole": lambda base: base,
    "columns": lambda base: base[:, 3:17],
    "rows": lambda base: base[5:19],
    "turned": lambda base: base.t(),
    "every other": lambda base: base[::2, ::3],
    "one": lambda base: base[7, 9],
    "none": lambda base: base[3:3],
}


def filled(dtype: str, device: str) -> torch.Tensor:
    """24 x 24 elements of random bytes."""
    size = ITEMSIZE[dtype]
    raw = torch.randint(0, 256, (24, 24 * size), dtype=torch.uint8)
    made = raw.view(getattr(torch, dtype))
    return made.pin_memory() if device == "pinned" else made.to(device)


@pytest.fixture(params=["triton", "torch"])
def each_copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one kernel, and where Triton is missing."""
    if request.param == "torch":
        monkeypatch.setattr(gather, "available", lambda: False)
    else:
        assert gather.available(), "pip install triton"


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8", "int64", "complex64"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", [("cuda", "cpu"), ("cpu", "cuda"), ("pinned", "cuda"), ("cuda", "cuda")])
@pytest.mark.usefixtures("each_copier")
def test_copies_arrive_and_neighbours_stay(dtype: str, cut: str, way: tuple[str, str]) -> None:
    source, destination = filled(dtype, way[0]), filled(dtype, way[1])
    expected = destination.cpu().clone()
    CUTS[cut](expected).copy_(CUTS[cut](source).cpu())
    table = CopyTable([(View.of(CUTS[cut](destination)), View.of(CUTS[cut](source)))])
    table.run()
    assert same_bytes(destination, expected)
    assert table.first_difference() is None


def test_several_batches_in_their_order() -> None:
    sources = [torch.randn(BATCH // 8, device="cuda") for _ in range(5)]
    held = torch.zeros(5, BATCH // 8)
    table = CopyTable([(View.of(held[at]), View.of(source)) for at, source in enumerate(sources)])
    for _ in range(2):
        sources[3].add_(1)
        table.run()
        assert torch.equal(held, torch.stack(sources).cpu())
    assert table.nbytes == held.nbytes


def test_what_other_streams_have_begun_is_waited_for() -> None:
    source = torch.zeros(1 << 20, device="cuda")
    held = torch.zeros(1 << 20)
    table = CopyTable([(View.of(held), View.of(source))])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        source.fill_(7)
    table.run()
    assert bool((held == 7).all())


def test_cast_is_torchs() -> None:
    source = torch.randn(1000, device="cuda") * 1000
    held = torch.zeros(1000, dtype=torch.bfloat16)
    table = CopyTable([Row(View.of(held), View.of(source), "w", cast=True)])
    table.run()
    assert same_bytes(held, source.cpu().to(torch.bfloat16))
    assert table.first_difference() is None
    with pytest.raises(InvalidArgument, match="no cast was asked for"):
        CopyTable([Row(View.of(held), View.of(source), "w")])


def test_first_difference_is_named() -> None:
    source, destination = torch.randn(8, 8), torch.zeros(8, 8, device="cuda")
    table = CopyTable([Row(View.of(destination), View.of(source), "w")])
    table.run()
    destination[5, 2] += 1
    assert table.first_difference() == Difference("w", (5, 2))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        destination = torch.zeros(64, device="cuda")
    source = torch.randn(64)
    CopyTable([(View.of(destination), View.of(source))]).run()
    assert same_bytes(destination, source)


def test_view_of_a_device_is_its_tensor() -> None:
    base = torch.randn(6, 8, device="cuda")
    view = View.of(base[1:, 2:]).sub((slice(1, 3), slice(0, 4)))
    assert same_bytes(view.tensor(), base[2:4, 2:6])
    assert view.tensor().data_ptr() == view.address


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("source", ["pinned", "cuda"])
def test_kernel_moves_any_strides(dims: int, source: str) -> None:
    """Boxes of many shapes out of and into larger ones, larger than a tile and odd, dimensions in any order."""
    generator = torch.Generator().manual_seed(dims)
    rows = []
    expected = []
    most = {1: 40_000, 2: 400, 3: 60, 4: 20}[dims]
    for at in range(24):
        shape = [int(n) for n in torch.randint(1, most, (dims,), generator=generator)]
        order = torch.randperm(dims, generator=generator).tolist()
        size = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)[at % 4]
        held = torch.randint(0, 100, [n + 3 for n in shape], generator=generator).to(size)
        held = held.pin_memory() if source == "pinned" else held.cuda()
        target = torch.zeros([shape[axis] + 2 for axis in order], dtype=size, device="cuda")
        of = held[tuple(slice(2, 2 + n) for n in shape)].permute(order)
        to = target[tuple(slice(1, 1 + shape[axis]) for axis in order)]
        rows.append((View.of(to), View.of(of)))
        expected.append((target, to, of, held))
    table = CopyTable(rows)
    table.run()
    for target, to, of, _ in expected:
        assert same_bytes(to, of)
        assert int(target.count_nonzero()) == int(of.count_nonzero()), "a neighbour was written"
    assert table.first_difference() is None


def test_device_gathers_what_is_strided_or_short_and_copies_what_is_long() -> None:
    long, short = torch.randn(2 << 20).pin_memory(), torch.randn(100).pin_memory()
    targets = [torch.zeros_like(tensor, device="cuda") for tensor in (long, short)]
    table = CopyTable([(View.of(to), View.of(of)) for to, of in zip(targets, (long, short), strict=True)])
    assert table._away is not None
    assert [len(pairs) for pairs in table._away._pairs] == [1]
    assert [sum(len(each) for _, _, each in one._tables) for one in table._away._gathers] == [1]
    table.run()
    assert all(same_bytes(to, of) for to, of in zip(targets, (long, short), strict=True))
