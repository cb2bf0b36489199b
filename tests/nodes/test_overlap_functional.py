"""Updates that copy what has come of a version while the rest of it is still on its way to their node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError
from tests.nodes.clusters import Cluster, job_of, lasting, until

Forks = Callable[[int], list[Process]]
TENSORS, ELEMENTS = 16, 4 << 20
NBYTES = 4 * TENSORS * ELEMENTS
HOLD = NBYTES * 5 // 8
"""Of a version: more than what a wave has, and readers are told of."""
HELD_SECONDS = 1.5

OPEN_WRITER = """
weights = {{str(at): torch.zeros({elements}, device={device!r}) for at in range({tensors})}}
writer = WeightWriter("j", 0, 1, {socket!r}, verify={verify!r}, mode="host", epoch="continue")
writer.register(weights)
def value(at, step):
    return at + 100 * step
"""
PUBLISH = """
[tensor.fill_(value(at, {step})) for at, tensor in enumerate(weights.values())]
writer.publish({step}).committed(timeout=60)
"""
WRITTEN = """
[tensor.fill_(value(at, {step}) + {more}) for at, tensor in enumerate(weights.values())]
update = writer.begin({step}).__enter__()
update.write([Shard(name, tensor) for name, tensor in weights.items()])
writer._tell_written(update.publication, writer._segment.manifest.segment_nbytes)
result = update.publication._early
"""
SEALED = "update.__exit__(None, None, None)\nupdate.publication.committed(timeout=60)"
GIVEN_UP = "update.__exit__(RuntimeError, RuntimeError('out of memory'), None)"
OPEN_READER = """
weights = {{str(at): torch.full(({elements},), -1.0, device={device!r}) for at in range({tensors})}}
reader = WorkerWeightsReader("j", {engine!r}, {rank}, {size}, {socket!r}, verify={verify!r})
reader.register(weights)
def wrong(step, more=0):
    return [at for at, tensor in enumerate(weights.values()) if not bool((tensor == at + 100 * step + more).all())]
