"""A box of a named global tensor, and one process's shard of it. Pure: no I/O, no torch.

Coordinates are in elements of the Hugging Face tensor (its name and shape are the one format both sides are mapped to).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

PAIRS = "pairs"
"""The checkpoint's last dimension, of 2n elements, as two: ``[..., n, 2]``. Gate and up of gpt-oss interleave so."""
RESHAPES = frozenset({PAIRS})
"""Layouts that are only another shape of the same elements in the same order: their boxes may be cut like a plain
tensor's. What follows any other layout moves whole."""
MAX_NAME_BYTES = 1024
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 48
"""Of one global tensor, and of one of its dimensions: sums and products then fit 64-bit integers and even floats."""


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open n-dimensional interval ``[offset, offset + shape)``. Zero dimensions: one element. Any zero: empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def relative_to(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Slices of this box in a local array that starts at ``origin``."""
        return tuple(slice(o - b, o - b + n) for o, b, n in zip(self.offset, origin, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A global tensor: checkpoint name, global shape in elements, torch dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One shard without its bytes.

    Attributes:
        tensor: the global tensor it is part of.
        box: its part, in global coordinates.
        piece: which stored piece of the rank holds it; entries with the same number are aliases of one storage.
        layout: None for a plain slice, else the name of a permutation both sides know; ``tensor.shape`` and ``box``
            are then those in the layout.
    """

    tensor: TensorSpec
    box: Box
    piece: int
    layout: str | None = None

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.tensor.dtype]


class Shard:
    """One process's part of a tensor: a view of live memory and the box of the global tensor that it holds.

    Args:
        name: the tensor's checkpoint name.
        tensor: the local view, any strides; never copied here.
        global_shape: shape of the whole tensor; omitted together with ``offset``: ``tensor`` is the whole.
        offset: first element of the box, one number a dimension; the box's shape is the view's.
        layout: named permutation, where the part is not a plain slice; with ``"pairs"`` all of the above have the
            checkpoint's last dimension as ``[n, 2]``.

    Raises:
        InvalidArgument: a box that is not inside the global shape, or only one of shape and offset.
    """

    __slots__ = ("box", "global_shape", "layout", "name", "tensor")

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        global_shape: Sequence[int] | None = None,
        offset: Sequence[int] | None = None,
        *,
        layout: str | None = None,
    ) -> None:
        shape = tuple(int(n) for n in tensor.shape)
        if (global_shape is None) != (offset is None):
            raise InvalidArgument(f"{name}: give both global_shape and offset, or neither (the whole tensor)")
        self.name = name
        self.tensor = tensor
        self.layout = layout
        self.global_shape = shape if global_shape is None else tuple(int(n) for n in global_shape)
        self.box = Box((0,) * len(shape) if offset is None else tuple(int(n) for n in offset), shape)
        problem = box_problem(self.global_shape, self.box)
        if problem:
            raise InvalidArgument(f"{name}: {problem}")

    @property
    def offset(self) -> tuple[int, ...]:
        return self.box.offset

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {self.tensor.dtype}, box={self.box} of {list(self.global_shape)})"


def check_tensor_name(name: object) -> str:
    """A tensor name as given, if it is one.

    Raises:
        InvalidArgument: empty, too long, or with control characters.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a tensor's name must be a non-empty string, not {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise InvalidArgument(f"a tensor's name of more than {MAX_NAME_BYTES} bytes: {name[:60]!r}...")
    if not name.isprintable():
        raise InvalidArgument(f"a tensor's name with control characters: {name!r}")
    return name


def box_problem(shape: tuple[int, ...], box: Box) -> str | None:
    """What is wrong with a part of a tensor of this shape; None if nothing is."""
    numbers = (*shape, *box.offset, *box.shape)
    if any(type(n) is not int or n < 0 for n in numbers):
        return f"sizes and offsets must be whole numbers >= 0, not {numbers}"
    if len(shape) > MAX_DIMS:
        return f"{len(shape)} dimensions; at most {MAX_DIMS}"
    if not len(shape) == len(box.offset) == len(box.shape):
        return f"global shape {list(shape)}, offset {list(box.offset)} and shape {list(box.shape)} differ in dimensions"
    if max(math.prod(shape), *shape, 0) > MAX_ELEMENTS:
        return f"{max(math.prod(shape), *shape)} elements; at most {MAX_ELEMENTS}"
    if any(end > n for end, n in zip(box.end, shape, strict=True)):
        return f"its box {box} is not inside the global shape {list(shape)}"
    return None
