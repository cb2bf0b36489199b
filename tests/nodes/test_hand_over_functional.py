"""From a trainer on one node to engines on others: the same calls and the same guarantees as on one node."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import UPDATE, Cluster, Engine, Trainer, fds, held, job_of, texts, until

Forks = Callable[[int], list[Process]]


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_every_engine_gets_every_bit_of_every_step(folder: Path, forks: Forks, verify: str) -> None:
    with Cluster(folder, "a", "b", "c", "d") as cluster:
        trainer = Trainer(forks(2), cluster["a"], verify=verify)
        sizes = {"a": 2, "b": 3, "c": 1, "d": 2}
        engines = [Engine(forks(n), cluster[name], f"e-{name}", verify=verify) for name, n in sizes.items()]
        for step in range(1, 11):
            trainer.publish(step)
            for engine in engines:
                engine.update(step)
        for name in "bcd":
            assert texts(cluster[name], "failed") == []


def test_two_jobs_that_cross(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainers = [Trainer(forks(2), cluster[name], job=f"j-{name}") for name in "ab"]
        engines = [Engine(forks(2), cluster[name], job=f"j-{other}") for name, other in ("ab", "ba")]
        for step in range(1, 6):
            for trainer in trainers:
                trainer.publish(step)
            for engine in engines:
                engine.update(step)


def test_memory_and_descriptors_do_not_grow(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), cluster["b"])
        seen = []
        for step in range(1, 31):
            trainer.publish(step)
            engine.update(step)
            if step in (10, 30):
                status = until(cluster["b"], lambda status: not job_of(status, "j")["elsewhere"]["fetching"])
                seen.append((len(cluster["b"].segments()), fds(cluster["a"]), fds(cluster["b"]), status["memory"]))
        assert seen[0][0] == seen[1][0] == 6  # keep + 1 slots of two ranks
        assert seen[1][1] <= seen[0][1] + 2
        assert seen[1][2] <= seen[0][2] + 2
        assert seen[0][3]["used_bytes"] == seen[1][3]["used_bytes"]


def test_engine_that_comes_first_waits_and_is_told_for_whom(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        engine = Engine(forks(1), cluster["b"])
        engine.fails("reader.update(timeout=0.5)", "DeadlineExceeded", "no trainer of it is registered on any node")
        engine.start("done = reader.update(timeout=60)\nresult = [done.step, held.wrong(done.step), done.transport]")
        trainer = Trainer(forks(2), cluster["a"])
        trainer.publish(4)
        assert engine.finish() == [[4, [], "shm"]]
        text = "step 5 of epoch 1 to be committed.*node a, where its trainer is"
        engine.fails("reader.update(5, timeout=0.5)", "DeadlineExceeded", text)
        engine.start("result = reader.wait(6, timeout=60)")
        trainer.publish(6)
        assert engine.finish()


def test_engine_that_comes_last_gets_the_newest_and_what_is_still_held(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer = Trainer(forks(2), cluster["a"])
        for step in (1, 2, 3):
            trainer.publish(step)
        engine = Engine(forks(2), cluster["b"])
        engine.do("done = reader.update(timeout=60)\nassert (done.step, held.wrong(3)) == (3, [])")
        engine.update(2)  # held there, asked for here
        engine.fails("reader.update(1, timeout=60)", "VersionUnavailable", "step 1 is not held any more")


def test_prefetch_brings_it_here_before_the_pause(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(1), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        engine.do("reader.prefetch()")
        engine.update(1)
        trainer.publish(2)
        until(cluster["b"], lambda status: [1, 2] in job_of(status, "j")["held"])  # nobody asked for it
        engine.update(2)


def test_what_is_rolled_back_is_withdrawn_everywhere(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), cluster["b"])
        for step in (1, 2, 3):
            trainer.publish(step)
            engine.update(step)
        job = job_of(cluster["a"].ask("status"), "j")["job"]
        cluster["a"].ask("rollback", job=job, step=2)
        until(cluster["b"], lambda status: job_of(status, "j")["held"] == [[1, 2]])
        engine.do("done = reader.update(timeout=60)\nassert (done.step, held.wrong(2)) == (2, [])")
        engine.fails("reader.update(3, timeout=60)", "VersionUnavailable", "step 3 is not held any more")
        trainer.publish(4)
        engine.update(4)
        cluster.server.kill()  # rolled back while nobody can be told, and remembered by nobody but the node itself
        cluster["a"].ask("rollback", job=job, step=2)
        assert held(cluster["b"], "j") == [[1, 4], [1, 2]]
        cluster.server.start()
        until(cluster["b"], lambda status: job_of(status, "j")["held"] == [[1, 2]])
        trainer.publish(5)
        engine.update(5)


def test_new_epoch_ends_what_was_waited_for_in_the_old_one(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), cluster["b"])
        trainer.publish(7)
        engine.update(7)
        engine.start("reader.wait(58, timeout=60)")
        trainer.close()
        trainer = Trainer(forks(3), cluster["a"], epoch="new")
        assert [kind for kind, _ in engine.errors()] == ["EpochChanged"] * 2
        trainer.publish(1, value=20)
        for found in engine.do(UPDATE.format(step=1, value=20)):
            assert found == [2, 1, []]


def test_job_that_is_closed_is_closed_everywhere_and_begins_anew(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(9)
        engine.update(9)
        trainer.processes[0].do("writer.close_job()")
        until(cluster["b"], lambda status: not job_of(status, "j").get("held"))
        cluster["b"].await_segments(0)
        engine.fails("reader.update(timeout=60)", "InvalidArgument", "closed")
        trainer, engine = Trainer(forks(1), cluster["a"]), Engine(forks(2), cluster["b"], "another")
        trainer.publish(1)
        engine.update(1)


def test_trainer_that_moves_goes_on_where_it_was(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), cluster["b"])
        trainer.publish(3)
        engine.update(3)
        with pytest.raises(RemoteError, match="its trainer is on node a") as error:
            Trainer(forks(1), cluster["b"])
        assert error.value.kind == "VersionConflict"
        trainer.close()
        until(cluster["b"], lambda status: not job_of(status, "j")["elsewhere"]["trainer_on"])
        trainer = Trainer(forks(2), cluster["b"])
        other = Engine(forks(1), cluster["a"], "e-a")
        trainer.publish(4)
        engine.update(4)
        other.update(4)


def test_budget_that_is_too_small_is_told_to_whoever_waits(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a") as cluster:
        cluster.add("b", "--memory-budget", "8K")
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["b"])
        engine.start("reader.update(timeout=60)")
        trainer.publish(1)
        ((kind, message),) = engine.errors()
        assert (kind, "of shared memory are needed" in message) == ("BudgetExceeded", True)
        assert any("cannot be brought here" in text for text in texts(cluster["b"], "failed"))
        assert cluster["b"].segments() == []


def test_node_without_a_listener_gets_versions_and_serves_none(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a") as cluster:
        (folder / "b").mkdir()
        with Daemon(folder / "b", "--metaserver", cluster.server.url, "--node", "b") as alone:
            trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), alone)
            trainer.publish(1)
            engine.update(1)


def test_status_says_where_it_comes_from(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["b"])
        trainer.publish(1)
        engine.update(1)
        assert job_of(cluster["a"].ask("status"), "j")["elsewhere"] is None
        told = job_of(cluster["b"].ask("status"), "j")["elsewhere"]
        assert (told["trainer_on"], told["route"], told["problem"]) == (["a"], "tcp", None)
        assert cluster["a"].ask("status")["metaserver"]["sent_bytes"] > 0
        shown = subprocess.run(
            [sys.executable, "-m", "awexd.ctl", "status", "--socket", cluster["b"].socket],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert "  trainer on a; route tcp\n" in shown.stdout
        kinds = [event["kind"] for event in cluster["b"].ask("events", job=None, after=None)["events"]]
        assert kinds.index("fetching") < kinds.index("fetched")


def test_restarted_daemon_has_what_it_had_and_goes_on(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(2), cluster["b"])
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        cluster["b"].kill()
        cluster["b"].start()
        assert held(cluster["b"], "j") == [[1, 2], [1, 1]]
        engine.do("result = reader.update(2, timeout=60).step")
        for step in (3, 4, 5):
            trainer.publish(step)
            engine.update(step)
        assert not any("Traceback" in cluster[name].log() for name in "ab")
