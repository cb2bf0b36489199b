"""One trainer process: FSDP2 over gloo, GRPO, and the publishing of its part of the weights at every step."""

from __future__ import annotations

import argparse
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from awexd.demo import model as models
from awexd.demo.grpo import Rollout, advantages, token_losses
from awexd.demo.sampling import decode
from awexd.demo.wire import Channel, Message, answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from awexd_client import WeightWriter

COLLECTIVE_SECONDS = 120
PUBLISH_SECONDS = 60
GRADIENT_NORM = 1.0


class Trainer:
    """Holds the sharded model, its optimizer and the writer; one method a request of the parent."""

    def __init__(self, rank: int, world_size: int, rendezvous: Path) -> None:
        self._rank = rank
        self._world_size = world_size
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        self._model: Any = None
        self._optimizer: Any = None
        self._writer: WeightWriter | None = None

    def load(self, request: Message) -> Message:
        self._directory = Path(request["directory"])
        self._dtype = models.DTYPES[request["dtype"]]
        torch.manual_seed(request["seed"])
        self._model = _shard(models.load(self._directory), self._dtype)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=request["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0
        )
        return {"parameters": sum(parameter.numel() for parameter in self._model.parameters())}

    def connect(self, request: Message) -> Message:
        from awexd_client import WeightWriter

        self._writer = WeightWriter(
            job=request["job"], rank=self._rank, world_size=self._world_size, socket=request["socket"]
        )
        # The master weights are fp32; the generator's are of the wire's dtype, and the cast is the writer's.
        self._writer.register(self._model, dtype=self._dtype)
        return {}

    def publish(self, request: Message) -> Message:
        writer = self._connected()
        started = time.perf_counter()
        publication = writer.publish(request["step"])
        publication.captured(timeout=PUBLISH_SECONDS)
        publication.committed(timeout=PUBLISH_SECONDS)
        return {"seconds": time.perf_counter() - started}

    def train(self, request: Message) -> Message:
        """One optimizer step on this rank's share of the rollouts; the share of the loss is of the batch's mean."""
        rollouts = _with_advantages(request["groups"])
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        self._optimizer.zero_grad()
        total, gap = token_losses(self._model, rollouts[self._rank :: self._world_size])
        # FSDP2 averages the ranks' gradients; the batch's mean wants their sum.
        torch.autograd.backward(total * (self._world_size / tokens))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": float(total.detach()) / tokens, "gap": gap}

    def digests(self, request: Message) -> Message:
        """Digests of the live weights, gathered and cast as on the wire; each rank computes its share of them."""
        del request
        found = {}
        for number, (name, tensor) in enumerate(_full_tensors(self._model)):
            if number % self._world_size == self._rank:
                found[name] = models.digest(tensor.to(self._dtype))
        return {"digests": found}

    def greedy(self, request: Message) -> Message:
        """The greedy answers of a plain model made of the live weights. Every rank gathers; rank 0 answers."""
        plain = models.blank(self._directory, self._dtype)
        targets = dict(plain.named_parameters())
        for name, tensor in _full_tensors(self._model):
            targets[name].data.copy_(tensor)
        if self._rank != 0:
            return {}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the generator does it
        samples = decode(plain, request["prompts"], request["limit"], request["end"])
        torch.set_num_threads(threads)
        return {"tokens": samples.tokens}

    def close(self, request: Message) -> Message:
        del request
        writer = self._connected()
        dist.barrier()  # nobody publishes any more
        if self._rank == 0:
            writer.close_job()
        writer.close()
        dist.barrier()
        dist.destroy_process_group()
        return {}

    def _connected(self) -> WeightWriter:
        if self._writer is None:
            raise RuntimeError("not connected to the daemon yet")
        return self._writer


def _shard(model: Any, dtype: torch.dtype) -> FSDPModule:
    """Each layer, and the rest as one group; fp32 parameters and sums, computing in ``dtype``."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy)
    return sharded


def _full_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().full_tensor()


def _with_advantages(groups: list[Message]) -> list[Rollout]:
    rollouts = []
    for group in groups:
        values = zip(group["tokens"], group["log_probabilities"], advantages(group["rewards"]), strict=True)
        rollouts += [Rollout(group["prompt"], *value) for value in values]
    return rollouts


def main() -> int:
    parser = argparse.ArgumentParser(prog="awexd.demo.trainer")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.rank, args.world_size, args.rendezvous)
    return answer(
        Channel.inherited(args.channel),
        {
            "load": trainer.load,
            "connect": trainer.connect,
            "publish": trainer.publish,
            "train": trainer.train,
            "digests": trainer.digests,
            "greedy": trainer.greedy,
            "close": trainer.close,
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
