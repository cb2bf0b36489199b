"""vLLM's models: what of a live model is written in place, and what its own loader must take.

Written in place is only what is proven plain: a module of a known class, not quantized, whose parameters have the
shape, dtype and order in memory with which the class created them, and no kernel that has a form of its own of them.
All else goes *aside*: whole checkpoint tensors in host buffers, loaded by the model's own ``load_weights`` in a session
of layerwise reloading (see ``loading``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import EngineWeights
from awexd_client.adapters.names import is_weight_buffer
from awexd_client.adapters.vllm.layout import Layout, buffers, class_names, direct, own_tensors
from awexd_client.adapters.vllm.loading import Loading
from awexd_client.adapters.vllm.names import Names
from awexd_client.adapters.vllm.rules import DERIVED, KINDS, PLAIN, layouts_of
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

_EXPERTS = frozenset({"RoutedExperts", "GptOssRoutedExperts"})
_UNQUANTIZED = frozenset(
    {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
_ONLINE = frozenset({"OnlineLinearBase", "OnlineMoEMethodBase"})
"""Classes of methods that quantize plain weights while they are loaded (layers/quantization/online)."""
_PLAIN_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""Of UnquantizedMoeBackend, those whose kernels take w13 and w2 as loaded (fused_moe/oracle/unquantized.py)."""


@dataclass(frozen=True)
class Owner:
    """A module that owns parameters: their layouts, and why they are not written in place, if they are not."""

    path: str
    module: Any
    layouts: tuple[Layout, ...]
    reason: str | None


class VLLMAdapter:
    """Adapter of a vLLM model as one worker holds it.

    Args:
        vllm_config: vLLM's VllmConfig; None: the current one, as in a worker's own calls.
    """

    name = "vllm"

    def __init__(self, vllm_config: Any = None) -> None:
        self._vllm_config = vllm_config

    def matches(self, target: object) -> bool:
        modules = (cls.__module__ for cls in type(target).__mro__)
        return any(module.startswith("vllm.model_executor.models.") for module in modules)

    def shards(self, target: object) -> Iterator[Shard]:
        """All weights, in place.

        Raises:
            InvalidArgument: some cannot be written so; they are named, with the reason.
        """
        weights = self.engine_weights(target)
        if weights.reasons:
            name, reason = next(iter(weights.reasons.items()))
            raise InvalidArgument(
                f"{name} and {len(weights.reasons) - 1} more cannot be written in place: {reason}; use the back end"
                " 'awexd' of vLLM, or WorkerWeightsReader with adapter='vllm'"
            )
        yield from weights.direct

    def engine_weights(self, target: Any) -> EngineWeights:
        """How each weight of the model is brought in.

        Raises:
            InvalidArgument: a parameter that no rule and no loader takes, by name.
        """
        owners = self.owners(target)
        plain = [owner for owner in owners if owner.reason is None]
        others = [owner for owner in owners if owner.reason is not None]
        held = buffers(layout for owner in others for layout in owner.layouts)
        reasons = {
            part.name: owner.reason or "" for owner in others for layout in owner.layouts for part in layout.parts
        }
        loading = Loading(target, [(owner.path, owner.module, _loaded(owner)) for owner in others], held, self._config)
        return EngineWeights(
            direct=[shard for owner in plain for shard in _in_place(owner)],
            aside=[Shard(name, tensor) for name, tensor in held.tensors.items()],
            load=loading.run if loading.needed else None,
            reasons=reasons,
        )

    def owners(self, model: Any) -> list[Owner]:
        """The modules that own parameters, in the model's order; a parameter that several share is its first's."""
        names = Names(model, self._config.model_config.model)
        found: list[Owner] = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            _refuse_buffers(path, module)
            created = {
                key: tensor for key, tensor in _created(module).items() if id(module._parameters.get(key)) not in seen
            }
            seen |= {id(tensor) for tensor in own_tensors(module).values()}
            if created and type(module).__name__ not in DERIVED:
                _refuse_quantized_on_disk(path, module)
            layouts = layouts_of(path, module, created, names) if created else []
            if layouts:
                found.append(Owner(path, module, tuple(layouts), _transformed(module, layouts)))
        return found

    @property
    def _config(self) -> Any:
        if self._vllm_config is not None:
            return self._vllm_config
        from vllm.config import get_current_vllm_config

        return get_current_vllm_config()


