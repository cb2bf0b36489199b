"""Clients that lend what they have not, take what was not lent to them, or never give it back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from awexd.manifests import lasting_memfd, sealed_memfd
from awexd.protocol import Message, encode
from awexd_transports.errors import AwexdError, InvalidArgument, ProtocolError, from_wire
from tests.attacks.raw import Raw, RawWriter, reader, until, writer
from tests.daemons import Daemon

NBYTES = 8192


def send(raw: Raw, operation: str, fds: list[int], arguments: dict[str, Any]) -> Message:
    """A request with descriptors, which are closed; its result, or the error that it is."""
    try:
        message = {"id": 9000, "op": operation, "args": arguments, "deadline_ms": 2000}
        raw.send(encode(message | ({"fds": len(fds)} if fds else {})), fds)
    finally:
        for fd in fds:
            os.close(fd)
    reply = raw.receive()
    if "error" in reply:
        raise from_wire(reply["error"]["code"], reply["error"]["message"], {})
    assert "ok" in reply, reply
    return dict(reply["ok"])


def lend(trainer: RawWriter, fd: int | None = None, nbytes: int = NBYTES) -> str:
    made = lasting_memfd("lent", nbytes) if fd is None else fd
    return str(send(trainer, "write.lend", [made], {"nbytes": nbytes, "devices": ["GPU-0"]})["segment"])


def borrow(trainer: RawWriter, step: int, segment: str, *, affirm: bool = True) -> Message:
    given: dict[str, Any] = {"step": step, "set": trainer.set, "segment": segment, "checksums": False}
    answer = trainer.call("write.borrow", **given)
    if affirm:
        trainer.call("write.affirm", step=step, attempt=answer["attempt"], good=True)
    return answer


def gpu_reader(path: str, engine: str = "e") -> Raw:
    made = Raw(path)
    who: dict[str, Any] = {"job": "j", "engine": engine, "rank": 0, "world_size": 1}
    made.call("read.register", body=b"worker", devices=["GPU-0"], **who)
    return made


def resolve(raw: Raw, **more: Any) -> Message:
    return raw.call("read.resolve", **{"step": None, "lease_ms": 5000, "stage": False} | more)


def _unsealed() -> int:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    return fd


@pytest.mark.parametrize("kind", ["unsealed", "a pipe", "a file", "smaller", "larger", "none", "two"])
def test_memory_is_described_by_one_lasting_memfd_of_the_size_that_is_said(daemon: Daemon, kind: str) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    made: dict[str, Callable[[], list[int]]] = {
        "unsealed": lambda: [_unsealed()],
        "a pipe": lambda: [os.dup(reading)],
        "a file": lambda: [os.open("/etc/passwd", os.O_RDONLY)],
        "smaller": lambda: [lasting_memfd("t", NBYTES // 2)],
        "larger": lambda: [sealed_memfd("t", [bytes(2 * NBYTES)])],
        "none": list,
        "two": lambda: [lasting_memfd("t", NBYTES) for _ in range(2)],
    }
    with writer(daemon.socket) as trainer:
        given = {"nbytes": NBYTES, "devices": ["GPU-0"]}
        with pytest.raises((ProtocolError, AssertionError)):
            send(trainer, "write.lend", made[kind](), given)
    os.close(reading)
    with writer(daemon.socket) as trainer:
        assert lend(trainer)


def test_only_its_owner_publishes_it_and_only_while_it_is_lent(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, writer(daemon.socket, "other") as other:
        segment, foreign = lend(trainer), lend(other)
        for wrong in (foreign, trainer.segments[0], "g" * 17, "../x"):
            given: dict[str, Any] = {"step": 1, "set": trainer.set, "segment": wrong, "checksums": False}
            assert trainer.refused("write.borrow", **given).code == "version_conflict"
        again = lend(trainer)
        given = {"step": 1, "set": trainer.set, "segment": segment, "checksums": False}
        assert trainer.refused("write.borrow", **given).code == "version_conflict"
        assert borrow(trainer, 1, again)["committed"]
        with pytest.raises(AwexdError):
            trainer.answer(trainer.ask("segment.open", ids=[again]))


def test_descriptions_are_for_leaseholders_and_are_the_very_memfd(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
        fd = lasting_memfd("lent", NBYTES)
        os.pwrite(fd, b"description", 0)
        segment = lend(trainer, os.dup(fd))
        borrow(trainer, 1, segment)
        with pytest.raises(AwexdError, match="neither written nor leased"):
            engine.answer(engine.ask("segment.open", ids=[segment]))
        answer = resolve(engine)
        assert (answer["borrowed"], answer["segments"]) == (True, [[segment, NBYTES, False]])
        _, (opened,) = engine.answer(engine.ask("segment.open", ids=[segment]))
        assert os.pread(opened, 11, 0) == b"description"
        with pytest.raises(PermissionError):
            os.ftruncate(opened, 1)
        os.close(opened)
        os.close(fd)


def test_worker_without_devices_never_gets_a_borrowed_version(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, reader(daemon.socket) as engine:
        borrow(trainer, 1, lend(trainer))
        error = engine.refused("read.resolve", step=None, lease_ms=1000, stage=False, deadline_ms=200)
        assert error.code == "deadline_exceeded"


def test_flood_of_declarations_keeps_one(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        lend(trainer)
        before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        for _ in range(200):
            lend(trainer)
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before
        assert daemon.ask("status")["memory"]["used_bytes"] < 1 << 20


def test_writer_that_never_affirms_is_named_at_the_deadline(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
        borrow(trainer, 1, lend(trainer), affirm=False)
        lease = resolve(engine)["lease"]
        told = {"lease": lease, "nbytes": 1, "stage_us": 1, "pause_us": 1}
        error = engine.refused("read.confirm", **told, deadline_ms=300)
        assert "rank 0 to affirm" in str(error)
        (worker,) = daemon.ask("status")["jobs"][0]["engines"][0]["workers"]
        assert worker["version"] is None


def test_affirmation_of_another_attempt_changes_nothing(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
        answer = borrow(trainer, 1, lend(trainer))
        for attempt in (1, answer["attempt"] + 1):
            trainer.call("write.affirm", step=1, attempt=attempt, good=False)
        trainer.call("write.affirm", step=2, attempt=answer["attempt"], good=False)
        assert resolve(engine)["step"] == 1


class TestChunks:
    def ask(self, engine: Raw, segment: str, first: int = 0, count: int = 2, deadline_ms: int = 5000) -> int:
        return engine.ask("segment.chunks", id=segment, first=first, count=count, deadline_ms=deadline_ms)

    def give(self, trainer: RawWriter, segment: str, number: int, text: bytes = b"") -> None:
        fd = sealed_memfd("chunk", [text or b"%d" % number])
        send(trainer, "write.give", [fd], {"segment": segment, "number": number})

    def test_chunks_come_in_order_whoever_asks_first(self, daemon: Daemon) -> None:
        with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            resolve(engine)
            number = self.ask(engine, segment, 3, 2)
            assert trainer.call("write.asked") == {"segment": segment, "first": 3, "count": 2}
            for chunk in (4, 3):
                self.give(trainer, segment, chunk)
            _, fds = engine.answer(number)
            assert [os.pread(fd, 10, 0) for fd in fds] == [b"3", b"4"]
            for fd in fds:
                os.close(fd)

    def test_only_for_leaseholders_and_only_what_was_asked_for(self, daemon: Daemon) -> None:
        with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            assert engine.refused("segment.chunks", id=segment, first=0, count=1).code == "version_unavailable"
            with pytest.raises(ProtocolError, match="not asked for"):
                self.give(trainer, segment, 0)
            with writer(daemon.socket, "other") as other, pytest.raises(ProtocolError, match="session's own memory"):
                self.give(other, segment, 0)
            for bad in ({"count": 0}, {"count": 1000}, {"first": -1}, {"first": 1 << 40}):
                given: dict[str, Any] = {"id": segment, "first": 0, "count": 1, **bad}
                assert isinstance(engine.refused("segment.chunks", **given), InvalidArgument)

    def test_owner_that_hands_nothing_over_is_named(self, daemon: Daemon) -> None:
        with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            resolve(engine)
            with pytest.raises(AwexdError, match="rank 0 to hand over"):
                engine.answer(self.ask(engine, segment, deadline_ms=200))

    def test_chunk_that_was_asked_for_and_did_not_come_is_asked_for_again(self, daemon: Daemon) -> None:
        with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            resolve(engine)
            number = self.ask(engine, segment, 0, 2)
            assert trainer.call("write.asked") == {"segment": segment, "first": 0, "count": 2}
            self.give(trainer, segment, 0)
            assert trainer.call("write.asked") == {"segment": segment, "first": 1, "count": 1}
            self.give(trainer, segment, 1)
            for fd in engine.answer(number)[1]:
                os.close(fd)

    def test_what_nobody_took_goes_at_once_with_the_memory(self, daemon: Daemon) -> None:
        with writer(daemon.socket) as trainer, gpu_reader(daemon.socket) as engine:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            resolve(engine)
            self.ask(engine, segment)
            trainer.call("write.asked")
            self.give(trainer, segment, 0)
            assert self.chunks(daemon) == 1
            lend(trainer)
            assert self.chunks(daemon) == 0

    def test_nothing_is_kept_of_what_nobody_took(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        with writer(daemon.socket) as trainer:
            segment = lend(trainer)
            borrow(trainer, 1, segment)
            with gpu_reader(daemon.socket) as engine:
                resolve(engine)
                self.ask(engine, segment)
                trainer.call("write.asked")
                self.give(trainer, segment, 0)
            until(daemon.socket, lambda _: self.chunks(daemon) == 0, seconds=30.0)

    @staticmethod
    def chunks(daemon: Daemon) -> int:
        found = 0
        for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += "memfd:chunk" in os.readlink(link)
        return found


def test_revoke_names_who_has_it_mapped_and_ends_with_them(daemon: Daemon) -> None:
    with writer(daemon.socket) as trainer:
        segment = lend(trainer)
        answer = borrow(trainer, 1, segment)
        with gpu_reader(daemon.socket) as engine:
            lease = resolve(engine)["lease"]
            _, (fd,) = engine.answer(engine.ask("segment.open", ids=[segment]))
            os.close(fd)
            engine.call("read.confirm", lease=lease, nbytes=1, stage_us=1, pause_us=1)
            attempted = {"epoch": answer["epoch"], "step": 1, "attempt": answer["attempt"]}
            trainer.call("write.captured", **attempted, at_once=False)
            dropped = engine.ask("segment.dropped")
            error = trainer.refused("write.revoke", deadline_ms=200)
            assert f"processes {os.getpid()} to close" in str(error)
            assert engine.receive()["drop"] == [segment]
            assert dropped
        trainer.call("write.revoke")
