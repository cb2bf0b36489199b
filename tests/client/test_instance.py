"""WeightReader: all workers get one version, or none is touched and the state of each is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from awexd_client import (
    DeadlineExceeded,
    InvalidArgument,
    ManifestMismatch,
    VersionUnavailable,
    WeightReader,
    WeightWriter,
    WorkerWeightsReader,
)
from awexd_client.verify import Verified
from awexd_transports.errors import AwexdError, IntegrityError
from tests.client.samples import Negating
from tests.daemons import Daemon
from tests.e2e.clients import Background

SIZE = 3


class Failing:
    """A real worker that cannot stage when told to; one that cannot load fails by its adapter."""

    def __init__(self, worker: WorkerWeightsReader, adapter: Negating) -> None:
        self.worker = worker
        self.adapter = adapter
        self.fails_to_stage = False
        self.rank = worker.rank

    @property
    def state(self) -> str:
        return self.worker.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self.worker.version

    def stage(self, step: int | None = None, timeout: float = 60) -> Any:
        if self.fails_to_stage:
            raise ManifestMismatch("does not fit")
        return self.worker.stage(step, timeout)

    def apply(self, staged: Any, timeout: float = 60) -> Any:
        return self.worker.apply(staged, timeout)

    def release(self, staged: Any) -> None:
        self.worker.release(staged)

    def compare(self, checkpoint_dir: str, timeout: float = 60) -> Verified:
        return self.worker.compare(checkpoint_dir, timeout)


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[WeightWriter]:
    with WeightWriter("grpo", 0, 1, daemon.socket) as opened:
        opened.register({"w": torch.arange(9.0)})
        opened.publish(1)
        yield opened


@pytest.fixture
def workers(daemon: Daemon, writer: WeightWriter) -> Iterator[list[Failing]]:
    readers = [WorkerWeightsReader("grpo", "e", rank, SIZE, daemon.socket) for rank in range(SIZE)]
    adapters = [Negating() for _ in readers]
    for reader, adapter in zip(readers, adapters, strict=True):
        reader.register({"w": torch.zeros(9)}, adapter)
    yield [Failing(reader, adapter) for reader, adapter in zip(readers, adapters, strict=True)]
    for reader in readers:
        reader.close()


class Crew:
    """The same workers as an engine's own calls reach them, which tells its caller nothing of what they raise."""

    def __init__(self, workers: list[Failing]) -> None:
        self.workers = workers
        self.staged: list[Any] = []
        self.served: list[tuple[int, int]] = []

    def stage(self, step: int | None, timeout: float) -> None:
        self.staged = []
        for worker in self.workers:
            try:
                self.staged.append(worker.stage(step, timeout))
            except AwexdError as error:
                self.staged.append(None)
                worker.worker.fail(error)

    def apply(self, epoch: int, step: int, timeout: float) -> None:
        for worker, staged in zip(self.workers, self.staged, strict=True):
            with contextlib.suppress(AwexdError):
                worker.apply(staged, timeout)
        self.served.append((epoch, step))

    def verify(self, checkpoint_dir: str, token: str, timeout: float) -> None:
        for worker in self.workers:
            try:
                worker.worker.compare_and_tell(checkpoint_dir, token, timeout)
            except AwexdError as error:
                worker.worker.fail(error)

    def abandon(self) -> None:
        for worker, staged in zip(self.workers, self.staged, strict=True):
            if staged is not None:
                worker.release(staged)


@pytest.fixture(params=["one by one", "together"])
def instance(request: pytest.FixtureRequest, daemon: Daemon, workers: list[Failing]) -> Iterator[WeightReader]:
    reached = workers if request.param == "one by one" else Crew(workers)
    with WeightReader("grpo", "e", reached, daemon.socket) as opened:
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
    workers[1].fails_to_stage = True
    with pytest.raises(ManifestMismatch) as caught:
        instance.update()
    assert [told["version"] for told in caught.value.details["workers"]] == [(1, 1)] * 3
    assert (instance.state, instance.version) == ("ready", (1, 1))
    workers[1].fails_to_stage = False
    assert instance.update().step == 2
    assert instance.version == (1, 2)


