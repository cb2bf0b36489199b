"""From a trainer on one node to engines on others: the same calls and the same guarantees as on one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, Engine, Trainer, fds, held, job_of, texts

Forks = Callable[[int], list[Process]]


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_every_engine_gets_every_bit_of_every_step(folder: Path, forks: Forks, verify: str) -> None:
    with Cluster(folder, "a", "b", "c", "d") as cluster:
        trainer = Trainer(forks(2), cluster["a"], verify=verify)
        engines = [Engine(forks(n), cluster[name], f"e-{name}", verify=verify) for name, n in zip("abcd", (2, 3, 1, 2))]
        for step in range(1, 11):
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        for engine in engines:
            engine.close()
        trainer.do("writer.close_job() if rank.locals and writer else None")
