"""Documents quote what was measured, and what was measured has the names that the benchmarks give now."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest

from benchmarks import control, cpu, document, exchange, faults, gpu, nodes, scale


def test_tables_of_figures_are_those_of_the_results() -> None:
    text = document.DOCUMENT.read_text()
    assert document.BEGIN in text
    assert document.updated(text) == text, "run: python benchmarks/document.py"


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("control", [f"{way}-{quantile}" for way in control.WAYS for quantile in control.QUANTILES]),
        ("cpu", [case.name for case in cpu.CASES] + cpu.PEERS),
        ("scale", scale.NAMES),
    ],
)
def test_results_have_the_benchmarks_figures(name: str, figures: list[str]) -> None:
    found = json.loads((document.RESULTS / f"{name}.json").read_bytes())
    assert [figure["name"] for figure in found] == figures


def test_results_of_a_gpu_are_among_the_benchmarks_figures() -> None:
    if not gpu.RESULTS.exists():
        pytest.skip("nothing was measured: run `make bench-gpu ARGS=--write` on a machine with an NVIDIA GPU")
    found = [figure["name"] for figure in json.loads(gpu.RESULTS.read_bytes())]
    assert found == [name for name in (*gpu.KNOWN, *gpu.OTHERS) if name in found]


def test_results_have_the_figures_of_2_to_9_processes() -> None:
    found = {figure["name"] for figure in json.loads(exchange.RESULTS.read_bytes())}
    assert set(exchange.NAMES) <= found


def test_results_of_several_nodes_are_there() -> None:
    found = {figure["name"] for figure in json.loads(nodes.RESULTS.read_bytes())}
    assert found >= nodes.BARS.keys() | faults.BARS.keys()


def test_what_the_metaserver_is_told_is_what_a_daemon_tells() -> None:
    document = json.loads(resources.files("awexd.metaserver").joinpath("openapi.json").read_bytes())
    schema = {"$ref": "#/components/schemas/ReportBody", "components": document["components"]}
    jsonschema.validate(json.loads(nodes._state(1)), schema)
