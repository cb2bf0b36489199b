"""Documents quote what was measured, and what was measured has the names that the benchmarks give now."""

from __future__ import annotations

import json

import pytest

from benchmarks import control, cpu, document


def test_tables_of_figures_are_those_of_the_results() -> None:
    text = document.DOCUMENT.read_text()
    assert document.BEGIN in text
    assert document.updated(text) == text, "run: python benchmarks/document.py"


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("control", [f"{way}-{quantile}" for way in control.WAYS for quantile in control.QUANTILES]),
        ("cpu", [case.name for case in cpu.CASES] + cpu.PEERS),
    ],
)
def test_results_have_the_benchmarks_figures(name: str, figures: list[str]) -> None:
    found = json.loads((document.RESULTS / f"{name}.json").read_bytes())
    assert [figure["name"] for figure in found] == figures
