"""Tiny checkpoints of model families: ``python checkpoints.py FOLDER`` makes FOLDER/<family>/<number>, three of each.

All tensors of a checkpoint are random, norms and biases too, and differ between numbers: a stale tensor is seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
"""No multiple of SGLang's padding."""
COUNT = 3
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LATENT = (
    {"num_key_value_heads": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 8}
    | {"n_shared_experts": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    | _EXPERTS
)
_YARN = {"type": "yarn", "rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0} | {
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
_BIASED = {"head_dim": 32, "attention_bias": True}
_GLM_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "num_nextn_predict_layers": 0}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64, "mlp_only_layers": []},
        {},
    ),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "num_experts": 8, "mlp_only_layers": []}, {}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, {}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 48}, {**_NOAUX, "rope_scaling": _YARN}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
        {"moe_layer_freq": 1, "scoring_func": "softmax", "rope_scaling": _YARN},
    ),
    "glm4": ("glm4", {**_BIASED, "partial_rotary_factor": 0.5}, {}),
    "glm4_moe": ("glm4_moe", {**_EXPERTS, **_BIASED, **_GLM_EXPERTS, "use_qk_norm": True}, {}),
    "gemma2": ("gemma2", {"head_dim": 32, "tie_word_embeddings": True}, {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "tie_word_embeddings": True}, {}),
}
"""Model type, what differs from the common sizes, and what SGLang wants in config.json besides."""


def make(folder: Path, family: str) -> None:
    """The family's checkpoints, and a tokenizer with each."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, differing, besides = FAMILIES[family]
    config = AutoConfig.for_model(kind, **_COMMON | differing)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    for number in range(COUNT):
        path = folder / family / str(number)
        _randomise(model, 1 + number)
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
        written = json.loads((path / "config.json").read_text()) | besides
        (path / "config.json").write_text(json.dumps(written))


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.data = torch.rand(tensor.shape, generator=generator)  # kept in fp32
            elif not name.endswith("inv_freq"):
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + noise / 8 if name.endswith("norm.weight") else noise / 16)


def tokenizer() -> Any:
    """A token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    built = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(symbols)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=built, eos_token=end, pad_token=end
    )


if __name__ == "__main__":
    for name in sys.argv[2:] or FAMILIES:
        make(Path(sys.argv[1]), name)
