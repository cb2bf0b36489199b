"""WeightReader: all workers get one version, or none is touched and the state of each is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from awexd_client import (
    InvalidArgument,
    ManifestMismatch,
    VersionUnavailable,
    WeightReader,
    WeightWriter,
    WorkerWeightsReader,
)
from awexd_transports.errors import AwexdError
from tests.daemons import Daemon

SIZE = 3


class Failing:
    """A real worker, one half of whose update fails when told to."""

    def __init__(self, worker: WorkerWeightsReader) -> None:
        self.worker = worker
        self.fails_at = ""
        self.rank = worker.rank

    @property
    def state(self) -> str:
        return self.worker.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self.worker.version

    def stage(self, step: int | None = None, timeout: float = 60) -> Any:
        if self.fails_at == "stage":
            raise ManifestMismatch("does not fit")
        return self.worker.stage(step, timeout)

    def apply(self, staged: Any, timeout: float = 60) -> Any:
        if self.fails_at == "apply":
            self.worker.release(staged)
            raise VersionUnavailable("lost")
        return self.worker.apply(staged, timeout)

    def release(self, staged: Any) -> None:
        self.worker.release(staged)


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[WeightWriter]:
    with WeightWriter("grpo", 0, 1, daemon.socket) as opened:
        opened.register({"w": torch.arange(9.0)})
        opened.publish(1)
        yield opened


@pytest.fixture
def workers(daemon: Daemon, writer: WeightWriter) -> Iterator[list[Failing]]:
    readers = [WorkerWeightsReader("grpo", "e", rank, SIZE, daemon.socket) for rank in range(SIZE)]
    for reader in readers:
        reader.register({"w": torch.zeros(9)})
    yield [Failing(reader) for reader in readers]
    for reader in readers:
        reader.close()


@pytest.fixture
def instance(workers: list[Failing]) -> Iterator[WeightReader]:
    with WeightReader("grpo", "e", workers) as opened:
        yield opened


def test_workers_that_are_not_all_ranks_once(workers: list[Failing]) -> None:
    for chosen in ([], workers[1:], [workers[0], workers[0]]):
        with pytest.raises(InvalidArgument):
            WeightReader("grpo", "e", chosen)


def test_update_of_all_workers(instance: WeightReader, writer: WeightWriter) -> None:
    assert (instance.state, instance.version) == ("empty", None)
    result = instance.update()
    assert (result.step, result.bytes, len(result.workers)) == (1, SIZE * 36, SIZE)
    assert (instance.state, instance.version) == ("ready", (1, 1))
    writer.publish(2)
    assert instance.update(2).step == 2


def test_case_13_worker_that_fails_before_any_is_touched(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    writer.publish(2)
    workers[1].fails_at = "stage"
    with pytest.raises(ManifestMismatch) as caught:
        instance.update()
    assert [told["version"] for told in caught.value.details["workers"]] == [(1, 1)] * 3
    assert (instance.state, instance.version) == ("ready", (1, 1))
    workers[1].fails_at = ""
    assert instance.update().step == 2
    assert instance.version == (1, 2)


def test_case_13_worker_that_fails_half_way(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    writer.publish(2)
    workers[1].fails_at = "apply"
    with pytest.raises(AwexdError) as caught:
        instance.update()
    assert [told["version"] for told in caught.value.details["workers"]] == [(1, 2), (1, 1), (1, 2)]
    assert (instance.state, instance.version) == ("dirty", None), "two versions in one engine"
    workers[1].fails_at = ""
    assert instance.update().step == 2
    assert (instance.state, instance.version) == ("ready", (1, 2))


def test_case_13_retry_after_newer_versions_converges(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    workers[1].fails_at = "apply"
    writer.publish(2)
    with pytest.raises(AwexdError):
        instance.update()
    workers[1].fails_at = ""
    writer.publish(3)
    for _ in range(3):
        try:
            instance.update()
        except AwexdError:
            continue
        if instance.version == (1, 3):
            break
    assert (instance.state, instance.version) == ("ready", (1, 3))


def test_case_13_retry_at_a_later_step_by_number_converges(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    workers[1].fails_at = "apply"
    writer.publish(2)
    with pytest.raises(AwexdError) as caught:
        instance.update(step=2)
    assert [worker["version"] for worker in caught.value.details["workers"]] == [(1, 2), (1, 1), (1, 2)]
    workers[1].fails_at = ""
    writer.publish(3)
    assert instance.update(step=3).step == 3
    assert (instance.state, instance.version) == ("ready", (1, 3))