def _transformed(module: Any, layouts: Sequence[Layout]) -> str | None:
    """Why a module's parameters are not what was loaded into them; None where it is proven that they are."""
    kind, method = type(module).__name__, _method(module)
    if kind not in KINDS and kind not in PLAIN:
        return f"what a {kind} makes of its weights is not known"
    if method not in _UNQUANTIZED:
        return f"quantized: {method}"
    if kind in _EXPERTS:
        return _transformed_experts(module) or _changed(module, layouts)
    return _changed(module, layouts)


def _changed(module: Any, layouts: Iterable[Layout]) -> str | None:
    for layout in layouts:
        key = layout.path.rpartition(".")[2]
        live = module._parameters[key]
        if live.is_meta:
            return f"{key} has no memory yet"
        if tuple(live.shape) != layout.shape:
            return f"{key} was repacked after loading: {list(live.shape)} now, {list(layout.shape)} when it was loaded"
        if live.dtype != layout.dtype:
            return f"{key} was cast after loading: {live.dtype} now, {layout.dtype} when it was loaded"
        if not live.is_contiguous():
            return f"{key} was rearranged after loading: its strides are {list(live.stride())}"
    return None


def _transformed_experts(module: Any) -> str | None:
    method = module.quant_method
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if backend not in _PLAIN_EXPERTS or experts is None:
        return f"experts of the back end {backend} have a layout of their own after loading"
    changes = next(cls for cls in type(experts).__mro__ if "process_weights_after_loading" in vars(cls))
    if changes.__name__ not in {"FusedMoEExperts", "FusedMoEExpertsModular", "FusedMoEExpertsMonolithic"}:
        return f"{type(experts).__name__} changes its weights after loading"
    return None


def _created(module: Any) -> dict[str, torch.Tensor]:
    """A module's parameters as its class created them: vLLM records that, biases and borrowed ones excepted.

    What a quantized module has besides, its quantization has made of them: scales, packed weights.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    recorded, own = get_layerwise_info(module).restore_metadata[0], own_tensors(module)
    if _method(module) not in _UNQUANTIZED:
        return {**recorded, **{key: tensor for key, tensor in own.items() if key in SKIP_TENSORS}}
    return {key: recorded.get(key, tensor) for key, tensor in own.items()}


def _method(module: Any) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _in_place(owner: Owner) -> Iterator[Shard]:
    for layout in owner.layouts:
        tensor = owner.module._parameters[layout.path.rpartition(".")[2]]
        yield from direct(layout, tensor)


def _loaded(owner: Owner) -> int:
    """How many elements vLLM's loader is to bring into a module."""
    return sum(layout.filled for layout in owner.layouts)


def _refuse_quantized_on_disk(path: str, module: Any) -> None:
    method = getattr(module, "quant_method", None)
    if _method(module) not in _UNQUANTIZED and _ONLINE.isdisjoint(class_names(method)):
        raise InvalidArgument(
            f"{path}: quantized in the checkpoint that the engine was started from ({_method(module)}), where a trainer"
            " has plain weights; start it from the plain checkpoint, and have vLLM quantize that, for example with"
            " --quantization fp8"
        )


def _refuse_buffers(path: str, module: Any) -> None:
    if type(module).__name__ in DERIVED:
        return
    for key, buffer in module._buffers.items():
        persistent = key not in module._non_persistent_buffers_set
        if buffer is not None and not key.startswith("_") and is_weight_buffer(f"{path}.{key}", persistent=persistent):
            raise InvalidArgument(
                f"{path}.{key}: a buffer that is saved with the weights, in a {'/'.join(class_names(module)[:1])};"
                " no rule says where it comes from"
            )
