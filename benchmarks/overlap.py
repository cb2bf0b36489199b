"""What it costs a GPU to take a version in waves, as ``update(overlap=True)`` does, and to give one in slices.

The set is that of ``gpu.py`` (``moe``), in one segment of shared memory that is registered with CUDA.
``overlap-launch``: milliseconds to launch a wave that is alone, beside the copies' own time: all waves, each launched
when the one before is done, less one update, over their number. ``overlap-waves``: all launched at once, over one
update. ``early-publish``: a publish in slices, each told when it is there, as where other nodes fetch early, over one
at once. Every bit is compared. With ``--write`` the figures go to ``benchmarks/results/h200.json``.
"""

from __future__ import annotations

import argparse
import ctypes
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
from awexd_client.outgoing import SegmentLayout, sliced
from awexd_client.tables import Prepared, Sources, prepare, run_all
from awexd_client.waves import Wave, waves
from awexd_transports.copy import CopyTable
from awexd_transports.layout import Manifest
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
        own = [figure.name for figure in figures]
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
        figures = _figures(weights, prepared, found, rounds, lambda: _check(made, live))
        return [*figures, _early(weights, Holding.of(made), mapping, rounds, lambda: _read(made, manifest, mapping))]
    finally:
        mapping.close()


def _early(weights: Weights, holding: Holding, mapping: Mapping, rounds: int, check: Callable[[], None]) -> Figure:
    segment = SegmentLayout(holding, holding.manifest, "")
    rows = [row for piece, view in enumerate(holding.piece_views()) for row in segment.rows(piece, view, mapping)]
    slices, whole = sliced(rows, mapping.address + HEADER_BYTES), CopyTable(rows)
    ratios, seconds, least = [], [], []
    for number in range(rounds + 2):
        if number == 1:
            ctypes.memset(mapping.address + HEADER_BYTES, 0, holding.manifest.segment_nbytes)
        began = time.perf_counter()
        for one in slices:
            one.table.run()
        sent = time.perf_counter()
        if number == 1:
            check()
        began_again = time.perf_counter()
        whole.run()
        if number > 1:
            seconds.append(sent - began)
            least.append(time.perf_counter() - began_again)
            ratios.append(seconds[-1] / least[-1])
    value, limit = statistics.median(seconds) * 1e3, statistics.median(least) * 1e3
    more = {"slices": len(slices), "bytes": weights.nbytes}
    return Figure("early-publish", value, "ms", limit, statistics.median(ratios), rounds=rounds, more=more)


def _read(made: dict[str, object], manifest: Manifest, mapping: Mapping) -> None:
    """Raises ValueError where the segment has another bit."""
    import torch

    for entry in manifest.entries:
        expected = made[entry.tensor.name]
        assert isinstance(expected, torch.Tensor)
        found = mapping.piece(manifest, entry.piece).tensor()
        if not torch.equal(found.view(torch.int16), expected.cpu().view(torch.int16)):
            raise ValueError(f"{entry.tensor.name} differs in the segment")


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
