"""Hand-overs of 1 GiB through host memory, between two processes, next to two flat copies of the same bytes.

Each round is a hand-over, from ``publish`` called to the reader's ``update`` done, and then, by the same two processes,
a copy of the same source memory into shared memory and one from there to the same destination, flat, by every thread
count; the fastest count is the limit. All pages are warm. Half of the tensors of a ``-reshard`` figure are cut along
dimension 1: the reader holds their left and right halves in separate tensors. The ratio is the median over the rounds.

Peers (``make bench-peers`` makes their environments) take turns with awexd in one run; their ratio is their time over
awexd's. With ``--write`` the figures go to ``benchmarks/results/cpu.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.daemon import daemon
from awexd.bench.figures import Bar, Figure, quartiles, table, write
from awexd.bench.handover import WARM_ROUNDS, Pair, figure, measure, pair, tiny
from awexd.bench.link import Side, SideFailed
from awexd.bench.weights import Weights
from benchmarks.peers.environments import environment, python

RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
GIB = 1 << 30
QUICK_BYTES = 32 << 20
PEER_ROUNDS = 7
PEER_WARM_ROUNDS = 2
PEER_BAR = Bar("ratio", ">=", 1.5)


@dataclass(frozen=True)
class Case:
    name: str
    tensors: int
    cut: bool
    verify: str
    bar: float | None


CASES = [
    Case("host-400", 400, False, "off", 1.10),
    Case("host-400-reshard", 400, True, "off", 1.15),
    Case("host-5000", 5000, False, "off", 1.15),
    Case("host-5000-reshard", 5000, True, "off", 1.25),
    Case("host-400-checksum", 400, False, "checksum", 1.4),
    Case("host-400-reshard-checksum", 400, True, "checksum", None),
    Case("host-5000-checksum", 5000, False, "checksum", None),
    Case("host-5000-reshard-checksum", 5000, True, "checksum", None),
]
PEERS = ["host-400-torchstore", "host-400-awex", "host-400-checkpoint-engine", "control-awex-metaserver"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="a figure (default %(default)s)")
    parser.add_argument("--only", metavar="NAME", action="append", help="figures to measure (default: all)")
    parser.add_argument("--peers", action="store_true", help="also those peers whose environments are there")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BYTES >> 20} MiB: whether it works, not how fast")
    parser.add_argument("--socket", help="of a running daemon (default: one is started)")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--quick figures are not for keeping")
    known = [case.name for case in CASES] + PEERS
    wanted = arguments.only or known
    if unknown := set(wanted) - set(known):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    nbytes = QUICK_BYTES if arguments.quick else GIB
    figures = list(run(arguments.socket, nbytes, arguments.rounds, wanted, peers=arguments.peers))
    print("\n".join(table(figures)))
    if arguments.write:
        options = " --peers" if arguments.peers else ""
        write(RESULTS, figures, f"python benchmarks/cpu.py{options} --rounds {arguments.rounds}", keep=known)


def run(path: str | None, nbytes: int, rounds: int, wanted: list[str], *, peers: bool) -> Iterator[Figure]:
    """The wanted figures, one after another."""
    with (
        contextlib.nullcontext(path) if path else daemon() as socket_path,
        pair(socket_path, nbytes) as ours,
    ):
        for case in CASES:
            if case.name in wanted:
                _say(case.name)
                weights = Weights(case.tensors, nbytes, cut=case.cut)
                measured = measure(ours, case.name, weights, case.verify, rounds)
                yield figure(case.name, measured, weights, Bar("ratio", "<=", case.bar) if case.bar else None)
        for name, (peer, measure_peer) in MEASURES.items() if peers else ():
            if name not in wanted:
                continue
            interpreter = python(peer)
            if interpreter is None:
                _say(f"{name}: {peer}'s environment is not there: make bench-peers")
                continue
            _say(name)
            yield measure_peer(name, interpreter, ours, Weights(400, nbytes), min(rounds, PEER_ROUNDS))


def _torchstore(name: str, interpreter: Path, ours: Pair, weights: Weights, rounds: int) -> Figure:
    peer = "torchstore 0.1.2"
    command = [str(interpreter), "-m", "benchmarks.peers.torchstore_side"]
    try:
        with Side("torchstore", command, environ=environment()) as side:
            side.ask("open", weights=asdict(weights))
            times = _in_turn(ours, weights, rounds, lambda step: float(side.ask("round", step=step)["seconds"]))
            _check(side, PEER_WARM_ROUNDS + rounds)
            side.ask("close")
    except SideFailed as failure:
        return _failed(name, peer, failure)
    note = (
        "put and get of all tensors at once, in place, through a volume in a third process, by Monarch's messages (the "
        "release has no shared-memory transport; RDMA needs a device); torchmonarch 0.2.0 and torch 2.13.0, since the "
        "torchmonarch 0.1.2 that it asks for is linked against libcuda"
    )
    return _compared(name, peer, times, note)


def _awex(name: str, interpreter: Path, ours: Pair, weights: Weights, rounds: int) -> Figure:
    peer = "awex 0.9.0"
    try:
        with _awex_pair(interpreter, weights) as (writer, reader):

            def round_(step: int) -> float:
                reader.tell("update")
                writer.tell("publish", step=step)
                started = writer.answer("publish")["started"]
                seconds = (reader.answer("update")["ended"] - started) / 1e9
                writer.ask("release")
                return float(seconds)

            times = _in_turn(ours, weights, rounds, round_)
            _check(reader, PEER_WARM_ROUNDS + rounds)
    except SideFailed as failure:
        return _failed(name, peer, failure)
    note = (
        "colocated mode with the cpu IPC backend: group_tensors_by_shape_and_dtype, share_memory_, ipc_serialize, "
        "reconstruct_ipc_weights, copy_ into the parameters; the pickle goes through a socket, not the MetaServer, "
        "whose clients poll"
    )
    return _compared(name, peer, times, note)


@contextlib.contextmanager
def _awex_pair(interpreter: Path, weights: Weights) -> Iterator[tuple[Side, Side]]:
    ends = socket.socketpair()
    with contextlib.ExitStack() as stack:
        sides = []
        for end, role in zip(ends, ("writer", "reader"), strict=True):
            stack.enter_context(end)
            command = [str(interpreter), "-m", "benchmarks.peers.awex_side", role, str(end.fileno())]
            side = Side(f"awex's {role}", command, fds=[end.fileno()], environ=environment())
            sides.append(stack.enter_context(side))
            side.ask("open", weights=asdict(weights))
        yield sides[0], sides[1]


def _checkpoint_engine(name: str, interpreter: Path, ours: Pair, weights: Weights, rounds: int) -> Figure:
    peer = "checkpoint-engine 0.4.2"
    command = [str(interpreter), "-m", "benchmarks.peers.checkpoint_engine_side"]
    try:
        with Side("checkpoint-engine", command, environ=environment()) as side:
            failure = side.ask("attempt")["failure"]
    except SideFailed as error:
        failure = error
    return _failed(name, peer, failure or "it can be made here, but no hand-over with it is written")


def _metaserver(name: str, interpreter: Path, ours: Pair, weights: Weights, rounds: int) -> Figure:
    """A publication of 16 small tensors told to a waiting reader; theirs: an object put that a client waits for."""
    peer = "awex 0.9.0's MetaServer"
    with ours.job(name, tiny(), "off") as hand_over:
        mine = [hand_over(step)[0] * 1e3 for step in range(1, 101)][WARM_ROUNDS:]
    try:
        command = [str(interpreter), "-m", "benchmarks.peers.awex_side", "server"]
        with Side("awex's MetaServer", command, environ=environment()) as side:
            theirs = side.ask("measure", rounds=16)
    except SideFailed as failure:
        return _failed(name, peer, failure)
    low, value, high = quartiles(mine)
    waited = statistics.median(theirs["waited"])
    return Figure(
        name,
        value,
        "ms",
        ratio=waited / value,
        low=low,
        high=high,
        rounds=len(mine),
        peer={"name": peer, "value": waited, "quoted": False},
        note="publish and update of 16 tensors; theirs: put_object until a get_object that waits returns (it polls)",
        more={"peer_put_and_get": theirs["median"]},
    )


MEASURES: dict[str, tuple[str, Callable[[str, Path, Pair, Weights, int], Figure]]] = {
    "host-400-torchstore": ("torchstore", _torchstore),
    "host-400-awex": ("awex", _awex),
    "host-400-checkpoint-engine": ("checkpoint-engine", _checkpoint_engine),
    "control-awex-metaserver": ("awex", _metaserver),
}
"""Figure to the peer's environment and what measures it."""


