"""Tables of copies between host memory and a device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from awexd_transports.cells import grid
from awexd_transports.copy import CopyTable, Difference, Row, View
from awexd_transports.cuda import gather, intake
from awexd_transports.cuda.copies import BATCH
from awexd_transports.cuda.ring import HALF, Ring
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument
from awexd_transports.kernel import Sums

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
@pytest.mark.parametrize(
    "way", [("cuda", "cpu"), ("cuda", "pinned"), ("cpu", "cuda"), ("pinned", "cuda"), ("cuda", "cuda")]
)
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


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.usefixtures("each_copier")
def test_cast_is_torchs(pinned: bool) -> None:
    source = torch.randn(1000, device="cuda") * 1000
    held = torch.zeros(1000, dtype=torch.bfloat16, pin_memory=pinned)
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


def addressed(tensor: torch.Tensor) -> View:
    """As of another process's memory: an address, and an owner that is no tensor."""
    view = View.of(tensor)
    return View(view.address, view.shape, view.strides, view.dtype, [tensor], view.device)


@pytest.mark.parametrize("cut", CUTS)
def test_view_of_an_address_on_a_device(cut: str) -> None:
    base = filled("bfloat16", "cuda")
    made = addressed(CUTS[cut](base)).tensor()
    assert same_bytes(made, CUTS[cut](base))
    assert made.stride() == CUTS[cut](base).stride() or not made.numel()
    made.view(torch.int16).fill_(7)
    assert bool((CUTS[cut](base).view(torch.int16) == 7).all()), "the same memory"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("each_copier")
def test_copies_out_of_an_address_on_a_device(dtype: str, cut: str) -> None:
    source, destination = filled(dtype, "cuda"), filled(dtype, "cuda")
    expected = destination.clone()
    CUTS[cut](expected).copy_(CUTS[cut](source))
    table = CopyTable([Row(View.of(CUTS[cut](destination)), addressed(CUTS[cut](source)), "w")])
    table.run()
    assert same_bytes(destination, expected)
    assert table.first_difference() is None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: `make test-gpu` on such a machine")
@pytest.mark.usefixtures("each_copier")
def test_copies_between_two_devices() -> None:
    source, destination = torch.randn(600, 900, device="cuda:1"), torch.zeros(900, 600, device="cuda:0")
    flat, target = torch.randn(3 << 20, device="cuda:1"), torch.zeros(3 << 20, device="cuda:0")
    table = CopyTable([(View.of(destination.t()), View.of(source)), (View.of(target), addressed(flat))])
    table.run()
    assert same_bytes(destination.t(), source)
    assert same_bytes(target, flat)
    assert table.first_difference() is None


FLOATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(("of", "to"), [(of, to) for of in FLOATS for to in FLOATS if of != to])
@pytest.mark.parametrize("cut", ["whole", "columns", "turned"])
@pytest.mark.usefixtures("each_copier")
def test_casts_on_a_device_are_torchs(of: str, to: str, cut: str) -> None:
    """Random bits: every kind of number, not-a-number among them."""
    source, destination = filled(of, "cuda"), filled(to, "cuda")
    expected = destination.clone()
    CUTS[cut](expected).copy_(CUTS[cut](source))
    table = CopyTable([Row(View.of(CUTS[cut](destination)), View.of(CUTS[cut](source)), "w", cast=True)])
    table.run()
    assert torch.equal(destination.isnan(), expected.isnan())
    assert same_bytes(destination.nan_to_num(), expected.nan_to_num())
    assert table.first_difference() is None


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


def test_what_is_long_is_copied_and_what_little_is_wanted_of_is_read_in_place() -> None:
    long, wide = torch.randn(4 << 20).pin_memory(), torch.randn(64, 4096).pin_memory()
    sources = (long, wide[:, :1000])
    targets = [torch.zeros(tensor.shape, device="cuda") for tensor in sources]
    table = CopyTable([(View.of(to), View.of(of)) for to, of in zip(targets, sources, strict=True)])
    assert table._away is not None
    assert [len(batch.pairs) for batch in table._away._batches] == [1]
    (up,) = table._away._intakes
    assert up.pace is None, "nothing was worth being measured"
    assert [one.tiles(0) > 0 for one in table._away._gathers.values()] == [True]
    table.run()
    assert all(same_bytes(to, of) for to, of in zip(targets, sources, strict=True))


