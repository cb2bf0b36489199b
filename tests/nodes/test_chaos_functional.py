"""Everything at once: a trainer and engines on several nodes, any process of which is killed or frozen at random."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes.clusters import OPEN_WRITER, Cluster, SpreadTrainer, lasting
from tests.nodes.spanning import Spread

Forks = Callable[[int], list[Process]]
ROUNDS, TRIES = 6, 12
SEEDS = [2]
RANKS = "aabb"
"""The node of each."""
ENGINES = {"both": "ab", "far": "bc", "alone": "c"}
"""The node of each worker."""
VICTIMS = ("rank", "worker", "daemon", "frozen daemon", "metaserver", "nobody")
PUBLISH = """
rank.fill({step})
try:
    publication = writer.publish({step}, timeout=10)
    publication.captured()
    publication.committed(timeout=10)
    result = True
except VersionConflict as error:
    result = "is not after step" in str(error)
"""
UPDATE = """
try:
    done = reader.update({step}, timeout=15)
except VersionConflict:  # its round was fixed to another step, which comes first
    done = reader.update(timeout=15)
result = [done.step, held.wrong(done.step), reader.state]
"""
TOLD = ("VersionConflict", "VersionUnavailable", "DeadlineExceeded", "DaemonUnavailable")


def idle() -> None:
    """Nothing happens."""


class World:
    def __init__(self, cluster: Cluster, forks: Forks) -> None:
        self.cluster, self.forks = cluster, forks
        self.trainer = SpreadTrainer(forks(len(RANKS)), [cluster[name] for name in RANKS])
        self.engines = {
            name: Spread(forks(len(nodes)), [cluster[node] for node in nodes], name) for name, nodes in ENGINES.items()
        }
        self.dead: set[int] = set()

    def strike(self, what: str, at: int) -> None:
        """``at``: which of its kind."""
        if what == "rank":
            self._kill(self.trainer.processes[at % len(RANKS)])
        elif what == "worker":
            engine = self.engines[sorted(ENGINES)[at % len(ENGINES)]]
            self._kill(engine.processes[at % len(engine.processes)])
        elif what == "daemon":
            daemon = self.cluster["abc"[at % 3]]
            daemon.kill()
            daemon.start()
        elif what == "frozen daemon":
            pid = self.cluster["abc"[at % 3]].pid
            os.kill(pid, signal.SIGSTOP)
            lasting(0.5)
            os.kill(pid, signal.SIGCONT)
        elif what == "metaserver":
            self.cluster.server.kill()
            self.cluster.server.start()

    def _kill(self, process: Process) -> None:
        process.kill()
        self.dead.add(process.pid)

    def _replace(self) -> None:
        """New processes in the place of those that were killed."""
        for rank, process in enumerate(self.trainer.processes):
            if process.pid in self.dead:
                (self.trainer.processes[rank],) = self.forks(1)
                given = {"size": len(RANKS), "job": "j", "verify": "checksum", "epoch": "continue"}
                daemon = self.cluster[RANKS[rank]]
                self.trainer.processes[rank].do(OPEN_WRITER.format(rank=rank, socket=daemon.socket, **given))
        for name, engine in self.engines.items():
            for rank, process in enumerate(engine.processes):
                if process.pid in self.dead:
                    engine.replace(rank, self.forks(1)[0], self.cluster[ENGINES[name][rank]])
        self.dead.clear()

    def publish(self, step: int, strike: Callable[[], None]) -> bool:
        """Whether every rank knows it committed."""
        return all(told is True for told in self.tried(self.trainer.processes, PUBLISH.format(step=step), strike))

    def update(self, engine: Spread, step: int, strike: Callable[[], None]) -> bool:
        """Whether every worker has that step; what any of them reports is what it has."""
        found = self.tried(engine.processes, UPDATE.format(step=step), strike)
        for got in found:
            assert got is None or got[1:] == [[], "ready"], found
        return all(got is not None and got[0] == step for got in found)

    def tried(self, processes: list[Process], source: str, strike: Callable[[], None]) -> list[Any]:
        """What came of it in each while something strikes; None: it was told why not, or is dead and replaced now."""
        for process in processes:
            process.start(source)
        strike()
        found = []
        for process in processes:
            try:
                found.append(process.finish())
            except RemoteError as error:
                if error.kind not in TOLD:
                    raise
                found.append(None)
            except EOFError:
                found.append(None)
        self._replace()
        return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_killed_and_frozen_at_random(folder: Path, forks: Forks, seed: int) -> None:
    """Each step is committed and read by every engine in the end; nobody ever reports bytes of two steps as one."""
    chance = random.Random(seed)
    with Cluster(folder, "a", "b", "c") as cluster:
        world = World(cluster, forks)

        def strike() -> None:
            lasting(chance.random() * 0.1)
            world.strike(chance.choice(VICTIMS), chance.randrange(12))

        for step in range(1, ROUNDS + 1):
            for attempt in range(TRIES):
                if world.publish(step, idle if attempt else strike):
                    break
            else:
                pytest.fail(f"step {step} was never committed")
            for name, engine in world.engines.items():
                for attempt in range(TRIES):
                    if world.update(engine, step, idle if attempt or chance.random() < 0.7 else strike):
                        break
                else:
                    pytest.fail(f"engine {name} never had step {step}")
        together(world.trainer.processes, ["writer.close()"] * len(RANKS))
        assert not any("Traceback" in cluster[name].log() for name in "abc")
