"""Trainers whose ranks are on several nodes: the same calls and the same guarantees as on one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.workers.processes import Process
from tests.nodes.clusters import Cluster, Engine, SpreadTrainer, texts

Forks = Callable[[int], list[Process]]


def test_every_engine_gets_every_bit_of_every_step(folder: Path, forks: Forks) -> None:
    """Two ranks on each of two nodes; engines on one of them and on a third."""
    with Cluster(folder, "a", "b", "c") as cluster:
        trainer = SpreadTrainer(forks(4), [cluster[name] for name in "aabb"])
        engines = [Engine(forks(n), cluster[name], f"e-{name}") for name, n in (("a", 2), ("c", 1))]
        for step in range(1, 7):
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        for name in "abc":
            assert texts(cluster[name], "failed") == []
            assert "Traceback" not in cluster[name].log()
