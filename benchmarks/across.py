"""What crosses the network: a MetaServer, a trainer's node and engines' nodes, each a daemon on this machine.

The model is two layers of a dense transformer in bfloat16, 96 MiB, which two trainer ranks cut by rows.
``network-bytes``: bytes that all daemons sent for a step over the union of what each node's workers read, summed over
nodes: engines whose workers are on one, two and four nodes (tensors cut by rows and by columns), all of them waiting
for the step; the ratio is the worst layout's. ``trainer-egress-N``: bytes that the trainer's node sent for a step over
the model's, for N nodes with an engine each that reads all of it and waits for the step; the worst of the rounds. Every
bit is compared after the last round. With ``--write`` the figures go to ``benchmarks/results/nodes.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, names, table, write
from awexd_client import Shard, WeightWriter, WorkerWeightsReader
from awexd_client.session import Connection
from benchmarks.nodes import metaserver

HIDDEN, KV, LAYERS = 2048, 1024, 2
ROWS = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "gate": (HIDDEN, HIDDEN), "up": (HIDDEN, HIDDEN)}
COLUMNS = {"o": (HIDDEN, HIDDEN), "down": (HIDDEN, HIDDEN)}
WHOLE = {"norm": (HIDDEN,)}
WRITERS = 2
LAYOUTS = {"tp2-on-1": (2, 1), "tp2-on-2": (2, 2), "tp4-on-2": (4, 2), "tp4-on-4": (4, 4), "tp8-on-4": (8, 4)}
"""Workers of the engine, and nodes that they are on."""
NODES = (1, 2, 4, 8)
BARS = {"network-bytes": Bar("ratio", "<=", 1.01)} | {f"trainer-egress-{n}": Bar("ratio", "<=", 2.0) for n in NODES}
TIMEOUT = 120.0
RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    figures = [_network(arguments.rounds), *(_egress(nodes, arguments.rounds) for nodes in NODES)]
    print("\n".join(table(figures)))
    if arguments.write:
        write(RESULTS, figures, f"python benchmarks/across.py --rounds {arguments.rounds}", keep=names(RESULTS))


# what a process has


def shards(rank: int, size: int) -> list[Shard]:
    """A rank's part: rows, columns, and what every rank has."""
    found = []
    for layer in range(LAYERS):
        for name, shape in {**ROWS, **COLUMNS, **WHOLE}.items():
            offset, extent = [0] * len(shape), list(shape)
            if name not in WHOLE:
                dim = int(name in COLUMNS)
                extent[dim] = shape[dim] // size
                offset[dim] = rank * extent[dim]
            found.append(Shard(f"{layer}.{name}", torch.zeros(extent, dtype=torch.bfloat16), shape, offset))
    return found


def fill(held: Sequence[Shard], step: int) -> None:
    for number, shard in enumerate(held):
        shard.tensor.fill_(float(step + number % 7))


def nbytes(held: Sequence[Shard]) -> int:
    return sum(shard.tensor.nbytes for shard in held)


MODEL = sum(2 * n * (m[0] if m else 1) for n, *m in {**ROWS, **COLUMNS, **WHOLE}.values()) * LAYERS


# nodes


