"""The weights of the GPU's figures: names and shapes of real models, how they are cut, and what they must hold.

Every element says where it belongs: its bits are a mix of its tensor's number and its index in the global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from awexd_client import Shard

ITEMSIZE = 2  # bfloat16
HEAD = 128
VOCABULARY = 151_936
CHUNK = 16 << 20
"""Elements whose pattern is made at once: eight bytes each, and as much again."""
_MIX = 0x9E3779B1  # odd: no two indices below 2^32 give one product


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """A set of bfloat16 tensors.

    Attributes:
        kind: ``dense``: those of Qwen3-8B, 399 tensors, 16.4 GB. ``moe``: one of four expert-parallel shards of
            Qwen3-30B-A3B, 5,043 tensors, 17.6 GB. ``rows``: 64 matrices of ``size`` bytes together, whose halves along
            dimension 1 have rows of ``width`` bytes.
        shrink: divides every dimension.
        layers: only so many; 0: all.
        moving: every element changes with each step, not only a tensor's first.
    """

    kind: Literal["dense", "moe", "rows"]
    shrink: int = 1
    layers: int = 0
    width: int = 0
    size: int = 0
    moving: bool = False

    def tensors(self) -> list[Tensor]:
        if self.kind == "rows":
            columns = 2 * self.width // ITEMSIZE
            return [Tensor(f"rows.{at}", (self.size // 64 // ITEMSIZE // columns, columns)) for at in range(64)]
        found = _dense(self.layers or 36) if self.kind == "dense" else _moe(self.layers or 48)
        return [Tensor(one.name, tuple(max(2, n // self.shrink) for n in one.shape)) for one in found]

    @property
    def nbytes(self) -> int:
        return sum(ITEMSIZE * math.prod(one.shape) for one in self.tensors())


def _dense(layers: int) -> list[Tensor]:
    found = _ends(4096)
    for at in range(layers):
        found += _attention(f"layers.{at}.", hidden=4096, heads=32, groups=8)
        found += _mlp(f"layers.{at}.mlp.", 4096, 12_288)
    return found


def _moe(layers: int) -> list[Tensor]:
    found = _ends(2048)
    for at in range(layers):
        found += _attention(f"layers.{at}.", hidden=2048, heads=32, groups=4)
        found.append(Tensor(f"layers.{at}.mlp.gate.weight", (128, 2048)))
        for expert in range(32):
            found += _mlp(f"layers.{at}.mlp.experts.{expert}.", 2048, 768)
    return found


def _ends(hidden: int) -> list[Tensor]:
    whole = (VOCABULARY, hidden)
    return [Tensor("embed.weight", whole), Tensor("head.weight", whole), Tensor("norm.weight", (hidden,))]


def _attention(prefix: str, *, hidden: int, heads: int, groups: int) -> list[Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (heads * HEAD, hidden),
        "k_proj": (groups * HEAD, hidden),
        "v_proj": (groups * HEAD, hidden),
        "o_proj": (hidden, heads * HEAD),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
        "input_norm": (hidden,),
        "post_norm": (hidden,),
    }
    return [Tensor(f"{prefix}{name}.weight", shape) for name, shape in shapes.items()]


def _mlp(prefix: str, hidden: int, inner: int) -> list[Tensor]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return [Tensor(f"{prefix}{name}.weight", shape) for name, shape in shapes.items()]


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensors are divided among processes; those that do not divide so are whole in each.

    Attributes:
        own: the part that a process holds; None: all of them, as tensors of their own.
    """

    dim: int = 0
    parts: int = 1
    own: int | None = None

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offset and shape of each part that is held."""
        if self.parts == 1 or self.dim >= len(shape) or shape[self.dim] % self.parts:
            yield (0,) * len(shape), tuple(shape)
            return
        each = shape[self.dim] // self.parts
        for part in range(self.parts) if self.own is None else (self.own,):
            offset = tuple(part * each if dim == self.dim else 0 for dim in range(len(shape)))
            yield offset, tuple(each if dim == self.dim else n for dim, n in enumerate(shape))


class Part(NamedTuple):
    """What one process holds of a tensor; ``number`` is the tensor's in its set."""

    number: int
    whole: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.whole.name}{list(self.offset)}"

    def shard(self, tensor: torch.Tensor) -> Shard:
        from awexd_client import Shard

        return Shard(self.whole.name, tensor, self.whole.shape, self.offset)


def parts_of(weights: Weights, cut: Cut) -> list[Part]:
    return [
        Part(number, one, offset, shape)
        for number, one in enumerate(weights.tensors())
        for offset, shape in cut.boxes(one.shape)
    ]


def fill(part: Part, tensor: torch.Tensor, step: int, *, moving: bool) -> None:
    """Writes what ``part`` holds at ``step``."""
    for rows, values in _values(part, tensor, step if moving else 0):
        _bits(part, tensor)[rows] = values


def holds(part: Part, tensor: torch.Tensor, step: int, *, moving: bool) -> bool:
    """Whether every element is what the trainer's was at ``step``."""
    for rows, values in _values(part, tensor, step if moving else 0):
        if not moving and rows.start == 0 and not any(part.offset):
            values[0, 0] = _marked(step)
        if not bool((_bits(part, tensor)[rows] == values).all()):
            return False
    return True


class Marks:
    """The first element of every tensor, which tells the step where the others do not."""

    def __init__(self, held: Sequence[tuple[Part, torch.Tensor]]) -> None:
        self._first = [_bits(part, tensor)[:1, :1] for part, tensor in held if not any(part.offset)]

    def set(self, step: int) -> None:
        import torch

        if not self._first:
            return
        torch._foreach_zero_(self._first)
        torch._foreach_add_(self._first, _marked(step))


def _marked(step: int) -> int:
    return step & 0x3FFF


def _bits(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    """int16 [rows, columns]; a vector is one row."""
    import torch

    return tensor.view(torch.int16).view(-1, part.shape[-1])


def _values(part: Part, tensor: torch.Tensor, step: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time, and int16 [rows, columns] that belong there."""
    import torch

    matrix = len(part.shape) == 2
    rows, columns = part.shape if matrix else (1, part.shape[0])
    first, left = part.offset if matrix else (0, part.offset[0])
    across = torch.arange(left, left + columns, dtype=torch.int64, device=tensor.device)
    height = max(1, CHUNK // columns)
    for at in range(0, rows, height):
        count = min(height, rows - at)
        down = torch.arange(first + at, first + at + count, dtype=torch.int64, device=tensor.device)
        mixed = (down * part.whole.shape[-1])[:, None] + across
        mixed *= _MIX
        mixed ^= mixed >> 17
        mixed += part.number * 40_503 + step * 25_173
        mixed &= 0xBFFF  # finite as bfloat16: a peer that copies by way of float32 may change what is not a number
        mixed -= (mixed & 0x8000) << 1
        yield slice(at, at + count), mixed.to(torch.int16)
