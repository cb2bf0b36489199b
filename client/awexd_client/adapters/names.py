"""From the names of live modules to the names of a checkpoint, without the experts (see ``experts``)."""

from __future__ import annotations

import re

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that DDP, torch.compile, FSDP1 and activation checkpointing put in; no checkpoint has them."""

WEIGHT_BUFFERS = frozenset({"e_score_correction_bias"})
"""Weights that some models keep as non-persistent buffers (DeepSeek V3, GLM 4.5): the trainer moves them every step."""

_DERIVED_LEAF = re.compile(
    r"(.*_)?(original_)?inv_freq|embed_scale|(cos|sin)_cached|cos_sin_cache|causal_mask|masked_bias|position_ids"
)
_ROTARY = re.compile(r"(^|\.)rotary_(pos_)?emb\.")


def checkpoint_path(path: str) -> str:
    """The dotted path without wrappers, wherever in it they stand."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def is_weight_buffer(path: str, *, persistent: bool) -> bool:
    """Whether a buffer belongs to the weights: not what a module computes from its configuration.

    Args:
        path: the buffer's dotted name.
        persistent: whether its module would save it in a state dict.
    """
    leaf = path.rpartition(".")[2]
    if leaf in WEIGHT_BUFFERS:
        return True
    return persistent and not is_derived_buffer(path)


def is_derived_buffer(path: str) -> bool:
    """Whether a buffer's name says that it is computed: rotary tables, embedding scale, masks."""
    return bool(_DERIVED_LEAF.fullmatch(path.rpartition(".")[2]) or _ROTARY.search(path))
