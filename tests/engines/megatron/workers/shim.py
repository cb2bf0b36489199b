"""Megatron-Core without a GPU: what it asks of torch.cuda while it builds and runs models is answered with nothing.

Imported before anything of megatron. It belongs to the tests: a trainer has GPUs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

warnings.filterwarnings("ignore")


class _Nothing:
    """A stream or an event of which every method does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: _Nothing()


cuda: Any = torch.cuda
cuda.current_device = lambda: "cpu"
cuda.Stream = cuda.Event = _Nothing
cuda.current_stream = lambda *arguments: _Nothing()
cuda.synchronize = lambda *arguments: None
cuda.stream = lambda stream=None: contextlib.nullcontext()
tensor: Any = torch.Tensor
tensor.record_stream = lambda *arguments: None
tensor.cuda = lambda self, *arguments: self

from megatron.core.tensor_parallel import random as _random  # noqa: E402
from megatron.core.transformer import dot_product_attention as _attention  # noqa: E402


@contextlib.contextmanager
def _fork(self: Any, name: Any = None) -> Iterator[None]:
    yield


_random.CudaRNGStatesTracker.fork = _fork
_with_one_size = _attention.DotProductAttention.__init__


def _init(self: Any, *arguments: Any, k_channels: Any = None, v_channels: Any = None, **options: Any) -> None:
    # MLA gives head sizes of keys and values, which this local attention does not take: it reads them off its inputs.
    _with_one_size(self, *arguments, **options)


_attention.DotProductAttention.__init__ = _init
