"""Tensors whose every element says which element of which version it is, cut for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from awexd_client import Shard

Cut = Callable[[tuple[int, ...], int, int], tuple[tuple[int, ...], tuple[int, ...]] | None]
"""Global shape, rank and world size to offset and shape of the rank's box; None: it has no part."""

SENTINEL = 0x5B
PADDING = 3


def by(dim: int) -> Cut:
    """As even as it goes along one dimension."""

    return lambda shape, rank, size: _even(shape, dim, rank, size)


def uneven(dim: int) -> Cut:
    """Rank r has a part in proportion to r + 1."""

    def cut(shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        total = size * (size + 1) // 2
        low, high = (shape[dim] * (at * (at + 1) // 2) // total for at in (rank, rank + 1))
        return _slab(shape, dim, low, high)

    return cut


def whole(shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * len(shape), shape


def on(chosen: int) -> Cut:
    """Only one rank has it (counted from the last where negative)."""
    return lambda shape, rank, size: whole(shape, rank, size) if rank == chosen % size else None


def mesh(shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two data-parallel replicas of a cut along dimension 0 where the size is even, else a cut along dimension 1."""
    return _even(shape, 0, rank % (size // 2), size // 2) if size % 2 == 0 else _even(shape, 1, rank, size)


def _even(shape: tuple[int, ...], dim: int, rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low, high = (shape[dim] * at // size for at in (rank, rank + 1))
    return _slab(shape, dim, low, high)


def _slab(shape: tuple[int, ...], dim: int, low: int, high: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offset = tuple(low if at == dim else 0 for at in range(len(shape)))
    return offset, (*shape[:dim], high - low, *shape[dim + 1 :])


@dataclass(frozen=True)
class Kind:
    """One tensor of the model. ``lie`` is how a local part lies in memory; ``same`` names whose values it has."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: Cut
    reader: Cut
    lie: str = "packed"
    same: str | None = None


MODEL = (
    Kind("rows_to_columns", (30, 14), torch.float32, by(0), by(1)),
    Kind("columns_to_rows", (14, 30), torch.bfloat16, by(1), by(0)),
    Kind("uneven", (37, 5), torch.float32, uneven(0), by(0)),
    Kind("to_uneven", (5, 41), torch.float16, by(1), uneven(1)),
    Kind("replicated", (11, 3), torch.int8, whole, whole),
    Kind("replicated_to_columns", (12, 9), torch.float32, whole, by(1)),
    Kind("rows_to_replicated", (9, 9), torch.float8_e4m3fn, by(0), whole),
    Kind("mesh", (8, 10), torch.int64, mesh, mesh),
    Kind("cube", (5, 4, 7), torch.float32, by(1), by(2)),
    Kind("transposed", (16, 10), torch.float32, by(0), by(1), "transposed"),
    Kind("stepped", (17, 6), torch.bfloat16, by(1), by(0), "stepped"),
    Kind("scalar", (), torch.float32, whole, whole),
    Kind("flag", (3,), torch.bool, whole, whole),
    Kind("empty", (0, 4), torch.float32, whole, whole),
    Kind("first_to_last", (3, 5), torch.float64, on(0), on(-1)),
    Kind("tied.a", (10, 6), torch.float32, by(0), by(0), same="tied.a"),
    Kind("tied.b", (10, 6), torch.float32, by(0), by(0), same="tied.a"),
    Kind("apart.a", (6, 10), torch.bfloat16, by(1), by(1), same="apart.a"),
    Kind("apart.b", (6, 10), torch.bfloat16, by(1), by(1), same="apart.a"),
)
"""``tied`` is one tensor at the writers and two at the readers, ``apart`` the other way round."""


def value(kind: Kind, version: int) -> torch.Tensor:
    """The whole tensor at that version: raw bits made of tensor, element index and version."""
    number = sum((kind.same or kind.name).encode())
    index = torch.arange(math.prod(kind.shape), dtype=torch.int64).reshape(kind.shape)
    key = index * 7 + number * 31 + version * 1009
    if kind.dtype is torch.bool:
        return key % 3 == 0
    raw = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.dtype.itemsize]
    modulus = {1: 251, 2: 32749, 4: 1 << 30, 8: 1 << 40}[kind.dtype.itemsize]
    return (key % modulus).to(raw).view(kind.dtype)


def part(kind: Kind, version: int, box: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    offset, shape = box
    return value(kind, version)[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


@dataclass
class Local:
    """One rank's part: ``view`` is what is registered, ``base`` the buffer around it."""

    kind: Kind
    box: tuple[tuple[int, ...], tuple[int, ...]]
    view: torch.Tensor
    base: torch.Tensor

    @property
    def shard(self) -> Shard:
        return Shard(self.kind.name, self.view, self.kind.shape, self.box[0])


class Rank:
    """All parts of one rank of one side ("writer" or "reader"), on that device."""

    def __init__(self, side: str, rank: int, size: int, device: str = "cpu") -> None:
        self.locals: list[Local] = []
        tied = "tied" if side == "writer" else "apart"
        for kind in MODEL:
            box = (kind.writer if side == "writer" else kind.reader)(kind.shape, rank, size)
            if box is None:
                continue
            known = next((one for one in self.locals if one.kind.same and one.kind.same == kind.same), None)
            view, base = (
                (known.view, known.base) if known and kind.name.startswith(tied) else _made(kind, box[1], device)
            )
            self.locals.append(Local(kind, box, view, base))
        self.addresses = [one.view.data_ptr() for one in self.locals]

    @property
    def shards(self) -> list[Shard]:
        return [one.shard for one in self.locals]

    def fill(self, version: int) -> None:
        for one in self.locals:
            one.view.copy_(part(one.kind, version, one.box))

    def wrong(self, version: int) -> list[str]:
        """What is not that version bit for bit, has moved, or has touched its neighbours."""
        found = [
            one.kind.name
            for one in self.locals
            if not torch.equal(_bits(one.view), _bits(part(one.kind, version, one.box)))
        ]
        found += [f"{one.kind.name}: neighbours" for one in self.locals if not _neighbours_untouched(one)]
        found += [
            f"{one.kind.name}: moved"
            for one, address in zip(self.locals, self.addresses, strict=True)
            if one.view.data_ptr() != address
        ]
        return found


def _made(kind: Kind, shape: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of that shape inside a buffer of sentinels."""
    if kind.lie == "transposed":
        base = _buffer(kind, (shape[1] + PADDING, shape[0] + PADDING)).to(device)
        return base.t()[: shape[0], : shape[1]], base
    if kind.lie == "stepped":
        base = _buffer(kind, (2 * shape[0] + 1, shape[1] + PADDING)).to(device)
        return base[: 2 * shape[0] : 2, : shape[1]], base
    base = _buffer(kind, (math.prod(shape) + 2 * PADDING,)).to(device)
    return base[PADDING : base.numel() - PADDING].view(shape), base


def _buffer(kind: Kind, shape: tuple[int, ...]) -> torch.Tensor:
    if kind.dtype is torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    raw = torch.full((math.prod(shape) * kind.dtype.itemsize,), SENTINEL, dtype=torch.uint8)
    return raw.view(kind.dtype).view(shape)


def _neighbours_untouched(one: Local) -> bool:
    around = one.base.cpu().clone()
    start = (one.view.data_ptr() - one.base.data_ptr()) // max(1, one.view.element_size()) if one.view.numel() else 0
    hidden = around.as_strided(one.view.shape, one.view.stride(), start)
    fresh = _buffer(one.kind, tuple(one.base.shape))
    hidden.copy_(fresh.as_strided(one.view.shape, one.view.stride(), start))
    return torch.equal(_bits(around), _bits(fresh))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)
