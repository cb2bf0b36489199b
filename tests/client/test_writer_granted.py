"""``publish`` into slots that were granted ahead: one message a step, and nothing else changes."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from awexd_client import (
    DaemonUnavailable,
    DeadlineExceeded,
    EpochChanged,
    ManifestMismatch,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
)
from awexd_client.session import Asked
from tests.attacks.raw import until
from tests.client.samples import PATIENCE, weights
from tests.daemons import Daemon


def requests_of(writer: WeightWriter, step: int) -> int:
    """How many requests a publication takes."""
    ids = writer._connection._ids
    before = next(ids)
    writer.publish(step)
    return next(ids) - before - 1


def job(daemon: Daemon) -> Any:
    (only,) = daemon.ask("status")["jobs"]
    return only


def test_publication_takes_one_request_once_its_slots_are_mapped(writer: WeightWriter) -> None:
    writer.register(weights(0))
    for step in range(1, 5):
        writer.publish(step)
    assert [requests_of(writer, step) for step in range(5, 9)] == [1, 1, 1, 1]


def test_slots_are_mapped_when_the_writer_registers(writer: WeightWriter) -> None:
    writer.register(weights(0))
    assert len(writer._maps._maps) == 3
    assert [requests_of(writer, step) for step in (1, 2)] == [2, 1]


def test_status_shows_no_attempt_and_a_free_slot_where_one_is_granted(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(weights(0))
    for step in (1, 2):
        writer.publish(step)
    assert isinstance(writer._next, str)
    assert job(daemon)["open"] == []
    assert job(daemon)["segments"] == {"free": 1, "writing": 0, "sealed": 0, "held": 2}


def test_long_form_uses_what_was_granted_and_both_forms_alternate(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    source, into = weights(0), weights(-1)
    writer.register(source)
    reader.register(into)
    for step in range(1, 9):
        for tensor in source.values():
            tensor.fill_(step)
        if step % 3:
            writer.publish(step)
        else:
            with writer.begin(step) as update:
                update.write(source)
        assert reader.update().step == step
        assert into["a"][0, 0] == step


def test_publication_waits_where_all_slots_are_in_use_and_goes_on_when_one_is_free(daemon: Daemon) -> None:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(weights(0))
        reader.register(weights(-1))
        writer.publish(1)
        staged = reader.stage()
        writer.publish(2)
        assert isinstance(writer._next, Asked), "no slot is free: it is asked for"
        with pytest.raises(DeadlineExceeded, match="readers' leases on epoch 1 step 1"):
            writer.publish(3, timeout=0.2)
        reader.apply(staged)
        writer.publish(3, timeout=PATIENCE)
        assert reader.update().step == 3


def test_close_while_a_slot_is_asked_for_returns(daemon: Daemon) -> None:
    writer = WeightWriter("grpo", 0, 1, daemon.socket, keep=1)
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        writer.register(weights(0))
        reader.register(weights(-1))
        writer.publish(1)
        reader.stage()
        writer.publish(2)
        assert isinstance(writer._next, Asked)
        writer.close()
        with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as successor:
            successor.register(weights(0))


def test_other_tensors_are_registered_between_two_publications(
    daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register(weights(1))
    for step in (1, 2):
        writer.publish(step)
    large = {"w": torch.full((5000,), 3.0)}
    writer.register(large)
    for step in (3, 4, 5):
        writer.publish(step)
    into = {"w": torch.zeros(5000)}
    reader.register(into)
    assert reader.update().step == 5
    assert set(into["w"].tolist()) == {3.0}
    assert len(daemon.segments()) == 3


def test_other_ranks_manifest_changes_between_two_publications(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        first.register({"a": torch.full((9,), 1.0)})
        second.register({"b": torch.full((9,), 1.0)})
        for step in (1, 2):
            for publication in (first.publish(step), second.publish(step)):
                publication.committed(PATIENCE)
        second.register({"b": torch.full((9,), 2.0), "c": torch.full((9,), 2.0)})
        for publication in (first.publish(3), second.publish(3)):
            publication.committed(PATIENCE)
        into = {name: torch.zeros(9) for name in "abc"}
        with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
            reader.register(into)
            assert reader.update().step == 3
        assert [int(into[name][0]) for name in "abc"] == [1, 2, 2]


def test_failure_while_a_granted_slot_is_filled_is_told_to_the_other_ranks(daemon: Daemon) -> None:
    tensors = [torch.zeros(9), torch.zeros(9)]
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        for rank, writer in enumerate((first, second)):
            writer.register({f"w{rank}": tensors[rank]})
        for publication in (first.publish(1), second.publish(1)):
            publication.committed(PATIENCE)
        sealed = first.publish(2)
        second._segment.tables.clear()
        second._segment.rows = None  # type: ignore[assignment,method-assign]
        with pytest.raises(TypeError):
            second.publish(2)
        with pytest.raises(VersionConflict, match="rank 1 aborted it: TypeError"):
            sealed.committed(PATIENCE)


def test_refused_publication_leaves_what_the_rank_has_sealed(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        for rank, writer in enumerate((first, second)):
            writer.register({f"w{rank}": torch.zeros(9)})
        for publication in (first.publish(1), second.publish(1)):
            publication.committed(PATIENCE)
        sealed = first.publish(2)
        with pytest.raises(VersionConflict, match="has sealed step 2 already"):
            first.publish(2)
        second.publish(2)
        sealed.committed(PATIENCE)


def test_publication_that_came_too_late_leaves_what_the_rank_has_sealed(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        for rank, writer in enumerate((first, second)):
            writer.register({f"w{rank}": torch.zeros(9)})
        for publication in (first.publish(1), second.publish(1)):
            publication.committed(PATIENCE)
        sealed = first.publish(2)
        first._ask("status", PATIENCE)  # by its answer the next slot's is here
        second._connection.close()
        until(daemon.socket, lambda status: status["jobs"][0]["writers"] == [0])
        with pytest.raises(DeadlineExceeded, match="rank 1 of 2 to register"):
            first.publish(2, timeout=0.2)
        second.publish(2)
        sealed.committed(PATIENCE)


def test_changed_tensors_are_refused_before_a_granted_slot_is_touched(writer: WeightWriter) -> None:
    source = weights(0)
    writer.register(source)
    for step in (1, 2):
        writer.publish(step)
    kept, source["a"] = source["a"], torch.zeros(3)
    with pytest.raises(ManifestMismatch):
        writer.publish(3)
    source["a"] = kept
    writer.publish(3)


def test_new_epoch_is_told_to_the_old_ones_writer_and_its_slot_goes(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(weights(0))
    for step in (1, 2):
        writer.publish(step)
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as new:
        new.register(weights(0))
        with pytest.raises(EpochChanged):
            writer.publish(3)
        for step in (1, 2, 3):
            new.publish(step)
        assert sum(job(daemon)["segments"].values()) == 3


def test_threads_publish_one_after_the_other(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    steps = iter(range(1, 41))
    turn = threading.Lock()
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            for _ in range(10):
                with turn:
                    step = next(steps)
                    publication = writer.publish(step)
                publication.committed(PATIENCE)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures
    reader.register(weights(0))
    assert reader.update().step == 40


def test_forked_child_does_not_publish_into_its_parents_slot(writer: WeightWriter) -> None:
    writer.register(weights(0))
    for step in (1, 2):
        writer.publish(step)
    child = os.fork()
    if child == 0:
        try:
            writer.publish(3)
        except DaemonUnavailable:
            os._exit(0 if writer._next is None else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert requests_of(writer, 3) <= 2
