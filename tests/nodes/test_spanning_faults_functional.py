"""Engines on several nodes whose workers, daemons and MetaServer die, freeze or come back in the middle of a round."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes import large
from tests.nodes.clusters import Cluster, Engine, Trainer, job_of, lasting, until
from tests.nodes.spanning import Spread

Forks = Callable[[int], list[Process]]
STAGE = "staged = reader.stage({step}, timeout=60)"
APPLY = "done = reader.apply(staged, timeout=60)\nresult = [done.step, held.wrong(done.step)]"


def test_worker_that_dies_after_the_round_was_settled(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(3), [a, b, b])
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        trainer.publish(3)
        engine.do(STAGE.format(step=3))
        engine.processes[2].kill()
        for process in engine.processes[:2]:
            assert process.do(APPLY) == [3, []]
        trainer.publish(4)
        with pytest.raises(RemoteError, match="readers' leases on epoch 1 step 2, epoch 1 step 3"):
            trainer.processes[0].do("writer.publish(5, timeout=1)")
        for daemon in (a, b):  # what it may have to go back to, and what it has yet to get
            keys = {(one["epoch"], one["step"]) for one in daemon.ask("versions", job=None)["versions"]}
            assert {(1, 2), (1, 3)} <= keys
        with pytest.raises(RemoteError, match="rank 2 of engine e to register"):
            engine.processes[0].do("reader.update(4, timeout=0.5)")
        (successor,) = forks(1)
        engine.replace(2, successor, b)
        assert successor.do("done = reader.update(timeout=60)\nresult = [done.step, held.wrong(3)]") == [3, []]
        engine.update(4)
        for step in (5, 6):
            trainer.publish(step)
            engine.update(step)
        for daemon in (a, b):
            until(daemon, lambda status: job_of(status, "j")["held"] == [[1, 6], [1, 5]])


def test_worker_that_dies_before_the_round_is_settled(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(3), [a, b, b])
        trainer.publish(1)
        engine.update(1)
        os.kill(b.pid, signal.SIGSTOP)
        trainer.publish(2)
        for process in engine.processes:
            process.start("reader.update(2, timeout=60)")
        _proposed(a)
        engine.processes[2].kill()
        os.kill(b.pid, signal.SIGCONT)
        for process in engine.processes[:2]:
            _either(process, "VersionUnavailable")
        engine.replace(2, forks(1)[0], b)
        trainer.publish(3)
        assert engine.do(CATCH_UP.format(step=3)) == [[["ready", [1, 3]], []]] * 3


def test_daemon_that_freezes_or_dies_before_the_round_is_settled(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", ttl=4.0) as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        alone = Engine(forks(1), a, "alone")
        trainer.publish(1)
        engine.update(1)
        os.kill(b.pid, signal.SIGSTOP)
        trainer.publish(2)
        engine.processes[0].start("reader.update(2, timeout=2)")
        with pytest.raises(RemoteError, match=r"waited .* for root/j: node b \(rank 1\) to have epoch 1 step 2"):
            engine.processes[0].finish()
        engine.processes[0].start("reader.update(2, timeout=60)")
        with pytest.raises(RemoteError, match="node b is gone: not heard of for 4 s") as error:
            engine.processes[0].finish()
        assert error.value.kind == "VersionUnavailable"
        assert engine.processes[0].do("result = [reader.state, reader.version]") == ["ready", [1, 1]]
        alone.update(2)
        os.kill(b.pid, signal.SIGCONT)
        engine.update(2)
        os.kill(b.pid, signal.SIGSTOP)
        trainer.publish(3)
        engine.processes[0].start("reader.update(3, timeout=60)")
        _proposed(a)
        b.kill()
        b.start()
        _either(engine.processes[0], "VersionUnavailable")
        engine.update(3)


def test_version_that_is_withdrawn_before_the_round_is_settled(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        os.kill(b.pid, signal.SIGSTOP)
        trainer.publish(3)
        engine.start("reader.update(3, timeout=60)")
        _proposed(a)
        a.ask("rollback", job=job_of(a.ask("status"), "j")["job"], step=2)
        os.kill(b.pid, signal.SIGCONT)
        errors = engine.errors()
        assert [kind for kind, _ in errors] == ["VersionUnavailable"] * 2
        assert engine.versions() == [["ready", [1, 2]]] * 2
        trainer.publish(4)
        engine.update(4)


def test_version_that_is_withdrawn_after_it_was_settled(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        for step in (1, 2, 3):
            trainer.publish(step)
        engine.update(2)
        engine.do(STAGE.format(step=3))
        assert engine.processes[1].do(APPLY) == [3, []]
        a.ask("rollback", job=job_of(a.ask("status"), "j")["job"], step=2)
        until(b, lambda status: job_of(status, "j")["held"] == [[1, 2]])
        with pytest.raises(RemoteError) as error:
            engine.processes[0].do(APPLY)
        assert error.value.kind in ("VersionUnavailable", "IntegrityError")
        trainer.publish(4)
        for _ in range(2):  # the one that had it is a round ahead
            for found in engine.do(f"{TRY.format(step=4)}"):
                assert found[0] in ("ready", "dirty")
        engine.update(4)


def test_metaserver_that_is_away_or_started_anew(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        alone = Engine(forks(2), a, "alone")
        trainer.publish(1)
        for one in (engine, alone):
            one.update(1)
        engine.do(STAGE.format(step=1))  # settled, and half applied
        assert engine.processes[1].do(APPLY) == [1, []]
        cluster.server.kill()
        trainer.publish(2)
        alone.update(2)
        engine.processes[1].start("reader.update(1, timeout=2)")
        with pytest.raises(RemoteError, match=r"the MetaServer, for update 2 of engine e.*the MetaServer at"):
            engine.processes[1].finish()
        assert engine.processes[0].do(APPLY) == [1, []]
        engine.processes[1].start(STAGE.format(step=2))
        cluster.server.start()
        engine.processes[1].finish()
        assert engine.processes[0].do("done = reader.update(timeout=60)\nresult = done.step") == 2
        assert engine.processes[1].do(APPLY) == [2, []]
        trainer.publish(3)
        engine.update(3)


CATCH_UP = """
while reader.version != (1, {step}):
    try:
        reader.update({step}, timeout=60)
    except VersionConflict:  # a sibling has yet to get what this one is through with, or the other way round
        reader.update(timeout=60)
