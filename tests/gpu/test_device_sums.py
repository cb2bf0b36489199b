"""Checksums that a device takes of its own memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from awexd_transports import native
from awexd_transports.cells import grid
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.cuda import gather
from awexd_transports.cuda.sums import DeviceSums, Summed, cells_of
from awexd_transports.digest import MASK, digest
from awexd_transports.dtypes import dtype_name
from awexd_transports.kernel import Sums
from awexd_transports.segment import CHECKSUM_OFFSET

SHAPES = [(), (1,), (5_000_001,), (700_000, 3), (3000, 4096), (129, 511), (3, 700, 1000), (40, 3, 5, 64), (2, 400_000)]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, device="cuda").view(dtype).view(shape)


def expected(held: torch.Tensor, item: Summed) -> list[int]:
    view, found = View.of(held.cpu()), []
    for _, _, _, begin, end in cells_of(item):
        low = item.low or (0,) * len(begin)
        cut = [slice(a - c, b - c) for a, b, c in zip(begin, end, low, strict=True)]
        place = tuple(a + b for a, b in zip(begin, item.offset, strict=False))
        found.append(digest(view.sub(cut) if view.shape else view, item.tensor, place))
    return found


def all_expected(held: Iterable[torch.Tensor], items: Iterable[Summed]) -> list[int]:
    return [one for tensor, item in zip(held, items, strict=True) for one in expected(tensor, item)]


def test_sums_are_the_digests() -> None:
    """Of whole tensors, turned ones, and of boxes that begin anywhere: all in one table, twice."""
    held, items = [], []
    for number, shape in enumerate(SHAPES):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
            base = made(shape, dtype, number)
            turned = base.transpose(-1, -2) if base.ndim > 1 else base
            box = base[tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in shape)]
            for tensor, offset in ((base, 0), (turned, 1), (box, 3)):
                place = (offset,) * tensor.ndim
                whole = tuple(n + 2 * offset for n in tensor.shape)
                held.append(tensor)
                items.append(Summed(View.of(tensor), whole, place))
    sums = DeviceSums(items)
    for _ in range(2):
        assert sums.run().tolist() == all_expected(held, items)
        held[0].fill_(1)
    assert sums.nbytes < 64 << 20


def test_parts_of_pieces_give_their_cells_sums() -> None:
    piece = made((1000, 3000), torch.float32)
    parts = [(0, 0, 1000, 1500), (0, 1500, 1000, 3000), (17, 5, 18, 6), (300, 40, 999, 2999)]
    held = [piece[a:c, b:d] for a, b, c, d in parts]
    items = [
        Summed(View.of(part), (1010, 3007), (10, 7), (1000, 3000), (a, b))
        for part, (a, b, _, _) in zip(held, parts, strict=True)
    ]
    sums = DeviceSums(items)
    assert sums.run().tolist() == all_expected(held, items)


@pytest.mark.parametrize(("of", "to"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32")])
def test_sums_of_casts_are_those_of_what_is_copied(of: str, to: str) -> None:
    """Random bits: not-a-number too."""
    source = made((500, 1200), getattr(torch, of))
    copied = torch.zeros(500, 1200, dtype=getattr(torch, to), device="cuda")
    CopyTable([Row(View.of(copied), View.of(source), cast=True)]).run()
    item = Summed(View.of(source), (500, 1200), (0, 0), dtype=dtype_name(copied.dtype))
    assert DeviceSums([item]).run().tolist() == expected(copied, Summed(View.of(copied), (500, 1200), (0, 0)))


def test_what_other_streams_have_begun_is_waited_for() -> None:
    source = torch.zeros(1 << 20, device="cuda")
    item = Summed(View.of(source), (1 << 20,), (0,))
    sums = DeviceSums([item])
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        source.fill_(7)
    assert sums.run().tolist() == expected(source, item)


@pytest.mark.parametrize("copier", ["triton", "torch"])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("cast", [True, False])
def test_tables_store_and_compare(copier: str, pinned: bool, cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece goes down, with its checksums; a part of it comes up, and is compared."""
    if native.load() is None:
        pytest.skip("the C library is not built here: python hatch_build.py")
    if copier == "torch":
        monkeypatch.setattr(gather, "available", lambda: False)
    shape, tensor, origin = (600, 1111), (700, 2000), (50, 333)
    live = torch.randn(shape, device="cuda")
    piece = torch.zeros(shape, dtype=torch.bfloat16 if cast else torch.float32, pin_memory=pinned)
    whole, cells = View.of(piece), grid(shape, piece.element_size())
    table = np.zeros(cells.cells, np.int64)
    sums = Sums(tensor, origin, shape, (), table.ctypes.data)
    down = CopyTable([Row(whole, View.of(live), "w", cast, sums=sums)])
    down.run()
    assert torch.equal(piece, live.cpu().to(piece.dtype))
    assert down.wrong() is None
    digests = expected(piece, Summed(whole, tensor, origin))
    assert table.view(np.uint64).tolist() == [(one + CHECKSUM_OFFSET) & MASK for one in digests]
    arrived = torch.zeros(500, 900, dtype=piece.dtype, device="cuda")
    part = [slice(60, 560), slice(111, 1011)]
    sums = Sums(tensor, origin, shape, (60, 111), table.ctypes.data, whole)
    up = CopyTable([Row(View.of(arrived), whole.sub(part), "w", sums=sums)])
    for _ in range(2):
        up.run()
        assert up.wrong() is None
    assert torch.equal(arrived.cpu(), piece[60:560, 111:1011])
    piece[300, 400] += 1
    up.run()
    found = up.wrong()
    assert found is not None
    tile = list(cells.tiles((60, 111), (560, 1011)))[found[1]]
    assert all(a <= n < b for a, n, b in zip(tile.low, (300, 400), tile.high, strict=True))
