"""Host memory for checkpoint tensors that an engine loads itself."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 256


class HostBuffers:
    """Host memory for whole tensors. Their addresses stay; pages are taken when written, given back by ``clear``."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        import torch

        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        steps = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]
        # Private, not mmap's default: only there MADV_DONTNEED gives the pages back.
        self._pages = mmap.mmap(-1, max(sum(steps), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensors: dict[str, torch.Tensor] = {}
        at = 0
        for (name, (shape, dtype)), step in zip(tensors.items(), steps, strict=True):
            memory = memoryview(self._pages)[at : at + sizes[name]]
            flat = torch.frombuffer(memory, dtype=dtype) if sizes[name] else torch.empty(0, dtype=dtype)
            self.tensors[name] = flat.view(shape)
            at += step

    def clear(self) -> None:
        """Forgets what the tensors hold: they read as zeros."""
        self._pages.madvise(mmap.MADV_DONTNEED)
