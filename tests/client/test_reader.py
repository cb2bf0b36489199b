"""WorkerWeightsReader: what does not fit is refused by name before a byte is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd_client import (
    AwexdError,
    DeadlineExceeded,
    InvalidArgument,
    ManifestMismatch,
    Shard,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
)
from awexd_client.endpoint import Deadline
from tests.client.samples import weights
from tests.daemons import Daemon


@pytest.mark.parametrize(
    "arguments",
    [{"rank": 2, "world_size": 2}, {"rank": None, "world_size": 1}, {"rank": 0, "world_size": 1, "mode": "fast"}],
    ids=str,
)
def test_constructor_with_a_bad_argument(daemon: Daemon, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        WorkerWeightsReader("grpo", "e", socket=daemon.socket, **arguments)


@pytest.mark.parametrize("engine", ["", "../x", "a/b", 3, None])
def test_engine_name_that_is_none(daemon: Daemon, engine: Any) -> None:
    with WorkerWeightsReader("grpo", engine, 0, 1, daemon.socket) as reader, pytest.raises(InvalidArgument):
        reader.register(weights(0))


def test_everything_before_register(reader: WorkerWeightsReader) -> None:
    for call in (reader.update, lambda: reader.wait(1), reader.stage):
        with pytest.raises(InvalidArgument, match="regist"):
            call()
    assert (reader.state, reader.version) == ("empty", None)


@pytest.mark.parametrize("step", [-1, 1.5, "1", True, 1 << 60], ids=repr)
def test_step_that_is_none(writer: WeightWriter, reader: WorkerWeightsReader, step: Any) -> None:
    writer.register(weights(1))
    reader.register(weights(0))
    writer.publish(1)
    for call in (reader.update, reader.wait):
        with pytest.raises(InvalidArgument):
            call(step)
    assert reader.update().step == 1


def test_use_after_close(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    reader.register(weights(0))
    reader.close()
    reader.close()
    for call in (reader.update, lambda: reader.wait(1), lambda: reader.register(weights(0)), reader.stage):
        with pytest.raises(InvalidArgument, match="closed"):
            call()


def rename(declared: dict[str, torch.Tensor]) -> None:
    declared["model.a"] = declared.pop("a")


def drop(declared: dict[str, torch.Tensor]) -> None:
    del declared["b"]


def add(declared: dict[str, torch.Tensor]) -> None:
    declared["c"] = torch.zeros(3)


def reshape(declared: dict[str, torch.Tensor]) -> None:
    declared["a"] = torch.zeros(2, 6)


def shorten(declared: dict[str, torch.Tensor]) -> None:
    declared["a"] = torch.zeros(5, 2)


def widen(declared: dict[str, torch.Tensor]) -> None:
    declared["b"] = torch.zeros(5)


MISFITS = [
    (rename, {"missing": ["model.a"], "unexpected": ["a"]}),
    (drop, {"unexpected": ["b"]}),
    (add, {"missing": ["c"]}),
    (reshape, {"mismatched": ["a"]}),
    (shorten, {"mismatched": ["a"]}),
    (widen, {"mismatched": ["b"]}),
]


@pytest.mark.parametrize(("change", "named"), MISFITS, ids=[change.__name__ for change, _ in MISFITS])
def test_case_3_44_49_what_does_not_fit_is_refused_at_registration(
    writer: WeightWriter,
    reader: WorkerWeightsReader,
    change: Callable[[dict[str, torch.Tensor]], None],
    named: dict[str, list[str]],
) -> None:
    declared = weights(0)
    change(declared)
    writer.register(weights(1))
    with pytest.raises(ManifestMismatch) as caught:
        reader.register(declared)
    check_named(caught.value, named, declared)


@pytest.mark.parametrize(("change", "named"), MISFITS, ids=[change.__name__ for change, _ in MISFITS])
def test_case_3_44_49_what_does_not_fit_an_engine_that_came_first(
    writer: WeightWriter,
    reader: WorkerWeightsReader,
    change: Callable[[dict[str, torch.Tensor]], None],
    named: dict[str, list[str]],
) -> None:
    """Another dtype or shape is refused when the trainer registers; names, which others may want, at the update."""
    declared = weights(0)
    change(declared)
    reader.register(declared)
    if "mismatched" in named:
        with pytest.raises(ManifestMismatch) as caught:
            writer.register(weights(1))
    else:
        writer.register(weights(1))
        writer.publish(1)
        with pytest.raises(ManifestMismatch) as caught:
            reader.update()
    check_named(caught.value, named, declared)
    assert (reader.state, reader.version) == ("empty", None)


def check_named(error: ManifestMismatch, named: dict[str, list[str]], declared: dict[str, torch.Tensor]) -> None:
    found = {"missing": error.missing, "unexpected": error.unexpected, "mismatched": list(error.mismatched)}
    assert {kind: names for kind, names in found.items() if names} == named
    for names in named.values():
        assert all(name in str(error) for name in names)
    assert all(not tensor.any() for tensor in declared.values())


def test_case_8_other_tensors_in_the_next_version(writer: WeightWriter, daemon: Daemon) -> None:
    writer.register({"a": torch.ones(3), "b": torch.ones(3)})
    writer.publish(1)
    into = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with WorkerWeightsReader("grpo", "old", 0, 1, daemon.socket) as reader:
        reader.register(into)
        assert reader.update().step == 1
        writer.register({"b": torch.full((3,), 2.0), "c": torch.full((3,), 2.0)})
        writer.publish(2)
        with pytest.raises(ManifestMismatch) as caught:
            reader.update()
        assert (caught.value.missing, caught.value.unexpected) == (["a"], ["c"])
        assert (reader.state, reader.version, into["b"].tolist()) == ("ready", (1, 1), [1.0] * 3)
        assert reader.update(1).step == 1
    with WorkerWeightsReader("grpo", "new", 0, 1, daemon.socket) as reader:
        new = {"b": torch.zeros(3), "c": torch.zeros(3)}
        reader.register(new)
        assert reader.update(2).step == 2
        with pytest.raises(ManifestMismatch):
            reader.update(1)
        assert (reader.state, reader.version, new["b"].tolist()) == ("ready", (1, 2), [2.0] * 3)


def test_destination_that_overlaps(reader: WorkerWeightsReader) -> None:
    buffer = torch.zeros(10)
    with pytest.raises(ManifestMismatch) as caught:
        reader.register({"a": buffer[:6], "b": buffer[5:]})
    assert caught.value.mismatched
    with pytest.raises(ManifestMismatch):
        reader.register({"a": torch.zeros(1).expand(4)})


def test_case_33_neighbours_of_a_strided_destination(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    source = {"a": torch.arange(8.0)[::2], "b": torch.arange(12.0).view(3, 4).t(), "c": torch.arange(4.0).expand(3, 4)}
    around = {"a": torch.full((12,), -1.0), "b": torch.full((6, 5), -1.0), "c": torch.full((3, 9), -1.0)}
    into = {"a": around["a"][1:12:3], "b": around["b"][1:5, 1:4], "c": around["c"][:, 1:9:2]}
    writer.register(source)
    reader.register(into)
    writer.publish(1)
    result = reader.update()
    assert result.bytes == (4 + 12 + 12) * 4
    for name, tensor in into.items():
        assert torch.equal(tensor, source[name])
        assert (around[name] == -1).sum() == around[name].numel() - tensor.numel()


def test_case_42_padding_of_the_destination(writer: WeightWriter, daemon: Daemon) -> None:
    """5 real rows, padded to 8 by the trainer and to 6 by the engine."""
    trained, padded = torch.zeros(8, 2), torch.full((6, 2), -1.0)
    trained[:5] = torch.arange(10.0).view(5, 2)
    writer.register({"embed": trained[:5]})
    writer.publish(1)
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        reader.register({"embed": padded[:5]})
        reader.update()
    assert torch.equal(padded[:5], trained[:5])
    assert padded[5].tolist() == [-1.0, -1.0]


def test_case_41_gate_and_up_fused_per_rank(
    writer: WeightWriter, engine: Callable[[int], list[WorkerWeightsReader]]
) -> None:
    writer.register({"gate": torch.arange(4.0), "up": torch.arange(10.0, 14.0)})
    writer.publish(1)
    fused = [torch.zeros(4) for _ in range(2)]
    readers = engine(2)
    for rank, reader in enumerate(readers):
        halves = zip(("gate", "up"), (fused[rank][:2], fused[rank][2:]), strict=True)
        reader.register([Shard(name, half, (4,), (2 * rank,)) for name, half in halves])
    for reader in readers:
        reader.update()
    assert [part.tolist() for part in fused] == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


def test_case_43_heads_fewer_than_ranks_are_replicated(
    writer: WeightWriter, engine: Callable[[int], list[WorkerWeightsReader]]
) -> None:
    heads = torch.arange(8.0).view(4, 2)
    writer.register({"k": heads})
    writer.publish(1)
    readers = engine(8)
    own = [torch.zeros(1, 2) for _ in readers]
    for rank, reader in enumerate(readers):
        reader.register([Shard("k", own[rank], (4, 2), (rank // 2, 0))])
    for rank, reader in enumerate(readers):
        reader.update()
        assert torch.equal(own[rank][0], heads[rank // 2])


def test_case_40_destination_ties_what_is_published_with_two_values(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    tied = torch.zeros(4)
    source = {"embed": torch.arange(4.0), "head": torch.arange(4.0)}
    writer.register(source)
    reader.register({"embed": tied, "head": tied})
    writer.publish(1)
    reader.update()
    source["head"][3] = 9
    writer.publish(2)
    with pytest.raises(ManifestMismatch) as caught:
        reader.update()
    assert list(caught.value.mismatched) == ["head"]
    assert tied.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (reader.state, reader.version) == ("ready", (1, 1))


def test_case_47_addresses_stay(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    into = weights(0)
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    writer.register(weights(1))
    reader.register(into)
    for step in range(1, 5):
        writer.publish(step)
        reader.update()
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses


def test_case_5_reader_that_missed_versions_gets_all_of_the_newest(writer: WeightWriter, daemon: Daemon) -> None:
    source = weights(1)
    writer.register(source)
    for step in (1, 2):
        source["a"].fill_(step)  # `b` has not changed since step 1
        writer.publish(step)
    with WorkerWeightsReader("grpo", "late", 0, 1, daemon.socket) as reader:
        into = weights(0)
        reader.register(into)
        assert reader.update(2).step == 2
        assert all(torch.equal(tensor, source[name]) for name, tensor in into.items())


def test_case_64_partly_declared_tensor(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    """Rows that nobody publishes are named; the others are not written."""
    writer.register([Shard("w", torch.ones(3, 2), (6, 2), (0, 0))])
    into = torch.zeros(6, 2)
    with pytest.raises(ManifestMismatch) as caught:
        reader.register({"w": into})
    assert caught.value.missing == ["w"]
    assert not into.any()


def test_case_3_published_name_that_no_worker_of_several_declares(
    writer: WeightWriter, engine: Callable[[int], list[WorkerWeightsReader]]
) -> None:
    writer.register(weights(1))
    writer.publish(1)
    readers = engine(2)
    into = [torch.zeros(6, 2) for _ in readers]
    for rank, reader in enumerate(readers):
        reader.register({"a": into[rank]})
    for rank, reader in enumerate(readers):
        with pytest.raises(ManifestMismatch) as caught:
            reader.update()
        assert caught.value.unexpected == ["b"]
        assert (reader.state, reader.version) == ("empty", None)
        assert not into[rank].any()


def test_engine_of_which_a_worker_has_not_come_is_not_updated(writer: WeightWriter, daemon: Daemon) -> None:
    """Until then nobody knows whether all that is published has a place."""
    writer.register(weights(1))
    writer.publish(1)
    with WorkerWeightsReader("grpo", "e", 0, 2, daemon.socket) as reader:
        reader.register({"a": torch.zeros(6, 2)})
        with pytest.raises(DeadlineExceeded, match="rank 1 of engine e"):
            reader.update(timeout=0.1)
        with WorkerWeightsReader("grpo", "e", 1, 2, daemon.socket) as other:
            other.register({"b": torch.zeros(5, dtype=torch.bfloat16)})
            assert [reader.update().step, other.update().step] == [1, 1]


def test_other_tensors_are_empty_until_they_are_updated(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    writer.register(weights(1))
    writer.publish(1)
    reader.register(weights(0))
    reader.update()
    other = weights(0)
    reader.register(other)
    assert (reader.state, reader.version) == ("empty", None)
    assert reader.update().step == 1
    assert torch.equal(other["a"], torch.ones(6, 2))


def test_tensors_rebound_between_stage_and_apply_are_not_reported_as_loaded(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register({"weight": torch.ones(4, 4)})
    writer.publish(1)
    module = torch.nn.Linear(4, 4, bias=False)
    reader.register(module)
    staged = reader.stage()
    module.weight.data = torch.zeros(4, 4)
    with pytest.raises(VersionConflict, match="rebound"):
        reader.apply(staged)
    assert (reader.state, reader.version) == ("empty", None)
    assert reader.update().step == 1
    assert torch.equal(module.weight, torch.ones(4, 4))


def test_segments_replaced_while_others_are_opened_block_nothing(
    writer: WeightWriter, reader: WorkerWeightsReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, held = weights(1), weights(0)
    writer.register(trained)
    writer.publish(1)
    reader.register(held)
    reader.update()
    trained["a"].fill_(2.0)
    writer.publish(2)
    opened = reader._open_segments

    def open_late(ids: Sequence[str], deadline: Deadline) -> list[int]:
        # The trainer's slots change between the two answers: the second one names segments to unmap.
        writer.register({**weights(3), "c": torch.zeros(100_000)})
        return opened(ids, deadline)

    monkeypatch.setattr(reader, "_open_segments", open_late)
    assert reader.update(step=2, timeout=10).step == 2
    assert torch.equal(held["a"], torch.full((6, 2), 2.0))


def test_other_tensors_may_be_registered_after_a_restart_that_the_former_do_not_fit(
    daemon: Daemon, writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register({"w": torch.ones(4)})
    writer.publish(1)
    reader.register({"w": torch.zeros(4)})
    reader.update()
    writer.close()
    daemon.restart()
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as larger:
        larger.register({"w": torch.ones(8)})
        larger.publish(1).committed()
        held = {"w": torch.zeros(8)}
        reader.register(held)
        assert reader.update().epoch == 2
        assert torch.equal(held["w"], torch.ones(8))


def test_case_21_memory_of_a_closed_job_is_unmapped_by_a_call_that_fails(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    writer.register(weights(1))
    writer.publish(1)
    reader.register(weights(0))
    reader.update()
    writer.close_job()
    writer.close()
    assert "awexd-" in Path("/proc/self/maps").read_text()
    with pytest.raises(AwexdError):
        reader.update(timeout=1)
    assert "awexd-" not in Path("/proc/self/maps").read_text()
