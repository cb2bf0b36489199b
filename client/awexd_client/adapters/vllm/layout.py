"""Live tensors of vLLM as parts of checkpoint tensors, and buffers for the rest.

A rule of an adapter says of which parts of checkpoint tensors a live tensor is made (:class:`Layout`): pure numbers,
which hold for the tensor as the engine creates it. Where the engine has left it so, its parts are written in place
(:func:`direct`); where it transforms what it has loaded, the checkpoint tensors themselves are received, whole, in host
buffers (:func:`buffers`), and the engine's own loader takes them from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import live_view
from awexd_client.adapters.buffers import HostBuffers
from awexd_client.adapters.rules import Run
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

Axis = tuple[int, int, int]
"""Of one dimension of a checkpoint tensor: where a part starts, how long it is, and the whole extent."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a live tensor that is a box of one checkpoint tensor.

    Attributes:
        name, shape: of the checkpoint tensor.
        offset: where in it the box starts.
        index: which box of the live tensor; a number leaves that dimension out (the slot of an expert).
        turned: the last two dimensions are the other way round in the checkpoint's tensor.
        zeros: this rank has zeros there instead: it takes no part in adding a bias.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    index: tuple[int | slice, ...]
    turned: bool = False
    zeros: bool = False

    @property
    def numel(self) -> int:
        return prod(step.stop - step.start for step in self.index if isinstance(step, slice))


@dataclass(frozen=True, slots=True)
class Layout:
    """Of which parts of checkpoint tensors a live tensor is made, as long as it is what the engine loaded.

    Attributes:
        path: the live tensor's dotted name.
        shape: it has in memory.
        parts: disjoint; what none covers is padding.
        dtype: of the checkpoint tensors.
    """

    path: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: torch.dtype

    @property
    def filled(self) -> int:
        """How many of its elements come from checkpoint tensors; the rest is padding."""
        return sum(part.numel for part in self.parts)


def parts_of(rows: Sequence[Run], *rest: Axis, slot: int | None = None, first: int = 0) -> Iterator[Part]:
    """The parts of a tensor whose rows are ``rows``, one after another, and whose further dimensions are ``rest``.

    Args:
        slot: the tensor has a leading dimension of experts more, and this is the index in it.
        first: where along the rows' dimension the first of them lies.
    """
    lead: tuple[int | slice, ...] = () if slot is None else (slot,)
    columns = tuple(slice(0, length) for _, length, _ in rest)
    starts = accumulate((run.length for run in rows), initial=first)
    for at, run in zip(starts, rows, strict=False):
        if run.name and run.length:
            shape = (run.total, *(total for _, _, total in rest))
            offset = (run.start, *(start for start, _, _ in rest))
            yield Part(run.name, shape, offset, (*lead, slice(at, at + run.length), *columns))


def whole(name: str, shape: Sequence[int]) -> Part:
    """A live tensor that is all of one checkpoint tensor."""
    return Part(name, tuple(shape), (0,) * len(shape), tuple(slice(0, extent) for extent in shape))


def direct(layout: Layout, tensor: torch.Tensor) -> Iterator[Shard]:
    """The parts of the live tensor, to be written in place.

    Raises:
        InvalidArgument: it has not the shape that its layout says, or cannot be handed out.
    """
    live = live_view(layout.path, tensor)
    if tuple(live.shape) != layout.shape:
        raise InvalidArgument(
            f"{layout.path}: {list(layout.shape)} by its rule, {list(live.shape)} in memory; not written in place"
        )
    for part in layout.parts:
        if not part.zeros:
            box = live[part.index]
            yield Shard(part.name, box.mT if part.turned else box, part.shape, part.offset)


def buffers(layouts: Iterable[Layout]) -> HostBuffers:
    """Host memory for each checkpoint tensor of which ``layouts`` hold a part, in that order.

    Raises:
        InvalidArgument: two parts that name one tensor of two shapes or dtypes.
    """
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for layout in layouts:
        for part in layout.parts:
            shape, dtype = made.setdefault(part.name, (part.shape, layout.dtype))
            if (shape, dtype) != (part.shape, layout.dtype):
                raise InvalidArgument(
                    f"{part.name}: {list(part.shape)} {layout.dtype} for {layout.path}, {list(shape)} {dtype} elsewhere"
                    " in the model"
                )
    return HostBuffers(made)


def own_tensors(module: Any) -> dict[str, torch.Tensor]:
    """A module's parameters, none of its children's."""
    return {key: tensor for key, tensor in module._parameters.items() if tensor is not None}


def class_names(thing: object) -> list[str]:
    """Names of an object's classes, its own first: engines are told by name, so that none is imported."""
    return [cls.__name__ for cls in type(thing).__mro__]
