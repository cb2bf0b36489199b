"""Versions that are fetched while their ranks still write them: never seen before their commit, and gone with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import OPEN_WRITER, Cluster, Engine, SpreadTrainer, Trainer, held, job_of, lasting, texts

Forks = Callable[[int], list[Process]]
PUBLISHED = "rank.fill({value})\npublication = writer.publish({step}, timeout=60)\npublication.captured()"
COMMITTED = "publication.committed(timeout=60)"
BEGUN = "rank.fill({value})\nupdate = writer.begin({step}).__enter__()\nupdate.write(rank.shards)"
SEALED = "update.__exit__(None, None, None)\nupdate.publication.committed(timeout=60)"
GIVEN_UP = "update.__exit__(RuntimeError, RuntimeError('out of memory'), None)"


def spread(cluster: Cluster, forks: Forks, job: str = "j", nodes: str = "ab", **given: Any) -> SpreadTrainer:
    return SpreadTrainer(forks(len(nodes)), [cluster[name] for name in nodes], job=job, **given)


def received(cluster: Cluster, job: str = "j", node: str = "c", step: int = 2) -> int:
    """Bytes of that step that a node has got, once there are any."""

    def of(status: dict[str, Any]) -> int:
        fetching = (job_of(status, job).get("elsewhere") or {}).get("fetching") or {}
        found: int = fetching["received_bytes"] if fetching and fetching["version"][1] == step else 0
        return found

    return of(cluster.until(node, of))


def half_written(cluster: Cluster, forks: Forks, job: str, nodes: str = "ab", reader: str = "c", **given: Any) -> Any:
    """A trainer whose last rank holds back its seal of step 2, and an engine that has step 1."""
    trainer = spread(cluster, forks, job, nodes, **given)
    engine = Engine(forks(1), cluster[reader], job=job, **given)
    trainer.publish(1)
    engine.update(1)
    trainer.processes[-1].do(BEGUN.format(step=2, value=2))
    for process in trainer.processes[:-1]:
        process.do(PUBLISHED.format(step=2, value=2))
    return trainer, engine


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_bytes_are_elsewhere_before_the_commit_and_seen_only_after_it(
    cluster: Cluster, forks: Forks, verify: str
) -> None:
    job = f"before-{verify}"
    trainer, engine = half_written(cluster, forks, job, verify=verify)
    first, second = trainer.processes
    assert received(cluster, job) > 0
    assert held(cluster["c"], job) == [[1, 1]]
    versions = cluster["c"].ask("versions", job=None)["versions"]
    assert [row["step"] for row in versions if row["job"].endswith(job)] == [1]
    engine.fails("reader.update(2, timeout=0.3)", "DeadlineExceeded", "step 2")
    engine.start("done = reader.update(2, timeout=60)\nresult = [done.step, held.wrong(2)]")
    lasting(0.2)
    second.do(SEALED)
    first.do(COMMITTED)
    assert engine.finish() == [[2, []]]
    for step in range(3, 8):
        trainer.publish(step)
        engine.update(step)
    assert [text for text in texts(cluster["c"], "failed") if job in text] == []


def test_bytes_come_as_far_as_a_rank_tells_and_slices_are_exact(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = half_written(cluster, forks, "slices")
    first, second = trainer.processes
    before = received(cluster, "slices")
    nbytes = second.do(
        "result = writer._segment.manifest.segment_nbytes\nwriter._tell_written(update.publication, result)"
    )

    def all_but_tables(status: dict[str, Any]) -> bool:
        return bool(job_of(status, "slices")["elsewhere"]["fetching"]["received_bytes"] > before)

    status = cluster.until("c", all_but_tables)
    assert job_of(status, "slices")["elsewhere"]["fetching"]["received_bytes"] <= before + nbytes
    assert held(cluster["c"], "slices") == [[1, 1]]
    second.do(SEALED)
    first.do(COMMITTED)
    engine.update(2)
    trainer.do("from awexd_client import outgoing\noutgoing.SLICE = 512")
    for step in range(3, 8):
        trainer.publish(step)
        engine.update(step)
    counts = trainer.do("result = [len(slices) for (_, early), slices in writer._segment.tables.items() if early]")
    assert all(max(found) > 3 for found in counts), counts
    assert [text for text in texts(cluster["c"], "failed") if "slices" in text] == []


def test_nodes_of_the_trainer_fetch_early_what_the_others_write(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = half_written(cluster, forks, "own", nodes="aab", reader="b")
    other = Engine(forks(1), cluster["c"], "f", job="own")
    assert received(cluster, "own", "b") > 0
    trainer.processes[-1].do(SEALED)
    for one in (engine, other):
        one.update(2)
    for step in range(3, 9):
        trainer.publish(step)
        for one in (engine, other):
            one.update(step)
    most = job_of(cluster["b"].ask("status"), "own")["segments"]
    assert sum(most.values()) <= 9


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_attempt_that_is_aborted_leaves_nothing_and_the_next_one_is_exact(
    cluster: Cluster, forks: Forks, verify: str
) -> None:
    job = f"aborted-{verify}"
    trainer, engine = half_written(cluster, forks, job, verify=verify)
    first, second = trainer.processes
    assert received(cluster, job) > 0
    second.do(GIVEN_UP)
    with pytest.raises(RemoteError, match="out of memory") as error:
        first.do(COMMITTED)
    assert error.value.kind == "VersionConflict"
    cluster.until("c", lambda status: not job_of(status, job)["elsewhere"]["fetching"])
    for node in "abc":
        cluster.until(node, lambda status: not job_of(status, job)["segments"]["writing"])
    assert held(cluster["c"], job) == [[1, 1]]
    second.do(BEGUN.format(step=2, value=12))
    first.do(PUBLISHED.format(step=2, value=12))
    received(cluster, job)
    second.do(SEALED)
    engine.update(2, 12)
    for step in range(3, 10):  # every slot in turn
        trainer.publish(step, step + 20)
        engine.update(step, step + 20)


def test_rank_that_begins_a_step_anew_discards_what_others_have_of_it(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = half_written(cluster, forks, "anew", verify="off")
    first, second = trainer.processes
    assert received(cluster, "anew") > 0
    second.do(BEGUN.format(step=2, value=32))
    with pytest.raises(RemoteError, match="rank 1 began it anew"):
        first.do(COMMITTED)
    first.do(PUBLISHED.format(step=2, value=32))
    second.do(SEALED)
    engine.update(2, 32)


def test_rank_that_is_killed_in_the_middle_of_it(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = half_written(cluster, forks, "killed")
    first, second = trainer.processes
    assert received(cluster, "killed") > 0
    second.kill()
    with pytest.raises(RemoteError, match="rank 1"):
        first.do(COMMITTED)
    cluster.until("c", lambda status: not job_of(status, "killed")["elsewhere"]["fetching"])
    assert held(cluster["c"], "killed") == [[1, 1]]
    (process,) = forks(1)
    given = {"rank": 1, "size": 2, "job": "killed", "socket": cluster["b"].socket, "verify": "checksum"}
    process.do(OPEN_WRITER.format(epoch="continue", **given))
    trainer.processes[1] = process
    for step in range(2, 6):
        trainer.publish(step, step + 20)
        engine.update(step, step + 20)


def test_older_step_that_somebody_asks_for_goes_first(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks, "older")
    engine = Engine(forks(1), cluster["c"], job="older")
    trainer.publish(1)
    trainer.publish(2)
    engine.update(2)
    late = Engine(forks(1), cluster["a"], "late", job="older")
    late.update(2)
    first, second = trainer.processes
    first.do(BEGUN.format(step=3, value=3))
    second.do(PUBLISHED.format(step=3, value=3))
    received(cluster, "older", "a", step=3)
    late.update(1)
    first.do(SEALED)
    for one in (engine, late):
        one.update(3)


def test_trainer_of_one_node_is_fetched_early_once_others_fetch(cluster: Cluster, forks: Forks) -> None:
    trainer = Trainer(forks(2), cluster["a"], job="one")
    engine = Engine(forks(1), cluster["c"], job="one")
    for step in (1, 2):
        trainer.publish(step)
        engine.update(step)
    first, second = trainer.processes
    for step, value in ((3, 3), (4, 14)):
        second.do(BEGUN.format(step=step, value=step))
        first.do(PUBLISHED.format(step=step, value=step))
        assert received(cluster, "one", step=step) > 0
        assert [1, step] not in held(cluster["c"], "one")
        if value != step:
            second.do(GIVEN_UP)
            cluster.until("c", lambda status: not job_of(status, "one")["elsewhere"]["fetching"])
            second.do(BEGUN.format(step=step, value=value))
            first.do(PUBLISHED.format(step=step, value=value))
            received(cluster, "one", step=step)
        second.do(SEALED)
        engine.update(step, value)
    for step in range(5, 9):
        trainer.publish(step)
        engine.update(step)


def test_what_a_process_says_of_its_progress_is_not_believed(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = half_written(cluster, forks, "lying")
    first, second = trainer.processes
    told = """
