"""Runs the devices' kernels on host memory in Triton's interpreter: `python -m tests.transports.interpreted copies`.

A process of its own, with TRITON_INTERPRET=1: Triton reads that when it is imported.
"""

from __future__ import annotations

import math
import sys

import torch

from awexd_transports.cuda.gather import Gather
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
        table = Gather(groups, "cpu")
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


def main() -> None:
    torch.manual_seed(math.prod(map(ord, sys.argv[1])) % 1_000_003)
    {"copies": copies, "casts": casts}[sys.argv[1]]()
    print("as torch")  # noqa: T201


if __name__ == "__main__":
    main()