def test_case_13_worker_that_fails_half_way_and_all_are_back_at_the_version_before(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    writer.publish(2)
    workers[1].adapter.failures = 1
    with pytest.raises(AwexdError, match="KeyError: 'no such layer'") as caught:
        instance.update()
    assert [told["version"] for told in caught.value.details["workers"]] == [(1, 1)] * SIZE
    assert caught.value.__notes__ == ["e runs on epoch 1 step 1 again"]
    assert (instance.state, instance.version) == ("ready", (1, 1))
    for step in (2, 3):
        if step == 3:
            writer.publish(3)
        assert instance.update().step == step
        assert (instance.state, instance.version) == ("ready", (1, step))


def test_case_13_worker_that_fails_for_good(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    writer.publish(2)
    workers[1].adapter.failures = 2
    with pytest.raises(AwexdError) as caught:
        instance.update()
    assert "could not be applied again" in caught.value.__notes__[0]
    assert [told["state"] for told in caught.value.details["workers"]] == ["ready", "dirty", "ready"]
    assert (instance.state, instance.version) == ("dirty", None)
    for _ in range(3):  # at the latest when the rounds have caught up
        instance.update()
        if instance.version == (1, 2):
            break
    assert (instance.state, instance.version) == ("ready", (1, 2))


def test_case_13_first_update_that_fails_leaves_an_instance_that_is_not_ready(
    instance: WeightReader, workers: list[Failing]
) -> None:
    workers[0].adapter.failures = 1
    with pytest.raises(AwexdError) as caught:
        instance.update()
    assert caught.value.__notes__ == ["e had no version before: it is not ready until an update succeeds"]
    assert (instance.state, instance.version) == ("dirty", None)
    assert instance.update().step == 1
    assert (instance.state, instance.version) == ("ready", (1, 1))


def test_case_13_version_before_that_is_gone_is_not_had_again(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter, daemon: Daemon
) -> None:
    instance.update()
    writer.publish(2)
    daemon.ask("drop", job="grpo", step=1)
    workers[1].adapter.failures = 1
    with pytest.raises(AwexdError) as caught:
        instance.update()
    assert "could not be applied again" in caught.value.__notes__[0]
    assert instance.state == "dirty"
    assert instance.update().step == 2
    assert (instance.state, instance.version) == ("ready", (1, 2))


def test_case_13_retry_at_a_later_step_by_number_converges(
    instance: WeightReader, workers: list[Failing], writer: WeightWriter
) -> None:
    instance.update()
    workers[1].adapter.failures = 2
    writer.publish(2)
    with pytest.raises(AwexdError):
        instance.update(step=2)
    writer.publish(3)
    assert instance.update(step=3).step == 3
    assert (instance.state, instance.version) == ("ready", (1, 3))


def test_version_is_waited_for_before_any_worker_is_asked(
    daemon: Daemon, workers: list[Failing], writer: WeightWriter
) -> None:
    crew = Crew(workers)
    with WeightReader("grpo", "e", crew, daemon.socket) as instance:
        assert instance.update().step == 1
        crew.staged = []
        with pytest.raises(DeadlineExceeded, match=r"grpo: waited 0.2 s for step 2 to be committed"):
            instance.update(2, timeout=0.2)
        assert crew.staged == []
        updating = Background(lambda: instance.update(2))
        writer.publish(2)
        assert updating.result().step == 2
    with (
        WeightReader("none", "e", crew, daemon.socket) as unknown,
        pytest.raises(DeadlineExceeded, match="for its first committed version"),
    ):
        unknown.update(timeout=0.1)


def test_engine_whose_workers_have_not_all_registered(daemon: Daemon, workers: list[Failing]) -> None:
    with WeightReader("grpo", "other", Crew([]), daemon.socket) as unknown:
        with pytest.raises(VersionUnavailable, match="no worker of engine other has registered"):
            unknown.update()
        assert (unknown.state, unknown.version) == ("empty", None)
    workers[2].worker.close()
    with (
        WeightReader("grpo", "e", Crew(workers[:2]), daemon.socket) as partial,
        pytest.raises(AwexdError, match=r"of 3 workers only ranks \[0, 1\] are registered"),
    ):
        partial.update()


@pytest.mark.parametrize("together", [False, True])
def test_live_tensors_of_all_workers_against_a_checkpoint(
    daemon: Daemon, writer: WeightWriter, tmp_path: Path, together: bool
) -> None:
    save_file({"w": torch.arange(9.0), "another": torch.ones(2)}, tmp_path / "model.safetensors")
    live = [torch.zeros(9) for _ in range(2)]
    readers = [WorkerWeightsReader("grpo", "plain", rank, 2, daemon.socket) for rank in range(2)]
    for reader, tensor in zip(readers, live, strict=True):
        reader.register({"w": tensor})
    workers = [Failing(reader, Negating()) for reader in readers]
    with WeightReader("grpo", "plain", Crew(workers) if together else workers, daemon.socket) as instance:
        instance.update()
        found = instance.verify(tmp_path)
        assert (found.tensors, found.nbytes) == (2, 72)
        assert found.unseen == (() if together else ("another",))
        live[1][4] = 7
        with pytest.raises(IntegrityError, match=r"w\[4\] is 7.0, in the checkpoint 4.0"):
            instance.verify(tmp_path)
        (difference,) = instance.compare(tmp_path).differences
        assert (difference.name, difference.index, difference.elements) == ("w", (4,), 1)
        with pytest.raises(InvalidArgument, match=r"no \*\.safetensors files there"):
            instance.verify(tmp_path / "nothing")
    if together:
        told = [event for event in daemon.ask("events", job=None, after=0)["events"] if event["kind"] == "verified"]
        assert [event["text"].split(": ")[1].split(" those of")[0] for event in told] == [
            *["all 1 tensors compared equal"] * 3,
            "1 of 1 tensors compared differ from",
            "all 1 tensors compared equal",
            "1 of 1 tensors compared differ from",
        ]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("together", [False, True])
def test_what_an_engine_keeps_in_another_form_is_named_not_compared(
    daemon: Daemon, tmp_path: Path, together: bool
) -> None:
    held = {"w": torch.arange(9.0), "b": torch.ones(2)}
    save_file(held, tmp_path / "model.safetensors")
    with (
        WeightWriter("aside", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("aside", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(held)
        writer.publish(1)
        reader.register({"w": torch.zeros(9), "b": torch.zeros(2)}, Negating())
        workers = [Failing(reader, Negating())]
        with WeightReader("aside", "e", Crew(workers) if together else workers, daemon.socket) as instance:
            instance.update()
            found = instance.verify(tmp_path)
            assert (found.tensors, found.aside) == (1, {"b": "it is kept negated"})


def test_many_differences_are_counted_and_a_few_named(daemon: Daemon, tmp_path: Path) -> None:
    held = {f"w{at:02}": torch.full((3,), float(at)) for at in range(20)}
    save_file(held, tmp_path / "model.safetensors")
    with (
        WeightWriter("many", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("many", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(held)
        writer.publish(1)
        live = {name: torch.zeros(3) for name in held}
        reader.register(live)
        with WeightReader("many", "e", Crew([Failing(reader, Negating())]), daemon.socket) as instance:
            instance.update()
            for tensor in live.values():
                tensor.add_(1)
            found = instance.compare(tmp_path)
            assert (len(found.differences), found.more) == (8, 12)
            with pytest.raises(IntegrityError, match="20 of 20 tensors are not the checkpoint's: w00"):
                found.check()
