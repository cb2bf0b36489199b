"""Runs the devices' kernels on host memory in Triton's interpreter: `python -m tests.transports.interpreted copies`.

A process of its own, with TRITON_INTERPRET=1: Triton reads that when it is imported.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from awexd_transports.cells import grid
from awexd_transports.copy import Row
from awexd_transports.cuda.checks import DeviceChecks
from awexd_transports.cuda.gather import COARSE, TILE, Gather
from awexd_transports.cuda.sums import DeviceSums, Summed, cells_of, takes
from awexd_transports.digest import MASK, SPAN, digest
from awexd_transports.dtypes import dtype_name
from awexd_transports.kernel import Sums
from awexd_transports.segment import CHECKSUM_OFFSET
from awexd_transports.view import View

MOST = {0: 1, 1: 20_000, 2: 120, 3: 24, 4: 9}
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def drawn(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def copies(count: int = 20) -> None:
    """Boxes out of and into larger tensors, dimensions in any order; several of a group, and groups on their own."""
    for _ in range(count):
        groups: list[list[tuple[View, View]]] = []
        made = []
        for _ in range(drawn(1, 3)):
            groups.append([])
            for _ in range(drawn(0, 3)):
                dims = drawn(0, 4)
                shape = [drawn(1, MOST[dims]) for _ in range(dims)]
                order = torch.randperm(dims).tolist()
                dtype = DTYPES[drawn(0, len(DTYPES) - 1)]
                held = torch.randint(1, 100, [n + 3 for n in shape]).to(dtype)
                target = torch.zeros([shape[axis] + 2 for axis in order], dtype=dtype)
                of = held[tuple(slice(2, 2 + n) for n in shape)].permute(order)
                to = target[tuple(slice(1, 1 + shape[axis]) for axis in order)]
                groups[-1].append((View.of(to), View.of(of)))
                made.append((len(groups) - 1, target, to, of))
        table = Gather(groups, "cpu", (TILE, COARSE)[drawn(0, 1)])
        for group in range(len(groups)):
            assert not any(int(target.count_nonzero()) for at, target, _, _ in made if at == group)
            table.launch(group)
            for at, target, to, of in made:
                if at == group:
                    assert torch.equal(to, of), (to.shape, of.stride(), of.dtype)
                    assert int(target.count_nonzero()) == of.numel(), "a neighbour was written"


def casts() -> None:
    """Every float16, every bfloat16 and what lies around each of them as float32, as torch casts."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    around = [(halves.to(torch.int32) << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    around += [
        bits(halves.view(torch.float16).float()).view(torch.int32) + low for low in (-1, 1, 0xFFF, 0x1000, 0x1001)
    ]
    given = {
        torch.float16: halves.view(torch.float16),
        torch.bfloat16: halves.view(torch.bfloat16),
        torch.float32: torch.cat(around).view(torch.float32),
    }
    for of, to in ((of, to) for of in FLOATS for to in FLOATS if of != to):
        source = given[of].view(-1, 2).t()
        made = torch.zeros(source.shape, dtype=to)
        Gather([[(View.of(made), View.of(source))]], "cpu").launch()
        expected = source.to(to)
        nan = expected.isnan()
        assert torch.equal(made.isnan(), nan), (of, to)
        assert torch.equal(bits(made[~nan]), bits(expected[~nan])), (of, to)


def summed() -> tuple[Summed, torch.Tensor]:
    """A box of a tensor as some process may hold it, and the box without gaps."""
    dims = drawn(0, 4)
    dtype = DTYPES[drawn(0, len(DTYPES) - 1)]
    most = {0: 1, 1: 30_000, 2: 600, 3: 60, 4: 12}[dims]
    tensor = [drawn(1, most) for _ in range(dims)]
    if dims > 1 and drawn(0, 1):
        tensor[-1] = 64 * drawn(1, 32)
    box = [sorted((drawn(0, n - 1), drawn(1, n))) for n in tensor]
    offset, shape = [low for low, _ in box], [max(1, high - low) for low, high in box]
    part = [sorted((drawn(0, n - 1), drawn(1, n))) if drawn(0, 1) else (0, n) for n in shape]
    low, extent = [a for a, _ in part], [max(1, b - a) for a, b in part]
    order = torch.randperm(dims).tolist() if drawn(0, 2) == 0 else list(range(dims))
    apart, before = drawn(1, 2), drawn(0, 2)
    lying = [before + extent[axis] * apart + drawn(0, 3) for axis in order]
    raw = torch.randint(0, 256, [*lying[:-1], (lying or [1])[-1] * dtype.itemsize], dtype=torch.uint8)
    base = raw.view(dtype) if dims else raw.view(dtype)[0]
    held = base[tuple(slice(before, before + extent[axis] * apart, apart) for axis in order)]
    held = held.permute([order.index(axis) for axis in range(dims)])
    item = Summed(View.of(held), tuple(tensor), tuple(offset), tuple(shape), tuple(low))
    return item, held


