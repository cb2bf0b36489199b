"""Trainers whose ranks are on several nodes: the same calls and the same guarantees as on one node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workers.processes import Process, RemoteError, together
from tests.nodes.clusters import (
    PUBLISH,
    UPDATE,
    Cluster,
    Engine,
    SpreadTrainer,
    Trainer,
    fds,
    held,
    job_of,
    texts,
    until,
)

Forks = Callable[[int], list[Process]]
RANK = """
rank = weights.Rank("writer", {rank}, {size})
how = dict(verify="checksum", mode={mode!r}, transport={transport!r}, epoch={epoch!r})
writer = WeightWriter("{job}", {rank}, {size}, {socket!r}, **how)
"""


def spread(cluster: Cluster, processes: list[Process], job: str, nodes: str = "aabb", **given: str) -> SpreadTrainer:
    return SpreadTrainer(processes, [cluster[name] for name in nodes], job=job, **given)


def test_every_engine_gets_every_bit_of_every_step(cluster: Cluster, forks: Forks) -> None:
    """Two ranks on each of two nodes; engines on one of them and on a third."""
    trainer = spread(cluster, forks(4), "bits")
    engines = [Engine(forks(n), cluster[name], f"e-{name}", job="bits") for name, n in (("a", 2), ("c", 1))]
    counts = []
    for step in range(1, 13):
        trainer.publish(step)
        for engine in engines:
            engine.update(step)
        if step in (6, 12):
            until(cluster["a"], lambda status: not job_of(status, "bits")["elsewhere"]["fetching"])
            jobs = [job_of(cluster[name].ask("status"), "bits") for name in "abc"]
            assert [job["held"] for job in jobs] == [[[1, step], [1, step - 1]], [], [[1, step], [1, step - 1]]]
            assert jobs[1]["partial"] == [[1, step], [1, step - 1]]
            slots = [sum(job["segments"].values()) for job in jobs]
            counts.append(slots + [fds(cluster[name]) - 3 * own for name, own in zip("abc", slots, strict=True)])
    for found in counts:  # keep + 1 slots at most of each rank that is there
        assert all(one <= most for one, most in zip(found, [12, 6, 12], strict=False)), found
    assert all(late <= early + 4 for early, late in zip(counts[0][3:], counts[1][3:], strict=True))
    sources = texts(cluster["c"], "fetched")
    assert any("from a" in text and "from b" in text for text in sources)
    assert texts(cluster["c"], "failed") == []
    engines[0].fails("reader.update(1, timeout=60)", "VersionUnavailable", "step 1 is not held any more")


def test_long_form_and_an_abort_of_one_rank(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks(4), "long")
    engine = Engine(forks(1), cluster["b"], job="long")
    trainer.publish(1)
    engine.update(1)
    trainer.do(
        "rank.fill(2)\nwith writer.begin(2) as update:\n    update.write(rank.shards)\nupdate.publication.committed()"
    )
    engine.update(2)
    trainer.start("rank.fill(3)\npublication = writer.publish(3)\npublication.captured()")
    trainer.finish()
    trainer.do("publication.committed()")
    engine.update(3)
    broken = "with writer.begin(4) as update:\n    raise RuntimeError('out of memory')"
    first, *others = trainer.processes
    with pytest.raises(RemoteError, match="out of memory"):
        first.do(broken)
    sealed = "rank.fill(5)\npublication = writer.publish(5)\npublication.captured()"
    together(others, [sealed] * 3)
    with pytest.raises(RemoteError, match="out of memory"):
        first.do(broken.replace("begin(4)", "begin(5)"))
    for process in others:
        with pytest.raises(RemoteError, match="out of memory") as error:
            process.do("publication.committed(timeout=60)")
        assert error.value.kind == "VersionConflict"
    trainer.publish(5)
    engine.update(5)


@pytest.mark.parametrize("engine_on", ["a", "c"])
def test_weights_that_are_offloaded_come_back(cluster: Cluster, forks: Forks, engine_on: str) -> None:
    """Where the whole version is on the node, and where only its ranks' segments are: then the rest is copied."""
    job, processes, reader = f"off-{engine_on}", forks(2), forks(1)[0]
    together(
        processes,
        [
            f"weights = {{'shared': torch.zeros(1000), 'r{rank}': torch.zeros(10)}}\n"
            f"writer = WeightWriter({job!r}, {rank}, 2, {cluster[node].socket!r}, mode='host')\n"
            "writer.register(weights)"
            for rank, node in enumerate("ab")
        ],
    )
    reader.do(
        "weights = {'shared': torch.ones(1000), 'r0': torch.ones(10), 'r1': torch.ones(10)}\n"
        f"reader = WorkerWeightsReader({job!r}, 'e', 0, 1, {cluster[engine_on].socket!r})\nreader.register(weights)"
    )
    seen = "sorted({float(x) for t in weights.values() for x in t})"
    for step in (1, 2):
        together(processes, [f"[t.fill_({step}) for t in weights.values()]\nwriter.publish({step}).committed()"] * 2)
        assert reader.do(f"reader.update({step}, timeout=60)\nresult = {seen}") == [step]
        assert together(processes, [f"writer.offload()\nwriter.restore()\nresult = {seen}"] * 2) == [[step]] * 2


