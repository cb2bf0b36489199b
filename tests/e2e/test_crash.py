"""SIGKILL and SIGSTOP of real trainers and engines: the last version stays readable, what they held is freed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from awexd.protocol import Message
from awexd_client import WeightWriter, WorkerWeightsReader
from awexd_client.session import Connection
from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError, together

PATIENCE = 20.0

OPEN_WRITER = """
a, b = torch.zeros(50_000), torch.zeros(7)
writer = WeightWriter("grpo", {rank}, {size}, {socket!r}, epoch={epoch!r})
writer.register([Shard("a{rank}", a), Shard("b{rank}", b)])
def publish(step):
    a.fill_(step); b.fill_(step)
    return writer.publish(step)
"""
OPEN_READER = """
names = [f"{{kind}}{{rank}}" for rank in range({size}) for kind in "ab"]
into = {{name: torch.full((50_000 if name[0] == "a" else 7,), -1.) for name in names}}
reader = WorkerWeightsReader("grpo", {engine!r}, {rank}, {workers}, {socket!r})
reader.register(into)
def values(): return sorted({{float(v) for tensor in into.values() for v in (tensor.min(), tensor.max())}})
"""


class Trainers:
    """Writer processes of one job, and readers."""

    def __init__(self, daemon: Daemon, fork: Callable[[], Process], size: int) -> None:
        self._daemon, self._fork, self.size = daemon, fork, size
        self.writers = [fork() for _ in range(size)]
        self.open(range(size))

    def open(self, ranks: Any, epoch: str = "continue") -> None:
        sources = [OPEN_WRITER.format(rank=r, size=self.size, socket=self._daemon.socket, epoch=epoch) for r in ranks]
        together([self.writers[rank] for rank in ranks], sources)

    def replace(self, rank: int) -> None:
        self.writers[rank] = self._fork()
        self.open([rank])

    def publish(self, step: int) -> None:
        together(self.writers, [f"done = publish({step})"] * self.size)
        together(self.writers, ["done.committed(20)"] * self.size)

    def reader(self, engine: str = "e", rank: int = 0, workers: int = 1) -> Process:
        process = self._fork()
        process.do(
            OPEN_READER.format(size=self.size, engine=engine, rank=rank, workers=workers, socket=self._daemon.socket)
        )
        return process


@pytest.fixture
def trainers(daemon: Daemon, fork: Callable[[], Process]) -> Trainers:
    return Trainers(daemon, fork, 2)


def job_status(daemon: Daemon) -> Message:
    (job,) = daemon.ask("status")["jobs"]
    return dict(job)


def await_status(daemon: Daemon, good: Callable[[Message], bool]) -> Message:
    """Looks until it is so; the looking itself takes its turn in the daemon."""
    connection = Connection(daemon.socket)
    end = time.monotonic() + PATIENCE
    try:
        while True:
            (job,) = connection.call("status", {}, timeout=PATIENCE)[0]["jobs"]
            if good(job):
                return dict(job)
            assert time.monotonic() < end, job
    finally:
        connection.goodbye()


def only_value(reader: Process, step: int, call: str = "reader.update()") -> None:
    assert reader.do(f"done = {call}; result = [done.step, values()]") == [step, [float(step)]]


def test_case_11_14_writer_killed_in_the_middle_of_a_version(daemon: Daemon, trainers: Trainers) -> None:
    reader = trainers.reader()
    trainers.publish(1)
    victim = trainers.writers[1]
    victim.start(
        "a.fill_(2); b.fill_(2)\n"
        "def parts():\n"
        "    yield Shard('a1', a)\n"
        "    say('half'); hear()\n"
        "with writer.begin(2) as update:\n"
        "    for part in parts(): update.write([part])"
    )
    assert victim.finish() == "half"
    together(trainers.writers[:1], ["done = publish(2)"])
    only_value(reader, 1)
    victim.kill()
    with pytest.raises(RemoteError) as caught:
        trainers.writers[0].do("done.committed(20)")
    assert caught.value.kind == "VersionConflict"
    assert "rank 1" in caught.value.message
    await_status(daemon, lambda job: job["segments"]["writing"] == 0 and job["open"] == [])
    only_value(reader, 1)
    trainers.replace(1)
    trainers.publish(2)
    only_value(reader, 2)


def test_case_50_writer_killed_before_it_sealed_is_named_at_the_deadline(daemon: Daemon, trainers: Trainers) -> None:
    trainers.publish(1)
    trainers.writers[1].kill()
    await_status(daemon, lambda job: job["writers"] == [0])
    with pytest.raises(RemoteError) as caught:
        trainers.writers[0].do("writer.publish(2, timeout=0.3)")
    assert caught.value.kind == "DeadlineExceeded"
    assert "rank 1" in caught.value.message


def test_writer_stopped_in_the_middle_blocks_nobody_but_its_own_version(daemon: Daemon, trainers: Trainers) -> None:
    reader = trainers.reader()
    trainers.publish(1)
    trainers.writers[1].do("update = writer.begin(2); update.write([Shard('a1', a)])")
    trainers.writers[1].stop()
    trainers.writers[0].do("done = publish(2)")
    with pytest.raises(RemoteError) as caught:
        trainers.writers[0].do("done.committed(0.2)")
    assert caught.value.kind == "DeadlineExceeded"
    assert "rank 1" in caught.value.message
    only_value(reader, 1)
    trainers.writers[1].resume()
    trainers.writers[1].do("update.write([Shard('b1', b)]); a.fill_(2); b.fill_(2)")
    assert job_status(daemon)["held"] == [[1, 1]]


def test_reader_killed_in_the_middle_of_an_update_frees_its_lease(daemon: Daemon, trainers: Trainers) -> None:
    victim, other = trainers.reader("victim"), trainers.reader("other")
    trainers.publish(1)
    victim.do("staged = reader.stage()")
    for step in (2, 3):
        trainers.publish(step)
    assert any(v["leases"] for v in daemon.ask("versions", job=None)["versions"])
    victim.kill()
    await_status(daemon, lambda job: [engine["engine"] for engine in job["engines"]] == ["other"])
    assert {v["leases"] for v in daemon.ask("versions", job=None)["versions"]} == {0}
    assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [3, 2]
    trainers.publish(4)
    only_value(other, 4)


def test_case_22_slow_reader_keeps_its_version_and_a_stopped_one_is_refused(
    folder: Any, fork: Callable[[], Process]
) -> None:
    with Daemon(folder, "--lease-ttl", "1.5") as daemon:
        trainers = Trainers(daemon, fork, 1)
        fast, stopped = [trainers.reader(f"fast{n}") for n in range(3)], trainers.reader("stopped")
        trainers.publish(1)
        stopped.do("staged = reader.stage(timeout=1.5)")
        stopped.stop()
        for step in (2, 3):
            trainers.publish(step)
            for reader in fast:
                only_value(reader, step)
        assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [3, 2, 1]
        trainers.publish(4)  # waits for a slot: that of step 1, once its lease has run out
        assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [4, 3]
        for step in (5, 6, 7, 8):
            trainers.publish(step)
        stopped.resume()
        with pytest.raises(RemoteError) as caught:
            stopped.do("reader.apply(staged)")
        assert caught.value.kind == "VersionUnavailable"
        # What it copied meanwhile was the old version whole: its memory was not given to another.
        assert stopped.do("result = [reader.state, reader.version, values()]") in (
            ["dirty", None, [1.0]],
            ["empty", None, [-1.0]],  # refused before it touched anything
        )
        only_value(stopped, 8)
        assert stopped.do("result = reader.state") == "ready"
        for process in (*fast, stopped, *trainers.writers):
            process.kill()


def test_case_23_version_of_a_trainer_that_ended_right_after_publishing(daemon: Daemon, trainers: Trainers) -> None:
    reader = trainers.reader()
    trainers.publish(1)
    for writer in trainers.writers:
        writer.kill()
    await_status(daemon, lambda job: job["writers"] == [])
    only_value(reader, 1)
    assert job_status(daemon)["segments"] == {"free": 0, "writing": 0, "sealed": 0, "held": 2}


def test_case_67_forked_data_loader_outlives_its_killed_parent(daemon: Daemon, trainers: Trainers) -> None:
    trainers.publish(1)
    writer = trainers.writers[1]
    child = writer.do(
        "writer.begin(2)\n"
        "gone, kept = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(kept); os.read(gone, 1); signal.pause()\n"
        "result = child"
    )
    handle = os.pidfd_open(child)
    try:
        writer.kill()
        await_status(daemon, lambda job: job["writers"] == [0] and job["segments"]["writing"] == 0)
        trainers.replace(1)
        trainers.publish(2)
    finally:
        os.kill(child, 9)
        os.close(handle)


def test_case_15_restarted_trainer(daemon: Daemon, trainers: Trainers) -> None:
    reader = trainers.reader()
    trainers.publish(57)
    only_value(reader, 57)
    for rank in (0, 1):
        trainers.writers[rank].kill()
    await_status(daemon, lambda job: job["writers"] == [])
    for rank in (0, 1):
        trainers.replace(rank)
    with pytest.raises(RemoteError) as caught:
        trainers.writers[0].do("publish(1)")
    assert caught.value.kind == "VersionConflict"
    assert 'epoch="new"' in caught.value.message
    assert job_status(daemon)["held"] == [[1, 57]]
    for rank in (0, 1):
        trainers.writers[rank].kill()
        trainers.writers[rank] = trainers._fork()
    await_status(daemon, lambda job: job["writers"] == [])
    trainers.open((0, 1), epoch="new")
    trainers.publish(1)
    assert job_status(daemon)["held"] == [[2, 1], [1, 57]]
    assert reader.do("done = reader.update(); result = [done.epoch, done.step]") == [2, 1]


def test_case_70_waits_are_told_at_once_when_the_epoch_changes(daemon: Daemon, trainers: Trainers) -> None:
    waiting, updating = trainers.reader("waiting"), trainers.reader("updating")
    trainers.publish(57)
    only_value(waiting, 57)
    only_value(updating, 57)
    waiting.start("reader.wait(58, timeout=60)")
    updating.start("reader.update(58, timeout=60)")
    for rank in (0, 1):
        trainers.writers[rank].kill()
        trainers.writers[rank] = trainers._fork()
    await_status(daemon, lambda job: job["writers"] == [])
    trainers.open((0, 1), epoch="new")
    started = time.monotonic()
    trainers.publish(1)
    for process in (waiting, updating):
        with pytest.raises(RemoteError) as caught:
            process.finish()
        assert caught.value.kind == "EpochChanged"
    assert time.monotonic() - started < PATIENCE
    assert updating.do("result = [reader.state, reader.version]") == ["ready", [1, 57]]


def test_new_epoch_with_a_rank_missing(daemon: Daemon, trainers: Trainers) -> None:
    trainers.publish(1)
    newcomer = trainers._fork()
    newcomer.do(OPEN_WRITER.format(rank=0, size=2, socket=daemon.socket, epoch="new"))
    with pytest.raises(RemoteError) as caught:
        newcomer.do("writer.publish(1, timeout=0.3)")
    assert caught.value.kind == "DeadlineExceeded"
    assert "rank 1 of the new epoch's 2" in caught.value.message
    trainers.publish(2)  # the old run goes on until the new one is whole
    newcomer.kill()
    trainers.publish(3)
    assert job_status(daemon)["epoch"] == 1


def test_case_56_readers_keep_the_old_version_while_a_rank_is_missing(daemon: Daemon, trainers: Trainers) -> None:
    reader = trainers.reader()
    trainers.publish(1)
    trainers.writers[0].do("done = publish(2)")
    with pytest.raises(RemoteError) as caught:
        trainers.writers[0].do("done.committed(0.2)")
    assert "rank 1 to seal step 2" in caught.value.message
    only_value(reader, 1)
    with pytest.raises(RemoteError) as caught:
        reader.do("reader.update(2, timeout=0.2)")
    assert caught.value.kind == "DeadlineExceeded"
    assert reader.do("result = [reader.state, reader.version]") == ["ready", [1, 1]]


def test_case_62_no_resource_tracker_unlinks_what_a_dead_process_mapped(daemon: Daemon, trainers: Trainers) -> None:
    trainers.publish(1)
    for engine in ("one", "two"):
        reader = trainers.reader(engine)
        only_value(reader, 1)
        reader.do("reader.close()")
        reader.kill()
    only_value(trainers.reader("three"), 1)


def test_case_34_tensor_larger_than_any_other(daemon: Daemon) -> None:
    import torch

    source, into = (
        {"big": torch.arange(20_000_000, dtype=torch.int32)},
        {"big": torch.zeros(20_000_000, dtype=torch.int32)},
    )
    with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer:
        writer.register(source)
        writer.publish(1)
        with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
            reader.register(into)
            assert reader.update().bytes == 80_000_000
    assert torch.equal(source["big"], into["big"])
