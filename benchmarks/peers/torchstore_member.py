"""torchstore: one process of a job, and what its release needs to run with a torchmonarch that needs no GPU driver.

Runs in torchstore's own environment. The release 0.1.2 has two transports: RDMA, and Monarch's messages where there is
no RDMA device (a shared-memory transport came after it). It asks for a torchmonarch that is linked against CUDA's
driver; the first that is not, 0.2.0, refuses actors that mix synchronous and asynchronous endpoints, as torchstore's
controller does, so its synchronous ones are wrapped here. Not part of the main module: Monarch would send it by value.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from typing import Any

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")  # as torchstore itself would

import torchstore
from monarch.actor import Actor, endpoint, this_host
from torchstore.controller import Controller

from awexd.bench.weights import Weights, fill, mapping, mark, source_tensors, wrong

__all__ = ["Member", "this_host", "torchstore"]


def _make_asynchronous(actor: type) -> None:
    for name, value in list(vars(actor).items()):
        method = getattr(value, "_method", None)
        if method is not None and not inspect.iscoroutinefunction(method):
            setattr(actor, name, endpoint(_asynchronous(method)))


def _asynchronous(method: Any) -> Any:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__, call.__qualname__ = method.__name__, method.__qualname__
    return call


_make_asynchronous(Controller)


class Member(Actor):
    """One process of the job, with weights of its own. All tensors are put, or got in place, at once (gather): that was
    twice as fast as ``put_state_dict`` and ``get_state_dict``, which take one after the other."""

    def __init__(self, weights: dict[str, Any], filled: bool) -> None:
        self.weights = Weights(**weights)
        self.memory = mapping(self.weights.nbytes)
        if filled:
            fill(self.memory)
        self.tensors = source_tensors(self.weights, self.memory)

    @endpoint
    async def put(self, step: int) -> int:
        mark(self.weights, self.memory, step)
        started = time.monotonic_ns()
        await asyncio.gather(*(torchstore.put(name, tensor) for name, tensor in self.tensors.items()))
        return started

    @endpoint
    async def get(self) -> int:
        await asyncio.gather(*(torchstore.get(name, tensor) for name, tensor in self.tensors.items()))
        return time.monotonic_ns()

    @endpoint
    async def wrong(self, step: int) -> list[str]:
        return wrong(self.weights, self.memory, step)[:5]
