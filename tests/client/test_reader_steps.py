"""Which version a reader gets, and how it is told that there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from awexd_client import (
    DeadlineExceeded,
    EpochChanged,
    InvalidArgument,
    VersionConflict,
    VersionUnavailable,
    WeightWriter,
    WorkerWeightsReader,
)
from tests.client.samples import PATIENCE, weights
from tests.daemons import Daemon


def test_case_16_version_that_is_retired_while_it_is_waited_for(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    for step in (1, 2, 3):
        writer.publish(step)
    with pytest.raises(VersionUnavailable, match="step 3, epoch 1 step 2"):
        reader.update(1)
    told: list[BaseException] = []

    def wait_for_five() -> None:
        try:
            reader.update(5)
        except VersionUnavailable as error:
            told.append(error)

    waiting = threading.Thread(target=wait_for_five)
    waiting.start()
    writer.publish(4)
    writer.publish(6)  # step 5 will never be
    waiting.join(PATIENCE)
    assert "step 6" in str(told[0])
    assert reader.update().step == 6


def test_case_19_reader_gets_the_step_it_asked_for(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    source, into = weights(7), weights(0)
    writer.register(source)
    reader.register(into)
    writer.publish(7)
    with pytest.raises(DeadlineExceeded, match=r"step 8 .*to be committed"):
        reader.update(8, timeout=0.1)
    for tensor in source.values():
        tensor.fill_(8)
    writer.publish(8)
    assert reader.update(7).step == 7
    assert into["a"][0, 0] == 7
    assert reader.update(8).step == 8
    assert into["a"][0, 0] == 8


def test_case_54_waiting_reader_is_told_at_once(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    late: list[float] = []
    for step in range(1, 21):
        committed = threading.Event()
        times: list[float] = []

        def wait(step: int = step, times: list[float] = times, committed: threading.Event = committed) -> None:
            reader.wait(step)
            times.append(time.monotonic())
            committed.wait(PATIENCE)

        waiting = threading.Thread(target=wait)
        waiting.start()
        writer.publish(step).committed()
        done = time.monotonic()
        committed.set()
        waiting.join(PATIENCE)
        late.append(times[0] - done)
    assert sorted(late)[10] < 0.05


def test_case_69_70_round_of_an_engine_is_one_version(
    writer: WeightWriter, engine: Callable[[int], list[WorkerWeightsReader]]
) -> None:
    source = weights(1)
    writer.register(source)
    readers = engine(2)
    for reader in readers:
        reader.register(weights(0))
    writer.publish(1)
    assert readers[0].update().step == 1
    writer.publish(2)
    writer.publish(3)
    assert readers[1].update().step == 1, "the first call of both is one round"
    assert [reader.update().step for reader in readers] == [3, 3]
    with pytest.raises(DeadlineExceeded):
        readers[0].update(4, timeout=0.1)
    writer.publish(4)
    assert readers[1].update(4).step == 4
    with pytest.raises(VersionConflict, match="step 4"):
        readers[0].update(3)
    assert readers[0].update(4).step == 4


def test_case_15_19_step_of_an_older_epoch_is_not_the_step_asked_for(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as old:
        old.register(weights(5))
        old.publish(5)
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as new:
        source = weights(1)
        new.register(source)
        new.publish(1)
        with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
            reader.register(weights(0))
            result = reader.update()
            assert (result.epoch, result.step) == (2, 1)
            with pytest.raises(DeadlineExceeded, match="step 5 of epoch 2"):
                reader.update(5, timeout=0.1)
            assert reader.version == (2, 1)


def test_case_70_reader_of_an_older_epoch_is_told_once(daemon: Daemon) -> None:
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        with WeightWriter("grpo", 0, 1, daemon.socket) as old:
            old.register(weights(5))
            reader.register(weights(0))
            old.publish(57)
        assert reader.update().step == 57
        with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as new:
            new.register(weights(1))
            new.publish(1)
            for call in (lambda: reader.wait(58), lambda: reader.update(58, timeout=0.1)):
                with pytest.raises((EpochChanged, DeadlineExceeded)):
                    call()
            result = reader.update()
            assert (result.epoch, result.step) == (2, 1)


def test_case_70_closed_job_is_told_at_once(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    writer.publish(1)
    reader.update()
    told: list[BaseException] = []

    def wait() -> None:
        try:
            reader.wait(2)
        except InvalidArgument as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    writer.close_job()
    waiting.join(PATIENCE)
    assert "closed" in str(told[0])


def test_prefetch_then_update(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    into = weights(0)
    writer.register(weights(1))
    reader.register(into)
    reader.prefetch()  # may wait for the first version
    writer.publish(1)
    assert reader.update().step == 1
    assert set(into["a"].flatten().tolist()) == {1.0}
    reader.prefetch(2)
    reader.close()  # while it waits


def test_update_after_a_stage_that_was_never_applied(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    writer.publish(1)
    reader.stage()
    writer.publish(2)
    assert reader.update().step == 2


def test_reader_opened_again_after_a_close_that_cut_a_prefetch(writer: WeightWriter, daemon: Daemon) -> None:
    writer.register(weights(1))
    writer.publish(1)
    for _ in range(3):
        with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
            reader.register(weights(0))
            reader.prefetch(9)
        assert reader._prefetching is not None


def test_case_12_every_copy_is_of_one_version(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    """The trainer writes into its parameter as soon as captured() returns, while the reader copies."""
    source, into = torch.zeros(1 << 20), torch.full((1 << 20,), -1.0)
    writer.register({"w": source})
    reader.register({"w": into})
    over = threading.Event()

    def train() -> None:
        for step in range(1, 41):
            source.fill_(step)
            writer.publish(step).captured()
        over.set()

    training = threading.Thread(target=train)
    training.start()
    seen = []
    while not over.is_set():
        step = reader.update().step
        assert into.min() == into.max() == step
        seen.append(step)
    training.join(PATIENCE)
    assert seen == sorted(seen)


def test_version_withdrawn_under_an_update(writer: WeightWriter, reader: WorkerWeightsReader, daemon: Daemon) -> None:
    source, into = weights(1), weights(0)
    writer.register(source)
    reader.register(into)
    writer.publish(1)
    reader.update()
    for tensor in source.values():
        tensor.fill_(2)
    writer.publish(2)
    staged = reader.stage()
    daemon.ask("rollback", job="grpo", step=1)
    with pytest.raises(VersionUnavailable, match="withdrawn"):
        reader.apply(staged)
    assert (reader.state, reader.version) == ("dirty", None)
    assert reader.update().step == 1
    assert (reader.state, set(into["a"].flatten().tolist())) == ("ready", {1.0})