def test_what_is_rolled_back_is_withdrawn_everywhere_and_its_steps_are_used(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks(2), "back", "ab")
    engines = [Engine(forks(1), cluster[name], f"e-{name}", job="back") for name in "bc"]
    for step in (1, 2, 3):
        trainer.publish(step)
        for engine in engines:
            engine.update(step)
    job = job_of(cluster["a"].ask("status"), "back")["job"]
    cluster["a"].ask("rollback", job=job, step=2)
    for name in "bc":
        until(cluster[name], lambda status: job_of(status, "back")["held"] == [[1, 2]])
    assert job_of(cluster["a"].ask("status"), "back")["partial"] == [[1, 2]]
    for engine in engines:
        engine.fails("reader.update(3, timeout=60)", "VersionUnavailable", "step 3 is not held any more")
        engine.do("done = reader.update(timeout=60)\nassert (done.step, held.wrong(2)) == (2, [])")
    trainer.fails("writer.publish(3, timeout=60)", "VersionConflict", "step 3 is not after step 3 of epoch 1")
    trainer.publish(4)
    for engine in engines:
        engine.update(4)


def test_restarted_trainer_opens_a_new_epoch_on_other_nodes(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks(2), "epoch", "ab")
    engine = Engine(forks(1), cluster["c"], job="epoch")
    trainer.publish(7)
    engine.update(7)
    engine.start("reader.wait(58, timeout=60)")
    processes = forks(3)
    trainer.close()
    trainer = spread(cluster, processes, "epoch", "abc", epoch="new")
    trainer.publish(1, value=20)
    assert [kind for kind, _ in engine.errors()] == ["EpochChanged"]
    for found in engine.do(UPDATE.format(step=1, value=20)):
        assert found == [2, 1, []]
    late = forks(1)[0]
    late.do(
        RANK.format(
            rank=0, size=2, job="epoch", socket=cluster["a"].socket, mode="host", transport="auto", epoch="continue"
        )
    )
    with pytest.raises(RemoteError, match="epoch 2 has 3 writer ranks, not 2"):
        late.do("writer.register(rank.shards)")


def test_trainer_of_one_node_spreads_over_two_and_gathers_on_one_again(cluster: Cluster, forks: Forks) -> None:
    trainer, engine = Trainer(forks(2), cluster["a"], job="grow"), Engine(forks(1), cluster["c"], job="grow")
    trainer.publish(1)
    engine.update(1)
    other = forks(1)[0]
    given = {"job": "grow", "mode": "host", "transport": "auto", "epoch": "continue"}
    other.do(RANK.format(rank=1, size=3, socket=cluster["b"].socket, **given))
    with pytest.raises(RemoteError, match="its trainer is on node a, with all its ranks") as error:
        other.do("writer.register(rank.shards)\nwriter.publish(2, timeout=60)")
    assert error.value.kind == "VersionConflict"
    other.do("writer.close()")
    trainer.close()
    trainer = spread(cluster, forks(4), "grow", "abab", epoch="new")
    for step in (21, 22):
        trainer.publish(step)
        with contextlib.suppress(RemoteError):  # told once that the epoch is over
            engine.do("reader.wait(21, timeout=60)")
        engine.update(step, epoch=2)
    trainer.close()
    until(cluster["b"], lambda status: not job_of(status, "grow")["elsewhere"]["trainer_on"])
    trainer = Trainer(forks(2), cluster["b"], job="grow", epoch="new")
    trainer.publish(31)
    with contextlib.suppress(RemoteError):
        engine.do("reader.wait(31, timeout=60)")
    engine.update(31, epoch=3)


