"""One rank of an FSDP2 trainer that steps, publishes, offloads and parks, and takes everything back.

Arguments: folder, rank, world size, the daemon's socket. Writes ``<rank>.json``: what was where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from awexd_client import WeightWriter


def main() -> None:
    folder, rank, world, socket = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 1), nn.Linear(1, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 8)).sum().backward()
        optimizer.step()
        writer.publish(number)

    with WeightWriter("fsdp", rank, world, socket) as writer:
        writer.register(model)
        step(1)
        parameters: list[Any] = list(model.parameters())
        live = [parameter.to_local() for parameter in parameters]
        before = [tensor.clone() for tensor in live]
        states = {f"{at}.{name}": t for at, one in enumerate(optimizer.state.values()) for name, t in one.items()}
        writer.offload()
        writer.park("optimizer", states)
        left = sum(tensor.untyped_storage().nbytes() for tensor in live)
        writer.restore("optimizer")
        writer.restore()
        same = all(torch.equal(tensor, held) for tensor, held in zip(live, before, strict=True))
        step(2)
        (folder / f"{rank}.json").write_text(json.dumps({"left": left, "same": same}))
    dist.destroy_process_group()


main()