result = [[reader.state, reader.version], held.wrong({step})]
"""
LARGE_CATCH_UP = CATCH_UP.replace("[[reader.state, reader.version], held.wrong({step})]", "[reader.version, seen()]")
LARGE = 8 << 20
TRY = """
try:
    done = reader.update({step}, timeout=60)
except AwexdError as error:
    why = [type(error).__name__, str(error)]
result = [reader.state, reader.version]
"""
KINDS = ("DeadlineExceeded", "VersionUnavailable", "DaemonUnavailable", "VersionConflict")


@pytest.mark.timeout(600)
def test_every_process_killed_and_frozen_in_turn(folder: Path, forks: Forks) -> None:
    """What a worker reports is what it has; in each round its siblings have that too, or are not ready at it."""
    choose = random.Random(7)
    with Cluster(folder, "a", "b", "c", ttl=2.0) as cluster:
        a, b, c = (cluster[name] for name in "abc")
        trainer, engine = Trainer(forks(1), c), Spread(forks(3), [a, b, b])
        homes = [a, b, b]
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        victims = ["worker", "a", "metaserver", "b", "worker"]
        for number in range(10):
            victim, freeze = victims[number % 5], number >= 5
            step += 1
            engine.start(f"done = reader.update({step}, timeout=60)\nresult = [done.step, held.wrong({step})]")
            trainer.processes[0].start(
                f"rank.fill({step})\npublication = writer.publish({step})\npublication.committed()"
            )
            lasting(choose.random() * 0.1)
            rank = choose.randrange(3)
            pid = {
                "worker": engine.processes[rank].pid,
                "a": a.pid,
                "b": b.pid,
                "metaserver": cluster.server.pid,
            }[victim]
            os.kill(pid, signal.SIGSTOP if freeze else signal.SIGKILL)
            if freeze:
                lasting(choose.choice([0.2, 3.0]))
                os.kill(pid, signal.SIGCONT)
            elif victim == "metaserver":
                cluster.server.kill()
                cluster.server.start()
            elif victim in "ab":
                cluster[victim].kill()
                cluster[victim].start()
            elif victim == "worker":
                engine.processes[rank].await_end()
                engine.replace(rank, forks(1)[0], homes[rank])
            trainer.processes[0].finish()
            for at, process in enumerate(engine.processes):
                if victim != "worker" or freeze or at != rank:
                    _either(process, *KINDS)
            step += 1
            trainer.publish(step)
            assert engine.do(CATCH_UP.format(step=step)) == [[["ready", [1, step]], []]] * 3


def test_versions_on_their_way_to_one_node_when_somebody_dies(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        trainer = large.writer_on(cluster["a"], forks(1)[0], LARGE)
        processes = zip("bc", forks(2), strict=True)
        workers = [large.reader_on(cluster[at], one, "e", LARGE, rank="bc".index(at), size=2) for at, one in processes]
        trainer.do(large.PUBLISH.format(step=1))
        assert together(workers, [large.UPDATE.format(step=1)] * 2) == [[1, [1]]] * 2
        for step, victim in ((2, "b"), (4, "c"), (6, "metaserver")):
            for worker in workers:
                worker.start(large.UPDATE.format(step=step))
            trainer.start(large.PUBLISH.format(step=step))
            large.on_its_way(cluster["c"], step)
            dying = cluster.server if victim == "metaserver" else cluster[victim]
            dying.kill()
            dying.start()
            trainer.finish()
            for worker in workers:
                try:
                    assert worker.finish() == [step, [step]]
                except RemoteError as error:
                    if error.kind not in KINDS:
                        raise
                    assert worker.do("result = [reader.state, seen()]") == ["ready", [step - 1]]
            trainer.do(large.PUBLISH.format(step=step + 1))
            found = together(workers, [LARGE_CATCH_UP.format(step=step + 1)] * 2)
            assert found == [[[1, step + 1], [step + 1]]] * 2


def _proposed(daemon: Daemon) -> None:
    """Returns once a round waits for another node."""

    def so(status: dict[str, Any]) -> bool:
        engines = job_of(status, "j")["engines"]
        return any(not one["settled"] for engine in engines for one in engine["rounds"])

    until(daemon, so)


def _either(process: Process, *kinds: str) -> None:
    """What it reports is what it has, in every bit; an update that was broken off may say so, and nothing else."""
    try:
        process.finish()
    except RemoteError as error:
        if error.kind not in kinds:
            raise
    state, version, wrong = process.do(
        "result = [reader.state, reader.version, reader.version and held.wrong(reader.version[1])]"
    )
    assert state == "dirty" or not wrong, (state, version, wrong)