def test_rank_that_is_killed_ends_the_attempt_on_every_node_and_comes_back(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks(4), "dead")
    engine = Engine(forks(1), cluster["c"], job="dead")
    trainer.publish(1)
    engine.update(1)
    *others, last = trainer.processes
    last.do("rank.fill(2)\nupdate = writer.begin(2).__enter__()")
    together(others, ["rank.fill(2)\npublication = writer.publish(2)\npublication.captured()"] * 3)
    last.kill()
    for process in others:
        with pytest.raises(RemoteError) as error:
            process.do("publication.committed(timeout=60)")
        assert error.value.kind == "VersionConflict"
    with pytest.raises(RemoteError, match=r"rank 3 of 4 (to register|has not registered) in epoch 1") as late:
        others[0].do("writer.publish(2, timeout=2)")
    assert late.value.kind == "DeadlineExceeded"
    (again,) = forks(1)
    given = {"job": "dead", "mode": "host", "transport": "auto", "epoch": "continue"}
    again.do(RANK.format(rank=3, size=4, socket=cluster["b"].socket, **given) + "writer.register(rank.shards)")
    trainer.processes[3] = again
    trainer.publish(2)
    engine.update(2)


def test_job_that_is_closed_is_closed_everywhere_and_begins_anew(cluster: Cluster, forks: Forks) -> None:
    trainer = spread(cluster, forks(2), "close", "ab")
    engine = Engine(forks(1), cluster["c"], job="close")
    trainer.publish(9)
    engine.update(9)
    trainer.processes[0].do("writer.close_job()")
    for name in "abc":
        until(cluster[name], lambda status: not job_of(status, "close"))
    with pytest.raises(RemoteError, match="closed"):
        trainer.processes[1].do("writer.publish(10)")
    trainer = spread(cluster, forks(2), "close", "ca")
    engine = Engine(forks(1), cluster["b"], job="close")
    trainer.publish(1)
    engine.update(1)


def test_lending_is_refused_and_says_why(cluster: Cluster, forks: Forks) -> None:
    processes = forks(2)
    given = {"job": "lends", "mode": "direct", "transport": "auto", "epoch": "continue", "size": 2}
    sources = [RANK.format(rank=n, socket=cluster["ab"[n]].socket, **given) for n in range(2)]
    together(processes, [source + "writer.register(rank.shards)" for source in sources])
    for process in processes:
        with pytest.raises(RemoteError, match="its ranks are on several nodes") as error:
            process.do("writer.publish(1, timeout=60)")
        assert error.value.kind == "InvalidArgument"


def test_auto_goes_through_host_memory_and_says_why(cluster: Cluster, forks: Forks) -> None:
    processes = forks(2)
    given = {"job": "auto", "mode": "auto", "transport": "auto", "epoch": "continue", "size": 2}
    sources = [RANK.format(rank=n, socket=cluster["ab"[n]].socket, **given) for n in range(2)]
    together(processes, [source + "writer.register(rank.shards)" for source in sources])
    engine = Engine(forks(1), cluster["a"], job="auto")
    together(processes, [PUBLISH.format(step=1, value=1)] * 2)
    engine.update(1)
    assert processes[0].do("result = publication.mode") == "host"


def test_rank_that_waits_alone_is_told_for_whom(cluster: Cluster, forks: Forks) -> None:
    process = forks(1)[0]
    given = {"job": "lone", "mode": "host", "transport": "auto", "epoch": "continue", "size": 2}
    process.do(RANK.format(rank=0, socket=cluster["a"].socket, **given) + "writer.register(rank.shards)")
    with pytest.raises(RemoteError, match="rank 1 of 2 to register, here or on other nodes") as error:
        process.do("writer.publish(1, timeout=1)")
    assert error.value.kind == "DeadlineExceeded"


def test_trainer_of_one_node_goes_on_while_the_metaserver_is_away(folder: Path, forks: Forks) -> None:
    """Its ranks register, publish and are read one after the other, as without a MetaServer."""
    with Cluster(folder, "a") as cluster:
        cluster.server.kill()
        began = time.monotonic()
        trainer, engine = Trainer(forks(2), cluster["a"]), Engine(forks(1), cluster["a"])
        for step in (1, 2):
            trainer.publish(step)
            engine.update(step)
        assert time.monotonic() - began < 20
        assert held(cluster["a"], "j") == [[1, 2], [1, 1]]
        cluster.server.start()
