"""What an engine's live parameters are in terms of checkpoint tensors, and which of them may be written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from awexd_client.adapters.base import EngineWeights
from awexd_client.adapters.buffers import HostBuffers
from awexd_client.adapters.rules import Run, shards_along
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

NamedTensors = list[tuple[str, "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class Part:
    """A live parameter, or one expert's slot of it.

    Attributes:
        path: of the parameter, for messages.
        tensor: its live memory.
        shape: that it has where its memory is slices of checkpoint tensors as they are.
        runs: what its indices along ``dim`` are.
        reason: why it must not be written in place, though its names and sizes are known; None: nothing known.
        dtype: of the checkpoint's tensors; None: the live one's.
        alias: a further name of a tensor that has another part; the model's own loader is not given this one.
    """

    path: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    runs: Sequence[Run]
    dim: int = 0
    reason: str | None = None
    dtype: torch.dtype | None = None
    alias: bool = False

    @property
    def problem(self) -> str | None:
        """Why it is not plain."""
        if self.reason:
            return self.reason
        if tuple(self.tensor.shape) != self.shape:
            return f"{list(self.tensor.shape)} in memory, {list(self.shape)} by its rule"
        if self.dtype not in (None, self.tensor.dtype):
            return f"{self.tensor.dtype} in memory, {self.dtype} in checkpoints"
        if not self.tensor.is_contiguous():
            return "not contiguous in memory"
        return None

    def shards(self) -> Iterable[Shard]:
        return shards_along(self.tensor, self.runs, self.dim)

    def whole(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the checkpoint tensors of which it has a part."""
        return {run.name: self._whole_shape(run.total) for run in self.runs if run.name}

    def _whole_shape(self, extent: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])


def arrange(
    parts: Sequence[Part], load_weights: Callable[[NamedTensors], object], refresh: Callable[[], None] | None
) -> tuple[EngineWeights, HostBuffers | None]:
    """Plain parts in place, the others through the model's own loader.

    Args:
        parts: of all live parameters.
        load_weights: the model's own; gets every tensor of a fused parameter in one call.
        refresh: computes what is derived from weights anew; None where nothing is.
    """
    import torch

    reasons = _reasons(parts)
    direct = [shard for part in parts if not reasons.keys() & part.whole().keys() for shard in part.shards()]
    late = [part for part in parts if reasons.keys() & part.whole().keys()]
    if not late:
        return EngineWeights(direct, (), refresh, {}), None
    buffers = HostBuffers(
        {
            name: (shape, part.dtype or part.tensor.dtype)
            for part in late
            if not part.alias
            for name, shape in part.whole().items()
        }
    )
    aside = [Shard(name, tensor) for name, tensor in buffers.tensors.items()]
    aside += [Shard(name, buffers.tensors[other]) for name, other in _aliases(late).items()]

    def load() -> None:
        with torch.no_grad():
            load_weights(list(buffers.tensors.items()))
            if refresh is not None:
                refresh()
        buffers.clear()

    return EngineWeights(direct, aside, load, reasons), buffers


def _reasons(parts: Sequence[Part]) -> dict[str, str]:
    """Names that go through the loader, and why. A fused parameter goes whole, and so does what shares a tensor."""
    reasons = {name: problem for part in parts if (problem := part.problem) for name in part.whole()}
    while True:
        more = {
            name: f"is part of {part.path}, which is loaded whole"
            for part in parts
            if reasons.keys() & part.whole().keys()
            for name in part.whole()
            if name not in reasons
        }
        if not more:
            return reasons
        reasons |= more


def _aliases(parts: Sequence[Part]) -> dict[str, str]:
    """Further names of tensors: of each, the name that has a buffer."""
    own = {part.tensor.data_ptr(): name for part in parts if not part.alias for name in part.whole()}
    return {name: own[part.tensor.data_ptr()] for part in parts if part.alias for name in part.whole()}