from awexd_transports.errors import AwexdError
where = dict(epoch=1, step=2, attempt=update.publication._attempt, checksums=True)
nbytes = writer._segment.nbytes
result = []
for more in ({"nbytes": nbytes + 1}, {"checksums": False}, {"attempt": 7}, {"step": 9}):
    try:
        writer._ask("write.progress", 5.0, **{"nbytes": 0} | where | more)
    except AwexdError as error:
        result.append([type(error).__name__, str(error)])
writer._ask("write.progress", 5.0, **where, nbytes=16)
try:
    writer._ask("write.progress", 5.0, **where, nbytes=8)
except AwexdError as error:
    result.append([type(error).__name__, str(error)])
"""
    kinds = [kind for kind, _ in second.do(told)]
    assert kinds == ["InvalidArgument", "InvalidArgument", "VersionConflict", "VersionConflict", "InvalidArgument"]
    late = "dict(epoch=1, step=2, attempt=publication._attempt, nbytes=0, checksums=True)"
    with pytest.raises(RemoteError, match="has sealed step 2"):
        first.do(f"writer._ask('write.progress', 5.0, **{late})")
    second.do(SEALED)
    engine.update(2)


def test_metaserver_that_is_restarted_in_between(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        trainer, engine = half_written(cluster, forks, "j")
        first, second = trainer.processes
        assert received(cluster) > 0
        cluster.server.kill()
        cluster.server.start()
        second.start(SEALED)
        first.start(COMMITTED)
        trainer.finish()
        engine.update(2)
        for step in range(3, 6):
            trainer.publish(step)
            engine.update(step)


@pytest.mark.parametrize("node", ["a", "b"])
def test_daemon_of_a_rank_that_is_killed_in_between(folder: Path, forks: Forks, node: str) -> None:
    with Cluster(folder, "a", "b", "c", ttl=2.0) as cluster:
        trainer, engine = half_written(cluster, forks, "j")
        assert received(cluster) > 0
        cluster[node].kill()
        cluster[node].start()
        cluster.until(node, lambda status: status["metaserver"]["connected"])
        with pytest.raises(RemoteError):
            trainer.processes[1].do(SEALED)
        assert held(cluster["c"], "j") == [[1, 1]]
        trainer.publish(2, 22)
        engine.update(2, 22)


def test_daemon_that_fetches_is_killed_in_between(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c") as cluster:
        trainer, engine = half_written(cluster, forks, "j")
        first, second = trainer.processes
        assert received(cluster) > 0
        cluster["c"].kill()
        cluster["c"].start()
        assert held(cluster["c"], "j") == [[1, 1]]
        engine.start("done = reader.update(2, timeout=60)\nresult = [done.step, held.wrong(2)]")
        assert received(cluster) > 0
        second.do(SEALED)
        first.do(COMMITTED)
        assert engine.finish() == [[2, []]]


def test_node_that_is_frozen_in_the_middle_of_it_is_aborted_with_it(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", ttl=2.0) as cluster:
        trainer, engine = half_written(cluster, forks, "j")
        first, second = trainer.processes
        assert received(cluster) > 0
        os.kill(cluster["b"].pid, signal.SIGSTOP)
        try:
            with pytest.raises(RemoteError, match="node b is gone"):
                first.do(COMMITTED)
            cluster.until("c", lambda status: not job_of(status, "j")["elsewhere"]["fetching"])
        finally:
            os.kill(cluster["b"].pid, signal.SIGCONT)
        with pytest.raises(RemoteError):
            second.do(SEALED)
        trainer.publish(2, 22)
        engine.update(2, 22)