"""
UPDATE = """
done = reader.update({step}, timeout={timeout}, overlap=True)
result = [done.step, wrong(done.step, {more}), done.pause_seconds, done.stage_seconds, done.bytes]
"""


def writer_on(daemon: Daemon, process: Process, verify: str = "checksum", device: str = "cpu") -> Process:
    given = {"socket": daemon.socket, "elements": ELEMENTS, "tensors": TENSORS, "verify": verify, "device": device}
    process.do(OPEN_WRITER.format(**given))
    return process


def reader_on(
    daemon: Daemon,
    process: Process,
    engine: str = "e",
    verify: str = "checksum",
    rank: int = 0,
    size: int = 1,
    device: str = "cpu",
) -> Process:
    given = {"socket": daemon.socket, "elements": ELEMENTS, "tensors": TENSORS, "verify": verify, "device": device}
    process.do(OPEN_READER.format(**given, engine=engine, rank=rank, size=size))
    return process


class Gate:
    """What daemon ``a`` sends passes it; each connection's first bytes only, until it is opened."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self._process, self._output = process, output

    def closed(self) -> None:
        """Returns once a connection is held back."""
        assert self._output.readline() == "held\n"

    def open(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def shut(self) -> None:
        self._process.send_signal(signal.SIGUSR2)


@contextmanager
def gated(folder: Path, names: str = "b") -> Iterator[tuple[Cluster, Gate]]:
    """Daemon ``a`` behind a gate, and others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.peers.proxy", json.dumps({"to": port, "hold": HOLD})]
    with Cluster(folder) as cluster, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            shown = f"127.0.0.1:{process.stdout.readline().strip()}"
            cluster.add("a", "--listen", f"127.0.0.1:{port}", "--advertise", shown, listen=False)
            for name in names:
                cluster.add(name)
            yield cluster, Gate(process, process.stdout)
        finally:
            process.kill()


@pytest.mark.parametrize("verify", ["checksum", "off"])
def test_copies_what_has_come_while_the_rest_is_on_its_way(folder: Path, forks: Forks, verify: str) -> None:
    with gated(folder) as (cluster, gate):
        trainer = writer_on(cluster["a"], forks(1)[0], verify)
        reader = reader_on(cluster["b"], forks(1)[0], verify=verify)
        reader.start(UPDATE.format(step=1, timeout=60, more=0))
        trainer.do(PUBLISH.format(step=1))
        gate.closed()
        lasting(HELD_SECONDS)
        assert job_of(cluster["b"].ask("status"), "j")["held"] == []
        gate.open()
        step, wrong, pause, _, nbytes = reader.finish()
        assert (step, wrong, nbytes) == (1, [], NBYTES)
        assert pause >= HELD_SECONDS / 2  # its first bytes were touched before the rest was let through
        for step in range(2, 6):  # in all slots
            reader.start(UPDATE.format(step=step, timeout=60, more=0))
            trainer.do(PUBLISH.format(step=step))
            assert reader.finish()[:2] == [step, []]
        assert reader.do("result = [reader.state, reader.version]") == ["ready", [1, 5]]


def at_step_1(cluster: Cluster, forks: Forks, verify: str = "checksum") -> tuple[Process, Process]:
    """A trainer on ``a``, and a reader on ``b`` that has its first step."""
    trainer = writer_on(cluster["a"], forks(1)[0], verify)
    reader = reader_on(cluster["b"], forks(1)[0], verify=verify)
    trainer.do(PUBLISH.format(step=1))
    assert reader.do(UPDATE.format(step=1, timeout=60, more=0))[:2] == [1, []]
    return trainer, reader


def caught(cluster: Cluster, gate: Gate, trainer: Process, readers: list[Process], step: int, timeout: float) -> None:
    """Readers are in the middle of an update to that step, of which a part is there."""
    for reader in readers:
        reader.start(UPDATE.format(step=step, timeout=timeout, more=0))
    trainer.do(PUBLISH.format(step=step))
    gate.closed()
    lasting(HELD_SECONDS / 3)


def test_all_workers_of_an_engine_and_one_that_does_not_overlap(folder: Path, forks: Forks) -> None:
    with gated(folder) as (cluster, gate):
        trainer, plain = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0], engine="plain")
        workers = [reader_on(cluster["b"], one, rank=rank, size=2) for rank, one in enumerate(forks(2))]
        plain.start("done = reader.update(1)\nresult = [done.pause_seconds, wrong(1)]")
        caught(cluster, gate, trainer, workers, 1, 60)
        gate.open()
        for worker in workers:
            step, wrong, pause, _, _ = worker.finish()
            assert (step, wrong) == (1, [])
            assert pause >= HELD_SECONDS / 6
        pause, wrong = plain.finish()
        assert wrong == []
        assert pause < HELD_SECONDS / 6 or pause < 1.0  # it copied when all was there


def test_source_that_is_gone_leaves_it_dirty_and_the_next_update_mends_that(folder: Path, forks: Forks) -> None:
    with gated(folder) as (cluster, gate):
        gate.open()
        trainer, reader = at_step_1(cluster, forks)
        gate.shut()
        caught(cluster, gate, trainer, [reader], 2, 4)
        cluster["a"].kill()
        with pytest.raises(RemoteError) as raised:
            reader.finish()
        assert raised.value.kind == "DeadlineExceeded"
        assert "the rest of epoch 1 step 2" in raised.value.message
        assert reader.do("result = [reader.state, reader.version]") == ["dirty", None]
        worker = job_of(cluster["b"].ask("status"), "j")["engines"][0]["workers"][0]
        assert (worker["state"], worker["version"]) == ("dirty", None)
        assert reader.do(UPDATE.format(step=1, timeout=60, more=0))[:2] == [1, []]  # what it had, in full again
        assert reader.do("result = [reader.state, reader.version]") == ["ready", [1, 1]]
        gate.open()
        cluster["a"].start()
        assert reader.do(UPDATE.format(step=2, timeout=60, more=0))[:2] == [2, []]


def test_version_that_is_withdrawn_on_its_way(folder: Path, forks: Forks) -> None:
    with gated(folder) as (cluster, gate):
        gate.open()
        trainer, reader = at_step_1(cluster, forks)
        gate.shut()
        caught(cluster, gate, trainer, [reader], 2, 60)
        cluster["a"].ask("rollback", job="j", step=1)
        with pytest.raises(RemoteError) as raised:
            reader.finish()
        assert raised.value.kind == "VersionUnavailable"
        assert reader.do("result = reader.state") == "dirty"
        assert reader.do(UPDATE.format(step=None, timeout=60, more=0))[:2] == [1, []]
        gate.open()
        for step in range(3, 7):  # the slots that were copied from have been replaced
            reader.start(UPDATE.format(step=step, timeout=60, more=0))
            trainer.do(PUBLISH.format(step=step))
            assert reader.finish()[:2] == [step, []]


def test_reader_killed_in_the_middle_holds_nothing(folder: Path, forks: Forks) -> None:
    with gated(folder) as (cluster, gate):
        trainer, reader = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        caught(cluster, gate, trainer, [reader], 1, 60)
        os.kill(reader.pid, signal.SIGKILL)
        successor = reader_on(cluster["b"], forks(1)[0])
        successor.start(UPDATE.format(step=1, timeout=60, more=0))
        lasting(HELD_SECONDS / 3)
        gate.open()
        assert successor.finish()[:2] == [1, []]
        for step in range(2, 6):
            successor.start(UPDATE.format(step=step, timeout=60, more=0))
            trainer.do(PUBLISH.format(step=step))
            assert successor.finish()[:2] == [step, []]
        job = job_of(cluster["b"].ask("status"), "j")
        assert len(job["held"]) == 2


def test_daemon_killed_in_the_middle_begins_again(folder: Path, forks: Forks) -> None:
    with gated(folder) as (cluster, gate):
        trainer, reader = writer_on(cluster["a"], forks(1)[0]), reader_on(cluster["b"], forks(1)[0])
        caught(cluster, gate, trainer, [reader], 1, 60)
        cluster["b"].kill()
        gate.open()
        cluster["b"].start()
        assert reader.finish()[:2] == [1, []]
        until(cluster["b"], lambda status: job_of(status, "j").get("held") == [[1, 1]])


def written_early(cluster: Cluster, trainer: Process, step: int, more: int = 0) -> None:
    """A reader is in the middle of an update to a step that its trainer has written and not sealed; all has come."""
    assert trainer.do(WRITTEN.format(step=step, more=more))  # other nodes fetch it early

    def all_here(status: dict[str, Any]) -> bool:
        fetching = (job_of(status, "j").get("elsewhere") or {}).get("fetching")
        return bool(fetching and fetching["version"][1] == step and fetching["received_bytes"] == NBYTES)

    until(cluster["b"], all_here)
    lasting(HELD_SECONDS / 3)
    assert [1, step] not in job_of(cluster["b"].ask("status"), "j")["held"]


def test_copies_what_is_not_committed_yet_and_has_it_only_once_it_is(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer = writer_on(cluster["a"], forks(1)[0], "off")
        reader, waits = (reader_on(cluster["b"], one, name, "off") for one, name in zip(forks(2), "ef", strict=True))
        trainer.do(PUBLISH.format(step=1))
        for one in (reader, waits):
            assert one.do(UPDATE.format(step=1, timeout=60, more=0))[:2] == [1, []]
        reader.start(UPDATE.format(step=2, timeout=60, more=0))
        written_early(cluster, trainer, 2)
        assert waits.do(UPDATE.format(step=None, timeout=60, more=0))[:2] == [1, []]  # the newest that is committed
        trainer.do(SEALED)
        step, wrong, pause, _, _ = reader.finish()
        assert (step, wrong) == (2, [])
        assert pause >= HELD_SECONDS / 6
        assert waits.do(UPDATE.format(step=2, timeout=60, more=0))[:2] == [2, []]


def test_what_was_copied_of_an_aborted_attempt_is_copied_again(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, reader = at_step_1(cluster, forks, "off")
        reader.start(UPDATE.format(step=2, timeout=60, more=7))
        written_early(cluster, trainer, 2)
        trainer.do(GIVEN_UP)
        lasting(HELD_SECONDS / 3)
        written_early(cluster, trainer, 2, more=7)
        trainer.do(SEALED)
        assert reader.finish()[:2] == [2, []]
        reader.start(UPDATE.format(step=3, timeout=2, more=0))
        written_early(cluster, trainer, 3)
        trainer.do(GIVEN_UP)
        with pytest.raises(RemoteError, match="step 3"):
            reader.finish()
        assert reader.do("result = reader.state") == "dirty"
        assert reader.do(UPDATE.format(step=2, timeout=60, more=7))[:2] == [2, []]


def test_trainer_killed_in_the_middle_of_what_is_copied(folder: Path, forks: Forks) -> None:
    with Cluster(folder, "a", "b") as cluster:
        trainer, reader = at_step_1(cluster, forks, "off")
        reader.start(UPDATE.format(step=2, timeout=60, more=0))
        written_early(cluster, trainer, 2)
        os.kill(trainer.pid, signal.SIGKILL)
        successor = writer_on(cluster["a"], forks(1)[0], "off")
        successor.do(PUBLISH.format(step=2))
        assert reader.finish()[:2] == [2, []]


def test_workers_of_one_engine_on_two_nodes(folder: Path, forks: Forks) -> None:
    with gated(folder, "bc") as (cluster, gate):
        trainer = writer_on(cluster["a"], forks(1)[0])
        workers = [
            reader_on(cluster[name], one, rank=rank, size=2)
            for rank, (name, one) in enumerate(zip("bc", forks(2), strict=True))
        ]
        caught(cluster, gate, trainer, workers, 1, 60)
        gate.open()
        found = [worker.finish() for worker in workers]
        assert [one[:2] for one in found] == [[1, []]] * 2
        assert max(one[2] for one in found) >= HELD_SECONDS / 6
        for step in range(2, 7):
            for worker in workers:
                worker.start(UPDATE.format(step=None if step % 2 else step, timeout=60, more=0))
            trainer.do(PUBLISH.format(step=step))
            got = [worker.finish() for worker in workers]
            assert got[0][0] == got[1][0]  # one version, whichever it was
            assert [one[1] for one in got] == [[], []]
            assert all(worker.do("result = reader.state") == "ready" for worker in workers)
