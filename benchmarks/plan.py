"""The planner: seconds, memory, bytes of manifests and balance, on the jobs of ``benchmarks/jobs.py``.

Each figure is of fresh processes that have only the encoded manifests, as a rank has them from the daemon: ``cold`` is
the first time in a process, ``warm`` the median of further ones. With ``--write`` the figures go to
``benchmarks/results/plan.json``. Where awex's environment is there (``make bench-peers``), its planner runs too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.figures import Bar, Figure, quartiles, table, write
from awexd.bench.limits import peak_gigabytes
from awexd.bench.link import Side, SideFailed
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.moves import Moves
from awexd_transports.plan import Plan, plan
from awexd_transports.share import share
from benchmarks.jobs import JOBS, Job, Rank
from benchmarks.peers.environments import environment, python

T = TypeVar("T")
RESULTS = ROOT / "benchmarks" / "results" / "plan.json"
ROUNDS = 5
SPENT_SECONDS = 60.0
"""After which a figure gets no further round."""
WARM_SECONDS = 3.0
QUOTED = {"plan-global-moe": 21.3, "plan-global-moe-rss": 1.6, "plan-local-1t": 1.67}
"""awex 0.9.0 where it is not measured in the run: the same jobs, measured once on a machine of this kind."""
QUOTED_BALANCE = {"64-to-one-tp8": 8.0, "dp8-to-2": 4.0, "4-replicas-to-5": 1.6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fresh processes a figure (default %(default)s)")
    parser.add_argument("--peers", action="store_true", help="also run awex's planner, where its environment is there")
    parser.add_argument("--quick", action="store_true", help="a tiny job: whether it works, not how fast")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--quick figures are not for keeping")
    if arguments.child:
        what, folder = arguments.child
        print(json.dumps(CHILDREN[what](Path(folder))))
        return
    figures = list(measure(arguments.rounds, peers=arguments.peers, quick=arguments.quick))
    print("\n".join(table(figures)))
    if arguments.write:
        options = " --peers" if arguments.peers else ""
        write(RESULTS, figures, f"python benchmarks/plan.py{options} --rounds {arguments.rounds}")


def measure(rounds: int, *, peers: bool, quick: bool) -> Iterator[Figure]:
    """All figures, slowest job first."""
    awex = _awex(quick) if peers else {}
    with tempfile.TemporaryDirectory(prefix="awexd-b") as name:
        folder = Path(name)
        yield from _global_moe(folder / "global", "tiny-moe" if quick else "global-moe", rounds, awex)
        yield _local_1t(folder / "local", "tiny-moe" if quick else "local-1t", rounds, awex)
        for job in QUOTED_BALANCE:
            yield _balance(folder / job, job, awex)


# What is measured, each in a process of its own


class Encoded:
    """A job's manifests as bytes, the distinct ones once, and which rank has which."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_bytes())
        self.bodies = [(folder / str(number)).read_bytes() for number in range(index["bodies"])]
        self.trainer: list[int] = index["trainer"]
        self.engine: list[int] = index["engine"]
        self.engines: int = index["engines"]
        self.copies: int | None = index["copies"]

    def decoded(self) -> tuple[list[Manifest], list[Manifest]]:
        """The trainer's ranks, and those of all engines; ranks with the same body share a manifest."""
        known = [Manifest.decode(body) for body in self.bodies]
        return [known[at] for at in self.trainer], [known[at] for at in self.engine] * self.engines


def _child_global(folder: Path) -> dict[str, Any]:
    encoded = Encoded(folder)

    def work() -> Plan:
        trainer, engines = encoded.decoded()
        return plan(share(trainer), engines)

    cold, warm, made, peak = _timed(work)
    _, engines = encoded.decoded()
    wanted = sum(manifest.nbytes for manifest in engines)
    if made.nbytes != wanted:
        raise SystemExit(f"the plan moves {made.nbytes} bytes; the engines hold {wanted}")
    return {"cold": cold, "warm": warm, "gigabytes": peak, "bytes": made.nbytes}


def _child_check(folder: Path) -> dict[str, Any]:
    """Every destination element is covered exactly once; not in the process that is measured."""
    trainer, engines = Encoded(folder).decoded()
    made = plan(share(trainer), engines)
    _check_coverage(made, engines)
    return {"copies": len(made)}


def _child_local_share(folder: Path) -> dict[str, Any]:
    started = time.perf_counter()
    trainer, _ = Encoded(folder).decoded()
    decode = time.perf_counter() - started
    cold, warm, _, peak = _timed(lambda: share(trainer)[0])  # a rank makes its own segment's alone
    return {"cold": cold, "warm": warm, "gigabytes": peak, "decode": decode}


def _child_local_plan(folder: Path) -> dict[str, Any]:
    started = time.perf_counter()
    segments, engines = Encoded(folder).decoded()
    decode = time.perf_counter() - started
    mine = [engines[0]]
    cold, warm, made, peak = _timed(lambda: plan(segments, mine, partial=True))
    if made.nbytes != mine[0].nbytes:
        raise SystemExit(f"the plan moves {made.nbytes} bytes; the worker holds {mine[0].nbytes}")
    return {"cold": cold, "warm": warm, "gigabytes": peak, "decode": decode}


