"""What a plan comes to: whether it works, who gives whom how much, how even that is, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from awexd.dryrun.bounds import Holdings, lower_bound
from awexd.dryrun.models import Model
from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import Manifest
from awexd_transports.names import Ints
from awexd_transports.plan import Plan, Traffic, plan
from awexd_transports.share import share

PUBLISH_RATE, UPDATE_RATE = 17.0, 9.3
"""GB/s of a published byte into host memory, and of one from there into differently cut tensors, with checksums: figure
host-400-reshard-checksum of benchmarks/results/cpu.json, a machine with two cores and no GPU."""


@dataclass(frozen=True)
class Side:
    """Trainer ranks, or the workers of one engine: what each declares."""

    name: str
    manifests: Sequence[Manifest]

    def __len__(self) -> int:
        return len(self.manifests)


@dataclass(frozen=True)
class Pair:
    """A trainer and its engines.

    Attributes:
        infer: the engines' spec, of a dry run.
        model: of a dry run; None: live manifests.
        segments: the trainer's manifests are what each rank writes already, replicas dealt out.
    """

    trainer: Side
    engines: Sequence[Side]
    infer: str = ""
    model: Model | None = None
    segments: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Load:
    """The largest load of a rank, and what it must be at least."""

    largest: int
    bound: float

    @property
    def ratio(self) -> float:
        return self.largest / self.bound if self.bound else 1.0


@dataclass(frozen=True)
class Moved:
    """The traffic of a pair that works.

    Attributes:
        traffic: copies and bytes, shape (trainer ranks, workers of all engines).
        holds, writes: bytes of each trainer rank: in its memory, and in the segment that it publishes.
        written, sent, received: how even they are.
    """

    traffic: Traffic
    holds: Ints
    writes: Ints
    written: Load
    sent: Load
    received: Load

    @property
    def sends(self) -> Ints:
        found: Ints = self.traffic.nbytes.sum(axis=1)
        return found

    @property
    def receives(self) -> Ints:
        found: Ints = self.traffic.nbytes.sum(axis=0)
        return found

    @property
    def links(self) -> int:
        return int((self.traffic.copies > 0).sum())


@dataclass(frozen=True)
class Estimate:
    """Seconds, and under which assumptions."""

    publish: float
    update: float
    assumption: str


@dataclass(frozen=True)
class Report:
    """``moved`` or ``problem``: one of them."""

    pair: Pair
    moved: Moved | None
    problem: ManifestMismatch | None
    estimate: Estimate | None

    @property
    def works(self) -> bool:
        return self.problem is None


def examine(pair: Pair, rate: float | None = None) -> Report:
    """Plans each engine and adds up.

    Args:
        rate: GB/s of each rank's link; None: all in the host memory of one machine.
    """
    try:
        moved = _moved(pair)
    except ManifestMismatch as problem:
        return Report(pair, None, problem, None)
    return Report(pair, moved, None, _estimate(moved, rate))


def _moved(pair: Pair) -> Moved:
    trainer = list(pair.trainer.manifests)
    segments: Sequence[Manifest] = trainer if pair.segments else share(trainer)
    alike = [tuple(map(id, engine.manifests)) for engine in pair.engines]
    plans: dict[tuple[int, ...], Plan] = {}
    for key, engine in zip(alike, pair.engines, strict=True):
        if key not in plans:
            plans[key] = plan(segments, engine.manifests)
    traffics = {key: made.traffic() for key, made in plans.items()}
    traffic = Traffic(
        *(np.concatenate(columns, axis=1) for columns in zip(*(traffics[key] for key in alike), strict=True))
    )
    writes = np.array([segment.nbytes for segment in segments], np.int64)
    holdings, ranks = Holdings(trainer), len(trainer)
    written = Load(int(writes.max(initial=0)), lower_bound(holdings.held(), ranks))
    sends, receives = traffic.nbytes.sum(axis=1), traffic.nbytes.sum(axis=0)
    read = holdings.read(segments, ((made, alike.count(key)) for key, made in plans.items()))
    sent = Load(int(sends.max(initial=0)), lower_bound(read, ranks))
    received = Load(int(receives.max(initial=0)), max(e.nbytes for side in pair.engines for e in side.manifests))
    return Moved(traffic, np.array([each.nbytes for each in trainer], np.int64), writes, written, sent, received)


def _estimate(moved: Moved, rate: float | None) -> Estimate:
    if rate is None:
        return Estimate(
            int(moved.writes.sum()) / PUBLISH_RATE / 1e9,
            int(moved.traffic.nbytes.sum()) / UPDATE_RATE / 1e9,
            f"all ranks on one machine without GPUs whose host memory takes {PUBLISH_RATE:g} GB/s in publishing and"
            f" gives {UPDATE_RATE:g} GB/s in updating, all engines together, as two cores were measured to do"
            " (benchmarks/results/cpu.json, host-400-reshard-checksum); give --rate for links of your own",
        )
    most = max(moved.sent.largest, moved.received.largest)
    return Estimate(
        moved.written.largest / rate / 1e9,
        most / rate / 1e9,
        f"each rank has a link of {rate:g} GB/s each way to itself, all are busy at once, and nothing else takes time",
    )


def as_json(report: Report) -> dict[str, Any]:
    """Plain values; every link, every rank, every name."""
    pair = report.pair
    told: dict[str, Any] = {
        "works": report.works,
        "problem": report.problem.message if report.problem else None,
        "missing": report.problem.missing if report.problem else [],
        "unexpected": report.problem.unexpected if report.problem else [],
        "mismatched": report.problem.mismatched if report.problem else {},
        "train": {"spec": pair.trainer.name, "ranks": len(pair.trainer)},
        "infer": [{"engine": engine.name, "workers": len(engine)} for engine in pair.engines],
        "notes": list(pair.notes),
    }
    if pair.model:
        model = pair.model
        told["model"] = {
            "family": model.family,
            "names": model.names,
            "parameters": model.elements,
            "bytes": model.nbytes,
        }
    if report.moved:
        told |= _traffic(pair, report.moved)
    if report.estimate:
        one = report.estimate
        told["estimate"] = {
            "publish_seconds": one.publish,
            "update_seconds": one.update,
            "assumption": one.assumption,
        }
    return told


def workers_of(pair: Pair) -> list[tuple[str, int]]:
    """Engine and rank of each column of the traffic."""
    return [(engine.name, rank) for engine in pair.engines for rank in range(len(engine))]


def _traffic(pair: Pair, moved: Moved) -> dict[str, Any]:
    copies, nbytes = moved.traffic
    workers = workers_of(pair)
    return {
        "totals": {"copies": int(copies.sum()), "bytes": int(nbytes.sum()), "links": moved.links},
        "trainer": [
            {"rank": rank, "holds": holds, "writes": writes, "sends": sends}
            for rank, (holds, writes, sends) in enumerate(
                zip(moved.holds.tolist(), moved.writes.tolist(), moved.sends.tolist(), strict=True)
            )
        ],
        "workers": [
            {"engine": engine, "rank": rank, "receives": received}
            for (engine, rank), received in zip(workers, moved.receives.tolist(), strict=True)
        ],
        "links": [
            {
                "source": source,
                "engine": workers[worker][0],
                "rank": workers[worker][1],
                "copies": int(copies[source, worker]),
                "bytes": int(nbytes[source, worker]),
            }
            for source, worker in np.argwhere(copies > 0).tolist()
        ],
        "balance": {
            name: {"largest": load.largest, "lower_bound": load.bound, "ratio": load.ratio}
            for name, load in (("written", moved.written), ("sent", moved.sent), ("received", moved.received))
        },
    }
