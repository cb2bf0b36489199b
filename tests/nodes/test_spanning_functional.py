"""Engines whose workers are on several nodes: one version for all of them in each update, or none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, Engine, SpreadTrainer, Trainer, job_of, texts, until
from tests.nodes.spanning import DRIVEN, TOGETHER, Spread

Forks = Callable[[int], list[Process]]
CHECKPOINT = """
from safetensors.torch import save_file
save_file({{kind.name: weights.value(kind, {step}).contiguous() for kind in weights.MODEL}}, {file!r})
"""
SAME = "done = reader.update(timeout=60)\nresult = [done.step, held.wrong(done.step)]"


def test_every_worker_gets_every_bit_of_every_step(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        a, b, c = (cluster[name] for name in "abc")
        trainer = Trainer(forks(2), a)
        beside = Spread(forks(4), [a, a, b, b], "beside")  # the trainer's node is one of its own
        far = Spread(forks(3), [c, b, c], "far", verify="off")
        alone = Engine(forks(2), b, "alone")
        beside.fails("reader.update(timeout=0.3)", "DeadlineExceeded", "its first committed version")
        for step in range(1, 8):
            trainer.publish(step)
            beside.start(f"reader.prefetch({step})" if step % 2 else f"reader.wait({step}, timeout=60)")
            for engine in (far, alone):
                engine.update(step)
            beside.finish()
            beside.update(step)
        for step in range(8, 12):  # asked for by nobody in particular: the newest that all of its nodes have
            trainer.publish(step)
            found = far.do(SAME)
            assert found == [found[0]] * 3, found
            assert step - 1 <= found[0][0] <= step
            found = beside.do(f"reader.wait({step}, timeout=60)\n{SAME}")
            assert found == [[step, []]] * 4
        for daemon in (a, b, c):
            assert texts(daemon, "failed") == []


def test_trainer_and_engines_on_the_same_nodes(folder: Path, forks: Forks) -> None:
    """Each node has ranks of both: it holds some ranks' segments, and brings what its workers read of the others'."""
    with Cluster(folder, "a", "b", "c") as cluster:
        a, b, c = (cluster[name] for name in "abc")
        trainer = SpreadTrainer(forks(4), [a, a, b, b])
        engines = [Spread(forks(3), [a, b, a], "both"), Spread(forks(2), [b, c], "far")]
        for step in range(1, 9):
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        for daemon in (a, b, c):
            assert texts(daemon, "failed") == []


def test_what_is_rolled_back_between_updates(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        for step in (1, 2, 3):
            trainer.publish(step)
            engine.update(step)
        job = job_of(a.ask("status"), "j")["job"]
        a.ask("rollback", job=job, step=2)
        until(b, lambda status: job_of(status, "j")["held"] == [[1, 2]])
        assert engine.do(SAME) == [[2, []]] * 2
        engine.fails("reader.update(3, timeout=60)", "VersionUnavailable", "step 3 is not held any more")
        trainer.publish(4)
        engine.update(4)
        engine.start("reader.update(9, timeout=60)")  # waits for it on both nodes
        trainer.close()
        trainer = Trainer(forks(1), a, epoch="new")
        assert [kind for kind, _ in engine.errors()] == ["EpochChanged"] * 2
        trainer.publish(1, value=30)
        engine.update(1, value=30, epoch=2)


def test_engine_that_waits_for_its_workers_names_them(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, processes = Trainer(forks(1), a), forks(3)
        trainer.publish(1)
        part = Spread(processes[:2], [a, b], size=3)
        part.fails("reader.update(timeout=0.5)", "DeadlineExceeded", "rank 2 of engine e to register, on this node")
        part.start(SAME)
        whole = Spread.__new__(Spread)
        whole.processes, whole.daemon, whole.given = processes, a, part.given
        whole.replace(2, processes[2], b)
        assert part.finish() == [[1, []]] * 2
        assert processes[2].do(SAME) == [1, []]  # the same round, which was settled without its asking
        trainer.publish(2)
        whole.update(2)


def test_steps_that_do_not_agree(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(2), [a, b])
        for step in (1, 2):
            trainer.publish(step)
        first, second = engine.processes
        second.do("reader.wait(2, timeout=60)")
        assert first.do("result = reader.update(2).step") == 2
        with pytest.raises(RemoteError, match="was fixed to step 2") as error:
            second.do("reader.update(1)")
        assert error.value.kind == "VersionConflict"
        assert second.do("result = reader.update(2).step") == 2
        engine.update(2)


def test_budget_that_is_too_small_on_one_node_fails_it_on_all(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a") as cluster:
        small = cluster.add("b", "--memory-budget", "8K")
        trainer, engine = Trainer(forks(2), cluster["a"]), Spread(forks(2), [cluster["a"], small])
        trainer.publish(1)
        engine.start("reader.update(1, timeout=60)")
        errors = engine.errors()
        assert [kind for kind, _ in errors] == ["BudgetExceeded"] * 2
        assert "node b (rank 1) cannot have it" in errors[0][1]
        assert engine.versions() == [["empty", None]] * 2


def test_driven_by_one_process(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, (driver,) = Trainer(forks(2), a), forks(1)
        for name, source in (("each", DRIVEN), ("together", TOGETHER)):
            driver.do(source.format(name=name, sockets=[a.socket, a.socket, b.socket, b.socket]))
        for step in range(1, 5):
            trainer.publish(step)
            for name in ("each", "together"):
                assert driver.do(f"result = update({name!r}, {step})") == [step, [], "ready", [1, step]]
        status = a.ask("read.engine", job=job_of(a.ask("status"), "j")["job"], engine="together")
        assert [worker["version"] for worker in status["workers"]] == [[1, 4]] * 4
        trainer.publish(5)
        for name in ("each", "together"):  # rank 2 fails half-way: all of them go back to what they had
            kind, message, state, version = driver.do(f"result = broken({name!r}, 5, 2)")
            assert (kind, state, version) == ("AwexdError", "ready", [1, 4]), message
            assert "it cannot load" in message
            assert driver.do(f"result = update({name!r}, 5)") == [5, [], "ready", [1, 5]]
        driver.do(CHECKPOINT.format(step=5, file=str(folder / "model.safetensors")))
        for name in ("each", "together"):
            compared = driver.do(f"result = engines[{name!r}][0].verify({str(folder)!r}).tensors")
            assert compared == driver.do(f"result = sum(len(held.locals) for held in engines[{name!r}][1])")


def test_status_shows_it_once(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        trainer, engine = Trainer(forks(1), a), Spread(forks(3), [a, b, b])
        trainer.publish(1)
        engine.update(1)
        line = "engine e (3 workers): on a: 0 ready 1.1; on b: 1 ready 1.1, 2 ready 1.1"
        for daemon in (a, b):
            job = until(daemon, lambda status: _all_at(status, [1, 1]))
            assert [len(found["workers"]) for found in job_of(job, "j")["engines"]] == [3]
            assert line in _awexctl("status", "--socket", daemon.socket)
        assert line in _awexctl("status", "--metaserver", cluster.server.url)


def _all_at(status: dict[str, object], version: list[int]) -> bool:
    (engine,) = job_of(status, "j")["engines"]
    return [worker["version"] for worker in engine["workers"]] == [version] * 3


def _awexctl(*arguments: str) -> str:
    command = [sys.executable, "-m", "awexd.ctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
