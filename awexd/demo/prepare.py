"""Prepares the model's directory: the child process that needs gguf, and no torch.

The directory holds what the other processes load: ``config.json`` and ``model.safetensors`` (fp32) in the Hugging Face
layout, and ``tokenizer.json`` for a model that has a tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from awexd.demo.source import find_gguf

Array = npt.NDArray[np.float32]

# GGUF's names of a Llama model's tensors, and those of its Hugging Face checkpoint.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="awexd.demo.prepare")
    parser.add_argument("--model", choices=("smollm2", "tiny"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    if args.model == "tiny":
        _write_tiny(args.directory, args.seed)
    else:
        _write_smollm2(find_gguf(), args.directory)
    return 0


def _write_smollm2(source: Path, directory: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    config = _config(reader)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Array] = {}
    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        projection = name.split(".")[-2]
        tensors[name] = _undo_rope_order(values, heads[projection]) if projection in heads else values
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    _write_model(directory, config, tensors)
    _write_tokenizer(reader, directory / "tokenizer.json")


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),  # before transformers 5
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def _hugging_face_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    block, layer, part, kind = name.split(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise ValueError(f"tensor {name} of the GGUF file is not one of a Llama model")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _undo_rope_order(values: Array, heads: int) -> Array:
    """GGUF pairs neighbouring rows for the rotary embedding; Hugging Face pairs row i with row i + half a head."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_tokenizer(reader: Any, path: Path) -> None:
    """Byte-level BPE with one token a digit: GGUF's pre-tokenizer ``smollm``."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(path))


def _write_tiny(directory: Path, seed: int) -> None:
    """A Llama model of random weights; its tokens are characters, so it needs no tokenizer."""
    random = np.random.default_rng(seed)
    config = TINY_CONFIG
    hidden, inner, vocabulary = 64, 128, 64
    kv_rows = hidden * 2 // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.02, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    _write_model(directory, config, tensors)


def _write_model(directory: Path, config: dict[str, Any], tensors: dict[str, Array]) -> None:
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    raise SystemExit(main())
