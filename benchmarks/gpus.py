"""Hand-overs between two GPUs of one node. The sets, and what is checked, are those of ``gpu.py``.

``peer-*``: a trainer on one GPU lends, an engine on the other copies; over one plain copy of the same bytes between the
two, just before each round. ``two-by-two-*``: a trainer of two ranks, one on each GPU, that hold halves of each matrix
along dimension 0, to an engine of two workers, one on each, that hold halves along dimension 1. With ``--write`` each
figure goes to ``benchmarks/results/h200x2.json`` at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, quartiles, table, write
from awexd.bench.gpu import measure
from awexd.bench.gpu.devices import devices
from awexd.bench.gpu.pair import Pair, Place, pair
from awexd.bench.gpu.weights import Weights
from benchmarks.gpu import FAILURES

RESULTS = ROOT / "benchmarks" / "results" / "h200x2.json"
FIRST, SECOND = ("cuda", "0"), ("cuda", "1")
FIGURES = [
    *("peer-dense", "peer-moe", "two-by-two-direct", "two-by-two-host", "peer-dense-memory", "peer-moe-memory"),
    *("nccl-dense", "nccl-moe", "nccl-reshard", "nccl-moe-checksum", "nccl-memory", "nccl-two-by-two"),
]
"""Of this and of ``nccl.py``, which write the same file."""
BARS = {"peer-dense": Bar("ratio", ">=", 0.9), "peer-moe": Bar("ratio", ">=", 0.9)}
MIB = 1 << 20


def peer(two: Pair, name: str, weights: Weights, rounds: int) -> Iterator[Figure]:
    """Rate of the whole hand-over, publish called to update done; ``name-memory``: what the engine takes elsewhere."""
    two.prepare(weights)
    with two.job(name, weights, mode="direct") as job:
        job.publish(1)
        before = two.writer.ask("memory")["used"]
        job.update(1)
        job.captured()
        taken = (two.writer.ask("memory")["used"] - before) / MIB
        found = measure.direct_rounds(job, rounds, weights.nbytes, first=2, warm=measure.WARM_ROUNDS, limit="peer")
    yield replace(measure.rate_figure(name, found.total, found.limit, weights), bar=BARS[name])
    note = "of the trainer's GPU, taken while the engine on the other opened its memory and copied"
    yield Figure(f"{name}-memory", taken, "MiB", note=note)


def two_by_two(
    socket: str,
    name: str,
    weights: Weights,
    rounds: int,
    mode: str,
    *,
    on: Sequence[Sequence[Sequence[str]]] = ((FIRST, SECOND), (FIRST, SECOND)),
    transport: str = "auto",
) -> Iterator[Figure]:
    """``on``: the devices of the trainer's ranks and of the engine's workers."""
    last = measure.WARM_ROUNDS + rounds
    times = []
    with (
        pair(Place(path=ROOT), socket, devices=on) as four,
        four.job(name, weights, mode=mode, transport=transport) as job,
    ):
        for step in range(1, last + 1):
            times.append(job.hand_over(step)[0] * 1e3)
            if step in (measure.WARM_ROUNDS, last):
                job.check(step)
    del times[: measure.WARM_ROUNDS]
    low, value, high = quartiles(times)
    more = {"bytes": weights.nbytes, "gbps": weights.nbytes / value / 1e6}
    yield Figure(name, value, "ms", low=low, high=high, rounds=rounds, more=more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="a figure (default %(default)s)")
    parser.add_argument("--only", metavar="NAME", action="append", help="groups to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sets: whether it works, not how fast")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if devices() < 2:
        sys.exit("two NVIDIA GPUs are needed")
    sets = {kind: Weights(kind, *((16, 4) if arguments.quick else ())) for kind in ("dense", "moe")}
    rounds, figures = arguments.rounds, list[Figure]()
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(daemon())
        two = stack.enter_context(pair(Place(path=ROOT), socket, devices=[[FIRST], [SECOND]]))
        name = two.reader.ask("describe")["device"]
        groups: dict[str, Callable[[], Iterator[Figure]]] = {
            "peer-dense": lambda: peer(two, "peer-dense", sets["dense"], rounds),
            "peer-moe": lambda: peer(two, "peer-moe", sets["moe"], rounds),
            "two-by-two-direct": lambda: two_by_two(socket, "two-by-two-direct", sets["moe"], rounds, "direct"),
            "two-by-two-host": lambda: two_by_two(socket, "two-by-two-host", sets["moe"], rounds, "host"),
        }
        for group in arguments.only or groups:
            started = time.monotonic()
            try:
                if group.startswith("two"):
                    for side in two.sides:
                        side.ask("free")
                for figure in groups[group]():
                    figures.append(replace(figure, more=figure.more | {"gpu": f"2 x {name}"}))
                    print(table(figures[-1:])[1], flush=True)
            except FAILURES as error:
                figures.append(Figure(group, None, "", bar=BARS.get(group), note=f"{type(error).__name__}: {error}"))
                print(f"{group}: {error}", flush=True)
            if arguments.write:
                write(RESULTS, figures, f"python benchmarks/gpus.py --rounds {rounds}", keep=FIGURES)
            print(f"{group}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(["", *table(figures)]))


if __name__ == "__main__":
    main()
