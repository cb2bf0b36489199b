"""Streams on devices, made one at a time: the first of torch's own makes a process all 128, 70 MiB of an H200."""

from __future__ import annotations

from functools import cache
from typing import Any

from awexd_transports.cuda import driver as cuda


@cache
def stream(device: int, priority: int) -> Any:
    """This process's on that device and of that priority (CUDA's: the least goes first), as torch's; it never goes."""
    import torch

    return torch.cuda.ExternalStream(cuda.driver.stream(device, priority), device=device)  # type: ignore[no-untyped-call]
