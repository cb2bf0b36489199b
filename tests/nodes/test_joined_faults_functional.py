"""A trainer on several nodes, of which any part is killed or frozen: never torn, never lost, never for ever."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes.clusters import OPEN_WRITER, Cluster, Engine, SpreadTrainer, job_of, lasting, until

Forks = Callable[[int], list[Process]]
SEAL = "rank.fill({step})\npublication = writer.publish({step}, timeout=60)\npublication.captured()"
COMMITTED = "publication.committed(timeout=60)"


def spread(cluster: Cluster, forks: Forks, nodes: str = "ab") -> SpreadTrainer:
    return SpreadTrainer(forks(len(nodes)), [cluster[name] for name in nodes])


def test_metaserver_that_is_away_is_waited_for_and_what_is_held_is_read(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = spread(cluster, forks), Engine(forks(1), cluster["a"])
        trainer.publish(1)
        engine.update(1)
        cluster.server.kill()
        for process in trainer.processes:
            process.start("writer.publish(2, timeout=3)")
        for kind, message in trainer.errors():
            assert kind == "DeadlineExceeded"
            assert "the MetaServer at" in message
        engine.update(1)
        trainer.start(SEAL.format(step=2) + "\n" + COMMITTED)
        cluster.server.start()
        trainer.finish()
        engine.update(2)
        assert not any("Traceback" in cluster[name].log() for name in "ab")


def test_attempt_that_was_sealed_in_part_when_the_metaserver_died_is_taken_up_again(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = spread(cluster, forks), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        first, second = trainer.processes
        second.do("rank.fill(2)\nupdate = writer.begin(2).__enter__()\nupdate.write(rank.shards)")
        first.do(SEAL.format(step=2))
        cluster.server.kill()
        first.start(COMMITTED)
        cluster.server.start()
        second.do("update.__exit__(None, None, None)\nupdate.publication.committed(timeout=60)")
        first.finish()
        engine.update(2)
        trainer.publish(3)
        engine.update(3)


def test_daemon_that_dies_has_its_ranks_segments_when_it_is_back(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        trainer = spread(cluster, forks)
        for step in (1, 2):
            trainer.publish(step)
        cluster["b"].kill()
        cluster["b"].start()
        assert job_of(cluster["b"].ask("status"), "j")["partial"] == [[1, 2], [1, 1]]
        engine = Engine(forks(1), cluster["c"])
        engine.update(2)
        engine.update(1)
        first, second = trainer.processes
        second.do("rank.fill(3)\nupdate = writer.begin(3).__enter__()\nupdate.write(rank.shards)")
        first.do(SEAL.format(step=3))
        cluster["b"].kill()
        cluster["b"].start()
        with pytest.raises(RemoteError, match="node b is gone") as error:
            first.do(COMMITTED)
        assert error.value.kind == "VersionConflict"
        with pytest.raises(RemoteError):  # that attempt went with its daemon
            second.do("update.__exit__(None, None, None)")
        trainer.publish(3)
        engine.update(3)


def test_sealed_segments_that_were_never_committed_are_not_adopted(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = spread(cluster, forks), Engine(forks(1), cluster["a"])
        trainer.publish(1)
        engine.update(1)
        first, _ = trainer.processes
        first.do(SEAL.format(step=2))
        cluster["a"].kill()
        cluster["a"].start()
        until(cluster["a"], lambda status: job_of(status, "j")["held"] == [[1, 1]])
        until(cluster["a"], lambda status: job_of(status, "j")["partial"] == [])
        trainer.publish(2)
        engine.update(2)


def test_node_that_is_lost_aborts_and_joins_again(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", ttl=2.0) as cluster:
        trainer, engine = spread(cluster, forks), Engine(forks(1), cluster["a"])
        trainer.publish(1)
        engine.update(1)
        first, second = trainer.processes
        second.do("rank.fill(2)\nupdate = writer.begin(2).__enter__()\nupdate.write(rank.shards)")
        first.do(SEAL.format(step=2))
        os.kill(cluster["b"].pid, signal.SIGSTOP)
        try:
            first.start(COMMITTED)
            with pytest.raises(RemoteError, match="node b is gone"):
                first.finish()
        finally:
            os.kill(cluster["b"].pid, signal.SIGCONT)
        with pytest.raises(RemoteError) as error:
            second.do("update.__exit__(None, None, None)\nupdate.publication.committed(timeout=60)")
        assert error.value.kind == "VersionConflict"
        trainer.publish(2)
        engine.update(2)


@pytest.mark.timeout(300)
def test_every_part_killed_in_turn(folder: Path, forks: Forks) -> None:
    """Whatever dies in the middle of a step: the engine has one version in every bit, and the next step comes."""
    choose = random.Random(7)
    with Cluster(folder, "a", "b", "c", ttl=3.0) as cluster:
        trainer = spread(cluster, forks)
        engines = [Engine(forks(1), cluster[name], f"e-{name}") for name in "ac"]
        step = 0
        for victim in ["a", "b", "metaserver", "rank", "c"] * 2:
            step += 1
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
            step += 1
            # A rank whose daemon was restarted writes the step again by itself, and then waits for the other.
            trainer.start(SEAL.format(step=step) + "\npublication.committed(timeout=8)")
            lasting(choose.random() * 0.05)
            if victim == "rank":
                trainer.processes[1].kill()
            elif victim == "metaserver":
                cluster.server.kill()
                cluster.server.start()
            else:
                cluster[victim].kill()
                cluster[victim].start()
            for process in trainer.processes[: 1 if victim == "rank" else 2]:
                _ended(process)
            if victim == "rank":
                (trainer.processes[1],) = forks(1)
                given = {"size": 2, "job": "j", "verify": "checksum", "epoch": "continue"}
                trainer.processes[1].do(OPEN_WRITER.format(rank=1, socket=cluster["b"].socket, **given))
            for engine in engines:
                _whole(engine.processes[0])
        step += 1
        trainer.publish(step)
        for engine in engines:
            engine.update(step)
        assert not any("Traceback" in cluster[name].log() for name in "abc")


def _ended(process: Process) -> None:
    """Committed; or it is told that the attempt is over, or that it waits for a rank that is dead."""
    try:
        process.finish()
    except RemoteError as error:
        if error.kind not in ("VersionConflict", "DeadlineExceeded", "DaemonUnavailable"):
            raise


def _whole(process: Process) -> None:
    """The newest version that is here is one version in every bit."""
    step, wrong = process.do("done = reader.update(timeout=60)\nresult = [done.step, held.wrong(done.step)]")
    assert step > 0
    assert wrong == []


def test_ranks_on_both_nodes_publish_many_steps_without_a_pause(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = spread(cluster, forks, "aabb"), Engine(forks(1), cluster["b"])
        source = (
            "for step in range(1, 41):\n    rank.fill(step)\n    writer.publish(step, timeout=60).committed(timeout=60)"
        )
        trainer.start(source)
        trainer.finish()
        engine.update(40)
        assert together(trainer.processes, ["result = writer.epoch"] * 4) == [1] * 4
