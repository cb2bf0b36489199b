"""Real processes, and a folder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.daemons import folder
from tests.e2e.conftest import fork, nursery
from tests.e2e.workers.processes import Process

__all__ = ["folder", "fork", "nursery"]


@pytest.fixture
def forks(fork: Callable[[], Process]) -> Callable[[int], list[Process]]:
    """Makes so many processes."""
    return lambda count: [fork() for _ in range(count)]
