"""The figures of hand-overs on one GPU: each round of awexd beside the machine's limit, measured in the same moment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from awexd.bench.figures import Bar, Figure, quartiles
from awexd.bench.gpu.pair import WHOLE, Job, Pair, Rounds, seconds
from awexd.bench.gpu.weights import Cut, Weights
from awexd.bench.link import SideFailed

WARM_ROUNDS = 3
"""More than the slots of a job."""
CONTROL_SECONDS = 1e-3
"""What the control path may cost at any size: not counted by the bars of direct versions."""
HALVES = Cut(1, 2)
"""An engine that holds the left and the right half of each matrix."""
MIB = 1 << 20
WIDTHS = (128, 512, 2048, 8192)
HOST_WIDTHS = WIDTHS[1:]
BARS = {
    "direct-dense": Bar("ratio", "<=", 1.06),
    "direct-moe": Bar("ratio", "<=", 1.10),
    "host-publish": Bar("ratio", ">=", 0.95),
    "host-update": Bar("ratio", ">=", 0.92),
    "host-update-reshard": Bar("ratio", ">=", 0.85),
    "swap-duplex": Bar("ratio", "<=", 1.2),
    "extra-memory": Bar("value", "<=", 64),
    "extra-memory-host": Bar("value", "<=", 64),
    "update-1000": Bar("value", "<=", 0),
    "kill-rounds": Bar("value", "<=", 0),
}

Beside = Mapping[str, Callable[[int], float]]


@dataclass(slots=True)
class Extra:
    """Bytes of device memory that each process took for a job, beyond its tensors and its context, at peak."""

    writer: int = 0
    reader: int = 0


class First:
    """The first version of a job, one side after the other, so that what either takes is seen apart."""

    def __init__(self, pair: Pair, weights: Weights) -> None:
        self._pair = pair
        pair.prepare(weights)
        for side in pair.sides:
            side.ask("forget_peak")
        self._before = pair.writer.ask("memory")["used"]
        self._reserved = (0, 0)
        self.extra = Extra()

    def hand_over(self, job: Job) -> Figure:
        """Publishes and updates step 1; the figure of it."""
        published = job.publish(1)
        writer = self._pair.writer.ask("memory")
        updated = job.update(1)
        job.captured()
        reader = self._pair.reader.ask("memory")
        self.extra = Extra(writer["used"] - self._before, reader["used"] - writer["used"])
        self._reserved = writer["reserved"], reader["reserved"]
        parts = {
            "writer_register": job.first["writer"],
            "first_publish": published,
            "reader_register": job.first["reader"],
            "first_update": updated,
        }
        note = "a reader's registration and its first update: plan, mappings, table; more: the trainer's side"
        return Figure("first-update", job.first["reader"] + updated, "s", more=parts, note=note)

    def again(self, job: Job, step: int) -> None:
        """Publishes and updates a later step through host memory: each slot takes its own of the device."""
        before = self._pair.writer.ask("memory")
        job.publish(step)
        writer = self._pair.writer.ask("memory")
        job.update(step)
        reader = self._pair.reader.ask("memory")
        self.extra.writer += max(0, writer["used"] - before["used"])
        self.extra.reader += max(0, reader["used"] - writer["used"])
        self._reserved = writer["reserved"], reader["reserved"]

    def extra_memory(self, name: str) -> Figure:
        """Asked after all rounds: what torch's allocator had reserved at most counts too."""
        for at, (kind, side) in enumerate((("writer", self._pair.writer), ("reader", self._pair.reader))):
            grown = max(0, side.ask("memory")["peak"] - self._reserved[at])
            setattr(self.extra, kind, getattr(self.extra, kind) + grown)
        found = {"writer": self.extra.writer / MIB, "reader": self.extra.reader / MIB}
        note = (
            "the larger of the two processes': growth of the whole device's memory in use while only that one works, "
            "from before it is registered, and what torch reserved beyond that at peak"
        )
        return Figure(name, max(found.values()), "MiB", bar=BARS[name], more=found, note=note)


