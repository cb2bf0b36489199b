"""Chunks in Megatron-Core's own wrappers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module


def half_precision(chunks: list[Any]) -> list[Any]:
    """bfloat16, in DistributedDataParallel, whose buffers then hold the parameters."""
    return [data_parallel(_half(chunk)) for chunk in chunks]


def _half(chunk: Any) -> Any:
    chunk.config.bf16, chunk.config.params_dtype = True, torch.bfloat16
    return Float16Module(chunk.config, chunk)


def data_parallel(chunk: Any, **options: Any) -> Any:
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, **options)
    return DistributedDataParallel(chunk.config, settings, chunk)
