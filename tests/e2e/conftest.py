"""A daemon a test, and real processes forked from one that has torch loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.daemons import daemon, folder
from tests.e2e.workers.processes import Nursery, Process

__all__ = ["daemon", "folder"]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture
def fork(nursery: Nursery) -> Iterator[Callable[[], Process]]:
    """Makes processes that are killed after the test."""
    processes: list[Process] = []

    def make() -> Process:
        processes.append(nursery.fork())
        return processes[-1]

    yield make
    for process in processes:
        process.close()