def _child_balance(folder: Path) -> dict[str, Any]:
    trainer, engines = Encoded(folder).decoded()
    made = plan(share(trainer), engines)
    _check_coverage(made, engines)
    sent = made.traffic().nbytes.sum(axis=1).tolist()
    return {"largest": max(sent), "total": sum(sent), "ranks": len(trainer)}


CHILDREN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "global": _child_global,
    "check": _child_check,
    "local-share": _child_local_share,
    "local-plan": _child_local_plan,
    "balance": _child_balance,
}


def _timed(work: Callable[[], T]) -> tuple[float, float | None, T, float]:
    """Seconds of the first time, the median of further ones, the first result, and the peak of gigabytes until then."""
    started = time.perf_counter()
    made = work()
    cold = time.perf_counter() - started
    peak = peak_gigabytes()
    warm: list[float] = []
    while len(warm) < ROUNDS and cold * (len(warm) + 1) < WARM_SECONDS:
        started = time.perf_counter()
        work()
        warm.append(time.perf_counter() - started)
    return cold, statistics.median(warm) if warm else None, made, peak


def _check_coverage(made: Plan, destinations: Sequence[Manifest]) -> None:
    """Raises SystemExit where no copy fills an element of a destination, or two do.

    Ranks that hold the same get the same copies, which are looked at once.
    """
    seen: dict[int, Manifest] = {}
    for rank, manifest in enumerate(destinations):
        of = int(made.destinations[rank])
        if seen.get(of) == manifest:
            continue
        seen[of] = manifest
        wrong = _badly_filled(made.to(rank), manifest)
        if wrong is not None:
            raise SystemExit(f"engine rank {rank}, {manifest.entries[wrong]}: not filled exactly once")


def _badly_filled(moves: Moves, manifest: Manifest) -> int | None:
    """An entry that is not the disjoint union of its copies: all inside, none shared, none left."""
    columns, into = manifest.columns, moves.destination_entry
    dims = columns.offset.shape[1]
    low, high = moves.offset[:, :dims], moves.offset[:, :dims] + moves.shape[:, :dims]
    outside = (low < columns.offset[into]) | (high > (columns.offset + columns.shape)[into])
    wrong = np.zeros(len(moves), bool)
    wrong[np.nonzero(outside)[0]] = True
    order = np.argsort(into, kind="stable")
    for apart in range(1, int(np.bincount(into).max(initial=0))):
        one, other = order[:-apart], order[apart:]
        clash = (into[one] == into[other]) & ((low[one] < high[other]) & (low[other] < high[one])).all(axis=1)
        wrong[one[clash]] = True
    filled = np.bincount(into, moves.shape.prod(axis=1), len(manifest))  # whole numbers below 2^53: exact as floats
    bad = [*into[wrong].tolist(), *np.flatnonzero(filled != columns.shape.prod(axis=1)).tolist()]
    return bad[0] if bad else None


# The figures


def _global_moe(folder: Path, name: str, rounds: int, awex: dict[str, Any]) -> Iterator[Figure]:
    job = JOBS[name]()
    bodies = _encode(folder, job, _manifests(job.trainer), _manifests(job.engine))
    found = _processes("global", folder, rounds)
    copies = _process("check", folder)["copies"]
    shape = {"copies": copies, "uncut_copies": job.copies, "bytes": found[0]["bytes"]}
    theirs = awex.get("global-moe")
    seconds = _figure("plan-global-moe", [one["cold"] for one in found], "s", 0.6, theirs and theirs["seconds"])
    warm = [one["warm"] for one in found if one["warm"] is not None]
    seconds.more.update(shape, warm=statistics.median(warm) if warm else None)
    yield seconds
    peaks = [one["gigabytes"] for one in found]
    yield _figure("plan-global-moe-rss", peaks, "GB", 0.35, theirs and theirs["gigabytes"])
    distinct, total = sum(map(len, bodies)) / 1e6, len(job.trainer) + len(job.engine) * job.engines
    manifests = Figure("manifest-moe", distinct, "MB", bar=Bar("value", "<=", 0.2))
    manifests.more.update(distinct=len(bodies), manifests=total)
    yield manifests


def _local_1t(folder: Path, name: str, rounds: int, awex: dict[str, Any]) -> Figure:
    job = JOBS[name]()
    trainer, engine = _manifests(job.trainer), _manifests(job.engine)
    _encode(folder / "ranks", job, trainer, engine)
    _encode(folder / "segments", job, share(trainer), engine)
    sides = {
        "writer": _processes("local-share", folder / "ranks", rounds),
        "reader": _processes("local-plan", folder / "segments", rounds),
    }
    colds = {side: [one["cold"] for one in found] for side, found in sides.items()}
    slower = max(colds, key=lambda side: statistics.median(colds[side]))
    theirs = awex.get("local-1t")
    figure = _figure("plan-local-1t", colds[slower], "s", 0.05, theirs and theirs["seconds"])
    figure.more["slower"] = slower
    for side, found in sides.items():
        figure.more[f"{side}_cold"] = statistics.median(colds[side])
        warm = [one["warm"] for one in found if one["warm"] is not None]
        figure.more[f"{side}_warm"] = statistics.median(warm) if warm else None
        figure.more[f"{side}_decode"] = statistics.median(one["decode"] for one in found)
    return figure


