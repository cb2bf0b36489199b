"""Tensors parked and brought back: their memory is gone meanwhile, and every bit is there afterwards."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from awexd_client import (
    AccessDenied,
    BudgetExceeded,
    IntegrityError,
    InvalidArgument,
    ManifestMismatch,
    VersionConflict,
    VersionUnavailable,
    WeightWriter,
    WorkerWeightsReader,
    storages,
)
from tests.client.samples import weights
from tests.daemons import Daemon

Tensors = dict[str, torch.Tensor]


def states(seed: int = 0) -> Tensors:
    """Like an optimizer's: of several kinds, views, an alias, odd sizes, none at all."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(1000, generator=generator)
    return {
        "flat.left": flat[:400].view(20, 20),
        "flat.right": flat[400:],
        "again": flat.view(10, 100).t(),
        "step": torch.tensor(7 + seed, dtype=torch.int64),
        "bytes": torch.randint(0, 256, (4099,), generator=generator).to(torch.uint8),
        "nan": torch.tensor([float("nan"), -0.0, 0.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.randn(3, 2, dtype=torch.complex128, generator=generator),
        "none": torch.zeros(0, 4),
        "large": torch.randn(700_001, generator=generator),
        "weight": torch.nn.Parameter(torch.randn(8, 8, generator=generator)),
    }


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: tensor.detach().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def sizes(tensors: Tensors) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in tensors.values()}


@pytest.mark.parametrize("verify", ["checksum", "off"])
@pytest.mark.usefixtures("each_way")
def test_bits_views_aliases_and_identity_come_back(daemon: Daemon, verify: str) -> None:
    tensors = states()
    before, kept = bits(tensors), dict(tensors)
    outside = tensors["flat.right"][5:10]
    with WeightWriter("grpo", 0, 1, daemon.socket, verify=verify) as writer:
        for _ in range(3):
            writer.park("optimizer", tensors)
            assert sizes(tensors) == {0}
            writer.restore("optimizer")
            assert bits(tensors) == before
            assert all(tensors[name] is kept[name] for name in tensors)
        tensors["flat.left"].fill_(3.0)
        assert torch.equal(tensors["again"].t().reshape(-1)[:400], torch.full((400,), 3.0))
        assert outside.data_ptr() == tensors["flat.right"].data_ptr() + 20


def test_list_is_parked_and_several_names_beside_each_other(writer: WeightWriter) -> None:
    one, two = [torch.arange(5.0), torch.arange(7)], {"g": torch.ones(3)}
    writer.park("gradients", one)
    writer.park("optimizer", two)
    with pytest.raises(VersionConflict, match="'optimizer' is parked already"):
        writer.park("optimizer", {"other": torch.ones(2)})
    with pytest.raises(InvalidArgument, match=r"0: its memory has been let go already"):
        writer.park("again", one)
    writer.restore("gradients")
    writer.restore("optimizer")
    assert one[0].tolist() == [0, 1, 2, 3, 4]
    assert two["g"].tolist() == [1, 1, 1]


def test_case_26_only_whole_storages_of_our_own_are_let_go(
    daemon: Daemon, writer: WeightWriter, tmp_path: Path
) -> None:
    whole = torch.arange(100.0)
    file = tmp_path / "f"
    file.write_bytes(bytes(400))
    refused: dict[str, torch.Tensor] = {
        "part": whole[:99],
        "every other": whole[::2],
        "numpy": torch.from_numpy(np.zeros(4)),
        "shared": torch.zeros(4).share_memory_(),  # type: ignore[no-untyped-call]
        "file": torch.from_file(str(file), size=100),
        "buffer": torch.frombuffer(bytearray(16), dtype=torch.float32),
    }
    free = torch.ones(50)
    for name, tensor in refused.items():
        with pytest.raises(InvalidArgument, match=name):
            writer.park("optimizer", {"free": free, name: tensor})
        assert free.untyped_storage().nbytes() == 200
    assert torch.equal(whole, torch.arange(100.0))
    assert daemon.segments() == []
    for odd in (torch.zeros(2), "text", 5, [], [None], {1: torch.zeros(1)}, [torch.zeros(1, device="meta")]):
        with pytest.raises(InvalidArgument):
            writer.park("optimizer", odd)
    for name in ("", "a/b", "../x", ".x", "awexd.offload", "x" * 200):
        with pytest.raises(InvalidArgument):
            writer.park(name, [torch.zeros(3)])
    writer.park("optimizer", {"even": whole[::2], "odd": whole[1::2]})
    writer.restore("optimizer")
    assert torch.equal(whole, torch.arange(100.0))


def test_memory_of_a_parcel_is_kept_for_the_next_one_or_given_back(daemon: Daemon, writer: WeightWriter) -> None:
    tensors = [torch.ones(5000)]
    writer.park("optimizer", tensors)
    (segment,) = daemon.segments()
    writer.restore("optimizer")
    assert daemon.segments() == [segment]
    assert daemon.ask("status")["jobs"][0]["parked"][0]["state"] == "spare"
    writer.park("optimizer", tensors)
    assert daemon.segments() == [segment]
    writer.restore("optimizer")
    writer.park("optimizer", [torch.ones(6000)])  # of another size
    assert len(daemon.segments()) == 1
    assert daemon.segments() != [segment]
    writer.restore("optimizer", keep=False)
    assert daemon.segments() == []
    writer.park("optimizer", tensors)
    writer.restore("optimizer")
    assert daemon.ask("gc")["freed_bytes"] > 20_000
    assert daemon.segments() == []
    writer.park("optimizer", tensors)
    assert sizes({"0": tensors[0]}) == {0}
    writer.restore("optimizer")
    assert tensors[0].sum() == 5000


def test_memory_goes_with_the_session_but_what_is_parked_stays(daemon: Daemon) -> None:
    tensors = states(1)
    before = bits(tensors)
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.park("a", [torch.ones(10)])
        writer.restore("a")
        writer.park("optimizer", tensors)
        assert len(daemon.segments()) == 2
    daemon.await_segments(1)
    (parked,) = daemon.ask("status")["jobs"][0]["parked"]
    assert (parked["name"], parked["rank"], parked["state"]) == ("optimizer", 0, "pinned")
    fresh = states(2)
    fresh["again"] = fresh["flat.left"].new_zeros(1000).view(10, 100).t()
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        with pytest.raises(VersionConflict, match="has parked 'optimizer' already"):
            writer.park("optimizer", [torch.ones(1)])
        with pytest.raises(InvalidArgument, match="give tensors of the same names"):
            writer.restore("optimizer")
        with pytest.raises(VersionUnavailable, match="nothing as 'other'; parked: 'optimizer'"):
            writer.restore("other", fresh)
        writer.restore("optimizer", fresh, keep=False)
        assert bits(fresh) == before
        assert daemon.segments() == []


@pytest.mark.parametrize("layout", ["apart", "tied"])
def test_other_names_shapes_dtypes_and_ties_are_refused_before_a_byte_is_touched(daemon: Daemon, layout: str) -> None:
    shared = torch.arange(6.0)
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        writer.park("optimizer", {"a": shared, "b": torch.ones(3), "same": shared.view(2, 3)})
    good = {"a": torch.zeros(6), "b": torch.zeros(3), "same": torch.zeros(2, 3)}
    flat = torch.zeros(9)
    with WeightWriter("grpo", 0, 1, daemon.socket) as writer:
        for wrong in (
            {"a": good["a"]},
            {**good, "c": torch.zeros(1)},
            {**good, "b": torch.zeros(4)},
            {**good, "b": torch.zeros(3, dtype=torch.int32)},
            {"a": flat[:6], "b": flat[5:8], "same": good["same"]},
        ):
            with pytest.raises(ManifestMismatch):
                writer.restore("optimizer", wrong)
        assert not any(tensor.any() for tensor in (*good.values(), flat))
        tied = {"a": (own := torch.zeros(6)), "b": torch.zeros(3), "same": own.view(2, 3)}
        with pytest.raises(ManifestMismatch, match="overlaps"):
            writer.restore("optimizer", tied | {"b": own[:3]})
        apart = {"a": torch.zeros(12)[::2], "b": tied["b"], "same": torch.zeros(3, 2).t()}
        writer.restore("optimizer", apart if layout == "apart" else tied)
        for found in [apart if layout == "apart" else tied]:
            assert found["a"].tolist() == [0, 1, 2, 3, 4, 5]
            assert found["b"].tolist() == [1, 1, 1]
            assert found["same"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_other_ranks_jobs_and_users_do_not_reach_it(daemon: Daemon, writer: WeightWriter) -> None:
    writer.park("optimizer", [torch.ones(3)])
    for job, rank in (("grpo", 1), ("other", 0)):
        with WeightWriter(job, rank, 2, daemon.socket) as other, pytest.raises(VersionUnavailable):
            other.restore("optimizer", [torch.zeros(3)])
    with (
        WeightWriter("nobody-at-all/grpo", 0, 1, daemon.socket) as stranger,
        pytest.raises(AccessDenied),
    ):
        stranger.restore("optimizer", [torch.zeros(3)])
    writer.restore("optimizer")


def test_discard_and_close_job_let_go(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(weights(1))
    writer.park("optimizer", [torch.ones(3)])
    writer.discard("optimizer")
    writer.discard("optimizer")
    with pytest.raises(InvalidArgument, match="has parked nothing"):
        writer.restore("optimizer")
    writer.park("optimizer", [torch.ones(3)])
    writer.close_job()
    assert daemon.segments() == []
    with pytest.raises(InvalidArgument, match="has parked nothing"):
        writer.restore("optimizer")


@pytest.mark.parametrize("fresh", [False, True])
def test_damage_is_found_and_what_is_parked_stays(daemon: Daemon, fresh: bool) -> None:
    tensors = {"a": torch.arange(3000.0), "b": torch.ones(5)}
    with WeightWriter("grpo", 0, 1, daemon.socket, verify="checksum") as writer:
        writer.park("optimizer", tensors)
        (name,) = daemon.segments()
        with open(f"/dev/shm/{name}", "r+b") as segment:
            segment.seek(4096 + 4000)
            right = segment.read(1)
            segment.seek(4096 + 4000)
            segment.write(bytes([right[0] ^ 1]))
        if fresh:
            with WeightWriter("grpo", 0, 1, daemon.socket, verify="checksum") as other:
                into = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
                with pytest.raises(IntegrityError, match="a "):
                    other.restore("optimizer", into)
                assert not into["a"].any()
        with pytest.raises(IntegrityError, match="a "):
            writer.restore("optimizer")
        assert sizes(tensors) == {0}
        with open(f"/dev/shm/{name}", "r+b") as segment:
            segment.seek(4096 + 4000)
            segment.write(right)
        writer.restore("optimizer")
        assert torch.equal(tensors["a"], torch.arange(3000.0))


def test_budget_counts_what_is_parked_and_the_error_names_it(folder: Path) -> None:
    tensors, more = [torch.ones(1 << 18)], [torch.ones(1 << 19)]
    with Daemon(folder, "--memory-budget", "2MiB") as daemon:
        with WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer:
            writer.park("optimizer", tensors)
            with pytest.raises(BudgetExceeded, match=r"cannot park 'more'.*1\.0 MiB are parked"):
                writer.park("more", more)
            assert sizes({"0": more[0]}) == {2 << 20}
            with pytest.raises(BudgetExceeded):
                writer.register({"w": torch.ones(1 << 18)})
            assert daemon.ask("status")["memory"]["used_bytes"] > 1 << 20
            writer.restore("optimizer")
            writer.register({"w": torch.ones(1 << 17)})  # takes the memory that was only kept
            assert daemon.ask("status")["jobs"][0]["parked"] == []
        assert torch.equal(tensors[0], torch.ones(1 << 18))


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Large allocations fail, as where a device is full."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_restore_without_room_leaves_it_parked_to_be_tried_again(writer: WeightWriter) -> None:
    tensors = {"small": torch.ones(1000), "large": torch.arange(float(64 << 20))}
    writer.park("optimizer", tensors)
    with no_more_memory(), pytest.raises(BudgetExceeded, match="large: no room for 268435456 bytes on cpu"):
        writer.restore("optimizer")
    assert sizes(tensors) == {0}
    writer.restore("optimizer")
    assert torch.equal(tensors["large"], torch.arange(float(64 << 20)))
    assert torch.equal(tensors["small"], torch.ones(1000))


def test_restore_into_memory_that_was_given_meanwhile_is_refused(writer: WeightWriter) -> None:
    tensors = [torch.ones(10), torch.ones(20)]
    writer.park("optimizer", tensors)
    tensors[1].untyped_storage().resize_(80)
    with pytest.raises(InvalidArgument, match="1: it has been given other memory"):
        writer.restore("optimizer")
    tensors[1].untyped_storage().resize_(0)
    with pytest.raises(InvalidArgument, match="0: not what this process parked"):
        writer.restore("optimizer", [torch.zeros(10), torch.zeros(20)])
    writer.restore("optimizer", tensors)
    assert tensors[1].sum() == 20


def test_storages_leave_in_groups(writer: WeightWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory is bounded by a group: seen by how much of it is left when each group has gone."""
    monkeypatch.setattr(storages, "CHUNK", 4000)
    tensors = [torch.ones(500) for _ in range(10)] + [torch.ones(5000)]
    assert [len(group) for group in storages.grouped(storages.storages_of(storages.named(tensors)))] == [2] * 5 + [1]
    writer.park("optimizer", tensors)
    writer.restore("optimizer")
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_registered_tensors_may_be_parked_and_what_is_published_afterwards_is_right(
    writer: WeightWriter, reader: WorkerWeightsReader
) -> None:
    live, into = weights(1), weights(0)
    writer.register(live)
    reader.register(into)
    writer.publish(1).committed()
    writer.park("weights", live)
    with pytest.raises(ValueError, match="freed or shrunk"):
        writer.publish(2)
    reader.update(1)
    held = [torch.empty(6, 2) for _ in range(50)]  # so that other addresses come
    writer.restore("weights")
    for tensor in live.values():
        tensor.add_(1)
    writer.publish(2).committed()
    assert reader.update(2).step == 2
    assert {value for tensor in into.values() for value in tensor.flatten().tolist()} == {2.0}
    assert held
