"""Weights of a GPU through host memory: publish and update, next to plain DMA of the same bytes, round by round.

The limit is one copy of all bytes between the GPU and page-locked memory, in the same process. Trainer and engine are
one process here: their halves are timed apart. Tensors are bfloat16; those of a ``-reshard`` figure are received as
halves that were cut along dimension 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.daemon import daemon
from awexd.bench.figures import Figure, quartiles, table
from awexd_client import Shard, WeightWriter, WorkerWeightsReader

GIB = 1 << 30
COLUMNS = 4096
WARM = 4
"""More than a job's slots."""


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def figure(name: str, times: list[float], limits: list[float], nbytes: int) -> Figure:
    """Rates in GB/s; the ratio is that of the rates."""
    rates = [nbytes / one / 1e9 for one in times]
    low, value, high = quartiles(rates)
    ratio = statistics.median(limit / one for one, limit in zip(times, limits, strict=True))
    limit = statistics.median(nbytes / one / 1e9 for one in limits)
    return Figure(name, value, "GB/s", limit=limit, ratio=ratio, low=low, high=high, rounds=len(times))


def measure(socket: str, nbytes: int, tensors: int, verify: str, rounds: int, *, cut: bool) -> list[Figure]:
    rows = nbytes // tensors // COLUMNS // 2
    live = [torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16) for _ in range(tensors)]
    whole = [torch.zeros_like(tensor) for tensor in live]
    target = []
    for at, tensor in enumerate(whole):
        for first in (0, COLUMNS // 2) if cut else (0,):
            part = tensor[:, first : first + COLUMNS // 2].contiguous() if cut else tensor
            target.append(Shard(f"w{at}", part, tuple(tensor.shape), (0, first)))
    flat = torch.empty(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    pinned = torch.empty(nbytes // 2, dtype=torch.bfloat16, pin_memory=True)
    taken: dict[str, list[float]] = {name: [] for name in ("publish", "update", "down", "up")}
    label = "-".join([str(tensors), *(["reshard"] if cut else []), *([verify] if verify != "off" else [])])
    with (
        WeightWriter(f"gpu-{label}", 0, 1, socket, verify=verify) as writer,
        WorkerWeightsReader(f"gpu-{label}", "e", 0, 1, socket, verify=verify) as reader,
    ):
        writer.register({f"w{at}": tensor for at, tensor in enumerate(live)})
        reader.register(target)
        for step in range(1, WARM + rounds + 1):
            live[0].add_(1)
            found = {
                "publish": seconds(lambda step=step: writer.publish(step)),  # type: ignore[misc]
                "update": seconds(lambda step=step: reader.update(step)),  # type: ignore[misc]
                "down": seconds(lambda: pinned.copy_(flat, non_blocking=True)),
                "up": seconds(lambda: flat.copy_(pinned, non_blocking=True)),
            }
            if step > WARM:
                for name, each in found.items():
                    taken[name].append(each)
        wrong = [s.name for s in target if not torch.equal(s.tensor, _part(live[int(s.name[1:])], s))]
        assert not wrong, wrong
        writer.close_job()
    moved = sum(tensor.nbytes for tensor in live)
    return [
        figure(f"host-publish-{label}", taken["publish"], taken["down"], moved),
        figure(f"host-update-{label}", taken["update"], taken["up"], moved),
    ]


def _part(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    return tensor[:, shard.offset[1] : shard.offset[1] + shard.tensor.shape[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensors", type=int, nargs="+", default=[400, 5000])
    parser.add_argument("--verify", nargs="+", default=["off", "checksum"], choices=["off", "checksum"])
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * GIB)
    figures = []
    with daemon() as socket:
        for tensors in arguments.tensors:
            for verify in arguments.verify:
                for cut in (False, True):
                    print(f"{tensors} tensors, verify={verify}, cut={cut}", file=sys.stderr)
                    figures += measure(socket, nbytes, tensors, verify, arguments.rounds, cut=cut)
    print("\n".join(table(figures)))


if __name__ == "__main__":
    main()
