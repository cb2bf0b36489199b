"""Hand-overs between a trainer's and an engine's process on one GPU, next to the machine's limits and to peers.

Sets are those of Qwen3-8B (``dense``: 399 tensors, 16.4 GB) and of one of four expert-parallel shards of Qwen3-30B-A3B
(``moe``: 5,043 tensors, 17.6 GB), in bfloat16. Every element is checked after the first and the last measured round of
each figure. Limits are measured beside each round: one flat copy of the same bytes within the device for lent versions,
DMA of page-locked memory for those through host memory. Figures are printed as they come, the most important first; one
that fails does not stop the others. With ``--write`` each goes to ``benchmarks/results/h200.json`` at once.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, table, write
from awexd.bench.gpu import kills, lasting, measure
from awexd.bench.gpu.devices import devices
from awexd.bench.gpu.pair import Pair, Place, Rounds, pair
from awexd.bench.gpu.weights import Weights
from awexd.bench.link import SideFailed
from awexd_transports.errors import AwexdError
from benchmarks.peers import on_gpu
from benchmarks.peers.environments import python

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
CHECKSUM_ROUNDS = 3
PEER_ROUNDS = 3
SWAP_ROUNDS = 5
FAILURES = (SideFailed, AwexdError, OSError, EOFError, ValueError, ArithmeticError)


@dataclass(frozen=True)
class Sizes:
    """What is measured. ``rows``, ``host_rows``: bytes of each width of rows."""

    moe: Weights
    dense: Weights
    kills: Weights
    small: Weights
    rows: int
    host_rows: int
    updates: int
    kill_rounds: int


FULL = Sizes(
    moe=Weights("moe"),
    dense=Weights("dense"),
    kills=Weights("moe", layers=2, moving=True),
    small=Weights("rows", width=512, size=16 << 20),
    rows=4 << 30,
    host_rows=2 << 30,
    updates=1000,
    kill_rounds=50,
)
QUICK = Sizes(
    moe=Weights("moe", shrink=16, layers=4),
    dense=Weights("dense", shrink=16, layers=4),
    kills=Weights("dense", shrink=16, layers=2, moving=True),
    small=Weights("rows", width=512, size=1 << 20),
    rows=8 << 20,
    host_rows=8 << 20,
    updates=40,
    kill_rounds=2,
)


@dataclass
class Bench:
    """One run.

    Attributes:
        gpu: what its processes run on, once there are any.
        host: rounds of the MoE set through host memory, for what is compared with them.
    """

    place: Place
    socket: str
    sizes: Sizes
    rounds: int
    peers: bool
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    gpu: str = ""
    host: Rounds | None = None
    _pair: Pair | None = None

    @property
    def pair(self) -> Pair:
        """The pair of processes that most figures share."""
        if self._pair is None:
            ends = socket.socketpair()
            for end in ends:
                self.stack.enter_context(end)
            fds = [[end.fileno()] for end in ends]
            place = replace(self.place, module="benchmarks.peers.gpu_sides") if self.peers else self.place
            self._pair = self.stack.enter_context(pair(place, self.socket, fds=fds))
            self.gpu = self._pair.reader.ask("describe")["device"]
        return self._pair

    def free(self) -> None:
        """Their memory is needed elsewhere."""
        for side in self._pair.sides if self._pair else ():
            side.ask("free")

    def drop(self) -> None:
        """Ends them: the next figure gets new ones."""
        self._pair = None
        self.stack.close()


def moe(bench: Bench) -> Iterator[Figure]:
    """Lent, with what takes turns with it."""
    weights = bench.sizes.moe
    first = measure.First(bench.pair, weights)
    with bench.pair.job("moe", weights, mode="direct") as job:
        yield first.hand_over(job)
        for step in range(2, 2 + measure.WARM_ROUNDS):
            job.hand_over(step)
        yield first.extra_memory("extra-memory")  # limits and peers take memory of their own
        with contextlib.ExitStack() as stack:
            turns = stack.enter_context(on_gpu.turns(bench.pair)) if bench.peers else {}
            found = measure.direct_rounds(job, bench.rounds, weights.nbytes, first=step + 1, warm=1, beside=turns)
        yield measure.direct_figure("direct-moe", found, weights)
        yield from on_gpu.figures(found)


def dense(bench: Bench) -> Iterator[Figure]:
    yield measure.direct(bench.pair, "direct-dense", bench.sizes.dense, bench.rounds)


def dense_reshard(bench: Bench) -> Iterator[Figure]:
    note = "the engine holds the left and the right half of each matrix"
    yield measure.direct(
        bench.pair, "direct-dense-reshard", bench.sizes.dense, bench.rounds, cut=measure.HALVES, note=note
    )


def through_host(bench: Bench) -> Iterator[Figure]:
    weights = bench.sizes.moe
    first = measure.First(bench.pair, weights)
    with bench.pair.job("host", weights, mode="host") as job:
        yield replace(first.hand_over(job), name="first-update-host")
        for step in range(2, 2 + measure.WARM_ROUNDS):
            first.again(job, step)
        yield first.extra_memory("extra-memory-host")
        bench.host = measure.host_rounds(job, bench.rounds, weights.nbytes, first=step + 1, warm=1)
        yield from measure.host_figures(bench.host, weights)
        step += 1 + bench.rounds
        rounds = min(bench.rounds, SWAP_ROUNDS)
        yield measure.swap(job, rounds, weights, step=step)
        yield measure.swap_park(job, rounds, weights, step=step + 2 * rounds)


def host_rows(bench: Bench) -> Iterator[Figure]:
    yield measure.host_rows(bench.pair, min(bench.rounds, 5), bench.sizes.host_rows)


def rows(bench: Bench) -> Iterator[Figure]:
    yield measure.direct_rows(bench.pair, min(bench.rounds, 5), bench.sizes.rows)


def killing(bench: Bench) -> Iterator[Figure]:
    yield kills.kill_rounds(bench.place, bench.socket, bench.sizes.kills, bench.sizes.kill_rounds)


def many_updates(bench: Bench) -> Iterator[Figure]:
    yield lasting.update_many(bench.pair, bench.sizes.small, bench.sizes.updates)


def many_processes(bench: Bench) -> Iterator[Figure]:
    note = "two trainer processes that hold halves along dimension 0, two engine workers that hold halves along 1"
    bench.free()
    with pair(bench.place, bench.socket, count=2) as four:
        yield measure.direct(four, "direct-many", bench.sizes.moe, bench.rounds, note=note)


def checksums(bench: Bench) -> Iterator[Figure]:
    for name, weights in (("direct-moe-checksum", bench.sizes.moe), ("direct-dense-checksum", bench.sizes.dense)):
        yield measure.direct(bench.pair, name, weights, min(bench.rounds, CHECKSUM_ROUNDS), verify="checksum", warm=1)


def host_checksums(bench: Bench) -> Iterator[Figure]:
    rounds = min(bench.rounds, CHECKSUM_ROUNDS)
    yield from measure.host(bench.pair, bench.sizes.moe, rounds, verify="checksum")


def checkpoint_engine(bench: Bench) -> Iterator[Figure]:
    name = "peer-checkpoint-engine"
    if not bench.peers:
        return
    interpreter = python("checkpoint-engine")
    if interpreter is None:
        raise SideFailed("its environment is not there: make bench-peers")
    if bench.host is None:
        for _ in through_host(bench):
            pass
    if bench.host is None:
        raise SideFailed("there is nothing to compare it with")
    bench.free()
    yield on_gpu.checkpoint_engine(
        name, interpreter, bench.sizes.moe, PEER_ROUNDS, (bench.host.publish, bench.host.update)
    )


@dataclass(frozen=True)
class Group:
    """Figures that are measured together. ``peers``: names that are there only with ``--peers``."""

    names: tuple[str, ...]
    measure: Callable[[Bench], Iterator[Figure]]
    peers: tuple[str, ...] = ()


GROUPS = [
    Group(("direct-moe", "first-update", "extra-memory"), moe, tuple(on_gpu.PEERS)),
    Group(("direct-dense",), dense),
    Group(
        ("host-publish", "host-update", "swap-duplex", "swap-park", "first-update-host", "extra-memory-host"),
        through_host,
    ),
    Group(("host-update-reshard",), host_rows),
    Group(("update-1000",), many_updates),
    Group(("kill-rounds",), killing),
    Group((), checkpoint_engine, ("peer-checkpoint-engine",)),
    Group(("direct-dense-reshard",), dense_reshard),
    Group(("direct-reshard",), rows),
    Group(("direct-many",), many_processes),
    Group(("direct-moe-checksum", "direct-dense-checksum"), checksums),
    Group(("host-publish-checksum", "host-update-checksum"), host_checksums),
]
KNOWN = [name for group in GROUPS for name in (*group.names, *group.peers)]
OTHERS = ["overlap-launch", "overlap-waves", "early-publish"]
"""Of ``overlap.py``, which writes the same file."""


def run(bench: Bench, wanted: Iterable[str]) -> Iterator[Figure]:
    """The wanted figures, one after another; those of a group that fails have no value and say why."""
    for group in GROUPS:
        names = [name for name in (*group.names, *(group.peers if bench.peers else ())) if name in wanted]
        if not names:
            continue
        left = list(names)
        started = time.monotonic()
        try:
            for figure in group.measure(bench):
                if figure.name in left:
                    left.remove(figure.name)
                    yield replace(figure, more=figure.more | {"gpu": bench.gpu})
        except FAILURES as error:
            for name in left:
                yield Figure(name, None, "", bar=bar_of(name), note=f"{type(error).__name__}: {error}"[:600])
            with contextlib.suppress(*FAILURES):
                bench.drop()
        print(f"{', '.join(names)}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def bar_of(name: str) -> Bar | None:
    """So that a figure which could not be measured still says what it should reach."""
    return on_gpu.BAR if name.startswith("peer-") else measure.BARS.get(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="a figure (default %(default)s)")
    parser.add_argument("--only", metavar="NAME", action="append", help="figures to measure (default: all)")
    parser.add_argument("--peers", action="store_true", help="also peers")
    parser.add_argument("--quick", action="store_true", help="small sets: whether it works, not how fast")
    parser.add_argument("--socket", help="of a running daemon (default: one is started)")
    parser.add_argument("--driver", metavar="MODULE:CLASS", help="plays a GPU over files of a folder (for tests)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or arguments.driver):
        parser.error("such figures are not for keeping")
    wanted = arguments.only or KNOWN
    if unknown := set(wanted) - set(KNOWN):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(KNOWN)}")
    if arguments.driver is None and not devices():
        sys.exit("no NVIDIA GPU here")
    command = " ".join(["python benchmarks/gpu.py", *(["--peers"] if arguments.peers else [])])
    figures: list[Figure] = []
    for figure in measured(arguments, wanted):
        figures.append(figure)
        print(table([figure])[1], flush=True)
        if arguments.write:
            write(RESULTS, figures, f"{command} --rounds {arguments.rounds}", keep=[*KNOWN, *OTHERS])
    print("\n".join(["", *table(figures), "", *(f"{one.name}: {one.note}" for one in figures if one.note)]))


def measured(arguments: argparse.Namespace, wanted: list[str]) -> Iterator[Figure]:
    with contextlib.ExitStack() as stack:
        device: tuple[str, ...] = ("cuda",)
        if arguments.driver:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="awexd-b"))
            device = ("played", arguments.driver, folder)
        path = arguments.socket or stack.enter_context(daemon())
        sizes = QUICK if arguments.quick else FULL
        bench = Bench(Place(device, path=ROOT), path, sizes, arguments.rounds, arguments.peers)
        stack.callback(bench.drop)
        yield from run(bench, wanted)


if __name__ == "__main__":
    main()