def target(like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of zeros, dimensions in any order, and a box in it of that shape."""
    order = torch.randperm(like.ndim).tolist() if drawn(0, 1) else list(range(like.ndim))
    around = torch.zeros([like.shape[axis] + 4 * drawn(0, 1) for axis in order], dtype=dtype)
    inside = around[tuple(slice(0, like.shape[axis]) for axis in order)]
    return around, inside.permute([order.index(axis) for axis in range(like.ndim)])


def sums(count: int = 40) -> None:
    """Against ``digest``, cell by cell: boxes with any strides, parts of pieces, several at once and in groups.

    Some are copied too.
    """
    taken = moved = 0
    for _ in range(count):
        made = [one for one in (summed() for _ in range(drawn(1, 4))) if takes(one[0])]
        targets = []
        for number, (item, held) in enumerate(made):
            around, into = target(held, held.dtype)
            both = item._replace(into=View.of(into))
            if drawn(0, 2) and takes(both):
                made[number] = both, held
                targets.append((around, into, held))
        groups = [drawn(0, 2) for _ in made]
        found = DeviceSums([item for item, _ in made], groups)
        for _ in range(2):
            expected = []
            for item, held in made:
                for _, _, _, begin, end in cells_of(item):
                    cut = [slice(a - b, c - b) for a, c, b in zip(begin, end, item.low, strict=False)]
                    place = [a + b for a, b in zip(begin, item.offset, strict=False)]
                    expected.append(digest(View.of(held).sub(cut), item.tensor, place))
                    taken += 1
            assert found.run().tolist() == expected, [(item, item.view.strides) for item, _ in made]
            for around, into, held in targets:
                assert torch.equal(bits(into), bits(held)), (into.stride(), held.stride(), held.dtype)
                assert int(around.count_nonzero()) == int(held.count_nonzero()), "a neighbour was written"
                around.zero_()
                moved += 1
            for _, held in made:
                held[...] = held.flip(0) if held.ndim else torch.ones((), dtype=held.dtype)
    assert taken > count
    assert moved > count // 2
    long = torch.randint(0, 1 << 62, (400_000,))
    for before in (0, SPAN - 1000):  # along a row longer than a span the words' weights begin again
        item = Summed(View.of(long), (before + len(long),), (before,))
        expected = [
            digest(item.view.sub([slice(*low, *high)]), item.tensor, (before + low[0],))
            for _, low, high, *_ in cells_of(item)
        ]
        assert DeviceSums([item]).run().tolist() == expected


def checks(count: int = 20) -> None:
    """What is stored is found again by whoever reads a part of the piece; one wrong element is told by its tile."""
    for _ in range(count):
        shape = tuple(drawn(1, n) for n in ((40_000,), (300, 700), (20, 40, 160), (4, 5, 6, 7))[drawn(0, 3)])
        offset, dtype = tuple(drawn(0, 9) for _ in shape), (torch.bfloat16, torch.float32, torch.uint8)[drawn(0, 2)]
        tensor = tuple(a + n for a, n in zip(offset, shape, strict=True))
        piece = torch.randint(0, 100, shape).to(dtype)
        whole, size = View.of(piece), dtype.itemsize
        table = np.zeros(grid(shape, size).cells + 1, np.int64)
        sums = Sums(tensor, offset, shape, (), table.ctypes.data)
        live = View.of(piece.clone())
        stores = DeviceChecks([(Row(whole, live, sums=sums), Summed(live, tensor, offset, shape), 0)])
        run(stores)
        assert stores.wrong() is None
        assert int(table[-1]) == 0, "the table's neighbour was written"
        expected = [
            (
                digest(
                    whole.sub([slice(*ends) for ends in zip(*grid(shape, size).cell(at), strict=True)]), tensor, place
                )
                + CHECKSUM_OFFSET
            )
            & MASK
            for at in range(len(table) - 1)
            for place in [tuple(a + b for a, b in zip(offset, grid(shape, size).cell(at)[0], strict=True))]
        ]
        assert table[:-1].view(np.uint64).tolist() == expected
        low = tuple(drawn(0, n - 1) for n in shape)
        high = tuple(drawn(a + 1, n) for a, n in zip(low, shape, strict=True))
        part = [slice(a, b) for a, b in zip(low, high, strict=True)]
        arrived = piece[tuple(part)].clone()
        sums = Sums(tensor, offset, shape, low, table.ctypes.data, whole)
        row = Row(View.of(arrived), whole.sub(part), sums=sums)
        compares = DeviceChecks([(row, Summed(row.destination, tensor, offset, shape, low), 3)])
        compares.begin()
        assert compares.wrong() == (row, 0), "what was not summed must not pass"
        run(compares)
        assert compares.wrong() is None
        at = tuple(drawn(0, n - 1) for n in arrived.shape)
        arrived[at] += 1
        run(compares)
        found = compares.wrong()
        assert found is not None
        tile = list(grid(shape, size).tiles(low, high))[found[1]]
        place = tuple(a + b for a, b in zip(low, at, strict=True))
        assert all(a <= n < b for a, n, b in zip(tile.taken_low, place, tile.taken_high, strict=True))


def run(one: DeviceChecks) -> None:
    one.begin()
    for group in range(4):
        one.launch(group)
    one.finish(one.rest(1))


def cast_sums() -> None:
    """Of what the bytes are once they have been cast."""
    for of, to in ((of, to) for of in FLOATS for to in FLOATS if of != to):
        for shape in ((), (5000,), (90, 70), (3, 40, 33)):
            held = torch.randn(shape) * 1000
            source = held.to(of).t() if len(shape) == 2 else held.to(of)
            item = Summed(View.of(source), tuple(source.shape), (0,) * source.ndim, dtype=dtype_name(to))
            into = source.to(to).contiguous()
            expected = DeviceSums([Summed(View.of(into), tuple(into.shape), (0,) * into.ndim)]).run()
            assert DeviceSums([item]).run().tolist() == expected.tolist(), (of, to, shape)
            made = torch.zeros(source.shape, dtype=to)
            moved = item._replace(into=View.of(made))
            assert DeviceSums([moved]).run().tolist() == expected.tolist(), (of, to, shape)
            assert torch.equal(made, into), (of, to, shape)


def main() -> None:
    torch.manual_seed(math.prod(map(ord, sys.argv[1])) % 1_000_003)
    {"copies": copies, "casts": casts, "sums": sums, "cast-sums": cast_sums, "checks": checks}[sys.argv[1]]()
    print("as torch")  # noqa: T201


if __name__ == "__main__":
    main()
