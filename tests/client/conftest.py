"""A daemon a test, with one writer and one reader of the job ``grpo``, and engines of any size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from awexd_client import WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon, daemon, folder

__all__ = ["daemon", "engine", "folder", "reader", "writer"]


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[WeightWriter]:
    with WeightWriter("grpo", 0, 1, daemon.socket, verify="checksum") as opened:
        yield opened


@pytest.fixture
def reader(daemon: Daemon) -> Iterator[WorkerWeightsReader]:
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket, verify="checksum") as opened:
        yield opened


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[[int], list[WorkerWeightsReader]]]:
    """Makes the workers of one engine; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(size: int) -> list[WorkerWeightsReader]:
            made = (WorkerWeightsReader("grpo", "e", rank, size, daemon.socket) for rank in range(size))
            return [stack.enter_context(reader) for reader in made]

        yield make