def _balance(folder: Path, name: str, awex: dict[str, Any]) -> Figure:
    job = JOBS[name]()
    _encode(folder, job, _manifests(job.trainer), _manifests(job.engine))
    found = _process("balance", folder)
    bound = max(found["total"] / found["ranks"], _held_by_few(job) * job.engines)
    ratio = found["largest"] / bound
    theirs = awex.get(name)
    peer = _peer(theirs["balance"] if theirs else None, QUOTED_BALANCE[name])
    return Figure(
        f"balance-{name}", found["largest"], "B", limit=bound, ratio=ratio, bar=Bar("ratio", "<=", 1.05), peer=peer
    )


def _held_by_few(job: Job) -> float:
    """Bytes that a set of ranks alone holds, over their number: the largest. Boxes are equal or disjoint here."""
    holders: dict[Any, list[int]] = {}
    for rank, held in enumerate(job.trainer):
        for row in held:
            holders.setdefault((row[0], row[3], row[4]), []).append(rank)
    sets: dict[tuple[int, ...], int] = {}
    for (_, _, extent), ranks in holders.items():
        numel = 2
        for size in extent:
            numel *= size
        sets[tuple(ranks)] = sets.get(tuple(ranks), 0) + numel
    return max(nbytes / len(ranks) for ranks, nbytes in sets.items())


def _figure(name: str, values: list[float], unit: str, bar: float, peer: float | None) -> Figure:
    low, value, high = quartiles(values)
    return Figure(
        name,
        value,
        unit,
        bar=Bar("value", "<=", bar),
        low=low,
        high=high,
        rounds=len(values),
        peer=_peer(peer, QUOTED[name]),
    )


def _peer(measured: float | None, quoted: float) -> dict[str, Any]:
    value = quoted if measured is None else measured
    return {"name": "awex 0.9.0", "value": value, "quoted": measured is None}


# Manifests, processes and the peer


def _manifests(ranks: Sequence[Rank]) -> list[Manifest]:
    """One a rank; ranks with the same rows share it."""
    made: dict[int, Manifest] = {}
    for rows in ranks:
        if id(rows) not in made:
            made[id(rows)] = Manifest.of(
                Entry(TensorSpec(name, shape, dtype), Box(offset, extent), piece)
                for piece, (name, dtype, shape, offset, extent) in enumerate(rows)
            )
    return [made[id(rows)] for rows in ranks]


def _encode(folder: Path, job: Job, trainer: Sequence[Manifest], engine: Sequence[Manifest]) -> list[bytes]:
    """Writes the distinct bodies, and returns them."""
    bodies: dict[bytes, int] = {}
    numbers = [[bodies.setdefault(m.encoded, len(bodies)) for m in side] for side in (trainer, engine)]
    folder.mkdir(parents=True)
    for body, number in bodies.items():
        (folder / str(number)).write_bytes(body)
    index = {"bodies": len(bodies), "trainer": numbers[0], "engine": numbers[1]}
    (folder / "index.json").write_text(json.dumps(index | {"engines": job.engines, "copies": job.copies}))
    return list(bodies)


def _processes(what: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    started = time.monotonic()
    found: list[dict[str, Any]] = []
    while len(found) < rounds and (not found or time.monotonic() - started < SPENT_SECONDS):
        found.append(_process(what, folder))
    return found


def _process(what: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _awex(quick: bool) -> dict[str, Any]:
    """awex's planner on the same jobs, each in a fresh process; nothing where it cannot run."""
    interpreter = python("awex")
    if interpreter is None:
        print("awex's environment is not there: make bench-peers", file=sys.stderr)
        return {}
    jobs = {name: name for name in QUOTED_BALANCE}
    jobs |= {"global-moe": "tiny-moe" if quick else "global-moe", "local-1t": "tiny-moe" if quick else "local-1t"}
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        ranks = [0, len(JOBS[job]().engine) * JOBS[job]().engines] if name == "local-1t" else [None]
        try:
            answers = [_awex_plans(interpreter, job, rank) for rank in ranks]
        except SideFailed as failure:
            print(f"awex, {name}: {failure}", file=sys.stderr)
            continue
        found[name] = max(answers, key=lambda answer: float(answer["seconds"]))
    return found


def _awex_plans(interpreter: Path, job: str, rank: int | None) -> dict[str, Any]:
    command = [str(interpreter), "-m", "benchmarks.peers.awex_side", "planner"]
    with Side("awex", command, environ=environment()) as side:
        return side.ask("plan", job=job, rank=rank)


if __name__ == "__main__":
    main()
