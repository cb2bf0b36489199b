"""Layers that Megatron-Core's local specifications lack: they stand in for Transformer Engine's or a bridge's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from torch.nn.functional import rms_norm

GEMMA = ("gemma2", "gemma3_text")
ZERO_CENTRED = (*GEMMA, "qwen3_next")


class _Norm(torch.nn.RMSNorm):
    """For sequence parallelism, with which Megatron-Core makes no norms of torch's."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


class _CentredNorm(_Norm):
    """``layernorm_zero_centered_gamma``, which only Transformer Engine's norms have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class _NormedRows(RowParallelLinear):  # type: ignore[misc]  # Any, where Megatron-Core is not installed
    """A norm of what the linear puts out, as Megatron-Bridge has it for Gemma."""

    def __init__(self, *arguments: Any, config: Any, **options: Any) -> None:
        super().__init__(*arguments, config=config, **options)
        if config.layernorm_zero_centered_gamma:
            self.post_layernorm: Any = _CentredNorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
        else:
            self.post_layernorm = torch.nn.RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = super().forward(x)
        return self.post_layernorm(out), bias


class _WithoutQueryLatent(MLASelfAttention):  # type: ignore[misc]
    """DeepSeek-V2-Lite's. With ``qk_layernorm`` Megatron-Core wants Transformer Engine's norm in ``linear_q_proj``."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


def adapt(block: Any, values: dict[str, Any], config: Any, fused: bool) -> None:
    """Changes a block's specification to the model's kinds.

    Args:
        values: a Hugging Face configuration. ``config``: Megatron-Core's own.
        fused: MLA's down projections in one parameter.
    """
    family = values["model_type"]
    norm = _CentredNorm if family in ZERO_CENTRED else _Norm if config.sequence_parallel else None
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        if "kv_lora_rank" in values and values["q_lora_rank"] is None:
            attention.module = _WithoutQueryLatent
        if fused:
            attention.module = FusedMLASelfAttention
            attention.submodules.linear_qkv_down_proj = attention.submodules.linear_q_down_proj
            attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = None
        if family in (*GEMMA, "glm4"):
            attention.submodules.linear_proj = _NormedRows
            parts.mlp.keywords["submodules"].linear_fc2 = _NormedRows
        if norm:
            parts.input_layernorm = parts.pre_mlp_layernorm = norm
    if norm:
        block.layer_norm = norm
        for layer in block.layer_specs:
            for name in ("q_layernorm", "k_layernorm"):
                if getattr(layer.submodules.self_attention.submodules, name) not in (None, IdentityOp):
                    setattr(layer.submodules.self_attention.submodules, name, norm)