class Nodes:
    """Daemons by number, the trainer's the first; its ranks, and workers of engines."""

    def __init__(self, stack: contextlib.ExitStack, count: int) -> None:
        url = f"http://127.0.0.1:{stack.enter_context(metaserver())}"
        arguments = ("--metaserver", url, "--listen", "127.0.0.1:0", "--node")
        self.sockets = [stack.enter_context(daemon(*arguments, f"node{at}")) for at in range(count + 1)]
        self._stack = stack
        self.job = "bench-across"
        self._held = [shards(rank, WRITERS) for rank in range(WRITERS)]
        self._writers = [
            stack.enter_context(contextlib.closing(WeightWriter(self.job, rank, WRITERS, self.sockets[0], mode="host")))
            for rank in range(WRITERS)
        ]
        together([partial(writer.register, held) for writer, held in zip(self._writers, self._held, strict=True)])
        self.workers: list[tuple[WorkerWeightsReader, list[Shard]]] = []

    def add(self, node: int, place: int, places: int, rank: int, size: int) -> list[Shard]:
        """A worker on that node (counted from 1), one of so many there: what it reads is that of a rank of ``size``."""
        held = shards(rank, size)
        reader = WorkerWeightsReader(self.job, f"e{node}", place, places, self.sockets[node])
        self._stack.enter_context(contextlib.closing(reader))
        reader.register(held)
        self.workers.append((reader, held))
        return held

    def step(self, step: int) -> None:
        """Publishes it, and updates all workers to it, which wait for it already."""
        for held in self._held:
            fill(held, step)

        def publish(writer: WeightWriter) -> None:
            writer.publish(step).committed(timeout=TIMEOUT)

        updates = [partial(reader.update, step, timeout=TIMEOUT) for reader, _ in self.workers]
        together([*updates, *(partial(publish, writer) for writer in self._writers)])

    def check(self, step: int) -> None:
        for reader, held in self.workers:
            for number, shard in enumerate(held):
                if not bool((shard.tensor == float(step + number % 7)).all()):
                    raise SystemExit(f"{reader.engine} rank {reader.rank}: {shard.name} is not that of step {step}")

    def sent(self) -> list[int]:
        """Bytes, by node."""
        return [_sent(socket) for socket in self.sockets]


def _sent(socket: str) -> int:
    with contextlib.closing(Connection(socket)) as connection:
        status, _ = connection.call("status", {}, timeout=TIMEOUT)
        return int(status["metaserver"]["sent_bytes"])


def together(work: Sequence[Callable[[], object]]) -> None:
    """Each in a thread of its own; raises the first that failed."""
    failed: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        yield Nodes(stack, count)


# the figures


def _network(rounds: int) -> Figure:
    """The worst layout's ratio; the value is all bytes of one step to all layouts."""
    found: dict[str, tuple[float, int]] = {}
    for name, (size, count) in LAYOUTS.items():
        with cluster(count) as nodes:
            union = 0
            for node in range(1, count + 1):
                ranks = range(size * (node - 1) // count, size * node // count)
                mine = [nodes.add(node, at, len(ranks), rank, size) for at, rank in enumerate(ranks)]
                union += sum(map(nbytes, mine)) - (len(mine) - 1) * 2 * HIDDEN * LAYERS  # norms: each worker has them
            nodes.step(1)
            before = sum(nodes.sent())
            for step in range(2, rounds + 2):
                nodes.step(step)
            nodes.check(rounds + 1)
            found[name] = (sum(nodes.sent()) - before) / rounds, union
    ratios = {name: sent / union for name, (sent, union) in found.items()}
    total, least = sum(sent for sent, _ in found.values()), sum(union for _, union in found.values())
    return Figure(
        "network-bytes",
        total,
        "B",
        limit=float(least),
        ratio=max(ratios.values()),
        bar=BARS["network-bytes"],
        rounds=rounds,
        note=f"the worst of {', '.join(LAYOUTS)}; a model of {MODEL} bytes",
        more={"ratios": ratios},
    )


def _egress(count: int, rounds: int) -> Figure:
    with cluster(count) as nodes:
        for node in range(1, count + 1):
            nodes.add(node, 0, 1, 0, 1)
        nodes.step(1)
        sent = []
        for step in range(2, rounds + 2):
            before = nodes.sent()[0]
            nodes.step(step)
            sent.append(nodes.sent()[0] - before)
        nodes.check(rounds + 1)
    name, low, high = f"trainer-egress-{count}", float(min(sent)), float(max(sent))
    limit = float(MODEL)
    return Figure(name, high, "B", limit, high / limit, BARS[name], low=low, high=high, rounds=rounds)


if __name__ == "__main__":
    main()
