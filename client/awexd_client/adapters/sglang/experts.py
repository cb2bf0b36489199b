"""SGLang's fused experts: which expert is in which slot, and of which matrices a slot is made.

Source: ``sglang/srt/layers/moe/fused_moe_triton/layer.py`` (FusedMoE) of 0.5.23 and what it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from awexd_client.adapters.rules import gated, split
from awexd_client.adapters.sglang.parts import Part
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


class _Expert(NamedTuple):
    """Paths of one expert's three matrices in the checkpoint."""

    gate: str
    up: str
    down: str


def expert_parts(path: str, layer: Any, reason: str | None) -> Iterator[Part]:
    """A part a slot of ``w13_weight`` [slots, 2F/T, h], rows of gate, then of up, and of ``w2_weight`` [slots, h, F/T].

    Args:
        path: of the FusedMoE in its model.
        reason: why nothing of it may be written in place; None: nothing known so far.

    Raises:
        InvalidArgument: a variant of it that is not understood.
    """
    _refuse_unknown(path, layer)
    reason = reason or _not_plain(layer)
    part, parts = layer.moe_tp_rank, layer.moe_tp_size
    width, hidden = layer.intermediate_size_per_partition, layer.hidden_size
    first_up = bool(getattr(layer.quant_method, "load_up_proj_weight_first", False))
    for slot in range(layer.num_local_experts):
        expert = _expert_in(path, layer, slot)
        pair = (expert.up, expert.gate) if first_up else (expert.gate, expert.up)
        rows = gated(*(f"{name}.weight" for name in pair), f=width * parts, part=part, parts=parts)
        w13, lacks = _slot(layer.w13_weight, slot, layer.num_local_experts)
        yield Part(f"{path}.w13_weight", w13, (2 * width, hidden), rows, 0, reason or lacks)
        columns = split(f"{expert.down}.weight", width * parts, part, parts)
        w2, lacks = _slot(layer.w2_weight, slot, layer.num_local_experts)
        yield Part(f"{path}.w2_weight", w2, (hidden, width), columns, 1, reason or lacks)


def stacked_parts(path: str, layer: Any, dtype: torch.dtype | None) -> Iterator[Part]:
    """gpt-oss: all experts in one checkpoint tensor, input first, gate and up in turn, and biases; SGLang's own loader
    turns them round (``weight_loader_fused``, models/gpt_oss.py), which is no slice.

    Raises:
        InvalidArgument: a variant of it that is not understood.
    """
    if getattr(layer.w13_weight.weight_loader, "__func__", None) is not type(layer).weight_loader_fused:
        raise InvalidArgument(f"{path}: experts with biases that checkpoints hold one by one have no rule")
    if _rebalances():
        raise InvalidArgument(f"{path}: experts move between ranks while it runs (--enable-eplb)")
    count, hidden = layer._num_global_routed, layer.hidden_size
    width = layer.intermediate_size_per_partition * layer.moe_tp_size
    whole = {
        "gate_up_proj": (layer.w13_weight, (count, hidden, 2 * width)),
        "gate_up_proj_bias": (layer.w13_weight_bias, (count, 2 * width)),
        "down_proj": (layer.w2_weight, (count, width, hidden)),
        "down_proj_bias": (layer.w2_weight_bias, (count, hidden)),
    }
    for name, (live, shape) in whole.items():
        runs = split(f"{path}.{name}", count, 0, 1)
        yield Part(f"{path}.{name}", live.detach(), shape, runs, 0, "transposed and interleaved in checkpoints", dtype)


def _slot(parameter: torch.Tensor, slot: int, slots: int) -> tuple[torch.Tensor, str | None]:
    """One expert's matrix, or the whole parameter and why its slots are not seen in it."""
    if parameter.ndim != 3 or parameter.shape[0] != slots:
        return parameter.detach(), f"{list(parameter.shape)} in memory, {slots} experts by its rule"
    return parameter.detach()[slot], None


def _refuse_unknown(path: str, layer: Any) -> None:
    kind = type(layer)
    loader = getattr(layer.w13_weight, "weight_loader", None)
    if layer.weight_load_method is not None:
        raise InvalidArgument(
            f"{path}: experts that are paged or split with the CPU ({type(layer.quant_method).__name__})"
        )
    if layer.with_bias or getattr(loader, "__func__", None) is not kind.weight_loader:
        raise InvalidArgument(f"{path}: experts with biases, or fused in the checkpoint, have no rule")
    if not layer.moe_runner_config.is_gated:
        raise InvalidArgument(f"{path}: experts without a gate have no rule")
    if getattr(layer.quant_method, "w13_swiglu_interleaved", False) or layer._dwdp_bound:
        raise InvalidArgument(f"{path}: gate and up interleaved, or several ranks' experts bound, have no rule")
    if layer.num_fused_shared_experts > 1:
        raise InvalidArgument(
            f"{path}: {layer.num_fused_shared_experts} shared experts among the routed ones, one is known"
        )
    if _rebalances():
        raise InvalidArgument(f"{path}: experts move between ranks while it runs (--enable-eplb)")


def _rebalances() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().moe.enable_eplb)


def _not_plain(layer: Any) -> str | None:
    """What ``UnquantizedFusedMoEMethod`` does to weights once they are loaded (layers/quantization/unquant.py)."""
    method = layer.quant_method
    if method.use_triton_kernels:
        return "transposed for triton_kernels"
    if method.use_flashinfer_trtllm_moe:
        return "in blocks for FlashInfer's TRT-LLM kernels after loading"
    if method._aiter_runner is not None:
        return "shuffled for AITER after loading"
    if layer.w13_weight.device.type not in ("cpu", "cuda"):
        return f"laid out for {layer.w13_weight.device.type} after loading"
    return None


def _expert_in(path: str, layer: Any, slot: int) -> _Expert:
    """Slots are a rank's routed experts, then the shared one if it is fused (every rank has it)."""
    if slot >= layer._num_local_routed:
        shared = path.removesuffix(".experts") + ".shared_experts"
        return _Expert(f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}.down_proj")
    base = f"{path}.{_logical(layer, layer._expert_storage_rank * layer._num_local_routed + slot)}"
    if path.endswith("block_sparse_moe.experts"):  # Mixtral's names, models/mixtral.py
        return _Expert(f"{base}.w1", f"{base}.w3", f"{base}.w2")
    return _Expert(f"{base}.gate_proj", f"{base}.up_proj", f"{base}.down_proj")


def _logical(layer: Any, physical: int) -> int:
    """The checkpoint's number of an expert: a map says, if there is one (eplb/expert_location.py)."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    found = get_global_expert_location_metadata() if layer.uses_expert_location else None
    return physical if found is None else int(found.physical_to_logical_map_cpu[layer.layer_id, physical])
