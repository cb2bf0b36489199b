"""The support matrix: lines that tests declare with the marker ``matrix``, which stand in the document if they pass."""

from __future__ import annotations

import pytest

from tests.engines.matrix import LAST, Line, Results

RESULTS = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        config.stash[RESULTS].declare(item.nodeid, [Line(**mark.kwargs) for mark in item.iter_markers("matrix")])
    items.sort(key=lambda item: item.name == LAST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call" and call.excinfo is None:
        item.config.stash[RESULTS].passed.add(item.nodeid)


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Results:
    return request.config.stash[RESULTS]
