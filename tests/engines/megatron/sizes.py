"""Small models as Hugging Face configurations: what the trainers train and the readers expect. Pure data."""

from __future__ import annotations

from typing import Any

PADDED_VOCABULARY = 256

_COMMON = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT = {**_COMMON, "num_hidden_layers": 2}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    # As long as hidden_size / num_attention_heads: Megatron-Core's own attention knows one head size for its output.
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    **_EXPERTS,
}


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "llama_tied": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_without(_SHORT, "head_dim"), "model_type": "qwen2"},
    "qwen3": {**_SHORT, "model_type": "qwen3"},
    # Sizes that engines on CPUs can run.
    "served": {
        **_SHORT,
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "max_position_embeddings": 512,
    },
    "mixtral": {**_SHORT, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_without(_SHORT, "head_dim"),
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {**_SHORT, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": []},
    "deepseek_v2": {
        **_without(_SHORT, "head_dim"),
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
    },
    "deepseek_v3": {
        **_without(_SHORT, "head_dim"),
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 32,
        "n_shared_experts": 1,
    },
    "glm4_moe": {
        **_SHORT,
        **_EXPERTS,
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "glm4": {
        **_SHORT,
        "model_type": "glm4",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma2": {
        **_SHORT,
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_SHORT,
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_SHORT,
        "model_type": "gpt_oss",
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * 2,
    },
    # Its gated attention only: Megatron-Core's linear attention needs a GPU.
    "qwen3_next": {
        **_SHORT,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["full_attention"] * 2,
        "mlp_only_layers": [],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}

TOKENS = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26)
