"""A report as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from awexd.dryrun.report import Load, Moved, Pair, Report, workers_of
from awexd_transports.errors import ManifestMismatch

SHOWN = 16
"""Rows of a table, and names of a list; --json has all."""


def lines(report: Report) -> Iterator[str]:
    pair = report.pair
    workers = sum(map(len, pair.engines))
    yield f"{pair.trainer.name} ({_count(len(pair.trainer), 'rank')}) to {_engines(pair)}"
    if pair.model:
        model = pair.model
        yield (
            f"{model.family}: {model.names:,} tensors, {model.elements / 1e9:,.3f} G parameters, {size(model.nbytes)}"
            + (", lm_head tied to the embedding" if model.tied else "")
        )
    if report.problem:
        yield from _problem(report.problem)
    if report.moved:
        moved = report.moved
        yield (
            f"works: {int(moved.traffic.copies.sum()):,} copies, {size(int(moved.traffic.nbytes.sum()))} over"
            f" {moved.links:,} of {len(pair.trainer) * workers:,} links"
        )
        yield ""
        yield from _balance(moved)
        yield ""
        yield from _table(["TRAINER RANK", "HOLDS", "WRITES", "SENDS"], _trainer_rows(moved))
        yield ""
        yield from _table(["ENGINE", "RANK", "RECEIVES"], _worker_rows(pair, moved))
        yield ""
        yield from _table(["TRAINER RANK", "ENGINE", "RANK", "COPIES", "BYTES"], _link_rows(pair, moved))
    if report.estimate:
        one = report.estimate
        yield ""
        yield f"estimate, not a measurement: publish {one.publish:,.3g} s, update {one.update:,.3g} s"
        yield f"  it assumes that {one.assumption}"
    for note in pair.notes:
        yield f"note: {note}"


def size(nbytes: float) -> str:
    """Decimal units, as rates are."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3f} TB"


def _engines(pair: Pair) -> str:
    counts = {len(engine) for engine in pair.engines}
    each = _count(counts.pop(), "worker") if len(counts) == 1 else "workers of different numbers"
    names = [engine.name for engine in pair.engines]
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
    return f"{pair.infer or shown} ({_count(len(pair.engines), 'engine')} of {each})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _problem(problem: ManifestMismatch) -> Iterator[str]:
    yield f"does not work: {problem.message.partition(':')[0]}"
    for title, names in (
        ("missing (no trainer rank has it, or not all of it)", problem.missing),
        ("unexpected (no worker of the engine declares it)", problem.unexpected),
        ("mismatched", [f"{name}: {why}" for name, why in problem.mismatched.items()]),
    ):
        if names:
            yield f"  {title}: {len(names):,}"
            yield from (f"    {name}" for name in names[:SHOWN])
            if len(names) > SHOWN:
                yield f"    and {len(names) - SHOWN:,} more (--json has all)"


def _balance(moved: Moved) -> Iterator[str]:
    rows = [("written by a trainer rank", moved.written), ("read from a trainer rank", moved.sent)]
    yield from _table(["BALANCE", "LARGEST", "LOWER BOUND", "RATIO"], [_load(name, load) for name, load in rows])


def _load(name: str, load: Load) -> list[str]:
    return [name, size(load.largest), size(load.bound), f"{load.ratio:.3f}"]


def _trainer_rows(moved: Moved) -> list[list[str]]:
    columns = [each.tolist() for each in (moved.holds, moved.writes, moved.sends)]
    return [[f"{rank}", *map(size, row)] for rank, row in enumerate(zip(*columns, strict=True))]


def _worker_rows(pair: Pair, moved: Moved) -> list[list[str]]:
    received = zip(workers_of(pair), moved.receives.tolist(), strict=True)
    return [[engine, f"{rank}", size(nbytes)] for (engine, rank), nbytes in received]


def _link_rows(pair: Pair, moved: Moved) -> list[list[str]]:
    """Largest first."""
    copies, nbytes = moved.traffic
    workers = workers_of(pair)
    links = np.argwhere(copies > 0)
    order = np.argsort(-nbytes[links[:, 0], links[:, 1]], kind="stable")
    return [
        [f"{source}", workers[to][0], f"{workers[to][1]}", f"{copies[source, to]:,}", size(int(nbytes[source, to]))]
        for source, to in links[order].tolist()
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    shown = [head, *rows[:SHOWN]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN:,} more (--json has all)"
