"""What an adapter is, and which live tensors may be handed out as bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from awexd_transports.dtypes import dtype_name
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

_PACKED_CLASSES = frozenset({"Int8Params", "Params4bit"})
"""bitsandbytes parameters: their shape and dtype are those of packed storage, not of the weight."""


@dataclass(frozen=True)
class EngineWeights:
    """How weights are handed out, or an engine's are brought up to date.

    Attributes:
        direct: live parameters, read or written in place; an engine's are proven plain.
        aside: whole checkpoint tensors in host buffers of the adapter's own, for what the engine transforms after
            loading. They are filled and checked while staging.
        load: called inside the update, once every byte of ``direct`` and ``aside`` is in and checked, before the update
            counts: the model's own loading of ``aside``, and whatever is derived from either. What it raises fails the
            update.
        reasons: for each tensor in ``aside``, by name, why it is not written in place.
        check: called with the target before each publication; raises where live memory is not the newest weights.
    """

    direct: Sequence[Shard]
    aside: Sequence[Shard] = ()
    load: Callable[[], None] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[object], None] | None = None


@runtime_checkable
class Adapter(Protocol):
    """Turns one kind of training or inference object into shards.

    An engine's adapter may have ``engine_weights(target) -> EngineWeights`` besides, which readers then ask instead;
    a trainer's ``check_current(target)``, which raises where memory is not the newest weights yet.

    Attributes:
        name: what ``register(adapter=...)`` calls it.
    """

    @property
    def name(self) -> str: ...

    def matches(self, target: object) -> bool:
        """Whether this adapter should be chosen for ``target`` when none is named. Cheap; must not raise."""
        ...

    def shards(self, target: object) -> Iterable[Shard]:
        """Views into live memory, under checkpoint names: detached, never copied, never gathered, no collectives.

        Raises:
            InvalidArgument: a tensor that cannot be handed out, by name.
        """
        ...


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; imports nothing (where DTensor's module is not loaded, there is no DTensor)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def live_view(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The detached view of a plain tensor: the same storage, no autograd.

    Raises:
        InvalidArgument: its bytes are not the weight's elements, or there are none; names the tensor.
    """
    problem = _unreadable(tensor)
    if problem:
        raise InvalidArgument(f"{name}: {problem}")
    try:
        dtype_name(tensor.dtype)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error
    return tensor.detach()


def _unreadable(tensor: Any) -> str | None:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet (a lazy module): run one forward pass first"
    if type(tensor).__name__ in _PACKED_CLASSES or tensor.is_quantized:
        return f"quantised storage ({type(tensor).__name__}, {tensor.dtype}); give the plain weight instead"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__} wraps other tensors; give its plain parts as Shards"
    if tensor.is_meta:
        return "on the meta device, it has no memory: materialise the model first"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}; only dense (strided) tensors can be moved"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negative view: its bytes are not its values; resolve it first"
    return None
