"""The model, built in one way by every process, and the greedy text and digests that are compared at the end."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(directory: Path) -> LlamaForCausalLM:
    """The prepared model with its fp32 weights."""
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def blank(directory: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with every parameter zero, in ``dtype``; its buffers are no weights and are as the model makes them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):  # else it is filled with random numbers first
        model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(config=config)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
        parameter.requires_grad_(False)
    model.tie_weights()
    model.train(False)
    return model


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a whole tensor's bytes in memory, with its dtype and shape."""
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + values.tobytes()).hexdigest()


def cache_argument(model: torch.nn.Module) -> str:
    """The name of ``forward``'s argument for the KV cache: transformers has renamed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