def _in_turn(
    ours: Pair, weights: Weights, rounds: int, theirs: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    """Seconds of awexd's rounds and of the peer's."""
    mine, others = [], []
    with ours.job("peer", weights, "off") as hand_over:
        for step in range(1, WARM_ROUNDS + 1):
            hand_over(step)
        for step in range(1, PEER_WARM_ROUNDS + rounds + 1):
            mine.append(hand_over(WARM_ROUNDS + step)[0])
            others.append(theirs(step))
    return mine[PEER_WARM_ROUNDS:], others[PEER_WARM_ROUNDS:]


def _check(side: Side, step: int) -> None:
    wrong = side.ask("check", step=step)["wrong"]
    if wrong:
        raise SideFailed(f"{side.name} brought other bytes: {wrong}")


def _compared(name: str, peer: str, times: tuple[list[float], list[float]], note: str) -> Figure:
    mine, others = times
    low, value, high = quartiles(mine)
    ratio_low, ratio, ratio_high = quartiles([b / a for a, b in zip(mine, others, strict=True)])
    return Figure(
        name,
        value,
        "s",
        ratio=ratio,
        bar=PEER_BAR,
        low=low,
        high=high,
        rounds=len(mine),
        peer={"name": peer, "value": statistics.median(others), "quoted": False},
        note=note,
        more={"ratio_low": ratio_low, "ratio_high": ratio_high, "ratio_of_minima": min(others) / min(mine)},
    )


def _failed(name: str, peer: str, why: object) -> Figure:
    note = str(why).partition("\n")[0]
    _say(f"{peer}: {note}")
    bar = PEER_BAR if name in ("host-400-torchstore", "host-400-awex") else None
    return Figure(name, None, "s", bar=bar, rounds=0, peer={"name": peer, "value": None, "quoted": False}, note=note)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
