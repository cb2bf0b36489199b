"""Real processes, a folder, and three nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.daemons import folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.workers.processes import Process
from tests.nodes.clusters import Cluster

__all__ = ["folder", "fork", "nursery"]


@pytest.fixture
def forks(fork: Callable[[], Process]) -> Callable[[int], list[Process]]:
    """Makes so many processes."""
    return lambda count: [fork() for _ in range(count)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of a module's tests, each with jobs of its own."""
    with Cluster(tmp_path_factory.mktemp("c"), "a", "b", "c") as cluster:
        yield cluster
        for name in "abc":
            assert "Traceback" not in cluster[name].log()
