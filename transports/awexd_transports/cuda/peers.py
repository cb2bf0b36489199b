"""Which devices read each other's memory."""

from __future__ import annotations

from functools import cache


@cache
def reaches(device: int, other: int) -> bool:
    """Whether kernels of ``device`` may read what is on ``other`` (ordinals in this process): they can from now on."""
    import torch

    if device == other:
        return True
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    with torch.inference_mode(False):  # torch gives a device access to another when it first copies from it to that one
        torch.empty(1, device=f"cuda:{other}").copy_(torch.empty(1, device=f"cuda:{device}"))
    return True
