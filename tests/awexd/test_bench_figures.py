from __future__ import annotations

import json
from pathlib import Path

import pytest

from awexd.bench.figures import Bar, Figure, quantile, quartiles, table, write


@pytest.mark.parametrize(
    ("bar", "value", "ratio", "met"),
    [
        (Bar("ratio", "<=", 1.1), 5.0, 1.1, True),
        (Bar("ratio", "<=", 1.1), 0.5, 1.2, False),
        (Bar("value", "<=", 0.6), 0.5, 1.2, True),
        (Bar("ratio", ">=", 1.5), 5.0, 1.4, False),
        (Bar("ratio", ">=", 1.5), None, None, None),
    ],
)
def test_bar_compares_what_it_is_of(bar: Bar, value: float | None, ratio: float | None, met: bool | None) -> None:
    assert bar.met(Figure("a", value, "s", ratio=ratio, bar=bar)) is met


def test_figure_as_dict_has_what_the_contract_names() -> None:
    figure = Figure(
        "a", 0.123456789, "s", limit=0.1, ratio=1.23456789, bar=Bar("ratio", "<=", 1.1), more={"threads": 2}
    )
    found = figure.as_dict("python it.py")
    contract = {"name", "value", "unit", "limit", "ratio", "peer", "machine", "date", "command"}
    assert contract <= found.keys()
    assert (found["value"], found["ratio"], found["met"], found["threads"]) == (0.12346, 1.2346, False, 2)
    assert found["command"] == "python it.py"
    assert "cores" in found["machine"]


def test_table_says_which_bars_are_met_and_what_was_not_measured() -> None:
    bar = Bar("value", "<=", 1)
    lines = table([Figure("a", 0.5, "s", bar=bar), Figure("b", 2.0, "s", bar=bar), Figure("c", None, "s", bar=bar)])
    assert [line.rsplit("  ", 1)[-1] for line in lines[1:]] == ["met", "NOT MET", "not measured"]


def test_write_keeps_named_figures_that_were_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "a.json"
    write(path, [Figure("a", 1.0, "s"), Figure("b", 2.0, "s"), Figure("gone", 3.0, "s")], "first")
    write(path, [Figure("a", 4.0, "s")], "second", keep=["b", "a"])
    found = [(one["name"], one["value"], one["command"]) for one in json.loads(path.read_text())]
    assert found == [("b", 2.0, "first"), ("a", 4.0, "second")]


def test_quartiles_and_quantile() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quantile([float(n) for n in range(100)], 0.99) == 99.0
