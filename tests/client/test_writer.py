"""WeightWriter: what its user may do wrong is refused by name, and the last version stays."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from awexd_client import (
    BudgetExceeded,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    ManifestMismatch,
    Shard,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
)
from tests.daemons import Daemon


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 1, "world_size": 1},
        {"rank": -1, "world_size": 1},
        {"rank": "0", "world_size": 1},
        {"rank": 0, "world_size": 1.0},
        {"rank": True, "world_size": 2},
        {"rank": 0, "world_size": 0},
        {"rank": 0, "world_size": 1, "keep": 0},
        {"rank": 0, "world_size": 1, "keep": "2"},
        {"rank": 0, "world_size": 1, "keep": True},
        {"rank": 0, "world_size": 1, "keep": 1000},
        {"rank": 0, "world_size": 1, "epoch": "old"},
        {"rank": 0, "world_size": 1, "epoch": 3},
        {"rank": 0, "world_size": 1, "mode": "direct", "transport": "shm"},
        {"rank": 0, "world_size": 1, "mode": "fast"},
        {"rank": 0, "world_size": 1, "transport": "rdma"},
        {"rank": 0, "world_size": 1, "transport": "nccl", "mode": "host"},
        {"rank": 0, "world_size": 1, "transport": "nccl", "ring_bytes": 10},
        {"rank": 0, "world_size": 1, "verify": True},
    ],
    ids=str,
)
def test_constructor_with_a_bad_argument(daemon: Daemon, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        WeightWriter("grpo", socket=daemon.socket, **arguments)


@pytest.mark.parametrize("job", ["", "../etc", "a/b/c", "a\0b", "a b", ".hidden", 7, None, "x" * 300])
def test_case_53_job_names_that_are_none(daemon: Daemon, job: Any) -> None:
    with WeightWriter(job, 0, 1, daemon.socket) as writer, pytest.raises(InvalidArgument):
        writer.register({"w": torch.zeros(1)})
    assert daemon.ask("status")["jobs"] == []


def test_publish_and_begin_before_register(writer: WeightWriter) -> None:
    for call in (writer.publish, writer.begin):
        with pytest.raises(InvalidArgument, match="register"):
            call(1)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 1 << 60])
def test_step_that_is_none(writer: WeightWriter, step: Any) -> None:
    writer.register({"w": torch.zeros(1)})
    with pytest.raises(InvalidArgument):
        writer.publish(step)
    writer.publish(1).committed()


def test_use_after_close(writer: WeightWriter) -> None:
    writer.register({"w": torch.zeros(1)})
    publication = writer.publish(1)
    writer.close()
    writer.close()
    for call in (lambda: writer.publish(2), lambda: writer.begin(2), lambda: writer.register({"w": torch.zeros(1)})):
        with pytest.raises(InvalidArgument, match="closed"):
            call()
    publication.captured()
    publication.committed()


def test_no_daemon_there(folder: Any) -> None:
    with pytest.raises(DaemonUnavailable, match="awexd serve"):
        WeightWriter("grpo", 0, 1, folder / "nobody")


def test_case_51_socket_path_over_107_bytes() -> None:
    with pytest.raises(InvalidArgument, match="107"):
        WeightWriter("grpo", 0, 1, "/tmp/" + "x" * 120)


@pytest.mark.parametrize("step", [5, 4, 0])
def test_case_15_step_that_is_not_after_the_last(writer: WeightWriter, reader: WorkerWeightsReader, step: int) -> None:
    source, into = torch.full((3,), 5.0), torch.zeros(3)
    writer.register({"w": source})
    reader.register({"w": into})
    writer.publish(5).committed()
    with pytest.raises(VersionConflict, match="step 5"):
        writer.publish(step)
    assert reader.update().step == 5
    assert torch.equal(source, into)


def test_case_7_rank_that_another_live_process_has(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register({"w": torch.ones(3)})
    writer.publish(1).committed()
    with WeightWriter("grpo", 0, 1, daemon.socket) as second, pytest.raises(VersionConflict, match="rank 0"):
        second.register({"w": torch.zeros(3)})
    writer.publish(2).committed()


def test_case_7_name_twice_in_one_registration(writer: WeightWriter) -> None:
    shards = [Shard("w", torch.zeros(2), (3,), (0,)), Shard("w", torch.zeros(2), (3,), (1,))]
    with pytest.raises(ManifestMismatch) as caught:
        writer.register(shards)
    assert list(caught.value.mismatched) == ["w"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quanti"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conj"),
    ],
    ids=["meta", "sparse", "quantised", "conjugated"],
)
@pytest.mark.filterwarnings("ignore")
def test_case_29_tensor_that_is_not_plain_host_memory(writer: WeightWriter, make: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?i)strange.*{why}|{why}.*strange"):
        writer.register({"good": torch.zeros(1), "strange": make()})
    writer.register({"good": torch.zeros(1)})
    writer.publish(1).committed()


@pytest.mark.parametrize("target", [None, 5, "w", [], {}, [torch.zeros(1)], {"w": 3}, {"w": None}, object()], ids=repr)
def test_target_that_holds_no_tensors(writer: WeightWriter, target: Any) -> None:
    with pytest.raises(InvalidArgument):
        writer.register(target)


def test_case_66_publish_with_no_reader_anywhere(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    source, into = torch.arange(5.0), torch.zeros(5)
    writer.register({"w": source})
    for step in range(1, 8):
        writer.publish(step).committed()
    reader.register({"w": into})
    assert reader.update().step == 7
    assert torch.equal(source, into)


def test_case_32_every_piece_is_aligned(writer: WeightWriter, daemon: Daemon) -> None:
    weights = {
        "h": torch.zeros(3, dtype=torch.float16),
        "f": torch.zeros(2),
        "u": torch.zeros(5, dtype=torch.uint8),
        "b": torch.zeros(1, dtype=torch.bfloat16),
    }
    writer.register(weights)
    writer.publish(1).committed()
    manifest = writer._segment.manifest
    assert [offset % 256 for offset in manifest.piece_offsets] == [0] * 4
    assert len(set(manifest.piece_offsets)) == 4


def test_case_45_49_cast_is_torchs_own_and_only_where_asked(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    master = {"w": torch.linspace(6.817, 7.063, 256), "bias": torch.linspace(6.817, 7.063, 256), "n": torch.arange(3)}
    writer.register(master, dtype={"w": torch.bfloat16})
    into = {
        "w": torch.zeros(256, dtype=torch.bfloat16),
        "bias": torch.zeros(256),
        "n": torch.zeros(3, dtype=torch.int64),
    }
    reader.register(into)
    writer.publish(1).committed()
    reader.update()
    assert torch.equal(into["w"], master["w"].to(torch.bfloat16))
    assert len(set(into["bias"].tolist())) == 256
    assert torch.equal(into["n"], master["n"])


def test_cast_that_matches_no_tensor(writer: WeightWriter) -> None:
    with pytest.raises(InvalidArgument, match=re.escape("layer.*")):
        writer.register({"w": torch.zeros(3)}, dtype={"layer.*": torch.bfloat16})


def test_case_60_no_room_for_the_versions(folder: Any) -> None:
    with Daemon(folder, "--memory-budget", "4M") as daemon:
        source, into = torch.full((100_000,), 1.0), torch.zeros(100_000)
        with (
            WeightWriter("grpo", 0, 1, daemon.socket) as writer,
            WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
        ):
            writer.register({"w": source})
            reader.register({"w": into})
            writer.publish(1).committed()
            with WeightWriter("other", 0, 1, daemon.socket) as other, pytest.raises(BudgetExceeded, match="MiB"):
                other.register({"w": torch.zeros(1_000_000)})
            assert reader.update().step == 1
            assert torch.equal(source, into)
            writer.publish(2).committed()
            assert daemon.ask("status")["memory"]["used_bytes"] < 4 << 20


def test_step_that_waits_for_a_leased_slot_names_the_lease(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register({"w": torch.zeros(3)})
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader:
        reader.register({"w": torch.zeros(3)})
        writer.publish(1)
        staged = reader.stage()
        writer.publish(2)
        writer.publish(3)
        with pytest.raises(DeadlineExceeded, match=r"lease.* step 1"):
            writer.publish(4, timeout=0.2)
        reader.release(staged)
        writer.publish(4).committed()


def test_keep_versions_are_held_and_no_more(daemon: Daemon) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket, keep=3) as writer:
        writer.register({"w": torch.zeros(3)})
        for step in range(1, 7):
            writer.publish(step).committed()
        assert [v["step"] for v in daemon.ask("versions", job=None)["versions"]] == [6, 5, 4]
        assert len(daemon.segments()) == 4
        writer.close_job()
        assert daemon.segments() == []


def test_case_21_memory_is_gone_after_close_job_even_if_a_traceback_holds_the_writer(daemon: Daemon) -> None:
    writer = WeightWriter("grpo", 0, 1, daemon.socket)
    writer.register({"w": torch.zeros(1000)})
    writer.publish(1)
    kept = None
    try:
        writer.publish(0)
    except VersionConflict as error:
        kept = error
    writer.close_job()
    assert daemon.segments() == []
    assert daemon.ask("status")["memory"]["used_bytes"] == 0
    writer.close()
    with open("/proc/self/maps") as maps:
        assert "awexd-" not in maps.read()
    assert kept is not None


def test_job_that_was_closed_is_opened_anew_by_register(writer: WeightWriter) -> None:
    weights = {"w": torch.zeros(3)}
    writer.register(weights)
    writer.publish(5)
    writer.close_job()
    with pytest.raises(InvalidArgument, match="closed"):
        writer.publish(6)
    writer.register(weights)
    writer.publish(1).committed()
    assert writer.epoch == 1
