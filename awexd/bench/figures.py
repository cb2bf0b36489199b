"""One measured figure: its value, the machine's limit, the bar that it should meet, and how far apart they are."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import orjson


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure should reach: ``of`` ("value" or "ratio") at most (or at least) ``number``."""

    of: Literal["value", "ratio"]
    relation: Literal["<=", ">="]
    number: float

    def met(self, figure: Figure) -> bool | None:
        """None where there is nothing to compare."""
        measured = figure.value if self.of == "value" else figure.ratio
        if measured is None:
            return None
        return measured <= self.number if self.relation == "<=" else measured >= self.number

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.number:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A result.

    Attributes:
        value: in ``unit``, the median of ``rounds``; None where it could not be measured (``note`` says why).
        limit: the same quantity at the machine's limit, in ``unit``.
        ratio: value over limit, the median of the rounds; for a peer, the peer's time over ours.
        low, high: quartiles of the value.
        peer: who else was measured or is quoted: ``name``, ``value``, ``quoted``.
        more: further numbers of the same run.
    """

    name: str
    value: float | None
    unit: str
    limit: float | None = None
    ratio: float | None = None
    bar: Bar | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 1
    peer: dict[str, Any] | None = None
    note: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, command: str) -> dict[str, Any]:
        """One JSON object, with the machine, today's date and the command that gave it."""
        met = self.bar.met(self) if self.bar else None
        found = {
            "name": self.name,
            "value": _rounded(self.value),
            "unit": self.unit,
            "limit": _rounded(self.limit),
            "ratio": _rounded(self.ratio),
            "low": _rounded(self.low),
            "high": _rounded(self.high),
            "rounds": self.rounds,
            "bar": str(self.bar) if self.bar else None,
            "met": met,
            "peer": None if self.peer is None else {name: _rounded(value) for name, value in self.peer.items()},
            "machine": machine(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": command,
        }
        if self.note:
            found["note"] = self.note
        return found | {name: _rounded(value) for name, value in self.more.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(figures: Iterable[Figure]) -> list[str]:
    """Lines for a person: value and spread, limit, ratio, the bar and whether it is met."""
    head = ["FIGURE", "VALUE", "SPREAD", "LIMIT", "RATIO", "BAR", ""]
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write(path: Path, figures: Iterable[Figure], command: str, *, keep: Iterable[str] = ()) -> None:
    """Replaces the file; figures named in ``keep`` that are there and are not measured now stay as they were."""
    order = list(keep)
    before = orjson.loads(path.read_bytes()) if path.exists() else []
    found = {one["name"]: one for one in before if one["name"] in order}
    found |= {figure.name: figure.as_dict(command) for figure in figures}
    names = [name for name in order if name in found] + [name for name in found if name not in order]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        orjson.dumps([found[name] for name in names], option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )


def named(path: Path) -> list[str]:
    """The figures that are in a file, in order: what a benchmark that shares it with others is to ``keep``."""
    return [figure["name"] for figure in orjson.loads(path.read_bytes())] if path.exists() else []


def short(value: float) -> str:
    """Four significant digits, for a person."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def machine() -> str:
    """Processor, cores and kernel; no name of the machine or its user."""
    return f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _row(figure: Figure) -> list[str]:
    met = figure.bar.met(figure) if figure.bar else None
    verdict = {True: "met", False: "NOT MET", None: ""}[met]
    if figure.value is None:
        verdict = "not measured"
    return [
        figure.name,
        "-" if figure.value is None else f"{short(figure.value)} {figure.unit}",
        "" if figure.low is None or figure.high is None else f"{short(figure.low)}..{short(figure.high)}",
        "" if figure.limit is None else short(figure.limit),
        "" if figure.ratio is None else f"{figure.ratio:.3f}",
        str(figure.bar) if figure.bar else "",
        verdict,
    ]


def _rounded(value: Any) -> Any:
    """Five significant digits, and all before the point: more would be noise."""
    if not isinstance(value, float) or not math.isfinite(value) or not value:
        return value
    return round(value, max(0, 4 - math.floor(math.log10(abs(value)))))
