"""Makes tiny checkpoints: ``python models.py FOLDER``. Each family twice, with other weights: ``old`` and ``new``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VERSIONS = {"old": 1, "new": 2, "newer": 3}
"""Name to seed."""
UPDATED = ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families made in every version; the others, of which only the layout is looked at, as ``new``."""

_SIZES: dict[str, Any] = {
    "vocab_size": 330,  # no multiple of 64: the engine pads it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def configs() -> dict[str, PretrainedConfig]:
    qwen = {**_SIZES, "head_dim": 32}
    latent = {
        **_SIZES,
        **_EXPERTS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        # The sizes that vLLM's latent attention is compiled for.
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    experts = {**_SIZES, **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {
        "deepseek_v2": DeepseekV2Config(**{**latent, "q_lora_rank": None, "n_group": 1}, topk_method="greedy"),
        "gemma2": Gemma2Config(**{**qwen, "tie_word_embeddings": True}),
        "gemma3": Gemma3TextConfig(**{**qwen, "tie_word_embeddings": True}),
        "glm4": Glm4Config(**{**qwen, "num_key_value_heads": 1}, attention_bias=True),
        "glm4_moe": Glm4MoeConfig(**{**experts, "head_dim": 32}, use_qk_norm=True, attention_bias=True),
        "gpt_oss": GptOssConfig(**qwen, num_local_experts=8),
        "mixtral": MixtralConfig(**_SIZES, num_local_experts=8),
        "qwen2_moe": Qwen2MoeConfig(**_SIZES, **_EXPERTS, num_experts=8, shared_expert_intermediate_size=64),
        "llama": LlamaConfig(**_SIZES),
        "qwen2": Qwen2Config(**_SIZES),
        "qwen3": Qwen3Config(**qwen),
        "qwen3_tied": Qwen3Config(**{**qwen, "tie_word_embeddings": True}),
        "qwen3_moe": Qwen3MoeConfig(**qwen, **_EXPERTS, num_experts=8, norm_topk_prob=True, mlp_only_layers=[0]),
        "deepseek_v3": DeepseekV3Config(**latent),
    }


def make(folder: Path, family: str, version: str) -> None:
    """A checkpoint as ``save_pretrained`` writes it, every weight drawn anew (biases and norms too)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(VERSIONS[version])
    model = AutoModelForCausalLM.from_config(configs()[family]).to(torch.bfloat16)  # type: ignore[no-untyped-call]
    model.tie_weights()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 and tensor.is_floating_point() and "inv_freq" not in name:
                tensor.add_(torch.rand_like(tensor) * 0.1)
            if name.endswith("e_score_correction_bias"):
                # In fp32 whatever the model's dtype, as DeepSeek publishes it; the trainer moves it every step.
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.e_score_correction_bias = torch.rand(tensor.shape) * 0.1
    path = folder / family / version
    model.save_pretrained(path)
    _tokenizer(path)
    if family == "deepseek_v3":
        # What DeepSeek's own files say and vLLM looks for; transformers does not write it.
        file = path / "config.json"
        config = json.loads(file.read_text())
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
        file.write_text(json.dumps(config, indent=1))


def _tokenizer(path: Path) -> None:
    """One token a number: a server wants a tokenizer, whatever it is asked."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(token): token for token in range(_SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="0", pad_token="0"
    ).save_pretrained(path)


def main() -> None:
    folder = Path(sys.argv[1])
    for family in configs():
        for version in VERSIONS if family in UPDATED else ["new"]:
            make(folder, family, version)


if __name__ == "__main__":
    main()
