"""What runs in ray actors: verl's actor worker and rollout worker, with a trainer's engine and a server of our own.

A module, not the script itself: ray imports it, where it would have to serialise classes of the script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout

HALVES = ("norm.weight", "norm.bias")


def model(seed: int) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(512, 257),
            "up": torch.nn.Linear(257, 1031),
            "odd": torch.nn.Linear(7, 3),
            "norm": torch.nn.LayerNorm(257),
        }
    )


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + raw).hexdigest()


class Engine:
    """The trainer's engine as verl's actor worker sees it: whole tensors, gathered one after another by all ranks."""

    def __init__(self, sharded: torch.nn.Module) -> None:
        self.model = sharded
        self.fault: tuple[str, int] | None = None

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._brought(), None

    def _brought(self) -> Iterator[tuple[str, torch.Tensor]]:
        for at, (name, parameter) in enumerate(self.model.named_parameters()):
            if self.fault == ("raise", at):
                raise RuntimeError("the gathering failed")
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor().detach()
            found = name, whole.bfloat16() if name in HALVES else whole
            yield found
            if self.fault == ("twice", at):
                yield found


class Trainer(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor worker. Its ``init_model`` needs a model on disk and a GPU: this ``__init__`` is in its place."""

    def __init__(self, config: CheckpointEngineConfig, seed: int) -> None:
        Worker.__init__(self)
        torch.set_num_threads(1)
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=config))
        whole = model(seed)
        mesh = init_device_mesh("cpu", (self.world_size,))
        for child in whole.values():
            fully_shard(child, mesh=mesh)
        self.actor = SimpleNamespace(engine=Engine(whole))
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, fault: tuple[str, int] | None = None) -> dict[str, str]:
        """New weights; what they are, as the rollout workers should have them."""
        engine = self.actor.engine
        engine.fault = None
        with torch.no_grad():
            for at, parameter in enumerate(engine.model.parameters()):
                parameter.mul_(0.75).add_(0.01 * (at + 1))
        found = {name: digest(tensor) for name, tensor in engine.get_per_tensor_param()[0]}
        engine.fault = fault
        return found


class Server(BaseRollout):  # type: ignore[misc]
    """A rollout worker's server: a model of its own, which it updates in place."""

    def __init__(self) -> None:
        self.model = model(0)
        self.model["norm"].bfloat16()
        self.updated: list[int | None] = []

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> None:
        assert wire_format == "named_tensors"
        live, seen = dict(self.model.named_parameters()), set()
        with torch.no_grad():
            async for name, tensor in weights:
                assert tensor.dtype == live[name].dtype
                assert tensor.shape == live[name].shape
                live[name].copy_(tensor)
                seen.add(name)
        assert seen == live.keys()
        self.updated.append(kwargs["global_steps"])


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's rollout worker with that server."""

    def __init__(self, config: RolloutConfig) -> None:
        torch.set_num_threads(1)
        super().__init__(config, None, Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def holds(self) -> dict[str, Any]:
        server = self.server_adapter
        digests = {name: digest(tensor) for name, tensor in server.model.named_parameters()}
        return {"digests": digests, "updated": server.updated}
