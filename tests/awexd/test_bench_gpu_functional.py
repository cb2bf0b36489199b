"""The GPU's figures at small sizes, on a GPU that a driver plays: processes, daemon and client are the real ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from awexd.bench.daemon import daemon as own_daemon
from awexd.bench.figures import Figure
from awexd.bench.gpu import command, kills, lasting
from awexd.bench.gpu.daemon_state import in_use, settled
from awexd.bench.gpu.measure import HALVES, First, direct, direct_rows, host_figures, host_rounds, swap, swap_park
from awexd.bench.gpu.pair import Job, Pair, Place, pair
from awexd.bench.gpu.weights import Weights
from awexd.bench.link import SideFailed
from awexd_client.session import Connection
from awexd_transports.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
DRIVER = "tests.devices:SharedMemoryDriver"
MOE = Weights("moe", shrink=32, layers=1)
DENSE = Weights("dense", shrink=32, layers=1)
GPU = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--quick", "--driver", DRIVER]


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    with own_daemon() as path:
        yield path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(("played", DRIVER, str(tmp_path_factory.mktemp("gpu"))), path=ROOT)


@pytest.fixture(scope="module")
def sides(place: Place, socket: str) -> Iterator[Pair]:
    with pair(place, socket) as running:
        yield running


def test_direct_hand_overs_beside_their_limit(sides: Pair) -> None:
    found = direct(sides, "direct-moe", MOE, 2)
    assert found.rounds == 2
    assert (found.value or 0) > 0
    assert (found.limit or 0) > 0
    assert (found.more["tensors"], found.more["bytes"]) == (len(MOE.tensors()), MOE.nbytes)
    assert str(found.bar) == "ratio <= 1.1"
    checked = direct(sides, "direct-dense-checksum", DENSE, 1, cut=HALVES, verify="checksum")
    assert (checked.value or 0) > 0
    assert checked.bar is None


def test_allowance_of_the_control_path_is_taken_off_before_the_ratio() -> None:
    from awexd.bench.gpu.measure import direct_figure
    from awexd.bench.gpu.pair import Rounds

    rounds = Rounds(total=[0.011, 0.021], publish=[0.001] * 2, update=[0.01] * 2, limit=[0.010, 0.010])
    found = direct_figure("direct-moe", rounds, MOE)
    assert found.ratio == pytest.approx(1.5)
    assert found.value == pytest.approx(16)
    assert found.limit == pytest.approx(10)


def test_rows_of_every_width(sides: Pair) -> None:
    found = direct_rows(sides, 1, 4 << 20)
    ratios = [found.more[f"ratio_{width}"] for width in (128, 512, 2048, 8192)]
    assert found.ratio == max(ratios)


def test_through_host_memory_and_back_at_once(sides: Pair, socket: str) -> None:
    first = First(sides, MOE)
    with sides.job("host", MOE, mode="host") as job:
        begun = first.hand_over(job)
        assert begun.more.keys() == {"writer_register", "first_publish", "reader_register", "first_update"}
        assert first.extra_memory("extra-memory-host").value == 0
        publish, update = host_figures(host_rounds(job, 2, MOE.nbytes, first=2), MOE)
        both = swap(job, 2, MOE, step=6)
        parked = swap_park(job, 2, MOE, step=10)
    assert [str(one.bar) for one in (publish, update, both)] == ["ratio >= 0.95", "ratio >= 0.92", "ratio <= 1.2"]
    assert all((one.value or 0) > 0 for one in (publish, update, both, parked))
    assert parked.more["restore"] > 0
    assert in_use(socket)["bytes"] == 0


def test_device_memory_that_a_later_slot_takes_counts_too(
    sides: Pair, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, taken = First(sides, MOE), Path(place.device[2]) / "taken"
    with sides.job("slots", MOE, mode="host") as job:
        first.hand_over(job)
        update = job.update

        def takes(step: int) -> float:
            taken.write_bytes(bytes(2 << 20))
            return update(step)

        monkeypatch.setattr(Job, "update", lambda _, step: takes(step))
        try:
            first.again(job, 2)
        finally:
            taken.unlink()
        found = first.extra_memory("extra-memory-host")
    assert (found.value, found.more["writer"], found.more["reader"]) == (2, 0, 2)


def test_device_memory_that_a_side_takes_is_told_as_that_sides(sides: Pair, place: Place) -> None:
    first = First(sides, MOE)
    with sides.job("taken", MOE, mode="direct") as job:
        before = sides.writer.ask("memory")["used"]
        left = Path(place.device[2]) / "taken"
        left.write_bytes(bytes(3 << 20))
        try:
            first.hand_over(job)
            found = first.extra_memory("extra-memory")
        finally:
            left.unlink()
    assert before >= MOE.nbytes
    assert (found.value, found.more["writer"], found.more["reader"]) == (3, 3, 0)


@pytest.mark.parametrize("mode", ["direct", "host"])
def test_bytes_that_did_not_arrive_are_found(sides: Pair, mode: str) -> None:
    with sides.job("missed", DENSE, mode=mode) as job:
        job.publish(1)
        job.update(1)
        job.captured()
        job.check(1)
        sides.writer.ask("change", step=2)
        with pytest.raises(SideFailed, match="hold other bytes"):
            job.check(2)


def test_several_processes_of_each_kind(place: Place, socket: str) -> None:
    with pair(place, socket, count=2) as four:
        assert (direct(four, "direct-many", DENSE, 1).value or 0) > 0


def test_many_updates_leave_nothing(sides: Pair) -> None:
    found = lasting.update_many(sides, Weights("rows", width=128, size=1 << 18), 11)
    assert found.value == 0, found.more
    assert found.rounds == 11


def test_what_is_left_in_a_daemon_is_seen(socket: str) -> None:
    before = in_use(socket)
    with contextlib.closing(Connection(socket)):
        found = settled(socket, lambda now: now == before, seconds=0.05)
        assert found["sessions"] == before["sessions"] + 1
        assert found["descriptors"] > before["descriptors"]
    assert settled(socket, lambda now: now == before) == before


@pytest.mark.slow
def test_killed_processes_leave_neither_torn_weights_nor_anything_in_the_daemon(place: Place, socket: str) -> None:
    before = in_use(socket)
    found = kills.kill_rounds(place, socket, replace(DENSE, moving=True), 4)
    assert (found.value, found.rounds) == (0, 4), found
    assert settled(socket, lambda now: now == before) == before


def test_weights_that_are_not_those_of_the_version_that_is_told_count_as_torn(place: Place, socket: str) -> None:
    moving = replace(DENSE, moving=True)
    with contextlib.ExitStack() as stack:
        killing = kills.Killing(place, socket, moving, [], stack)
        with killing._pair.job("torn", moving, mode="host") as job:
            job.hand_over(1)
            killing._look_for_torn(job.name)
            assert killing.counts.faults == 0
            job.pair.writer.ask("publish", job=job.name, step=2, changed=True)  # they are the first step's
            job.update(2)
            killing._look_for_torn(job.name)
            killing._check(job, 2)
            assert (killing.counts.torn, killing.counts.wrong) == (1, 1)
            killing._check(job, 3)
            assert killing.counts.wrong == 2


def test_awexctl_bench_on_a_played_gpu(place: Place, socket: str) -> None:
    said: list[str] = []
    found = list(command.measured(place, socket, 1 / 256, said.append, quick=True))
    names = [one.name for one in found]
    assert names[:3] == ["gpu-copy", "gpu-to-host", "host-to-gpu"]
    assert {"gpu-direct", "gpu-direct-reshard", "gpu-host-publish", "gpu-host-update-checksum"} <= set(names)
    assert all(one.note and (one.value or 0) > 0 and one.bar is None for one in found)
    with pytest.raises(InvalidArgument, match="GiB of GPU memory are needed"):
        list(command.measured(place, socket, 1024, said.append, quick=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_awexctl_bench_without_a_gpu_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "awexd.ctl", "bench", "--gpu"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("unit", "ratio", "told"),
    [
        ("ms", 1.05, "as it should be"),
        ("ms", 1.4, "busy"),
        ("GB/s", 0.95, "as it should be"),
        ("GB/s", 0.5, "far more"),
        ("ms", None, "not measured"),
    ],
)
def test_verdict_tells_near_from_far(unit: str, ratio: float | None, told: str) -> None:
    assert told in command.verdict(Figure("gpu-direct", 1.0, unit, ratio=ratio))


@pytest.mark.slow
def test_benchmark_prints_each_figure_and_goes_on_where_one_fails(folder: Path) -> None:
    only = ["direct-moe", "peer-copy-loop", "peer-buckets", "peer-checkpoint-engine", "swap-duplex"]
    options = [part for name in only for part in ("--only", name)]
    environ = os.environ | {"BENCH_PEERS": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(
        [*GPU, "--rounds", "1", "--peers", *options], capture_output=True, text=True, timeout=100, env=environ
    )
    assert done.returncode == 0, done.stderr
    told = [line.split()[0] for line in done.stdout.partition("\n\n")[0].splitlines()]
    assert sorted(told) == sorted(only)
    assert "peer-checkpoint-engine  -" in done.stdout
    assert "make bench-peers" in done.stdout
    assert list(folder.iterdir()) == []


def test_benchmark_refuses_what_is_not_for_keeping_or_not_known() -> None:
    for options, why in ((["--write"], "not for keeping"), (["--only", "direct-none"], "no such figure")):
        done = subprocess.run([*GPU, *options], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert why in done.stderr
