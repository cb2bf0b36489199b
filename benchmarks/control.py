"""Latency of the control path: one trainer and one engine of 16 small tensors, each a process of its own.

Measures from the moment before ``publish`` is called to the moment after the reader's update returned, by
``time.monotonic_ns`` (one clock for all processes of a Linux host). ``control-*``: the reader waits in
``update(step)``, whose answer ``publish`` brings; ``control-wait-*``: in ``wait(step)``, and then calls ``update()``,
one request more. The limit is as many round trips of one byte between two processes, at the same quantile. What the
reader confirms is not waited for. With ``--write`` the figures go to ``benchmarks/results/control.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, quantile, quartiles, table, write
from awexd.bench.limits import round_trips

TENSORS = 16
SHAPE = (64, 64)
WAYS = {"control": ("update", 1), "control-wait": ("wait_update", 2)}
"""How the reader waits, and the requests that it waits for: the first is answered by the writer's message."""
QUANTILES = {"p50": 0.50, "p99": 0.99}
BARS = {"control-p50": Bar("value", "<=", 0.5), "control-p99": Bar("value", "<=", 2.0)}
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "control.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--socket", help="of a running daemon (default: one is started)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with contextlib.nullcontext(arguments.socket) if arguments.socket else daemon() as socket:
        trips = round_trips(arguments.rounds)
        figures: list[Figure] = []
        for name, (way, requests) in WAYS.items():
            latencies = _measure(socket, way, arguments.rounds)
            figures += _figures(name, latencies, [requests * trip for trip in trips])
    print("\n".join(table(figures)))
    if arguments.write:
        write(RESULTS, figures, f"python benchmarks/control.py --rounds {arguments.rounds}")


def _measure(socket: str, way: str, rounds: int) -> list[float]:
    """Milliseconds from publish called to the reader's update done, a number a round."""
    context = get_context("spawn")
    to_writer, writer_end = context.Pipe()
    to_reader, reader_end = context.Pipe()
    job = f"control-{way.replace('_', '-')}"
    sides = [
        context.Process(target=_write, args=(writer_end, socket, job, rounds)),
        context.Process(target=_read, args=(reader_end, socket, job, rounds, way)),
    ]
    for side in sides:
        side.start()
    writer_end.close()
    reader_end.close()
    for end in (to_writer, to_reader):
        end.recv()  # both have registered
    for step in range(1, rounds + 1):
        # The reader says that it is about to wait, so that what is measured begins with it in its call.
        to_reader.send(step)
        to_reader.recv()
        to_writer.send(step)
        to_reader.recv()
    to_writer.send(0)
    published, done = to_writer.recv(), to_reader.recv()
    for side in sides:
        side.join()
    return [(end - start) / 1e6 for start, end in zip(published, done, strict=True)]


def _weights(value: float) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {f"layer.{n}.weight": torch.full(SHAPE, value) for n in range(TENSORS)}


def _write(link: Connection, socket: str, job: str, rounds: int) -> None:
    from awexd_client import WeightWriter

    writer = WeightWriter(job, 0, 1, socket)
    writer.register(_weights(1.0))
    link.send(True)
    published = []
    while step := link.recv():
        published.append(time.monotonic_ns())
        writer.publish(step)
    writer.close_job()
    writer.close()
    link.send(published)


def _read(link: Connection, socket: str, job: str, rounds: int, way: str) -> None:
    from awexd_client import WorkerWeightsReader

    reader = WorkerWeightsReader(job, "engine", 0, 1, socket)
    reader.register(_weights(0.0))
    link.send(True)
    done = []
    for _ in range(rounds):
        step = link.recv()
        link.send(True)
        if way == "wait_update":
            reader.wait(step)
            result = reader.update()
        else:
            result = reader.update(step)
        done.append(time.monotonic_ns())
        if result.step != step:
            raise RuntimeError(f"step {result.step} where {step} was published")
        link.send(True)
    reader.close()
    link.send(done)


def _figures(name: str, latencies: list[float], limits: list[float]) -> Iterator[Figure]:
    """Milliseconds; quartiles stand beside the median."""
    low, _, high = quartiles(latencies)
    for label, share in QUANTILES.items():
        value, limit = quantile(latencies, share), quantile(limits, share)
        full = f"{name}-{label}"
        figure = Figure(full, value, "ms", limit, value / limit, BARS.get(full), rounds=len(latencies))
        yield replace(figure, low=low, high=high) if label == "p50" else figure


if __name__ == "__main__":
    main()