def direct_rounds(
    job: Job,
    rounds: int,
    nbytes: int,
    *,
    first: int,
    warm: int,
    beside: Beside | None = None,
    limit: Literal["flat", "peer"] = "flat",
) -> Rounds:
    """Hand-overs of lent versions, from step ``first`` on; every byte of the last warm one and of the last checked."""
    found = Rounds(beside={name: [] for name in beside or {}})
    for step in range(first, first + warm):
        job.hand_over(step)
    job.check(first + warm - 1)
    for name in beside or {}:
        (beside or {})[name](0)
    for step in range(first + warm, first + warm + rounds):
        found.limit.append(float(job.pair.reader.ask(limit, nbytes=nbytes)["seconds"]))
        total, publish, pause = job.hand_over(step)
        found.total.append(total)
        found.publish.append(publish)
        found.update.append(pause)
        if step == first + warm + rounds - 1:
            job.check(step)
        for name, round_ in (beside or {}).items():
            found.beside[name].append(round_(step))
    return found


def direct_figure(name: str, found: Rounds, weights: Weights, note: str | None = None) -> Figure:
    """Milliseconds; the control path's allowance is taken off before the ratio is."""
    low, value, high = quartiles([one * 1e3 for one in found.total])
    ratios = [(one - CONTROL_SECONDS) / limit for one, limit in zip(found.total, found.limit, strict=True)]
    ratio_low, ratio, ratio_high = quartiles(ratios)
    return Figure(
        name,
        value,
        "ms",
        limit=statistics.median(found.limit) * 1e3,
        ratio=ratio,
        bar=BARS.get(name),
        low=low,
        high=high,
        rounds=len(found.total),
        note=note,
        more={
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
            "publish": statistics.median(found.publish) * 1e3,
            "pause": statistics.median(found.update) * 1e3,
            "bytes": weights.nbytes,
            "tensors": len(weights.tensors()),
        },
    )


def direct(
    pair: Pair,
    name: str,
    weights: Weights,
    rounds: int,
    *,
    cut: Cut = WHOLE,
    verify: str = "off",
    warm: int = WARM_ROUNDS,
    note: str | None = None,
) -> Figure:
    """One figure of a lent set."""
    with pair.job(name, weights, mode="direct", verify=verify, cut=cut) as job:
        found = direct_rounds(job, rounds, weights.nbytes, first=1, warm=warm)
    return direct_figure(name, found, weights, note)


def direct_rows(pair: Pair, rounds: int, size: int) -> Figure:
    """The worst of several widths of rows, each of ``size`` bytes."""
    ratios: dict[str, float] = {}
    worst: Figure | None = None
    for width in WIDTHS:
        weights = Weights("rows", width=width, size=size)
        found = direct(pair, "direct-reshard", weights, rounds, cut=HALVES)
        ratios[f"ratio_{width}"] = found.ratio or 0.0
        worst = found if worst is None or (found.ratio or 0.0) > (worst.ratio or 0.0) else worst
    if worst is None:
        raise SideFailed("no width was measured")
    return _with(worst, ratios, f"the worst of rows of {', '.join(map(str, WIDTHS))} bytes, {size / 1e9:.1f} GB each")


def host_rounds(job: Job, rounds: int, nbytes: int, *, first: int, warm: int = WARM_ROUNDS) -> Rounds:
    """Publish, then update; DMA of the same bytes by the same process beside each."""
    found = Rounds()
    writer, reader = job.pair.writer, job.pair.reader
    for step in range(first, first + warm):
        job.publish(step)
        job.update(step)
    job.check(first + warm - 1)
    for step in range(first + warm, first + warm + rounds):
        found.down.append(float(writer.ask("down", nbytes=nbytes)["seconds"]))
        found.publish.append(job.publish(step))
        found.up.append(float(reader.ask("up", nbytes=nbytes)["seconds"]))
        found.update.append(job.update(step))
        found.total.append(found.publish[-1] + found.update[-1])
    job.check(first + warm + rounds - 1)
    return found


def rate_figure(name: str, times: Sequence[float], limits: Sequence[float], weights: Weights) -> Figure:
    """GB/s, and the median share of the limit's rate."""
    nbytes = weights.nbytes
    low, value, high = quartiles([nbytes / one / 1e9 for one in times])
    ratio_low, ratio, ratio_high = quartiles([limit / one for one, limit in zip(times, limits, strict=True)])
    return Figure(
        name,
        value,
        "GB/s",
        limit=statistics.median(nbytes / one / 1e9 for one in limits),
        ratio=ratio,
        bar=BARS.get(name),
        low=low,
        high=high,
        rounds=len(times),
        more={
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
            "seconds": statistics.median(times),
            "bytes": nbytes,
            "tensors": len(weights.tensors()),
        },
    )


