"""Nodes that die for good are replaced by others, whatever was on them, and nobody else is started anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, Engine, Trainer, job_of, until

Forks = Callable[[int], list[Process]]


def test_trainers_node_dies_for_good_and_more_ranks_go_on_elsewhere(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", ttl=2.0) as cluster:
        ranks = forks(2)
        trainer, engine = Trainer(ranks, cluster["a"]), Engine(forks(2), cluster["b"])
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        engine.start("reader.wait(9, timeout=60)")
        cluster["a"].kill()
        for rank in ranks:
            rank.kill()
        until(cluster["b"], lambda status: not job_of(status, "j")["elsewhere"]["trainer_on"])
        trainer = Trainer(forks(3), cluster["c"], epoch="new")  # on a node that has never heard of the job
        assert [kind for kind, _ in engine.errors()] == ["EpochChanged"] * 2
        late = Engine(forks(1), cluster["c"], "late")
        for step in (1, 2):
            trainer.publish(step, value=20 + step)
            for one in (engine, late):
                one.update(step, value=20 + step, epoch=2)


def test_node_that_dies_is_replaced_by_another_whose_engine_takes_its_name(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", ttl=2.0) as cluster:
        trainer, stays = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["b"], "stays")
        workers = forks(2)
        goes = Engine(workers, cluster["c"], "goes")
        trainer.publish(1)
        for engine in (stays, goes):
            engine.update(1)
        trainer.publish(2)
        cluster["c"].kill()
        for worker in workers:
            worker.kill()
        stays.update(2)
        cluster.add("d")
        comes = Engine(forks(3), cluster["d"], "goes")  # with another number of workers
        assert comes.do("result = [reader.state, reader.version]") == [["empty", None]] * 3
        comes.update(2)
        trainer.publish(3)
        for engine in (stays, comes):
            engine.update(3)
        assert comes.do("result = reader.state") == ["ready"] * 3


def test_trainer_goes_on_where_others_left_off_on_nodes_that_have_missed_it(folder: Path, forks: Forks) -> None:
    """No engine is there, so nothing of the job is followed; and it comes back to a node whose record is old."""
    with Cluster(folder, "a", "b", "c") as cluster:
        engine, step = Engine(forks(1), cluster["c"]), 0
        for name in ("a", "b", "a"):
            trainer = Trainer(forks(2), cluster[name])
            for _ in range(2):
                step += 1
                trainer.publish(step)
                engine.update(step)
            trainer.close()
            until(cluster["c"], lambda status: not job_of(status, "j")["elsewhere"]["trainer_on"])
        other = Trainer(forks(1), cluster["b"], epoch="new")
        other.close()
        with pytest.raises(RemoteError, match="epoch 2 has 1 writer ranks, not 2"):
            Trainer(forks(2), cluster["a"])


def test_trainer_of_a_new_job_waits_for_no_metaserver_that_is_away(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", ttl=2.0) as cluster:
        cluster.server.kill()
        until(cluster["a"], lambda status: not status["metaserver"]["connected"])
        began = time.monotonic()
        trainer, engine = Trainer(forks(1), cluster["a"]), Engine(forks(1), cluster["a"])
        trainer.publish(1)
        engine.update(1)
        assert time.monotonic() - began < 20
        cluster.server.start()
