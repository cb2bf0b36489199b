"""Chunks in Megatron-Core's own wrappers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
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


def step_own_parts(model: Any) -> None:
    """Adds one to this rank's part of each bucket: what DistributedOptimizer, which takes CUDA tensors only, writes."""
    with torch.no_grad():
        for group in model.bucket_groups:
            for bucket in group.buckets:
                shard_buffer(bucket.param_data, group.intra_distributed_optimizer_instance_size)[
                    group.intra_distributed_optimizer_instance_rank
                ].add_(1)
