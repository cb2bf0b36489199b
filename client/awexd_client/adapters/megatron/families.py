"""Which names a family's checkpoint has, where they are not the same in all of them: a table keyed by ``model_type``.

Checked against what transformers 5.24 writes for each family, except for layers of multi-token prediction, which
transformers leaves out: those are DeepSeek-V3's and GLM-4.5's as published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from awexd_client.adapters.experts import SPLIT, ExpertNames
from awexd_transports.errors import InvalidArgument


@dataclass(frozen=True)
class Names:
    """A family's names; a field that is None or False says that its checkpoints have no such tensor.

    Attributes:
        experts: of the three matrices of an expert, and of the block that holds them.
        shared: what the shared experts are called in that block.
        expert_bias: whether the router has ``e_score_correction_bias``.
        mlp_norm: the norm before the MLP.
        after_attention, after_mlp: norms of what attention and MLP put out.
        fused_gate_up: whether dense MLPs have ``gate_up_proj``, gate first, in the checkpoint already.
        zero_centred: whether norms are stored as what is added to one.
        latent: whether attention is multi-head latent attention (MLA).
        rotates_pairs: whether rotary embedding turns neighbouring elements of a head (``rotary_interleaved``), not its
            halves; rows of queries and keys are in another order then.
        sinks: whether attention has ``sinks``, a logit a head.
        mtp: whether layers of multi-token prediction follow the others under the same prefix.
        stacked: whether all experts of a layer are one tensor, with biases, as gpt-oss's are (``adapters/experts.py``).
    """

    experts: ExpertNames | None = None
    shared: str | None = None
    expert_bias: bool = False
    mlp_norm: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None
    fused_gate_up: bool = False
    zero_centred: bool = False
    latent: bool = False
    rotates_pairs: bool = False
    sinks: bool = False
    mtp: bool = False
    stacked: bool = False


_PLAIN = Names()
_GEMMA = Names(
    mlp_norm="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    zero_centred=True,
)
_DEEPSEEK_V3 = Names(SPLIT["deepseek_v3"], shared="shared_experts", expert_bias=True, latent=True, mtp=True)

FAMILIES: dict[str, Names] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _PLAIN),
    "qwen2_moe": Names(SPLIT["qwen2_moe"], shared="shared_expert"),
    "qwen3_moe": Names(SPLIT["qwen3_moe"]),
    "mixtral": Names(SPLIT["mixtral"]),
    "deepseek_v2": Names(SPLIT["deepseek_v2"], shared="shared_experts", latent=True),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK_V3),
    "glm4": Names(
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        fused_gate_up=True,
        rotates_pairs=True,
    ),
    "glm4_moe": Names(SPLIT["glm4_moe"], shared="shared_experts", expert_bias=True, mtp=True),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gpt_oss": Names(sinks=True, stacked=True),
}


@dataclass(frozen=True)
class Checkpoint:
    """What the adapter needs to know of the checkpoint's side.

    Attributes:
        family: ``model_type``; None where no configuration was given.
        vocabulary: rows of the embedding without padding; None: as many as are in memory.
        values: the configuration itself.
    """

    family: str | None = None
    names: Names = _PLAIN
    vocabulary: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_of(config: object, names: Names | None) -> Checkpoint:
    """Reads a Hugging Face configuration.

    Args:
        config: a dict, the path of a ``config.json`` or of its folder, a transformers configuration, or None.
        names: for a family that the table does not have.

    Raises:
        InvalidArgument: none of these, or a family that is not known.
    """
    if config is None:
        return Checkpoint(names=names or _PLAIN)
    values = _values(config)
    family, vocabulary = values.get("model_type"), values.get("vocab_size")
    if names is None:
        if family not in FAMILIES:
            raise InvalidArgument(
                f"how checkpoints of model type {family!r} name their tensors is not known; give names= to"
                f" MegatronAdapter (known: {', '.join(sorted(FAMILIES))})"
            )
        names = FAMILIES[family]
    if not isinstance(vocabulary, int):
        raise InvalidArgument(f"the configuration of {family!r} has no vocab_size")
    return Checkpoint(family, names, vocabulary, values)


def _values(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | Path):
        path = Path(config)
        return _read(path / "config.json" if path.is_dir() else path)
    values = config.to_dict() if hasattr(config, "to_dict") else None
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"a {type(config).__name__} is no Hugging Face configuration, nor a path of one")
    return values


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as a configuration: {error}") from error
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{path} holds no configuration")
    return values


_SAME = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "kv_channels": ("head_dim",),
    "num_moe_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Fields of ``TransformerConfig`` and what they are called in a Hugging Face configuration."""

_NOT_LATENT = frozenset({"num_query_groups", "kv_channels"})
"""With MLA, Megatron-Core sets these to anything and uses neither."""


def check_model(checkpoint: Checkpoint, model: Any) -> None:
    """Compares a GPTModel with the checkpoint's configuration.

    Raises:
        InvalidArgument: they are of different models, or values in memory are not those that the checkpoint has.
    """
    config, names = model.config, checkpoint.names
    latent = bool(getattr(config, "multi_latent_attention", False))
    if checkpoint.family is None and names is _PLAIN and (latent or getattr(config, "num_moe_experts", None)):
        raise InvalidArgument(
            "without the model's configuration only dense models are taken, whose names are the same in every family:"
            " pass MegatronAdapter(config)"
        )
    _check_sizes(checkpoint, config)
    stored = {
        "layernorm_zero_centered_gamma": ("norms", names.zero_centred),
        "rotary_interleaved": ("queries and keys", names.rotates_pairs),
    }
    for key, (what, expected) in stored.items():
        value = bool(getattr(config, key, False))
        if value != expected:
            raise InvalidArgument(
                f"{key} is {value}: {what} are stored in another way than in checkpoints of"
                f" {checkpoint.family or 'most families'}"
            )
    if latent and checkpoint.values.get("rope_interleave") is False:
        raise InvalidArgument("rope_interleave is False: Megatron-Core's MLA rotates neighbouring elements")
    if checkpoint.values.get("tie_word_embeddings") and not model.share_embeddings_and_output_weights:
        raise InvalidArgument("the configuration ties lm_head to the embedding, the model does not")


def _check_sizes(checkpoint: Checkpoint, config: Any) -> None:
    latent = bool(getattr(config, "multi_latent_attention", False))
    for ours, theirs in _SAME.items():
        if latent and ours in _NOT_LATENT:
            continue
        live = getattr(config, ours, None)
        key = next((key for key in theirs if checkpoint.values.get(key) is not None), None)
        if key is not None and live is not None and live != checkpoint.values[key]:
            raise InvalidArgument(
                f"the model's {ours} is {live}, its configuration's {key} {checkpoint.values[key]}: not the same model"
            )
