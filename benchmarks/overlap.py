"""What it costs a GPU to take a version in waves, as ``update(overlap=True)`` does, instead of at once.

The set is that of ``gpu.py`` (``moe``), in one segment of shared memory that is registered with CUDA.
``overlap-launch``: milliseconds to launch a wave that is alone, beside the copies' own time: all waves, each launched
when the one before is done, less one update, over their number. ``overlap-waves``: all launched at once, over one
update. Every bit is compared. With ``--write`` the figures go to ``benchmarks/results/h200.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.figures import Figure, names, table, write
from awexd.bench.gpu.weights import Weights
from awexd_client.holding import Holding
from awexd_client.mappings import Mapping
from awexd_client.tables import Prepared, Sources, prepare, run_all
from awexd_client.waves import Wave, waves
from awexd_transports.plan import plan
from awexd_transports.segment import HEADER_BYTES, segment_nbytes

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PIECE_BYTES = 32 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="(default %(default)s)")
    parser.add_argument("--shrink", type=int, default=1, help="divides every dimension of the weights")
    parser.add_argument("--device", default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    figures = measure(Weights("moe", arguments.shrink), arguments.device, arguments.rounds)
    for line in table(figures):
        print(line)
    if arguments.write:
        own = {figure.name for figure in figures}
        others = [name for name in names(RESULTS) if name not in own]
        write(RESULTS, figures, f"python benchmarks/overlap.py --rounds {arguments.rounds}", keep=[*others, *own])


def measure(weights: Weights, device: str, rounds: int) -> list[Figure]:
    import torch

    shapes = weights.tensors()
    made = {one.name: torch.empty(one.shape, dtype=torch.bfloat16, device=device) for one in shapes}
    live = {one.name: torch.zeros(one.shape, dtype=torch.bfloat16, device=device) for one in shapes}
    holding = Holding.to_fill(live, None)
    manifest = holding.manifest
    fd = os.memfd_create("awexd-bench")
    nbytes = HEADER_BYTES + segment_nbytes(manifest)
    os.ftruncate(fd, nbytes)
    mapping = Mapping(fd, nbytes, writable=True)
    os.close(fd)
    generator = torch.Generator(device).manual_seed(1)
    for entry in manifest.entries:
        tensor = made[entry.tensor.name]
        tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
        mapping.piece(manifest, entry.piece).tensor().copy_(tensor.cpu())
    sources = Sources((manifest,), plan((manifest,), [manifest]))
    prepared = prepare(holding, sources, {0: mapping}, None)
    found = waves(holding, sources, {0: mapping}, None, [-(-nbytes // PIECE_BYTES)])
    try:
        return _figures(weights, prepared, found, rounds, lambda: _check(made, live))
    finally:
        mapping.close()


def _figures(
    weights: Weights, prepared: Prepared, found: tuple[Wave, ...], rounds: int, check: Callable[[], None]
) -> list[Figure]:
    tables = [wave.tables for wave in found]

    def singly() -> None:
        for one in tables:
            one.run()

    ways: dict[str, Callable[[], None]] = {
        "update": lambda: prepared.live.run(),
        "singly": singly,
        "together": lambda: run_all(tables),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if number > 1:
                seconds[name].append(time.perf_counter() - began)
            elif number == 1:
                check()
    update, apart, together = (statistics.median(seconds[name]) for name in ways)
    shared = {"waves": len(found), "bytes": weights.nbytes, "update_ms": update * 1e3}
    launch = Figure("overlap-launch", 1e3 * (apart - update) / len(found), "ms", rounds=rounds, more=dict(shared))
    ratio = Figure("overlap-waves", together * 1e3, "ms", update * 1e3, together / update, rounds=rounds, more=shared)
    return [launch, ratio]


def _check(made: dict[str, object], live: dict[str, object]) -> None:
    """Raises ValueError where a bit differs; zeroes what was compared, so that the next way has to bring it again."""
    import torch

    for name, tensor in live.items():
        expected = made[name]
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        if not torch.equal(tensor.view(torch.int16), expected.view(torch.int16)):
            raise ValueError(f"{name} differs")
        tensor.zero_()


if __name__ == "__main__":
    main()