def host(
    pair: Pair, weights: Weights, rounds: int, *, verify: str = "off", warm: int = WARM_ROUNDS
) -> Iterator[Figure]:
    """``host-publish`` and ``host-update`` of one set, same sharding."""
    with pair.job("host", weights, mode="host", verify=verify) as job:
        found = host_rounds(job, rounds, weights.nbytes, first=1, warm=warm)
    yield from host_figures(found, weights, "" if verify == "off" else f"-{verify}")


def host_figures(found: Rounds, weights: Weights, suffix: str = "") -> Iterator[Figure]:
    yield rate_figure(f"host-publish{suffix}", found.publish, found.down, weights)
    yield rate_figure(f"host-update{suffix}", found.update, found.up, weights)


def host_rows(pair: Pair, rounds: int, size: int) -> Figure:
    """``host-update-reshard``: the worst of several widths of rows."""
    ratios: dict[str, float] = {}
    worst: Figure | None = None
    for width in HOST_WIDTHS:
        weights = Weights("rows", width=width, size=size)
        with pair.job("rows", weights, mode="host", cut=HALVES) as job:
            rounds_ = host_rounds(job, rounds, weights.nbytes, first=1)
        found = rate_figure("host-update-reshard", rounds_.update, rounds_.up, weights)
        ratios[f"ratio_{width}"] = found.ratio or 0.0
        worst = found if worst is None or (found.ratio or 0.0) < (worst.ratio or 0.0) else worst
    if worst is None:
        raise SideFailed("no width was measured")
    widths = ", ".join(map(str, HOST_WIDTHS))
    return _with(worst, ratios, f"the worst of rows of {widths} bytes, {size / 1e9:.1f} GB each")


def swap(job: Job, rounds: int, weights: Weights, *, step: int) -> Figure:
    """``swap-duplex``: a version goes to host memory while the one before it comes back to the GPU.

    Args:
        step: the newest there is.
    """
    both: list[float] = []
    alone: list[float] = []
    writer, reader = job.pair.writer, job.pair.reader
    for at in range(step + 1, step + 1 + 2 * rounds, 2):
        published, updated = job.publish(at), job.update(at)
        alone.append(max(published, updated))
        reader.ask("update", job=job.name, step=at, staged=True)
        writer.tell("publish", job=job.name, step=at + 1)
        sides = [writer.answer("publish"), reader.answer("update")]
        both.append((max(one["ended"] for one in sides) - min(one["started"] for one in sides)) / 1e9)
        job.check(at)
    low, value, high = quartiles(both)
    return Figure(
        "swap-duplex",
        value,
        "s",
        limit=statistics.median(alone),
        ratio=statistics.median(one / other for one, other in zip(both, alone, strict=True)),
        bar=BARS["swap-duplex"],
        low=low,
        high=high,
        rounds=rounds,
        note="publish of a version while the version before it is updated from; limit: the slower of the two alone",
        more={"bytes_each_way": weights.nbytes},
    )


def swap_park(job: Job, rounds: int, weights: Weights, *, step: int) -> Figure:
    """``swap-park``: as much of a trainer's state goes to host memory as weights come to the engine.

    Args:
        step: the newest there is.
    """
    both: list[float] = []
    alone: list[float] = []
    back: list[float] = []
    writer, reader = job.pair.writer, job.pair.reader
    for at in range(step + 1, step + 2 + rounds):
        job.publish(at)
        parked = seconds([writer.ask("park", job=job.name)])
        back.append(_restored(job))
        updated = job.update(at)
        reader.ask("update", job=job.name, step=at)
        writer.tell("park", job=job.name)
        sides = [writer.answer("park"), reader.answer("update")]
        back.append(_restored(job))
        alone.append(max(parked, updated))
        both.append(seconds(sides))
        job.check(at)
    writer.ask("discard")
    low, value, high = quartiles(both[1:])  # in the first round memory for it was made
    return Figure(
        "swap-park",
        value,
        "s",
        limit=statistics.median(alone[1:]),
        ratio=statistics.median(one / other for one, other in zip(both[1:], alone[1:], strict=True)),
        low=low,
        high=high,
        rounds=rounds,
        note="park of as many bytes as are updated meanwhile; limit: the slower of the two alone",
        more={"bytes_each_way": weights.nbytes, "restore": statistics.median(back[2:])},
    )


def _restored(job: Job) -> float:
    found = job.pair.writer.ask("restore", job=job.name)
    if found["wrong"]:
        raise SideFailed(f"{found['wrong']} parked tensors came back otherwise")
    return seconds([found])


def _with(figure: Figure, more: Mapping[str, Any], note: str) -> Figure:
    return replace(figure, more=figure.more | dict(more), note=note)
