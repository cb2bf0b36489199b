"""Killed and frozen at any moment: never torn, never lost, never for ever; and what comes next is right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, fds, job_of, lasting, texts, until
from tests.nodes.large import ELEMENTS, OPEN_READER, OPEN_WRITER, PUBLISH, UPDATE, on_its_way, reader_on, writer_on

Forks = Callable[[int], list[Process]]


@pytest.mark.timeout(600)
def test_every_process_killed_and_frozen_in_turn(folder: Path, forks: Forks) -> None:
    """20 rounds. What a worker reports is what it has, in every bit, whatever happens to whom."""
    choose = random.Random(20)
    with Cluster(folder, "a", "b", ttl=4.0) as cluster:
        trainer, engine = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        caught = 0
        for step in range(1, 5):  # until it has all its slots
            trainer.do(PUBLISH.format(step=step))
            assert engine.do(UPDATE.format(step=step)) == [step, [step]]
        counts = fds(cluster["a"]), fds(cluster["b"])
        victims = ["source", "target", "trainer", "engine", "metaserver"]
        for number in range(20):
            victim, freeze = victims[number % 5], number // 5 % 2 == 1
            step += 1
            trainer.start(PUBLISH.format(step=step))
            engine.start(UPDATE.format(step=step))
            moment = choose.random()
            if victim != "trainer" and moment < 0.7:
                caught += on_its_way(cluster["b"], step)
            lasting(choose.random() * 0.1)
            pid = {
                "source": cluster["a"].pid,
                "target": cluster["b"].pid,
                "trainer": trainer.pid,
                "engine": engine.pid,
                "metaserver": cluster.server.pid,
            }[victim]
            os.kill(pid, signal.SIGSTOP if freeze else signal.SIGKILL)
            if freeze:
                lasting(choose.choice([0.5, 1.0, 7.0]))
                os.kill(pid, signal.SIGCONT)
            elif victim == "source":
                cluster["a"].kill()
                cluster["a"].start()
            elif victim == "target":
                cluster["b"].kill()
                cluster["b"].start()
            elif victim == "metaserver":
                cluster.server.kill()
                cluster.server.start()
            if victim == "trainer" and not freeze:
                trainer.await_end()
                trainer = writer_on(cluster["a"], forks(1)[0])
            else:
                trainer.finish()
            if victim == "engine" and not freeze:
                engine.await_end()
                engine = reader_on(cluster["b"], forks(1)[0])
            elif victim == "trainer" and not freeze:  # that step may never come: the update goes on to the next
                trainer.do(PUBLISH.format(step=step) if not _committed(cluster["a"], step) else "")
                _check(engine, step)
            else:
                _check(engine, step)
            step += 1
            trainer.do(PUBLISH.format(step=step))
            assert engine.do(UPDATE.format(step=step)) == [step, [step]], (number, victim, freeze)
        assert caught >= 5, "rounds that met a version on its way"
        until(cluster["b"], lambda status: not job_of(status, "j")["elsewhere"]["fetching"])
        assert fds(cluster["a"]) <= counts[0] + 4
        assert fds(cluster["b"]) <= counts[1] + 4
        for name in "ab":
            assert "Traceback" not in cluster[name].log()


def _committed(daemon: Daemon, step: int) -> bool:
    return [1, step] in job_of(daemon.ask("status"), "j")["held"]


def _check(process: Process, step: int) -> None:
    """What it reports is what it has; an update that was broken off may say so, and nothing else."""
    try:
        assert process.finish() == [step, [step]]
    except RemoteError as error:
        if error.kind not in ("DeadlineExceeded", "VersionUnavailable", "DaemonUnavailable"):
            raise
        source = "result = [reader.state, reader.version and list(reader.version)[1], seen()]"
        state, version, seen = process.do(source)
        assert state == "dirty" or seen == [version]


def test_source_that_dies_for_good_is_replaced_by_another_holder(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", ttl=3.0) as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0])
        first = reader_on(cluster["b"], forks(1)[0])
        trainer.do(PUBLISH.format(step=1))
        assert first.do(UPDATE.format(step=1)) == [1, [1]]
        os.kill(cluster["a"].pid, signal.SIGSTOP)  # frozen: it accepts, and says nothing
        second = reader_on(cluster["c"], forks(1)[0], "another")
        assert second.do(UPDATE.format(step=1)) == [1, [1]]
        cluster["a"].kill()
        cluster.add("d")
        third = reader_on(cluster["d"], forks(1)[0], "a-third")
        assert third.do(UPDATE.format(step=1)) == [1, [1]]
        cluster["a"].start()
        trainer.do(PUBLISH.format(step=2))
        for engine in (first, second, third):
            assert engine.do(UPDATE.format(step=2)) == [2, [2]]


def test_chain_whose_middle_dies_while_it_fetches(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b", "c", "d", ttl=3.0) as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0])
        engines = {name: reader_on(cluster[name], forks(1)[0], name) for name in "bcd"}
        for step in (1, 2, 3):
            trainer.start(PUBLISH.format(step=step))
            for engine in engines.values():
                engine.start(UPDATE.format(step=step))
            on_its_way(cluster["c"], step)
            cluster["b" if step < 3 else "c"].kill()
            trainer.finish()
            others = [name for name in "bcd" if name != ("b" if step < 3 else "c")]
            for name in others:
                assert engines[name].finish() == [step, [step]]
            for name in "bc":
                if not cluster[name].running:
                    cluster[name].start()
                    assert engines[name].finish() == [step, [step]]


def test_version_that_is_on_its_way_when_its_daemon_dies_is_not_adopted(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        trainer.do(PUBLISH.format(step=1))
        assert engine.do(UPDATE.format(step=1)) == [1, [1]]
        caught = 0
        for step in range(2, 6):
            trainer.start(PUBLISH.format(step=step))
            caught += on_its_way(cluster["b"], step)
            cluster["b"].kill()
            cluster.server.kill()  # so that it cannot simply fetch it again
            cluster["b"].start()
            found = job_of(cluster["b"].ask("status"), "j")["held"]
            assert [1, step - 1] in found
            cluster.server.start()
            trainer.finish()
            assert engine.do(UPDATE.format(step=step)) == [step, [step]]
        assert caught >= 2


def test_metaserver_that_is_away_costs_no_version_that_is_here(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = writer_on(cluster["a"], forks(1)[0], 1000), reader_on(cluster["b"], forks(1)[0], "e", 1000)
        trainer.do(PUBLISH.format(step=1))
        assert engine.do(UPDATE.format(step=1)) == [1, [1]]
        cluster.server.kill()
        trainer.do(PUBLISH.format(step=2))
        assert engine.do(UPDATE.format(step=1)) == [1, [1]]
        with pytest.raises(RemoteError, match="the MetaServer at") as error:
            engine.do("reader.update(2, timeout=3)")
        assert error.value.kind == "DeadlineExceeded"
        engine.start(UPDATE.format(step=2))
        cluster.server.start()
        assert engine.finish() == [2, [2]]
        assert any("not told what becomes of it elsewhere" in text for text in texts(cluster["b"], "metaserver"))


def test_slow_node_holds_a_slot_for_seconds_at_most(folder: Path, forks: Forks) -> None:
    """One that is frozen in the middle of a fetch makes the trainer wait for its slot, and is cut off."""
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        trainer.do(PUBLISH.format(step=1))
        engine.start(UPDATE.format(step=1))
        on_its_way(cluster["b"], 1)
        os.kill(cluster["b"].pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for step in range(2, 7):
                trainer.do(PUBLISH.format(step=step))
            assert time.monotonic() - began < 40
        finally:
            os.kill(cluster["b"].pid, signal.SIGCONT)
        _answered(engine)
        assert engine.do(UPDATE.format(step=6)) == [6, [6]]


def _answered(process: Process) -> None:
    """Step 1 came in time, or had gone."""
    try:
        assert process.finish() == [1, [1]]
    except RemoteError as error:
        if error.kind != "VersionUnavailable":
            raise


def test_versions_are_never_mixed_though_nobody_stored_checksums(folder: Path, forks: Forks) -> None:
    """The trainer goes on faster than a version is fetched; what engines get is one version in every byte."""
    with Cluster(folder, "a", "b") as cluster:
        trainer, engine = forks(1)[0], forks(1)[0]
        given = {"elements": ELEMENTS, "engine": "e"}
        trainer.do(OPEN_WRITER.format(socket=cluster["a"].socket, **given).replace("checksum", "off"))
        engine.do(OPEN_READER.format(socket=cluster["b"].socket, rank=0, size=1, **given).replace("checksum", "off"))
        trainer.do("import time\n" + PUBLISH.format(step=1))
        engine.do(UPDATE.format(step=1))
        trainer.start(
            "for step in range(2, 30):\n"
            "    [t.fill_(step) for t in weights.values()]\n"
            "    writer.publish(step).captured()\n"
            "    time.sleep(0.1)"
        )
        steps = set()
        while 29 not in steps:
            step, seen = engine.do("done = reader.update(timeout=60)\nresult = [done.step, seen()]")
            assert seen == [step]
            steps.add(step)
        trainer.finish()
        assert len(steps) > 1  # how many it gets between is a matter of how busy the machine is


def test_node_that_is_too_slow_for_its_grace_is_cut_off_and_gets_the_newest(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "b") as cluster:
        cluster.add("a", "--fetch-grace", "0.01")
        trainer, engine = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        trainer.do(PUBLISH.format(step=1))
        assert engine.do(UPDATE.format(step=1)) == [1, [1]]
        for step in range(2, 12):
            trainer.do(PUBLISH.format(step=step))
        assert engine.do(UPDATE.format(step=11)) == [11, [11]]
        assert any("it is held nowhere else any more" in text for text in texts(cluster["b"], "failed"))
