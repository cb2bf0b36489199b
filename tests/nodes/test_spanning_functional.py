"""Engines whose workers are on several nodes: one version for all of them in each update, whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.workers.processes import Process
from tests.nodes.clusters import Cluster, Trainer
from tests.nodes.spanning import Spread

Forks = Callable[[int], list[Process]]


def test_every_worker_gets_every_bit_of_every_step(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        a, b = (cluster[name] for name in "ab")
        trainer = Trainer(forks(2), a)
        beside = Spread(forks(4), [a, a, b, b], "beside")
        for step in range(1, 6):
            trainer.publish(step)
            beside.update(step)
