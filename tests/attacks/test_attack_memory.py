"""Shared memory that is small, forged, truncated, replaced or somebody else's."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from awexd_transports.errors import BudgetExceeded
from tests.attacks.raw import Raw, RawWriter, reader, until, writer
from tests.daemons import Daemon

MIB = 1 << 20
SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"')


def _fill(fd: int) -> None:
    try:
        while True:
            os.write(fd, bytes(64 << 10))
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017 - a loop that only this ends


def _may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="a private /dev/shm needs root and mount namespaces: run as root")
def test_segment_larger_than_dev_shm_is_refused_with_numbers_and_the_daemon_serves_on(folder: Path) -> None:
    with Daemon(folder, wrapper=SMALL_SHM) as daemon, RawWriter(daemon.socket, nbytes=4 * MIB) as trainer:
        trainer.register()
        trainer.set = trainer.call("write.ready")["set"]
        error = trainer.refused("write.reserve", body=b"s", set=trainer.set, nbytes=4 * MIB)
        assert isinstance(error, BudgetExceeded)
        assert "12.0 MiB of shared memory are needed" in str(error)
        assert re.search(r"/dev/shm [01]\.\d MiB", str(error))
        assert isinstance(trainer.refused("write.begin", step=1, set=trainer.set), BudgetExceeded)
        trainer.nbytes = 64 << 10
        trainer.reserve()
        trainer.publish(1)


@pytest.mark.skipif(not _may_mount(), reason="a private /dev/shm needs root and mount namespaces: run as root")
def test_dev_shm_that_fills_up_leaves_no_half_made_segment(folder: Path) -> None:
    with Daemon(folder, wrapper=SMALL_SHM) as daemon, RawWriter(daemon.socket, nbytes=300 << 10) as trainer:
        trainer.register(keep=1)
        trainer.reserve()
        with RawWriter(daemon.socket, "second", nbytes=300 << 10) as second:
            second.register(keep=1)
            second.set = second.call("write.ready")["set"]
            second.refused("write.reserve", body=b"s", set=second.set, nbytes=300 << 10)
        trainer.publish(1)
        used = daemon.ask("status")["memory"]["used_bytes"]
        assert used == 2 * (4096 + (300 << 10))


@pytest.mark.skipif(not _may_mount(), reason="a private /dev/shm needs root and mount namespaces: run as root")
def test_writer_that_fills_dev_shm_through_its_segments_fails_alone(folder: Path) -> None:
    with Daemon(folder, wrapper=SMALL_SHM) as daemon, Raw(daemon.socket) as other:
        trainer = RawWriter(daemon.socket, nbytes=64 << 10)
        trainer.register(keep=1)
        trainer.reserve()
        first = trainer.publish(1)
        second = trainer.begin(2)
        with trainer.opened(second["segment"]) as hole:
            trainer.seal(second, 2)
            third = trainer.begin(3)
            assert third["segment"] == first["segment"]
            with trainer.opened(third["segment"]) as full:
                os.ftruncate(hole, 0)  # its header page is gone: to write it takes a page that there is not
                _fill(full)
                trainer.ask("write.seal", epoch=1, step=3, attempt=third["attempt"], checksums=False)
                trainer.receive()
                for _ in range(2):
                    other.call("status")
                trainer.close()
                until(daemon.socket, lambda status: status["sessions"] == 2)
        daemon.close_jobs()
        until(daemon.socket, lambda status: status["memory"]["used_bytes"] == 0)


@pytest.mark.skipif(not _may_mount(), reason="a private /dev/shm needs root and mount namespaces: run as root")
def test_granted_slot_whose_header_cannot_be_written_leaves_no_attempt(folder: Path) -> None:
    with Daemon(folder, wrapper=SMALL_SHM) as daemon, RawWriter(daemon.socket, nbytes=64 << 10) as trainer:
        trainer.register(keep=1)
        trainer.reserve()
        slot = trainer.call("write.slot")["segment"]
        filler = Path("/proc", str(daemon.pid), "root", "dev", "shm", "filler")  # as the daemon sees it
        with trainer.opened(slot) as hole, open(filler, "wb", buffering=0) as full:
            os.ftruncate(hole, 0)  # as above
            _fill(full.fileno())
            error = trainer.refused("write.publish", step=1, set=trainer.set, segment=slot, checksums=False)
        filler.unlink()
        assert error.code == "integrity_error"
        assert daemon.ask("status")["jobs"][0]["open"] == []


def test_budget_is_kept_across_jobs_and_told(folder: Path) -> None:
    with Daemon(folder, "--memory-budget", "1MiB") as daemon, writer(daemon.socket, nbytes=100 << 10) as trainer:
        trainer.publish(1)
        with RawWriter(daemon.socket, "large", nbytes=400 << 10) as large:
            large.register()
            large.set = large.call("write.ready")["set"]
            error = large.refused("write.reserve", body=b"s", set=large.set, nbytes=400 << 10)
            assert isinstance(error, BudgetExceeded)
            assert "memory budget 0.7 MiB" in str(error)
            assert error.details["needed"] == 3 * (4096 + (400 << 10))
        trainer.publish(2)


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 60])
def test_size_that_no_machine_has_is_refused(daemon: Daemon, nbytes: int) -> None:
    with RawWriter(daemon.socket) as trainer:
        trainer.register()
        trainer.set = trainer.call("write.ready")["set"]
        error = trainer.refused("write.reserve", body=b"s", set=trainer.set, nbytes=nbytes)
        assert isinstance(error, BudgetExceeded)
        assert daemon.segments() == []


def _header(trainer: RawWriter, segment: str) -> bytes:
    with trainer.opened(segment) as fd:
        return os.pread(fd, 4096, 0)


def test_header_of_another_job_is_not_believed_after_a_restart(daemon: Daemon) -> None:
    with writer(daemon.socket, "victim") as victim, writer(daemon.socket, "thief") as thief:
        victim.publish(1)
        (name,) = [name for name in daemon.segments() if _sealed(name)]
        genuine = Path(f"/dev/shm/{name}").read_bytes()[:4096]
        slot = thief.begin(1)["segment"]
        with thief.opened(slot) as fd:
            os.pwrite(fd, genuine.replace(b'"step":1', b'"step":9'), 0)
            daemon.kill()
            os.pwrite(fd, genuine, 0)  # and as it is: right for another segment
    daemon.start()
    held = {job["job"]: job["held"] for job in daemon.ask("status")["jobs"]}
    assert held == {"root/victim": [[1, 1]], "root/thief": []}
    assert daemon.segments() == [name]


def test_header_that_a_writer_changed_in_its_own_segment_is_not_believed(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        begun = trainer.begin(1)
        with trainer.opened(begun["segment"]) as fd:
            trainer.seal(begun, 1)
            page = os.pread(fd, 4096, 0)
            assert b'"step":1' in page
            os.pwrite(fd, page.replace(b'"step":1', b'"step":9'), 0)
            daemon.kill()
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert job["held"] == []
    assert daemon.segments() == []


def test_header_of_an_earlier_version_put_back_does_not_bring_it_back(daemon: Daemon) -> None:
    # A withdrawn version must stay withdrawn, whatever its writer does to its own slot.
    with writer(daemon.socket) as trainer:
        trainer.publish(1)
        begun = trainer.begin(2)
        with trainer.opened(begun["segment"]) as fd:
            trainer.seal(begun, 2)
            page = os.pread(fd, 4096, 0)
            trainer.call("rollback", job="j", step=1)
            os.pwrite(fd, page, 0)
            daemon.kill()
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert (job["held"], job["last_step"]) == ([[1, 1]], 2)


def _sealed(name: str) -> bool:
    return Path(f"/dev/shm/{name}").read_bytes()[:8] == b"AWEXDSEG"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 5000, 1 << 20])
def test_segment_of_another_size_is_survived_now_and_after_a_restart(daemon: Daemon, size: int) -> None:
    with writer(daemon.socket) as trainer, reader(daemon.socket) as worker:
        kept = trainer.publish(1)["segment"]
        begun = trainer.begin(2)
        with trainer.opened(begun["segment"]) as fd:
            trainer.seal(begun, 2)
            os.ftruncate(fd, size)
            worker.call("read.resolve", step=2, lease_ms=1000, stage=False)
            for step in (3, 4, 5):
                trainer.publish(step)
            os.ftruncate(fd, size)
            daemon.ask("status")
            daemon.kill()
    daemon.start()
    assert daemon.ask("status")["jobs"]
    assert kept


def test_truncated_version_is_gone_after_a_restart_and_the_one_before_is_held(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        trainer.publish(1)
        begun = trainer.begin(2)
        with trainer.opened(begun["segment"]) as fd:
            trainer.seal(begun, 2)
            os.ftruncate(fd, 4096)
        daemon.kill()
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert job["held"] == [[1, 1]]


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _empty(path: Path) -> None:
    path.touch()


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 44)


def _noise(path: Path) -> None:
    path.write_bytes(b"AWEXDSEG" + bytes([1, 0, 0, 0]) + b"\xff" * 9000)


@pytest.mark.parametrize("make", [_directory, _pipe, _link, _empty, _sparse, _noise])
def test_entry_that_somebody_put_among_our_names_does_not_keep_the_daemon_from_starting(
    daemon: Daemon, make: Callable[[Path], None]
) -> None:
    with writer(daemon.socket) as trainer:
        trainer.publish(1)
        (own, *_) = daemon.segments()
    path = Path("/dev/shm") / (own.rsplit("-", 2)[0] + "-1-1")
    daemon.terminate()
    make(path)
    try:
        daemon.start()
        (job,) = daemon.ask("status")["jobs"]
        assert job["held"] == [[1, 1]]
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    assert Path("/etc/passwd").exists()


def test_segment_unlinked_by_somebody_else_is_survived(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        trainer.publish(1)
        for name in daemon.segments():
            os.unlink(f"/dev/shm/{name}")
        for step in (2, 3, 4):
            trainer.publish(step)
        daemon.ask("job.close", job="j")
        until(daemon.socket, lambda status: status["memory"]["used_bytes"] == 0)


def test_lost_manifest_costs_its_versions_only(daemon: Daemon) -> None:
    with writer(daemon.socket, "a") as one, writer(daemon.socket, "b") as other:
        one.publish(1)
        other.publish(1)
    daemon.terminate()
    for path in daemon.state_dir.glob("*/manifests/*"):
        if path.read_bytes() == b"segment of rank 0":
            path.write_bytes(b"damaged")
    daemon.start()
    assert [job["held"] for job in daemon.ask("status")["jobs"]] == [[], []]
    assert daemon.segments() == []


def test_collecting_garbage_forgets_the_manifests_of_closed_jobs_and_keeps_those_in_use(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, Raw(daemon.socket) as control:
        trainer.publish(1)
        control.call("gc")
        assert len(list(daemon.state_dir.glob("*/manifests/*"))) == 2
        daemon.restart()
        assert daemon.ask("status")["jobs"][0]["held"] == [[1, 1]]
    daemon.close_jobs()
    daemon.ask("gc")
    assert list(daemon.state_dir.glob("*/manifests/*")) == []


def test_garbage_collection_spares_what_a_rank_sealed_before_it_left(daemon: Daemon) -> None:
    first, second = (RawWriter(daemon.socket, rank=rank, size=2) for rank in range(2))
    for rank in (first, second):
        rank.register()
    for rank in (first, second):
        rank.reserve()
    begun = second.begin(1)
    first.publish(1)
    first.call("goodbye")
    first.close()
    until(daemon.socket, lambda status: status["jobs"][0]["writers"] == [1])
    daemon.ask("gc")
    second.seal(begun, 1)
    second.close()
    assert daemon.ask("read.sources", job="j", set=None)["set"]
    daemon.restart()
    assert daemon.ask("status")["jobs"][0]["held"] == [[1, 1]]


def test_garbage_collection_spares_what_is_being_registered(daemon: Daemon) -> None:
    with ExitStack() as stack:
        collecting = stack.enter_context(Raw(daemon.socket))
        for number in range(10):
            for _ in range(20):
                collecting.ask("gc")
            trainer = stack.enter_context(RawWriter(daemon.socket, f"j{number}"))
            own = b"manifest of %d" % number
            trainer.call("write.register", body=own, job=trainer.job, rank=0, world_size=1, epoch="continue", keep=1)
            trainer.set = trainer.call("write.ready")["set"]
            trainer.call("write.reserve", body=b"segment of %d" % number, set=trainer.set, nbytes=trainer.nbytes)
            trainer.publish(1)
            for _ in range(20):
                collecting.receive()
        daemon.kill()
    daemon.start()
    assert [job["held"] for job in daemon.ask("status")["jobs"]] == [[[1, 1]]] * 10


def test_manifests_that_nobody_uses_any_more_do_not_pile_up(daemon: Daemon) -> None:
    megabyte = bytes(1 << 20)
    with RawWriter(daemon.socket) as trainer:
        trainer.register()
        for number in range(40):
            body = b"%d" % number + megabyte
            trainer.call("write.register", body=body, job="j", rank=0, world_size=1, epoch="continue", keep=2)
    until(daemon.socket, lambda status: status["sessions"] == 1)
    daemon.close_jobs()
    left = sum(path.stat().st_size for path in daemon.state_dir.glob("*/manifests/*"))
    assert left < 10 << 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_daemon_that_ends_while_it_reserves_memory_leaves_none(daemon: Daemon, number: int) -> None:
    with RawWriter(daemon.socket) as trainer:
        trainer.register()
        trainer.set = trainer.call("write.ready")["set"]
        trainer.ask("write.reserve", body=b"s", set=trainer.set, nbytes=256 * MIB)
        end = time.monotonic() + 10
        while not daemon.segments() and time.monotonic() < end:
            os.sched_yield()
        daemon.terminate(number)
    if number == signal.SIGKILL:
        daemon.start()
    assert daemon.segments() == []


def test_restarting_many_times_leaks_nothing(daemon: Daemon) -> None:
    for step in range(3):
        with writer(daemon.socket) as trainer:
            trainer.publish(step)
            daemon.kill()
        daemon.start()
    assert len(daemon.segments()) == 2
    (job,) = daemon.ask("status")["jobs"]
    assert job["held"] == [[1, 2], [1, 1]]
