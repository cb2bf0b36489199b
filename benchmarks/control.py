"""Latency of the control path: one trainer and one engine of 16 small tensors, each a process of its own.

Measures from the moment before ``publish`` is called to the moment after the reader's update returned, by
``time.monotonic_ns`` (one clock for all processes of a Linux host). ``control-*``: the reader waits in
``update(step)``, which takes two requests; ``control-wait-*``: in ``wait(step)``, and then calls ``update()``, which
takes three. With ``--write`` the figures go to ``benchmarks/results/control.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket as socketlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TENSORS = 16
SHAPE = (64, 64)
LIMITS = {"p50": 0.5, "p99": 2.0}
"""Milliseconds. A process waits for another one three times: the reader for the version (it is answered by the
writer's message), and for the answer to its confirmation."""
RESULTS = Path(__file__).parent / "results" / "control.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--socket", help="of a running daemon (default: one is started)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(RESULTS.parents[2])}")
    arguments = parser.parse_args()
    with contextlib.nullcontext(arguments.socket) if arguments.socket else _daemon() as socket:
        figures = []
        for name, way in (("control", "update"), ("control-wait", "wait_update")):
            figures += list(_figures(name, _measure(socket, way, arguments.rounds), arguments.rounds))
        trip = _quantile(_round_trips(arguments.rounds), 0.5)
    for figure in figures:
        print(f"{figure['name']:<28}{figure['value']:>9.3f} {figure['unit']}  (limit {figure['limit']:.3f})")
    print(f"{'one byte there and back':<28}{trip:>9.3f} ms, between two processes of this machine")
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


@contextlib.contextmanager
def _daemon() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="awexd-b") as folder:
        socket = f"{folder}/s"
        command = [sys.executable, "-m", "awexd", "serve", "--socket", socket, "--state-dir", f"{folder}/state"]
        process = subprocess.Popen([*command, "--log-level", "WARNING"])
        try:
            yield socket
        finally:
            process.terminate()
            process.wait()


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


def _round_trips(rounds: int) -> list[float]:
    """Milliseconds of one byte to another process and back."""
    ours, theirs = socketlib.socketpair()
    process = get_context("spawn").Process(target=_echo, args=(theirs,))
    process.start()
    theirs.close()
    times = []
    with ours:
        ours.sendall(b"-")
        ours.recv(1)  # it has started
        for _ in range(rounds):
            started = time.monotonic_ns()
            ours.sendall(b"-")
            ours.recv(1)
            times.append((time.monotonic_ns() - started) / 1e6)
    process.join()
    return times


def _echo(link: socketlib.socket) -> None:
    while data := link.recv(1):
        link.sendall(data)


def _weights(value: float) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {f"layer.{n}.weight": torch.full(SHAPE, value) for n in range(TENSORS)}


def _connected(make: Any) -> Any:
    """The daemon that was started with us may not listen yet."""
    from awexd_client import DaemonUnavailable

    end = time.monotonic() + 30
    while True:
        try:
            return make()
        except DaemonUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _write(link: Connection, socket: str, job: str, rounds: int) -> None:
    from awexd_client import WeightWriter

    writer = _connected(lambda: WeightWriter(job, 0, 1, socket))
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

    reader = _connected(lambda: WorkerWeightsReader(job, "engine", 0, 1, socket))
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


def _figures(name: str, latencies: list[float], rounds: int) -> Iterator[dict[str, Any]]:
    for quantile, share in (("p50", 0.50), ("p99", 0.99)):
        value, limit = _quantile(latencies, share), LIMITS[quantile]
        yield {
            "name": f"{name}-{quantile}",
            "value": round(value, 4),
            "unit": "ms",
            "limit": limit,
            "ratio": round(value / limit, 3),
            "peer": None,
            "machine": f"{_cpu()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": f"python benchmarks/control.py --rounds {rounds}",
        }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
