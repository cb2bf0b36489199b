"""Trainers and engines of these tests, in this process: a pair, calls in the background, a daemon that is restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from awexd.protocol import Message
from awexd_client import WeightWriter, WorkerWeightsReader
from tests.attacks.raw import until
from tests.daemons import Daemon

PATIENCE = 60.0


class Background:
    """A call in a thread; ``result`` waits for it and gives what it returned or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


class Pair:
    """A trainer of one rank, whose values are its steps, and an engine of one worker; either may use the gate."""

    def __init__(self, job: str, writer_socket: str, reader_socket: str) -> None:
        self.weights = {"a": torch.zeros(40_000), "b": torch.zeros(3)}
        self.into = {name: torch.full_like(tensor, -1.0) for name, tensor in self.weights.items()}
        self.writer = WeightWriter(job, 0, 1, writer_socket, verify="checksum")
        self.reader = WorkerWeightsReader(job, "e", 0, 1, reader_socket, verify="checksum")

    def register(self) -> None:
        self.writer.register(self.weights)
        self.reader.register(self.into)

    def publish(self, step: int) -> None:
        for tensor in self.weights.values():
            tensor.fill_(step)
        self.writer.publish(step).committed()

    def prepare(self, *, granted: bool) -> None:
        """The next publication has a slot that was granted; or it begins by a message, as the first of a connection."""
        if granted:
            await_granted(self.writer)
        else:
            self.writer._next = None

    def values(self) -> set[float]:
        return {value for tensor in self.into.values() for value in tensor.tolist()}

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def await_granted(writer: WeightWriter) -> None:
    """The slot was asked for after the last publication: the answer is here when that of a later request is."""
    writer._ask("status", PATIENCE)
    assert writer._next is not None


def publish_all(writers: Sequence[WeightWriter], step: int) -> None:
    """All ranks at the same time: after a restart each waits for the others to come back."""
    for running in [Background(lambda w=w: w.publish(step).committed(PATIENCE)) for w in writers]:  # type: ignore[misc]
        running.result()


def restart(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def check_nothing_orphaned(daemon: Daemon) -> None:
    """Every object in shared memory is a segment of a job; the writer's next slot may just be being made."""
    daemon.ask("gc")
    until(daemon.socket, lambda status: _segments(status) == len(daemon.segments()))


def _segments(status: Message) -> int:
    return sum(sum(job["segments"].values()) for job in status["jobs"])