@pytest.mark.parametrize("pace", [0.0, 1.0], ids=["ring", "in place"])
@pytest.mark.parametrize("summed", [False, True])
def test_what_goes_up_by_either_way_arrives(pace: float, summed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the ring takes at once: short rows, parts of rows, casts; again and again, from two threads too."""
    measured = intake._pace
    paces: list[float] = []

    def forced(ring: Ring, worth: Sequence[intake.Chunk]) -> float:
        paces.append(measured(ring, worth))
        return pace

    monkeypatch.setattr(intake, "_pace", forced)
    held = torch.randint(0, 1 << 30, (3 * HALF // 4,), dtype=torch.int32).pin_memory()
    parts = [held[at : at + 30_000].view(100, 300) for at in range(0, len(held) - 30_000, 30_016)]
    sources = [part[:, 10:] if number % 3 == 0 else part for number, part in enumerate(parts)]
    targets = [torch.zeros(of.shape, dtype=torch.int32, device="cuda") for of in sources]
    views = [replace(View.of(of), owner=held) for of in sources]
    rows = [Row(View.of(to), of, f"w{at}") for at, (to, of) in enumerate(zip(targets, views, strict=True))]
    floats = torch.randn(1000, 500).pin_memory()
    narrow = torch.zeros(1000, 500, dtype=torch.bfloat16, device="cuda")
    rows.append(Row(View.of(narrow), View.of(floats), "cast", cast=True))
    if summed:
        rows = [summed_row(row, part) for row, part in zip(rows, parts, strict=False)]
    table = CopyTable(rows)
    for _ in range(3):
        for to in targets:
            to.zero_()
        table.run()
        assert table.wrong() is None
        assert all(same_bytes(to, of) for to, of in zip(targets, sources, strict=True))
        held.add_(0 if summed else 1)
    if not summed:
        assert same_bytes(narrow, floats.bfloat16())
        with ThreadPoolExecutor(2) as pool:
            other = CopyTable(rows)
            list(pool.map(lambda one: one.run(), (table, other)))
        assert table.first_difference() is None
    assert len(paces) <= 2
    assert all(0.05 < one < 50 for one in paces), paces  # many short DMAs are slower than reading in place


def summed_row(row: Row, piece: torch.Tensor) -> Row:
    """With the checksums of the whole piece, a part of which it is; they are kept with the row."""
    whole = View.of(piece)
    table = np.zeros(grid(whole.shape, whole.itemsize).cells, np.int64)
    offset = 10 if row.source.shape != whole.shape else 0
    stored = Sums(whole.shape, (0, 0), whole.shape, (), table.ctypes.data)
    CopyTable([Row(View.of(torch.zeros(whole.shape, dtype=torch.int32)), whole, sums=stored)]).run()
    owner = [row.source.owner, table, piece]
    source = View(row.source.address, row.source.shape, row.source.strides, row.source.dtype, owner)
    return Row(row.destination, source, row.label, sums=replace(stored, low=(0, offset), piece=whole))


@pytest.mark.parametrize("cast", [False, True])
def test_what_is_copied_within_a_device_is_summed_in_that_pass(cast: bool) -> None:
    """Boxes of a piece that another process has, into tensors of any strides; a wrong element is told by its tile."""
    piece = torch.randn(600, 1110, device="cuda").to(torch.bfloat16)
    whole = View.of(piece)
    table = np.zeros(grid(whole.shape, 2).cells, np.int64)
    sums = Sums((700, 2000), (50, 333), whole.shape, (), table.ctypes.data)
    stored = torch.zeros(600, 1110, dtype=torch.bfloat16)
    CopyTable([Row(View.of(stored), whole, sums=sums)]).run()
    boxes = [(0, 0, 600, 555), (0, 555, 600, 1110), (37, 100, 38, 101), (100, 3, 599, 1109)]
    rows: list[Row] = []
    targets = []
    for a, b, c, d in boxes:
        around = torch.zeros(d - b + 3, c - a + 2, dtype=torch.float32 if cast else torch.bfloat16, device="cuda")
        to = around[3:, 2:].t() if len(rows) % 2 else torch.zeros_like(around)[3:, 2:].t().contiguous()
        targets.append((to, piece[a:c, b:d]))
        seen = addressed(piece).sub([slice(a, c), slice(b, d)])
        own = None if cast else replace(sums, low=(a, b), piece=addressed(piece))
        rows.append(Row(View.of(to), seen, f"w{a}", cast, sums=own))
    copies = CopyTable(rows)
    assert copies._away is not None
    assert bool(copies._away._gathers) == cast, "one pass"
    for _ in range(2):
        copies.run()
        assert copies.wrong() is None
        assert all(torch.equal(to, of.to(to.dtype)) for to, of in targets)
    if not cast:
        piece[300, 700] += 1
        copies.run()
        found = copies.wrong()
        assert found is not None
        assert found[0] in rows


def rows_down(count: int, host: torch.Tensor, seed: int) -> tuple[list[Row], list[torch.Tensor], torch.Tensor]:
    """Rows of many lengths into every other part of that host memory, some out of strided ones; what it then holds."""
    generator = torch.Generator().manual_seed(seed)
    expected = host.clone()
    rows, sources = [], []
    at = 0
    for number in range(count):
        high, wide = (int(n) for n in torch.randint(1, 300, (2,), generator=generator))
        held = torch.randint(0, 256, (wide, 4 * high), generator=generator, dtype=torch.uint8).cuda().view(torch.int32)
        of = held.t() if number % 2 else held.reshape(high, wide)
        view = View.packed(host.data_ptr() + at, (high, wide), "int32", host)
        rows.append(Row(view, View.of(of), f"w{number}"))
        sources.append(of)
        expected[at : at + view.nbytes] = of.cpu().contiguous().view(-1).view(torch.uint8)
        at += view.nbytes + 4 * number % 300
    assert at < len(host)
    return rows, sources, expected


@pytest.mark.usefixtures("each_copier")
def test_what_is_short_or_strided_comes_down_and_neighbours_stay() -> None:
    """More than both halves of the ring hold, more than once."""
    host = torch.full((100 << 20,), 255, dtype=torch.uint8).pin_memory()
    rows, sources, expected = rows_down(900, host, 1)
    assert sum(row.destination.nbytes for row in rows) > 4 * HALF
    table = CopyTable(rows)
    for _ in range(3):
        host.fill_(255)
        table.run()
        assert torch.equal(host, expected)
    assert table.first_difference() is None
    sources[7][0, 0] += 1
    assert table.first_difference() == Difference("w7", (0, 0))


def test_padding_that_is_nobodys_comes_down_as_zeros() -> None:
    host = torch.full((1024,), 255, dtype=torch.uint8).pin_memory()
    sources = [torch.full((100,), at + 1, dtype=torch.uint8, device="cuda") for at in range(3)]
    rows = [
        Row(View.packed(host.data_ptr() + 256 * at, (100,), "uint8", host), View.of(source), padding=156)
        for at, source in enumerate(sources)
    ]
    table = CopyTable(rows)
    for _ in range(2):
        table.run()
        assert [set(host[256 * at : 256 * at + 100].tolist()) for at in range(3)] == [{1}, {2}, {3}]
        assert [set(host[256 * at + 100 : 256 * at + 256].tolist()) for at in range(2)] == [{0}, {0}]
        assert set(host[612:].tolist()) == {255}


def test_a_row_longer_than_the_ring_comes_down() -> None:
    source = torch.randn(3000, 5000, device="cuda")
    host = torch.zeros(5000, 3000).pin_memory()
    cast = torch.zeros(3000, 5000, dtype=torch.bfloat16).pin_memory()
    rows = [Row(View.of(host), View.of(source.t())), Row(View.of(cast), View.of(source), cast=True)]
    CopyTable(rows).run()
    assert same_bytes(host, source.t())
    assert same_bytes(cast, source.bfloat16())


def test_threads_share_a_ring() -> None:
    hosts = [torch.full((100 << 20,), 255, dtype=torch.uint8).pin_memory() for _ in range(2)]
    made = [rows_down(900, host, seed) for seed, host in enumerate(hosts)]
    tables = [CopyTable(rows) for rows, _, _ in made]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            for host in hosts:
                host.fill_(255)
            list(pool.map(lambda table: table.run(1), tables))
            assert all(torch.equal(host, expected) for host, (_, _, expected) in zip(hosts, made, strict=True))


def test_weights_made_in_inference_mode_go_and_come() -> None:
    with torch.inference_mode():
        source, destination = torch.randn(70, 90, device="cuda"), torch.zeros(70, 90, device="cuda")
        host = torch.zeros(90, 70).pin_memory()
        down = CopyTable([(View.of(host), View.of(source.t()))])
        up = CopyTable([(View.of(destination.t()), View.of(host))])
        down.run()
        up.run()
        assert same_bytes(destination, source)
    down.run()
    up.run()


@pytest.mark.usefixtures("each_copier")
def test_table_without_rows_on_a_way() -> None:
    host, device = torch.randn(8).pin_memory(), torch.zeros(8, device="cuda")
    for rows in ([], [(View.of(device), View.of(host))], [(View.of(host), View.of(device))]):
        table = CopyTable(rows)
        table.run()
        assert table.first_difference() is None


def test_what_differs_on_a_device_is_found_by_its_index() -> None:
    """NaN is equal to itself, and minus zero is not zero: bits are compared."""
    source = torch.tensor([[float("nan"), -0.0, 1.0], [2.0, 3.0, 4.0]], device="cuda")
    destination = torch.zeros(3, 2, device="cuda").t()
    table = CopyTable([Row(View.of(destination), View.of(source), "w")])
    table.run()
    assert table.first_difference() is None
    destination[0, 1] = 0.0
    found = table.first_difference()
    assert found is not None
    assert (found.label, found.index) == ("w", (0, 1))


def test_a_ring_takes_little_more_than_its_halves() -> None:
    """In a process of its own, which has made no streams yet."""
    code = """
import torch
from awexd_transports.cuda.ring import ring
held = torch.zeros(1, device="cuda")
before = torch.cuda.mem_get_info()[0]
held = ring(0)
for stream in (held.gathering, held.sending):
    with torch.cuda.stream(stream):
        held.halves[0].memory.zero_()
torch.cuda.synchronize()
print(before - torch.cuda.mem_get_info()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 2 * HALF + (8 << 20)
