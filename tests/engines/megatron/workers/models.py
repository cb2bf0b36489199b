"""Megatron-Core models of the sizes in ``sizes.py``, filled by Megatron-Core's own idea of what each rank holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as state
from megatron.core.activations import quick_gelu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import gelu, silu

from tests.engines.megatron.sizes import CONFIGS, PADDED_VOCABULARY
from tests.engines.megatron.workers.specs import GEMMA, ZERO_CENTRED, adapt


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; ``etp`` None: as ``tp``; ``vpp`` None: no virtual stages. What is left of the world is data."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1


def set_up(layout: Layout) -> None:
    state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        context_parallel_size=layout.cp,  # groups only: local attention cannot run so
    )


def tensor_parallel_group() -> Any:
    return state.get_tensor_model_parallel_group()


def build(name: str, layout: Layout, *, fused: bool = False, **changes: Any) -> list[Any]:
    """The model's chunks on this rank, in evaluation mode.

    Args:
        fused: MLA's down projections in one parameter.
        changes: to Megatron-Core's configuration.
    """
    values = CONFIGS[name]
    config = transformer_config(values, layout, **changes)
    return [_chunk(values, config, stage, fused) for stage in (range(layout.vpp) if layout.vpp else [None])]


def _chunk(values: dict[str, Any], config: Any, stage: int | None, fused: bool) -> Any:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    adapt(spec, values, config, fused)
    rope = values["rope_parameters"]
    rope = rope.get("full_attention", rope)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=values["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    if values["model_type"] in GEMMA and model.pre_process:
        model.embedding.word_embeddings.register_forward_hook(lambda module, given, out: out * config.hidden_size**0.5)
    return model.eval()


def transformer_config(values: dict[str, Any], layout: Layout, **changes: Any) -> Any:
    """Megatron-Core's own words for a Hugging Face configuration."""
    family = values["model_type"]
    options: dict[str, Any] = {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "num_attention_heads": values["num_attention_heads"],
        "ffn_hidden_size": values["intermediate_size"],
        "gated_linear_unit": True,
        "activation_func": partial(gelu, approximate="tanh") if family in GEMMA else silu,
        "add_bias_linear": False,
        "add_qkv_bias": family in ("qwen2", "qwen2_moe") or values.get("attention_bias", False),
        "qk_layernorm": family not in ("llama", "qwen2", "mixtral", "qwen2_moe", "glm4", "gemma2", "gpt_oss"),
        "attention_output_gate": family == "qwen3_next",
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": family in ZERO_CENTRED,
        "rotary_interleaved": family == "glm4",
        "layernorm_epsilon": values["rms_norm_eps"],
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    options |= _experts(values, layout)
    if family == "gpt_oss":
        options |= {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
    if "kv_lora_rank" not in values:
        heads = {"num_query_groups": values["num_key_value_heads"]}
        size = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
        return TransformerConfig(**{**options, **heads, "kv_channels": size, **changes})
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": values["q_lora_rank"],
        "kv_lora_rank": values["kv_lora_rank"],
        "qk_head_dim": values["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": values["qk_rope_head_dim"],
        "v_head_dim": values["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": values["rope_parameters"]["rope_theta"],
    }
    return MLATransformerConfig(**{**options, **latent, **changes})


def _experts(values: dict[str, Any], layout: Layout) -> dict[str, Any]:
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    count = next((values[key] for key in keys if key in values), None)
    if count is None:
        return {}
    size = values.get("moe_intermediate_size", values["intermediate_size"])
    shared = values.get("shared_expert_intermediate_size") or values.get("n_shared_experts", 0) * size
    dense = values.get("first_k_dense_replace", 0)
    biased = values["model_type"] in ("deepseek_v3", "glm4_moe")
    return {
        "num_moe_experts": count,
        "moe_router_topk": values["num_experts_per_tok"],
        "moe_ffn_hidden_size": size,
        "moe_layer_freq": [int(at >= dense) for at in range(values["num_hidden_layers"])],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather" if layout.ep > 1 else "alltoall",
        "moe_router_pre_softmax": not values.get("norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": values["model_type"] in ("qwen2_moe", "qwen3_next"),
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_router_enable_expert_bias": biased,
    }


def sharded(chunks: list[Any]) -> Iterator[ShardedTensor]:
    """What Megatron-Core says that this rank's parameters are parts of: ``sharded_state_dict()``, factories built."""
    for chunk in chunks:
        pending = list(chunk.sharded_state_dict().values())
        while pending:
            entry = pending.pop()
            if isinstance(entry, ShardedTensorFactory):
                entry = entry.build()
            if isinstance(entry, dict):
                pending += entry.values()
            elif isinstance(entry, list | tuple):
                pending += entry
            elif isinstance(entry, ShardedTensor):
                yield entry


def fill(chunks: list[Any], shift: int = 0) -> None:
    """Values that depend on a tensor's name and on global indices only, so that any parallel layout gets the same ones.

    Every parameter must have got one.
    """
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)
        for entry in sharded(chunks):
            entry.data.copy_(_values(entry.key, entry.global_shape, shift)[_region(entry)])
    for chunk in chunks:
        for path, parameter in chunk.named_parameters():
            if torch.isnan(parameter).any():
                raise SystemExit(f"{path} has elements that sharded_state_dict() does not know")


def _values(key: str, shape: tuple[int, ...], shift: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + shift)
    values = torch.randn(shape, generator=generator) * (0.3 if "norm" in key else 0.15)
    return values + 1 if "norm" in key else values


def _region(entry: ShardedTensor) -> tuple[int | slice, ...]:
    """Where a part lies; leading axes (layers, experts) that the part itself does not have are indices."""
    before = entry.prepend_axis_num
    along = zip(entry.global_offset[before:], entry.local_shape, strict=True)
    return (*entry.global_offset[:before], *(slice(start, start + length) for start, length in along))
