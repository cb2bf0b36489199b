"""Several ranks of one trainer: what they must agree on, and how they share the work."""

from __future__ import annotations

import pytest
import torch

from awexd_client import (
    DeadlineExceeded,
    ManifestMismatch,
    Shard,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
)
from tests.daemons import Daemon


def test_world_size_that_the_other_rank_does_not_have(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 3, daemon.socket) as second:
        first.register({"w": torch.zeros(3)})
        with pytest.raises(VersionConflict, match="2 writer ranks"):
            second.register({"w": torch.zeros(3)})


def test_keep_that_the_other_rank_does_not_have(daemon: Daemon) -> None:
    with (
        WeightWriter("grpo", 0, 2, daemon.socket, keep=2) as first,
        WeightWriter("grpo", 1, 2, daemon.socket, keep=3) as second,
    ):
        first.register({"w": torch.zeros(3)})
        with pytest.raises(VersionConflict, match="keep"):
            second.register({"w": torch.zeros(3)})


def test_ranks_that_contradict_each_other(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        first.register({"w": torch.zeros(3)})
        with pytest.raises(ManifestMismatch) as caught:
            second.register({"w": torch.zeros(3, dtype=torch.bfloat16)})
        assert list(caught.value.mismatched) == ["w"]
        second.register({"w": torch.zeros(3)})
        for publication in (first.publish(1), second.publish(1)):
            publication.committed()


def test_case_57_replicas_are_shared_out_evenly(daemon: Daemon) -> None:
    weights = {f"w{n}": torch.zeros(1000 + 37 * n) for n in range(20)}
    total = sum(tensor.nbytes for tensor in weights.values())
    writers = [WeightWriter("grpo", rank, 4, daemon.socket) for rank in range(4)]
    try:
        for writer in writers:
            writer.register(weights)
        loads = [writer.publish(1).nbytes for writer in writers]
        assert sum(loads) == total
        assert max(loads) <= 1.05 * total / 4
    finally:
        for writer in writers:
            writer.close()


def test_more_ranks_than_one_message_carries_descriptors(daemon: Daemon) -> None:
    size = 130
    parts = [torch.full((2,), float(rank)) for rank in range(size)]
    writers = [WeightWriter("grpo", rank, size, daemon.socket) for rank in range(size)]
    into = torch.zeros(2 * size)
    try:
        for rank, writer in enumerate(writers):
            writer.register([Shard("w", parts[rank], (2 * size,), (2 * rank,))])
        for writer in writers:
            writer.publish(1)
        with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
            reader.register({"w": into})
            reader.update()
        assert torch.equal(into, torch.cat(parts))
    finally:
        for writer in writers:
            writer.close()


def test_world_that_shrinks_and_grows_with_new_epochs(daemon: Daemon) -> None:
    for epoch, size in enumerate((3, 2, 4), start=1):
        writers = [
            WeightWriter("grpo", rank, size, daemon.socket, epoch="new" if epoch > 1 else "continue")
            for rank in range(size)
        ]
        for rank, writer in enumerate(writers):
            writer.register({f"w{rank}": torch.full((4,), float(epoch))})
        publications = [writer.publish(1) for writer in writers]
        for writer, publication in zip(writers, publications, strict=True):
            publication.committed()
            assert writer.epoch == epoch
            writer.close()
    rows = daemon.ask("versions", job=None)["versions"]
    assert [(row["epoch"], row["ranks"]) for row in rows] == [(3, 4), (2, 2)]
    daemon.await_segments(6)


def test_rank_may_be_a_step_ahead_of_another(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 2, daemon.socket) as first, WeightWriter("grpo", 1, 2, daemon.socket) as second:
        first.register({"a": torch.zeros(3)})
        second.register({"b": torch.zeros(3)})
        ahead = [first.publish(5), first.publish(6)]
        behind = [second.publish(5), second.publish(6)]
        for publication in (*ahead, *behind):
            publication.committed(timeout=5)


@pytest.mark.parametrize("back_first", [0, 1])
def test_part_sealed_by_a_dead_trainer_does_not_join_its_successor(
    daemon: Daemon, reader: WorkerWeightsReader, back_first: int
) -> None:
    def trainer(value: float) -> list[WeightWriter]:
        made = {}
        for rank in (back_first, 1 - back_first):
            made[rank] = WeightWriter("grpo", rank, 2, daemon.socket)
            made[rank].register({f"w{rank}": torch.full((3,), value)})
        return [made[0], made[1]]

    first, second = trainer(1.0)
    first.publish(1)
    second.publish(1).committed()
    first.publish(2)  # sealed by rank 0 alone; then the whole trainer is gone
    first.close()
    second.close()
    first, second = trainer(50.0)
    with first, second:
        publication = second.publish(2)
        with pytest.raises(DeadlineExceeded, match="rank 0 to seal step 2"):
            publication.committed(timeout=0.1)
        first.publish(2).committed()
        held = {"w0": torch.zeros(3), "w1": torch.zeros(3)}
        reader.register(held)
        assert reader.update().step == 2
        assert [tensor.tolist() for tensor in held.values()] == [[50.0] * 3] * 2
