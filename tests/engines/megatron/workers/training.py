"""One rank of a Megatron-Core trainer that publishes when it is told to: a line ``STEP SEED`` each on its input.

Arguments: folder, rank, world size, socket, job, configuration, tensor- and pipeline-parallel size. A line is answered
with ``STEP`` once every rank has published that step.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from awexd_client import WeightWriter
from awexd_client.adapters.megatron import MegatronAdapter
from tests.engines.megatron.sizes import CONFIGS
from tests.engines.megatron.workers import shim  # noqa: F401  (before the others)
from tests.engines.megatron.workers.models import Layout, build, fill, set_up


def main(folder: str, rank: str, world: str, socket: str, job: str, config: str, tp: str, pp: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world))
    layout = Layout(tp=int(tp), pp=int(pp))
    set_up(layout)
    chunks = build(config, layout)
    with WeightWriter(job, int(rank), int(world), socket) as writer:
        writer.register(chunks[0], MegatronAdapter(CONFIGS[config]))
        for line in sys.stdin:
            step, seed = map(int, line.split())
            fill(chunks, seed)
            writer.publish(step).committed()
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
