"""Tiny configurations of every family, as transformers takes them."""

from __future__ import annotations

from typing import Any

_BASE = {
    "vocab_size": 70,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "pad_token_id": 0,
}
_GROUPS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 12}
_MOE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    **_MOE,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama, biases, tied": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": _GROUPS,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": _GROUPS,
    "qwen3, biases, tied": {**_GROUPS, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
        "mlp_only_layers": [1],
        **_MOE,
    },
    "qwen3_moe": {**_GROUPS, "num_experts": 4, "decoder_sparse_step": 2, **_MOE},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 10, "n_shared_experts": 1, "attention_bias": True},
    "glm4": {**_GROUPS, "attention_bias": True},
    "glm4_moe": {
        **_GROUPS,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **_MOE,
    },
    "gemma2": _GROUPS,
    "gemma3_text": {**_GROUPS, "attention_bias": True},
    "gpt_oss": {**_GROUPS, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Variant (its family first) to what differs from the smallest one."""


def tiny(variant: str) -> dict[str, Any]:
    """A variant's ``config.json``."""
    return {**_BASE, **TINY[variant], "model_type": variant.partition(",")[0], "dtype": "float32"}
