"""One GPU, one phase, among real processes and over restarts of a real daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from awexd.protocol import Message
from awexd_client import (
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    WeightWriter,
    WorkerWeightsReader,
    aio,
)
from tests.attacks.raw import until
from tests.client.samples import PATIENCE, weights
from tests.daemons import Daemon
from tests.e2e.clients import Background

INSIDE = """
import sys
from awexd_client import WeightWriter
with WeightWriter("other", 0, 1, sys.argv[1]) as writer, writer.phase("train", gpus=[sys.argv[2]]):
    print("inside", flush=True)
    sys.stdin.read()
"""


class Process:
    """A trainer that is inside until its input ends, or it is killed."""

    def __init__(self, socket: str, gpu: str) -> None:
        command = [sys.executable, "-c", INSIDE, socket, gpu]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout
        assert self._process.stdout.readline() == b"inside\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._process.communicate(timeout=PATIENCE)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)


@pytest.fixture
def process(daemon: Daemon) -> Iterator[Callable[[str], Process]]:
    made: list[Process] = []

    def start(gpu: str) -> Process:
        made.append(Process(daemon.socket, gpu))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def phases(daemon: Daemon) -> dict[str, tuple[str | None, int, int]]:
    """By GPU: the phase, how many are inside, how many wait."""
    found = daemon.ask("status")["phases"]
    return {gpu["gpu"]: (gpu["phase"], len(gpu["holders"]), len(gpu["waiting"])) for gpu in found}


def waiting(count: int) -> Callable[[Message], bool]:
    return lambda status: sum(len(gpu["waiting"]) for gpu in status["phases"]) == count


def test_rollout_waits_for_training_to_end(daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    order: list[str] = []

    def roll_out() -> None:
        with reader.phase("rollout", PATIENCE):
            order.append("rollout")

    with writer.phase("train"):
        engine = Background(roll_out)
        until(daemon.socket, waiting(1))
        writer.publish(1).committed()  # other calls go on
        order.append("train")
    engine.result()
    assert order == ["train", "rollout"]
    assert phases(daemon) == {}
    with writer.phase("train", 1.0), pytest.raises(DeadlineExceeded), reader.phase("rollout", 0.0):
        pass


def test_deadline_names_who_is_inside_and_the_claim_is_gone(
    daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    with writer.phase("train"):
        told = rf"for phase rollout: writer rank 0 of \w+/grpo \(process {os.getpid()}, uid \d+\), in phase train for"
        with pytest.raises(DeadlineExceeded, match=told) as caught, reader.phase("rollout", timeout=0.2):
            pytest.fail("two phases at once")
        assert caught.value.details["holders"][0]["pid"] == os.getpid()
        assert phases(daemon) == {"host": ("train", 1, 0)}
    with reader.phase("rollout", timeout=PATIENCE):
        assert phases(daemon) == {"host": ("rollout", 1, 0)}


def test_entering_twice_is_refused_and_changes_nothing(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(weights(1))
    with writer.phase("train"):
        for phase in ("train", "rollout"):
            with pytest.raises(InvalidArgument, match="in phase 'train' already"), writer.phase(phase):
                pass
        assert phases(daemon) == {"host": ("train", 1, 0)}
    with writer.phase("rollout"):
        pass


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda writer: writer.phase("sleep"), "train and rollout"),
        (lambda writer: writer.phase("train", gpus="GPU-1"), "a list of UUIDs"),
        (lambda writer: writer.phase("train", gpus=[]), "1 to 64 UUIDs"),
        (lambda writer: writer.phase("train", gpus=[""]), "1 to 64 UUIDs"),
        (lambda writer: writer.phase("train", -1.0, gpus=["g"]).__enter__(), "timeout"),
        (lambda writer: writer.phase("train"), "register"),
    ],
)
def test_bad_arguments(writer: WeightWriter, call: Callable[[WeightWriter], object], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        call(writer)


def test_killed_process_has_left(
    daemon: Daemon, reader: WorkerWeightsReader, process: Callable[[str], Process]
) -> None:
    trainer = process("GPU-x")
    with pytest.raises(DeadlineExceeded, match=str(trainer.pid)), reader.phase("rollout", 0.1, gpus=["GPU-x"]):
        pass
    os.kill(trainer.pid, signal.SIGKILL)
    with reader.phase("rollout", PATIENCE, gpus=["GPU-x"]):
        assert phases(daemon) == {"GPU-x": ("rollout", 1, 0)}


def test_error_inside_leaves(daemon: Daemon, writer: WeightWriter) -> None:
    with pytest.raises(KeyError), writer.phase("train", gpus=["g"]):
        raise KeyError
    assert phases(daemon) == {}


def test_closed_client_has_left(daemon: Daemon, writer: WeightWriter) -> None:
    with writer.phase("train", gpus=["g"]):
        writer.close()
        until(daemon.socket, lambda status: status["phases"] == [])


@pytest.mark.parametrize("way", ["killed", "ended"])
class TestRestart:
    """The daemon goes and comes again while somebody is inside."""

    def restart(self, daemon: Daemon, way: str) -> None:
        daemon.kill() if way == "killed" else daemon.terminate()
        daemon.start()

    def test_who_is_inside_stays_inside_before_it_says_a_word(
        self, daemon: Daemon, reader: WorkerWeightsReader, process: Callable[[str], Process], way: str
    ) -> None:
        trainer = process("g")
        self.restart(daemon, way)
        (gpu,) = daemon.ask("status")["phases"]
        assert [(holder["pid"], holder["connected"]) for holder in gpu["holders"]] == [(trainer.pid, False)]
        with pytest.raises(DeadlineExceeded, match=str(trainer.pid)), reader.phase("rollout", 0.1, gpus=["g"]):
            pass
        trainer.end()  # tells the new daemon that it leaves
        with reader.phase("rollout", PATIENCE, gpus=["g"]):
            pass

    def test_who_dies_afterwards_has_left(
        self, daemon: Daemon, reader: WorkerWeightsReader, process: Callable[[str], Process], way: str
    ) -> None:
        trainer = process("g")
        self.restart(daemon, way)
        trainer.kill()
        with reader.phase("rollout", PATIENCE, gpus=["g"]):
            pass

    def test_who_died_meanwhile_has_left(
        self, daemon: Daemon, reader: WorkerWeightsReader, process: Callable[[str], Process], way: str
    ) -> None:
        trainer = process("g")
        daemon.kill() if way == "killed" else daemon.terminate()
        trainer.kill()
        daemon.start()
        assert phases(daemon) == {}
        with reader.phase("rollout", PATIENCE, gpus=["g"]):
            pass

    def test_next_call_says_so_again_and_who_waits_goes_on_waiting(
        self, daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader, way: str
    ) -> None:
        writer.register(weights(1))

        def roll_out() -> None:
            with reader.phase("rollout", PATIENCE, gpus=["host"]):
                assert phases(daemon)["host"][0] == "rollout"

        with writer.phase("train"):
            engine = Background(roll_out)
            until(daemon.socket, waiting(1))
            self.restart(daemon, way)
            until(daemon.socket, waiting(1))
            writer.publish(1).committed()
            (gpu,) = daemon.ask("status")["phases"]
            assert [holder["connected"] for holder in gpu["holders"]] == [True]
        engine.result()

    def test_phase_that_was_left_without_a_daemon_is_told_later(
        self, daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader, way: str
    ) -> None:
        with pytest.raises(DaemonUnavailable), writer.phase("train", timeout=0.2, gpus=["g"]):
            daemon.kill() if way == "killed" else daemon.terminate()
        daemon.start()
        assert phases(daemon) == {"g": ("train", 1, 0)}
        writer.register({"w": torch.zeros(2)})
        assert phases(daemon) == {}


async def test_awaitable_phases(daemon: Daemon) -> None:
    async with (
        aio.WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        aio.WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        async with writer.phase("train", gpus=["g"]):
            with pytest.raises(DeadlineExceeded, match="writer rank 0"):
                async with reader.phase("rollout", 0.1, gpus=["g"]):
                    pass

            async def enter() -> None:
                async with reader.phase("rollout", PATIENCE, gpus=["g"]):
                    pass

            waits = asyncio.create_task(enter())
            await asyncio.to_thread(until, daemon.socket, waiting(1))
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert await asyncio.to_thread(phases, daemon) == {"g": ("train", 1, 0)}
        async with reader.phase("rollout", PATIENCE, gpus=["g"]):
            pass
