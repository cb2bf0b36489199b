"""Digests of all that a model holds, to compare models of different processes by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors that modules keep as plain attributes."""
    for path, module in model.named_modules():
        for key, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}", value.detach()


def digests(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of each tensor's elements, with its shape and dtype."""
    found = {}
    for name, tensor in tensors_of(model):
        body = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
        found[name] = f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(body.numpy().tobytes()).hexdigest()}"
    return found
