"""One parameter of a Megatron-Core model in its place, and the rules that most parameters follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import is_dtensor
from awexd_client.adapters.megatron.families import Names
from awexd_client.adapters.megatron.parallel import Place, Places
from awexd_client.adapters.rules import Run, shards_along, split
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """A live parameter, or a buffer that is a weight.

    Attributes:
        path: its dotted name in the model, for messages.
        layer: the TransformerLayer that it is in; for parameters outside of layers the model.
        owner: the module that it is a parameter of.
        prefix: the checkpoint's name up to here, such as ``model.layers.3.``.
        config: the layer's TransformerConfig.
        found: what the rule's pattern matched.
    """

    path: str
    tensor: torch.Tensor
    layer: Any
    owner: Any
    prefix: str
    config: Any
    places: Places
    names: Names
    found: re.Match[str]

    @property
    def leaf(self) -> str:
        """``weight`` or ``bias``."""
        return "bias" if self.path.endswith("bias") else "weight"

    def refuse(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {why}")


Rule = Callable[[Part], Iterator[Shard]]


def check_plain(path: str, tensor: torch.Tensor) -> None:
    """Refuses what holds something else than its elements.

    Raises:
        InvalidArgument: FP8 or FP4 parameters (Transformer Engine's QuantizedTensor, see megatron/core/fp8_utils.py),
            its GroupedTensor, DTensors, and weights that GTP rematerialises.
    """
    import torch

    kinds = {type(tensor), type(tensor.data)} - {torch.Tensor, torch.nn.Parameter}
    if kinds or is_dtensor(tensor):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidArgument(f"{path}: a {names} is not laid out as a plain tensor (no FP8 or grouped parameters yet)")
    if getattr(tensor, "is_gtp_weight_remat", False):
        raise InvalidArgument(f"{path}: a part that GTP gathers again for each use; not supported")


def check_cut(part: Part, cut: bool, place: Place | None = None) -> None:
    """Holds a rule's idea against what Megatron-Core set on the parameter, where it set something.

    ``tensor_model_parallel`` (megatron/core/tensor_parallel/layers.py) says whether it is a part of a tensor;
    ``allreduce`` is False for experts with groups of their own, that is with more than one expert-parallel rank, or
    another expert-tensor-parallel size than the tensor-parallel one. ``partition_dim`` is not looked at: Transformer
    Engine's grouped linears give 0 for row-parallel weights too.

    Raises:
        InvalidArgument: they contradict each other.
    """
    places = part.places
    size = (place or places.tensor).size
    said = getattr(part.tensor, "tensor_model_parallel", None)
    if size > 1 and said is not None and bool(said) != cut:
        raise part.refuse(f"tensor_model_parallel is {said}, where a {'part' if cut else 'whole tensor'} is expected")
    own_groups = place is not None and (places.expert.size > 1 or places.expert_tensor.size != places.tensor.size)
    together = getattr(part.tensor, "allreduce", None)
    if together is not None and bool(together) == own_groups:
        raise part.refuse(f"allreduce is {together}, where expert groups say {not own_groups}")


def whole(part: Part, name: str) -> Iterator[Shard]:
    """Replicated: each rank has all of it."""
    check_cut(part, cut=False)
    length = int(part.tensor.shape[0])
    yield from shards_along(part.tensor, [Run(part.prefix + name, length, 0, length)])


def rows(part: Part, runs: Sequence[Run]) -> Iterator[Shard]:
    """ColumnParallelLinear: output features are cut, which are a weight's rows and a bias's elements."""
    check_cut(part, cut=True)
    yield from shards_along(part.tensor, runs)


def columns(part: Part, name: str, total: int) -> Iterator[Shard]:
    """RowParallelLinear: input features are cut, a weight's columns; the bias is replicated."""
    if part.leaf == "bias":
        yield from whole(part, name)
        return
    check_cut(part, cut=True)
    yield from shards_along(part.tensor, split(part.prefix + name, total, *part.places.tensor), dim=1)


def named(name: str) -> Rule:
    """Replicated, under a name that is the same in all families; ``{leaf}`` is ``weight`` or ``bias``."""
    return lambda part: whole(part, name.format(leaf=part.leaf))


def of_family(attribute: str, name: str) -> Rule:
    """Replicated, under a name of which ``{}`` is the family's; refused where the family has none."""

    def rule(part: Part) -> Iterator[Shard]:
        value = getattr(part.names, attribute)
        if not value:
            raise part.refuse("checkpoints of this family have no such tensor")
        yield from whole(part, name.format(value, leaf=part.leaf))

    return rule
