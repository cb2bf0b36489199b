"""Rewrites the tables of ``docs/benchmarks.md`` from ``benchmarks/results``: what it quotes is what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from awexd.bench.figures import short

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: python benchmarks/document.py -->\n", "<!-- end of figures -->\n"
TABLES = {
    "h200": "On one H200",
    "h200x2": "On two H200s of one host",
    "cpu": "Hand-overs",
    "control": "The control path",
    "nodes": "Several nodes",
    "plan": "Plans",
}
COLUMNS = ("figure", "value", "limit", "ratio", "bar", "met", "peer")
MET = {True: "yes", False: "NO", None: ""}


def main() -> None:
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))


def updated(text: str) -> str:
    """The document with today's tables between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "".join("\n".join(_table(name, title)) + "\n\n" for name, title in TABLES.items() if _path(name).exists())
    return f"{before}{BEGIN}\n{tables}{END}{after}"


def _table(name: str, title: str) -> Iterator[str]:
    figures: list[dict[str, Any]] = json.loads(_path(name).read_bytes())
    yield f"### {title} (`{name}.json`)\n"
    yield _line(*COLUMNS)
    yield _line(*["---"] * len(COLUMNS))
    for figure in figures:
        yield _row(figure)
    yield ""
    yield from dict.fromkeys(f"- {one['date']}, {_machine(one)}: `{one['command']}`" for one in figures)


def _machine(figure: dict[str, Any]) -> str:
    return ", ".join(filter(None, [figure.get("gpu"), figure["machine"]]))


def _path(name: str) -> Path:
    return RESULTS / f"{name}.json"


def _row(figure: dict[str, Any]) -> str:
    name = f"`{figure['name']}`"
    if figure["value"] is None:
        return _line(name, f"not measured: {figure.get('note', '')}", *[""] * 4, _peer(figure["peer"]))
    value = f"{short(figure['value'])} {figure['unit']}"
    if figure.get("low") is not None:
        value += f" ({short(figure['low'])} to {short(figure['high'])})"
    limit, ratio = ("" if figure[key] is None else short(figure[key]) for key in ("limit", "ratio"))
    return _line(name, value, limit, ratio, figure["bar"] or "", MET[figure["met"]], _peer(figure["peer"]))


def _peer(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return ""
    value = "" if peer["value"] is None else f": {short(peer['value'])}"
    return f"{peer['name']}{value}{' (quoted)' if peer['quoted'] else ''}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
