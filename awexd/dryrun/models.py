"""A checkpoint's tensors by kind: which of them trainers and engines cut in the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.shard import PAIRS


class Kind(Enum):
    """What a tensor is, which decides how trainers and engines cut it."""

    EMBEDDING = auto()
    HEAD = auto()
    FINAL_NORM = auto()
    WHOLE = auto()  # norms and routers, and whatever else every rank has all of
    ROUTER_BIAS = auto()  # a float32 buffer, where other tensors are parameters
    QUERY = auto()
    KEY = auto()
    VALUE = auto()
    OUTPUT = auto()  # attention's: columns by head
    HEADED = auto()  # rows by head: MLA's up-projections, sinks
    LATENT = auto()  # MLA's down-projections
    UP = auto()  # of a dense MLP: gate and up, rows
    DOWN = auto()  # columns
    GATE_UP = auto()  # gate's rows, then up's, in one tensor
    SHARED_UP = auto()
    SHARED_DOWN = auto()
    EXPERT_UP = auto()  # one expert's
    EXPERT_DOWN = auto()
    STACK_UP = auto()  # all experts': [E, h, 2F], gate and up interleaved
    STACK_UP_BIAS = auto()  # [E, 2F]
    STACK_DOWN = auto()  # [E, F, h]
    STACK_DOWN_BIAS = auto()  # [E, h]


OUTSIDE = frozenset({Kind.EMBEDDING, Kind.HEAD, Kind.FINAL_NORM})
STACKS = frozenset({Kind.STACK_UP, Kind.STACK_UP_BIAS, Kind.STACK_DOWN, Kind.STACK_DOWN_BIAS})


@dataclass(frozen=True)
class Tensors:
    """Tensors that differ in their numbers only.

    Attributes:
        name: with ``{layer}`` and ``{expert}`` where those stand.
        layers: numbers of the layers that have it; none: it is outside of layers.
        experts: how many each layer has of it; 0: it is no single expert's.
        shape: in the checkpoint.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] = ()
    experts: int = 0

    @property
    def layout(self) -> str | None:
        """In which both sides give it, where parts are no slices of the checkpoint's tensor."""
        return PAIRS if self.kind in (Kind.STACK_UP, Kind.STACK_UP_BIAS) else None

    @property
    def extent(self) -> tuple[int, ...]:
        """Its shape in that layout."""
        return (*self.shape[:-1], self.shape[-1] // 2, 2) if self.layout == PAIRS else self.shape

    @property
    def count(self) -> int:
        return (1 if self.kind in OUTSIDE else len(self.layers)) * (self.experts or 1)

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)

    def names(self) -> Iterator[str]:
        for layer in self.layers or (0,):
            for expert in range(self.experts or 1):
                yield self.name.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the sizes by which layouts cut it.

    Attributes:
        tensors: what the checkpoint holds; without ``lm_head`` where it is ``tied`` to the embedding.
        heads, groups, head: query heads, key/value heads, and the size of each.
        notes: what a reader of the plan should know.
    """

    family: str
    tensors: tuple[Tensors, ...]
    layers: int
    vocabulary: int
    heads: int
    groups: int
    head: int
    experts: int
    tied: bool
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> int:
        return sum(each.count for each in self.tensors)

    @property
    def elements(self) -> int:
        return sum(each.elements for each in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(each.elements * ITEMSIZE[each.dtype] for each in self.tensors)

    @property
    def embedding(self) -> Tensors:
        return next(each for each in self.tensors if each.kind is Kind.EMBEDDING)

    @property
    def tied_head(self) -> Tensors | None:
        """The embedding's other name, where it has one."""
        one = self.embedding
        return Tensors("lm_head.weight", Kind.HEAD, one.shape, one.dtype) if self.tied else None
