"""Other users of the machine: who may connect, write, read and see what."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from awexd_transports.errors import AccessDenied, AwexdError, from_wire
from tests.attacks.raw import DONE, Raw, reader, writer
from tests.attacks.test_attack_lending import borrow, lend
from tests.daemons import Daemon

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user: run as root")

# Connects, makes the calls that it reads from its input, and writes each answer as a line.
_CLIENT = """
import json, os, sys
from tests.attacks.raw import Raw
from awexd_transports.errors import AwexdError
# Only now: the interpreter may lie where that user cannot go.
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
raw = None
for line in sys.stdin:
    operation, body, arguments = json.loads(line)
    try:
        raw = raw or Raw(sys.argv[1])
        answer = {"ok": raw.call(operation, body=body and body.encode(), **arguments)}
    except AwexdError as error:
        answer = {"error": [error.code, error.message, error.details]}
    except OSError as error:
        answer = {"error": [type(error).__name__, str(error), {}]}
    print(json.dumps(answer), flush=True)
"""


class Foreigner:
    """A process of user 65534, with one connection."""

    def __init__(self, path: str) -> None:
        root = str(Path(__file__).parents[2])
        environ = {"PYTHONPATH": os.pathsep.join([root, *sys.path]), "PATH": os.environ.get("PATH", "")}
        command = [sys.executable, "-c", _CLIENT, path, str(NOBODY)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def call(self, operation: str, *, body: str | None = None, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([operation, body, arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise from_wire(*answer["error"])
        result: dict[str, Any] = answer["ok"]
        return result

    def refused(self, operation: str, *, body: str | None = None, **arguments: Any) -> AwexdError:
        with pytest.raises(AwexdError) as failure:
            self.call(operation, body=body, **arguments)
        return failure.value

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


def _open_to_all(folder: Path) -> Path:
    folder.chmod(0o755)
    return folder


@pytest.fixture
def public(folder: Path) -> Iterator[Daemon]:
    """A daemon that every user of the machine can connect to."""
    with Daemon(_open_to_all(folder), "--socket-mode", "666") as running:
        yield running


@pytest.fixture
def foreigner(public: Daemon) -> Iterator[Foreigner]:
    made = Foreigner(public.socket)
    yield made
    made.close()


def test_socket_is_closed_to_others_unless_its_mode_says_otherwise(folder: Path) -> None:
    with Daemon(_open_to_all(folder)) as daemon:
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o660
        stranger = Foreigner(daemon.socket)
        assert "PermissionError" in str(stranger.refused("status"))
        stranger.close()


def test_user_who_is_not_allowed_is_refused_at_the_hello(folder: Path) -> None:
    with Daemon(_open_to_all(folder), "--socket-mode", "666", "--allow-uids", "1234") as daemon:
        stranger = Foreigner(daemon.socket)
        for _ in range(20):  # each a connection of its own: whoever is faster, it is told why
            error = stranger.refused("status")
            assert isinstance(error, AccessDenied), error
            assert "uid 65534 is not among those" in str(error)
        stranger.close()
        daemon.ask("status")


@pytest.mark.parametrize("option", ["--allow-uids", "--allow-gids"])
def test_user_who_is_allowed_by_uid_or_group_is_served(folder: Path, option: str) -> None:
    with Daemon(_open_to_all(folder), "--socket-mode", "666", option, f"1234,{NOBODY}") as daemon:
        stranger = Foreigner(daemon.socket)
        assert stranger.call("status")["jobs"] == []
        stranger.close()


def test_bare_names_of_two_users_never_meet(public: Daemon, foreigner: Foreigner) -> None:
    with writer(public.socket, "grpo") as own:
        own.publish(1)
        registration = {"job": "grpo", "rank": 0, "world_size": 1, "epoch": "continue", "keep": 1}
        theirs = foreigner.call("write.register", body="m", **registration)
        assert theirs["job"] != "root/grpo"
        assert [job["job"] for job in foreigner.call("status")["jobs"]] == [theirs["job"]]
        assert {job["job"] for job in public.ask("status")["jobs"]} == {"root/grpo", theirs["job"]}


def test_other_users_job_can_be_neither_read_written_nor_controlled(public: Daemon, foreigner: Foreigner) -> None:
    name = "root/j"
    worker = {"engine": "e", "rank": 0, "world_size": 1}
    with writer(public.socket) as own:
        own.publish(1)
        attempts: list[tuple[str, str | None, dict[str, Any]]] = [
            ("write.register", "m", {"rank": 0, "world_size": 1, "epoch": "new", "keep": 2}),
            ("read.register", "m", worker),
            ("read.sources", None, {}),
            ("manifests", None, {}),
            ("versions", None, {}),
            ("drop", None, {}),
            ("rollback", None, {"step": 1}),
            ("job.close", None, {}),
            ("job.grant", None, {"uids": [NOBODY], "gids": []}),
        ]
        for operation, body, arguments in attempts:
            error = foreigner.refused(operation, body=body, job=name, **arguments)
            assert isinstance(error, AccessDenied), operation
        assert isinstance(foreigner.refused("gc"), AccessDenied)
        assert foreigner.call("versions")["versions"] == []
        assert [row["role"] for row in foreigner.call("sessions")["sessions"]] == ["control"]
        (job,) = public.ask("status")["jobs"]
        assert (job["held"], job["writers"]) == ([[1, 1]], [0])


def test_job_that_does_not_exist_looks_like_one_that_may_not_be_read(foreigner: Foreigner) -> None:
    there = foreigner.refused("read.sources", job="root/nothing")
    assert isinstance(there, AccessDenied)


@pytest.mark.parametrize("by", ["uids", "gids"])
def test_granted_user_reads_and_does_nothing_else(public: Daemon, foreigner: Foreigner, by: str) -> None:
    with writer(public.socket) as own:
        own.publish(1)
        granted = {"uids": list[int](), "gids": list[int]()} | {by: [NOBODY]}
        own.call("job.grant", job="j", uids=granted["uids"], gids=granted["gids"])
        foreigner.call("read.register", body="w", job="root/j", engine="e", rank=0, world_size=1)
        answer = foreigner.call("read.resolve", step=None, lease_ms=1000, stage=False)
        assert answer["step"] == 1
        foreigner.call("segment.open", ids=[answer["segments"][0][0]])
        foreigner.call("read.confirm", lease=answer["lease"], **DONE)
        for operation in ("drop", "job.close"):
            assert isinstance(foreigner.refused(operation, job="root/j"), AccessDenied)


def test_granted_user_never_gets_gpu_memory_which_he_could_write_to(public: Daemon, foreigner: Foreigner) -> None:
    with writer(public.socket) as own:
        own.publish(1)
        own.call("job.grant", job="j", uids=[NOBODY], gids=[])
        foreigner.call("read.register", body="w", job="root/j", engine="e", rank=0, world_size=1, devices=["GPU-0"])
        borrow(own, 2, lend(own))
        assert foreigner.call("read.resolve", step=None, lease_ms=1000, stage=False)["step"] == 1
        error = foreigner.refused("read.resolve", step=2, lease_ms=1000, stage=False)
        assert "lent by its trainer" in str(error)


def test_grant_outlives_a_restart_and_a_reader_that_came_before_the_trainer(public: Daemon) -> None:
    public.ask("job.grant", job="j", uids=[NOBODY], gids=[])
    for _ in range(2):
        stranger = Foreigner(public.socket)
        stranger.call("read.register", body="w", job="root/j", engine="e", rank=0, world_size=1)
        stranger.close()
    public.restart()
    stranger = Foreigner(public.socket)
    stranger.call("read.register", body="w", job="root/j", engine="e", rank=0, world_size=1)
    stranger.close()


def test_readers_descriptor_cannot_be_written_or_truncated(public: Daemon) -> None:
    with writer(public.socket) as own, reader(public.socket) as worker:
        slot = own.publish(1)["segment"]
        worker.call("read.resolve", step=None, lease_ms=1000, stage=False)
        _, (fd,) = worker.answer(worker.ask("segment.open", ids=[slot]))
        with pytest.raises(OSError):  # noqa: PT011 - EBADF, EINVAL or EACCES
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):  # noqa: PT011
            os.ftruncate(fd, 0)
        os.close(fd)


def test_what_the_daemon_keeps_on_disk_is_closed_to_others(public: Daemon) -> None:
    with writer(public.socket) as own:
        own.publish(1)
        for path in public.state_dir.rglob("*"):
            reachable = all(p.stat().st_mode & 0o005 for p in path.parents if public.state_dir in (p, *p.parents))
            assert path.is_dir() or not (reachable and path.stat().st_mode & 0o077), path
        for name in public.segments():
            assert stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) == 0o600


def test_secrets_of_the_environment_are_in_no_log_status_or_error(folder: Path) -> None:
    secret = "s3cr3t-hunter2"
    with Daemon(folder, "--log-level", "DEBUG", environ={"HF_TOKEN": secret, "WANDB_API_KEY": secret}) as daemon:
        with writer(daemon.socket) as own, Raw(daemon.socket) as odd:
            own.publish(1)
            said = [odd.call(operation) for operation in ("status", "versions", "sessions")]
            said.append(odd.refused("read.wait", step=1).details)
        assert secret not in json.dumps(said)
        daemon.restart()
        assert secret not in daemon.log()


def test_setting_that_is_unknown_is_refused_without_its_value(folder: Path) -> None:
    daemon = Daemon(folder)
    done = subprocess.run(
        daemon.command, env=daemon.environ | {"AWEXD_TOKEN": "s3cr3t"}, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "unknown setting 'token'" in done.stderr
    assert "s3cr3t" not in done.stderr + done.stdout
