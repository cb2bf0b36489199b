"""Stands in for sgl_kernel, which loads only where a CUDA driver is: the few operators that SGLang's CPU layers call.

Written in plain torch from what the operators' names and SGLang's own ``forward_native`` say. Weights never pass
through them: what the tests compare does not depend on this file. Tokens do, in every run alike.
"""

from __future__ import annotations

from typing import Any

import torch
from absent import stand_in
from torch.nn.functional import gelu, silu

__version__ = "0.4.10"
__getattr__ = stand_in(__name__)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def rmsnorm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _normalised(x, eps).to(x.dtype) * weight


def gemma_rmsnorm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_normalised(x, eps) * (1.0 + weight.float())).to(x.dtype)


def fused_add_rmsnorm_cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(rmsnorm_cpu(residual, weight, eps))


def gemma_fused_add_rmsnorm_cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(gemma_rmsnorm_cpu(residual, weight, eps))


def silu_and_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def gelu_tanh_and_mul_cpu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up


_library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
for _operator, _schema in (
    (rmsnorm_cpu, "(Tensor x, Tensor weight, float eps) -> Tensor"),
    (gemma_rmsnorm_cpu, "(Tensor x, Tensor weight, float eps) -> Tensor"),
    (fused_add_rmsnorm_cpu, "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()"),
    (gemma_fused_add_rmsnorm_cpu, "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()"),
    (silu_and_mul_cpu, "(Tensor x) -> Tensor"),
    (gelu_tanh_and_mul_cpu, "(Tensor x) -> Tensor"),
):
    _library.define(_operator.__name__ + _schema)
    _library.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")
