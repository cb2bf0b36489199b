"""``awexctl bench`` and the benchmarks as commands, at small sizes: they work, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from awexd.bench.daemon import daemon as own_daemon
from awexd.bench.handover import Pair, measure, pair
from awexd.bench.limits import Copier, address, copy_rates, fresh_memory_seconds, round_trips, thread_counts
from awexd.bench.link import SideFailed
from awexd.bench.weights import Weights, fill, mapping
from awexd_client.session import Connection
from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
SIZE = 16 << 20
ENDED_SECONDS = 60.0
BENCH = [sys.executable, "-m", "awexd.ctl", "bench", "--quick", "--size", "0.016"]


@pytest.fixture(scope="module")
def sides() -> Iterator[Pair]:
    with own_daemon() as socket, pair(socket, SIZE) as running:
        yield running


def test_measure_gives_a_number_a_round_and_every_thread_count(sides: Pair) -> None:
    found = measure(sides, "a", Weights(16, SIZE, cut=True), "checksum", 2)
    assert [len(times) for times in (found.total, found.publish, found.pause)] == [2, 2, 2]
    assert {count: len(times) for count, times in found.copies.items()} == dict.fromkeys(thread_counts(), 2)
    assert all(0 < pause < total for pause, total in zip(found.pause, found.total, strict=True))
    assert found.threads in found.copies


def test_bytes_that_did_not_arrive_are_found(sides: Pair) -> None:
    with sides.job("b", Weights(16, SIZE), "off") as hand_over:
        hand_over(1)
        sides.check(1)
        with pytest.raises(SideFailed, match="holds other bytes than the writer"):
            sides.check(2)


def test_job_that_fails_is_closed(sides: Pair) -> None:
    def failing() -> None:
        with sides.job("c", Weights(16, SIZE), "off") as hand_over:
            hand_over(1)
            raise SideFailed("on purpose")

    with pytest.raises(SideFailed, match="on purpose"):
        failing()
    with contextlib.closing(Connection(sides.socket)) as connection:
        assert connection.call("status", {}, timeout=30)[0]["jobs"] == []
    for side in (sides.reader, sides.writer):
        side.ask("close")
    with sides.job("c", Weights(16, SIZE), "off") as hand_over:
        assert hand_over(1)[0] > 0


def test_limits_are_measured() -> None:
    rates = copy_rates(SIZE, 2)
    assert all(rate > 0 for found in rates.values() for rate in found)
    assert set(fresh_memory_seconds(SIZE)) == {"reserve", "populate", "map"}
    assert len(round_trips(20)) == 20


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copier_copies_every_byte(threads: int) -> None:
    copier = Copier()
    nbytes = (1 << 20) + 4096 + 24
    with mapping(nbytes) as source, mapping(nbytes) as target:
        fill(source)
        copier.copy(address(target), address(source), nbytes, threads)
        assert target[:] == source[:]
    copier.close()


@pytest.mark.slow
def test_awexctl_bench_starts_a_daemon_where_none_runs(folder: Path) -> None:
    environ = os.environ | {"AWEXD_SOCKET": str(folder / "none"), "TMPDIR": str(folder)}
    done = subprocess.run([*BENCH, "--json"], capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    found = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert {"copy-1-thread", "shared-memory-reserve", "round-trip", "hand-over-16-MiB", "control"} <= found.keys()
    assert all(figure["value"] > 0 and figure["note"] for figure in found.values())
    assert found["hand-over-16-MiB-checksum"]["ratio"] > 0
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_awexctl_bench_asks_a_running_daemon_and_closes_its_jobs(daemon: Daemon) -> None:
    done = subprocess.run([*BENCH, "--socket", daemon.socket], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"asking the daemon at {daemon.socket}" in done.stderr
    assert "times two plain copies" in done.stdout
    assert daemon.ask("status")["jobs"] == []


@pytest.mark.parametrize("size", ["0.001", "1000000"])
def test_awexctl_bench_refuses_a_size_that_cannot_be(size: str) -> None:
    done = subprocess.run([*BENCH[:-1], size], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "--size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_awexctl_bench_that_is_stopped_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    environ = os.environ | {"AWEXD_SOCKET": str(folder / "none"), "TMPDIR": str(folder)}
    with subprocess.Popen(BENCH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if b"measuring hand-over" in line:
                break
        children = _children(running.pid)
        running.send_signal(number)
        running.communicate(timeout=ENDED_SECONDS)
    _await_end(children)
    assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_benchmarks_run(folder: Path) -> None:
    environ = os.environ | {"BENCH_PEERS": str(folder), "TMPDIR": str(folder)}
    for command, names in (
        (["control.py", "--rounds", "20"], ["control-p50", "control-wait-p99"]),
        (
            ["plan.py", "--quick", "--rounds", "1"],
            ["plan-global-moe", "manifest-moe", "plan-local-1t", "balance-dp8-to-2"],
        ),
        (["cpu.py", "--quick", "--rounds", "1", "--peers", "--only", "host-400-reshard"], ["host-400-reshard"]),
    ):
        script = [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]]
        done = subprocess.run(script, capture_output=True, text=True, timeout=100, env=environ)
        assert done.returncode == 0, done.stderr
        assert [name for name in names if f"\n{name} " not in done.stdout] == []
    assert list(folder.iterdir()) == []


def _children(pid: int) -> list[tuple[int, int]]:
    """Each child with a descriptor of it; this process adopts them when ``pid`` is killed."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [(child, os.pidfd_open(child)) for child in pids]


def _await_end(children: list[tuple[int, int]]) -> None:
    assert children
    for child, handle in children:
        ended, _, _ = select.select([handle], [], [], ENDED_SECONDS)
        os.close(handle)
        assert ended, f"process {child} has not ended"
        try:
            os.waitid(os.P_PID, child, os.WEXITED)
        except ChildProcessError:
            continue  # its own parent has reaped it
