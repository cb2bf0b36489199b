"""The ``nccl`` transport between a trainer on one GPU and an engine on another, beside plain sends of the same bytes.

``nccl-dense``, ``nccl-moe``: the whole hand-over, publish called to update done, over one ``send`` and ``recv`` of one
buffer of as many bytes by torch.distributed, just before each round; ``more`` has what peers do: an operation a tensor,
512 at once, and a broadcast a tensor. ``nccl-reshard``: the engine holds the left and the right half of each matrix.
``*-checksum``: the same, with checksums. ``nccl-memory``: what a process takes of its GPU's memory.
``nccl-two-by-two``, where there are four GPUs: two trainer ranks that hold rows to two workers that hold columns. With
``--write`` each figure goes to ``benchmarks/results/h200x2.json`` at once.

``--host``: the same between two processes' host memory; such figures are printed only.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, table, write
from awexd.bench.gpu import measure
from awexd.bench.gpu.devices import devices
from awexd.bench.gpu.pair import WHOLE, Job, Pair, Place, pair
from awexd.bench.gpu.weights import Cut, Weights
from benchmarks.gpu import FAILURES
from benchmarks.gpus import FIGURES, FIRST, MIB, RESULTS, SECOND, two_by_two

BARS = {name: Bar("ratio", ">=", 0.9) for name in ("nccl-dense", "nccl-moe", "nccl-reshard")}
FOUR = ((FIRST, SECOND), (("cuda", "2"), ("cuda", "3")))
BESIDE = ("each", "broadcast")
MODULE = "benchmarks.nccl_sides"


class Bare:
    """torch.distributed between the two sides, while the block runs."""

    def __init__(self, two: Pair) -> None:
        self._two = two

    def __enter__(self) -> Bare:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for rank, side in enumerate(self._two.sides):
            side.tell("bare_open", address=address, rank=rank)
        for side in self._two.sides:
            side.answer("bare_open")
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._two.sides:
            side.tell("bare_close")
        for side in self._two.sides:
            side.answer("bare_close")

    def seconds(self, how: str) -> float:
        for side in self._two.sides:
            side.tell("bare", how=how)
        found = [side.answer("bare") for side in self._two.sides]
        return float(max(one["ended"] for one in found) - min(one["started"] for one in found)) / 1e9


def rounds_of(job: Job, bare: Bare, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of hand-overs, and of plain sends just before them."""
    times, limits = list[float](), list[float]()
    for step in range(1, measure.WARM_ROUNDS + rounds + 1):
        limits.append(bare.seconds("one"))
        times.append(job.hand_over(step)[0])
        if step in (measure.WARM_ROUNDS, measure.WARM_ROUNDS + rounds):
            job.check(step)
    return times[measure.WARM_ROUNDS :], limits[measure.WARM_ROUNDS :]


def handed_over(
    two: Pair,
    name: str,
    weights: Weights,
    rounds: int,
    *,
    verify: str = "off",
    cut: Cut = WHOLE,
    beside: bool = False,
    ring_bytes: int | None = None,
) -> Figure:
    ways = {"mode": "direct", "transport": "nccl", "verify": verify}
    with two.job(name, weights, **ways, cut=cut, ring_bytes=ring_bytes) as job, Bare(two) as bare:
        times, limits = rounds_of(job, bare, rounds)
        more = {how: statistics.median(bare.seconds(how) for _ in range(3)) * 1e3 for how in (BESIDE if beside else ())}
    found = measure.rate_figure(name, times, limits, weights)
    note = "more: milliseconds of an operation a tensor, 512 at once, and of a broadcast a tensor" if beside else None
    return replace(found, bar=BARS.get(name), more=found.more | more, note=note)


def memory(two: Pair, weights: Weights, ring_bytes: int | None) -> Figure:
    """Growth of each GPU's memory in use from before the job is opened to after three hand-overs."""
    two.prepare(weights)
    before = [side.ask("memory")["used"] for side in two.sides]
    with two.job("nccl-memory", weights, mode="direct", transport="nccl", ring_bytes=ring_bytes) as job:
        for step in (1, 2, 3):
            job.hand_over(step)
        taken = [(side.ask("memory")["used"] - used) / MIB for side, used in zip(two.sides, before, strict=True)]
    more = dict(zip(("writer", "reader"), taken, strict=True))
    note = "the larger of the two GPUs': the ring, tables, and what NCCL takes"
    return Figure("nccl-memory", max(taken), "MiB", more=more, note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="a figure (default %(default)s)")
    parser.add_argument("--only", metavar="NAME", action="append", help="groups to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sets: whether it works, not how fast")
    parser.add_argument("--host", action="store_true", help="between two processes' host memory")
    parser.add_argument("--ring-mib", type=int, help="of each side's ring (default: awexd's)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or arguments.ring_mib):
        parser.error("such figures are not for keeping")
    ring = arguments.ring_mib * MIB if arguments.ring_mib else None
    if devices() < 2 and not arguments.host:
        sys.exit("two NVIDIA GPUs are needed; --host needs none")
    sets = {kind: Weights(kind, *((16, 4) if arguments.quick else ())) for kind in ("dense", "moe")}
    rounds, figures = arguments.rounds, list[Figure]()
    on = [[("host",)], [("host",)]] if arguments.host else [[FIRST], [SECOND]]
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(daemon())
        two = stack.enter_context(pair(Place(path=ROOT, module=MODULE), path, devices=on))

        def one(*given: Any, **more: Any) -> Iterator[Figure]:
            yield handed_over(two, *given, **more)

        groups: dict[str, Callable[[], Iterator[Figure]]] = {
            "nccl-dense": lambda: one("nccl-dense", sets["dense"], rounds, beside=True, ring_bytes=ring),
            "nccl-moe": lambda: one("nccl-moe", sets["moe"], rounds, beside=True, ring_bytes=ring),
            "nccl-reshard": lambda: one("nccl-reshard", sets["moe"], rounds, cut=measure.HALVES, ring_bytes=ring),
            "nccl-moe-checksum": lambda: one(
                "nccl-moe-checksum", sets["moe"], rounds, verify="checksum", ring_bytes=ring
            ),
            "nccl-memory": lambda: iter([memory(two, sets["moe"], ring)]),
        }
        if devices() >= len(FOUR) * 2:
            groups["nccl-two-by-two"] = lambda: two_by_two(
                path, "nccl-two-by-two", sets["moe"], rounds, "direct", on=FOUR, transport="nccl"
            )
        name = two.reader.ask("describe")["device"]
        for group in arguments.only or groups:
            started = time.monotonic()
            try:
                for figure in groups[group]():
                    figures.append(replace(figure, more=figure.more | {"gpu": f"2 x {name}"}))
                    print(table(figures[-1:])[1], flush=True)
            except FAILURES as error:
                figures.append(Figure(group, None, "", bar=BARS.get(group), note=f"{type(error).__name__}: {error}"))
                print(f"{group}: {error}", flush=True)
            if arguments.write and not arguments.host:
                write(RESULTS, figures, f"python benchmarks/nccl.py --rounds {rounds}", keep=FIGURES)
            print(f"{group}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(["", *table(figures)]))


if __name__ == "__main__":
    main()
