from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from tests.attacks.raw import Raw, RawWriter, reader, until, writer
from tests.daemons import Daemon


def refused(daemon: Daemon, *changes: str) -> str:
    """What a daemon that must not start says."""
    command = [*daemon.command, *changes]  # a repeated option: the last one counts
    done = subprocess.run(command, env=daemon.environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_second_daemon_on_the_same_path_is_refused_and_the_first_serves_on(daemon: Daemon) -> None:
    assert "another daemon serves" in refused(daemon)
    daemon.ask("status")


def test_second_daemon_on_another_path_with_the_same_folder_is_served_beside_it(daemon: Daemon, folder: Path) -> None:
    other = folder / "b"
    other.mkdir()
    with Daemon(other, "--state-dir", str(daemon.state_dir)) as second:
        second.ask("status")
        daemon.ask("status")


def test_socket_file_of_a_killed_daemon_is_taken_over(daemon: Daemon) -> None:
    daemon.kill()
    assert os.path.exists(daemon.socket)
    daemon.start().ask("status")


def test_socket_of_something_else_that_lives_is_left_alone(folder: Path) -> None:
    daemon = Daemon(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(daemon.socket)
        other.listen()
        assert "another daemon serves" in refused(daemon)
        assert stat.S_ISSOCK(os.lstat(daemon.socket).st_mode)


def test_path_of_a_regular_file_is_refused_and_the_file_left(folder: Path) -> None:
    daemon = Daemon(folder)
    Path(daemon.socket).write_text("precious")
    assert "is no socket" in refused(daemon)
    assert Path(daemon.socket).read_text() == "precious"


def test_path_that_is_a_link_to_a_file_is_refused(folder: Path) -> None:
    daemon = Daemon(folder)
    (folder / "target").write_text("precious")
    os.symlink(folder / "target", daemon.socket)
    assert "is no socket" in refused(daemon)


@pytest.mark.parametrize("length", [108, 500])
def test_path_that_the_kernel_would_cut_is_refused(folder: Path, length: int) -> None:
    path = str(folder / "x").ljust(length, "x")
    assert f"{length} bytes; the kernel takes 107" in refused(Daemon(folder), "--socket", path)


def test_path_of_107_bytes_is_served(folder: Path) -> None:
    path = str(folder / "x").ljust(107, "x")
    daemon = Daemon(folder, "--socket", path)
    daemon.socket = path
    with daemon:
        daemon.ask("status")


def test_folder_that_does_not_exist_is_named(folder: Path) -> None:
    assert "No such file" in refused(Daemon(folder), "--socket", str(folder / "none" / "none" / "s"))


def test_state_folder_in_use_by_another_daemon_is_named(daemon: Daemon, folder: Path) -> None:
    # The same socket name reached through a link: the same state, another path.
    os.symlink(folder, folder / "link")
    message = refused(daemon, "--socket", str(folder / "link" / "s"))
    assert "another daemon" in message
    daemon.ask("status")


def test_state_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "file").write_text("")
    message = refused(Daemon(folder), "--state-dir", str(folder / "file" / "state"))
    assert "--state-dir" in message
    assert not os.path.exists(folder / "s")


def test_damaged_record_is_named_and_left(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        trainer.publish(1)
    daemon.terminate()
    (record,) = daemon.state_dir.glob("*/jobs/*.json")
    good = record.read_bytes()
    record.write_bytes(good[:-5])
    assert str(record) in refused(daemon)
    assert record.exists()
    record.write_bytes(good)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o640])
def test_socket_has_its_mode_from_the_start(folder: Path, mode: int) -> None:
    with Daemon(folder, "--socket-mode", f"{mode:o}") as daemon:
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == mode


def test_stopping_tells_clients_keeps_what_is_committed_and_unlinks_the_rest(daemon: Daemon) -> None:
    trainer = writer(daemon.socket)
    kept = trainer.publish(1)["segment"]
    trainer.begin(2)
    waiting = reader(daemon.socket)
    number = waiting.ask("read.wait", step=9, deadline_ms=3_600_000)
    assert daemon.terminate() == -signal.SIGTERM
    for client in (trainer, waiting):
        assert client.end() == {"bye": {"reason": "the daemon is stopping"}}
        client.close()
    assert number
    assert [name.rsplit("-", 2)[1:] for name in daemon.segments()] == [kept.split("-")]
    assert not os.path.lexists(daemon.socket)
    assert not os.path.lexists(f"{daemon.socket}.lock")
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert (job["held"], job["open"], job["last_step"]) == ([[1, 1]], [], 1)


def test_epoch_and_last_step_outlive_a_kill_right_after_a_rollback(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        for step in (1, 2):
            trainer.publish(step)
        trainer.call("rollback", job="j", step=1)
        daemon.kill()
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert (job["held"], job["last_step"]) == ([[1, 1]], 2)
    with writer(daemon.socket) as trainer:
        assert "not after step 2" in str(trainer.refused("write.begin", step=2, set=trainer.set))
        trainer.publish(3)


def test_versions_of_two_ranks_are_back_after_a_kill_only_if_both_had_sealed(daemon: Daemon) -> None:
    with writer_of_two(daemon, 0) as first, writer_of_two(daemon, 1) as second:
        for rank in (first, second):
            rank.reserve()
        begun = [rank.begin(1) for rank in (first, second)]
        for rank, one in zip((first, second), begun, strict=True):
            rank.seal(one, 1)
        one = first.begin(2)
        second.begin(2)
        first.seal(one, 2)
        daemon.kill()
    daemon.start()
    (job,) = daemon.ask("status")["jobs"]
    assert job["held"] == [[1, 1]]
    assert len(daemon.segments()) == 2


def writer_of_two(daemon: Daemon, rank: int) -> RawWriter:
    made = RawWriter(daemon.socket, rank=rank, size=2)
    made.register()
    return made


def test_job_is_closed_after_its_time_and_its_memory_goes(folder: Path) -> None:
    with Daemon(folder, "--job-ttl", "0.5") as daemon:
        with writer(daemon.socket) as trainer:
            trainer.publish(1)
        assert daemon.segments()
        until(daemon.socket, lambda status: not status["jobs"])
        until(daemon.socket, lambda status: not daemon.segments())


def test_closing_a_job_frees_its_memory_and_forgets_its_record(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, Raw(daemon.socket) as control:
        trainer.publish(1)
        control.call("job.close", job="j")
        until(daemon.socket, lambda status: not daemon.segments())
        assert "closed" in str(trainer.refused("write.begin", step=2, set=trainer.set))
        daemon.terminate()
        assert list(daemon.state_dir.glob("*/jobs/*")) == []


def test_missing_folder_of_the_socket_is_made(folder: Path) -> None:
    with Daemon(folder, "--socket", str(folder / "run" / "s")) as daemon:
        daemon.socket = str(folder / "run" / "s")
        daemon.ask("status")
