"""Malformed frames and requests: each ends its own connection at most, and the daemon serves on."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from awexd.manifests import sealed_memfd
from awexd.protocol import MAX_FDS, MAX_FRAME_BYTES, PROTOCOL_VERSION, encode, hello
from awexd_transports.errors import AccessDenied, AwexdError, InvalidArgument, ProtocolError
from tests.attacks.raw import DONE, Raw, until, writer
from tests.daemons import Daemon

FDS_OF_A_SESSION = 2
"""Its socket and its process's pidfd."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all of these: it must survive every one of them, and close every descriptor that it was sent."""
    with Daemon(tmp_path_factory.mktemp("d")) as running:
        fds = _fds(running)
        yield running
        until(running.socket, lambda status: status["sessions"] == 1)
        assert _fds(running) <= fds + FDS_OF_A_SESSION


@pytest.fixture
def serving(shared: Daemon) -> Iterator[Daemon]:
    """The daemon, with a bystander who must be served after the attack as before."""
    with Raw(shared.socket) as bystander:
        bystander.call("status")
        yield shared
        bystander.call("status")


def _fds(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


MALFORMED = {
    "not JSON": _frame(b"\x80\x04\x95pickle."),
    "an empty frame": _frame(b""),
    "not an object": _frame(b"[1]"),
    "not UTF-8": _frame(b'{"id":"\xff"}'),
    "half an escape": _frame(b'{"id":"\\ud800"}'),
    "a 2 GiB frame": struct.pack("<I", 2 << 30),
    "one byte too large": struct.pack("<I", MAX_FRAME_BYTES + 1),
    "JSON too deep to parse": _frame(b'{"id":1,"op":' + _deep(5000) + b"}"),
    "no id": _frame(b'{"op":"status"}'),
    "an id that is no number": _frame(b'{"id":"1","op":"status","args":{},"deadline_ms":1}'),
    "a negative id": _frame(b'{"id":-1,"op":"status","args":{},"deadline_ms":1}'),
    "an id that is true": _frame(b'{"id":true,"op":"status","args":{},"deadline_ms":1}'),
    "a descriptor that is not there": _frame(b'{"id":1,"op":"status","args":{},"deadline_ms":1,"fds":1}'),
    "a negative count of descriptors": _frame(b'{"id":1,"op":"status","args":{},"deadline_ms":1,"fds":-1}'),
    "a count that is text": _frame(b'{"id":1,"op":"status","args":{},"deadline_ms":1,"fds":"1"}'),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_frame_ends_that_connection_saying_why(serving: Daemon, kind: str) -> None:
    with Raw(serving.socket) as raw:
        raw.send(MALFORMED[kind])
        said = raw.end()
    assert said.get("bye", {}).get("code") == ProtocolError.code, said


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_hello_ends_that_connection(serving: Daemon, kind: str) -> None:
    with Raw(serving.socket, greet=False) as raw:
        raw.send(MALFORMED[kind])
        raw.end()


@pytest.mark.parametrize(
    "body",
    [
        {"hello": {"protocol": 1, "version": "x"}},
        {"hello": {"version": "x"}},
        {"hello": []},
        {"hello": None},
        {"id": 1, "op": "status", "args": {}, "deadline_ms": 1},
    ],
)
def test_first_message_that_is_not_our_hello_is_refused(serving: Daemon, body: dict[str, Any]) -> None:
    with Raw(serving.socket, greet=False) as raw:
        raw.send(encode(body))
        assert raw.end()["bye"]["code"] == ProtocolError.code


def _request(**changes: Any) -> bytes:
    return encode({"id": 7, "op": "versions", "args": {"job": None}, "deadline_ms": 1000} | changes)


BAD_REQUESTS = {
    "an unknown operation": _request(op="shutdown"),
    "an operation that is a list": _request(op=["status"]),
    "an operation as deep as JSON may be": _frame(b'{"id":7,"op":' + _deep(1000) + b',"args":{},"deadline_ms":1}'),
    "no operation": _request(op=None),
    "arguments that are a list": _request(args=[]),
    "an argument missing": _request(args={}),
    "an argument unknown": _request(args={"job": None, "path": "/etc/passwd"}),
    "an argument of another kind": _request(args={"job": 5}),
    "an argument as deep as JSON may be": _frame(
        b'{"id":7,"op":"versions","args":{"job":' + _deep(1000) + b'},"deadline_ms":1}'
    ),
    "an argument with NUL": _request(args={"job": "a\0b"}),
    "an argument with a line break": _request(args={"job": "a\nb"}),
    "an empty argument": _request(args={"job": ""}),
    "a long argument": _request(args={"job": "x" * 300}),
    "a path upwards": _request(args={"job": "../../etc/passwd"}),
    "a path upwards in an owner": _request(args={"job": "../x"}),
    "two slashes": _request(args={"job": "a/b/c"}),
    "a leading dot": _request(args={"job": ".x"}),
    "no deadline": _request(deadline_ms=None),
    "a deadline that is text": _request(deadline_ms="1"),
    "a deadline that is true": _request(deadline_ms=True),
    "a negative deadline": _request(deadline_ms=-1),
    "a deadline of a year": _request(deadline_ms=365 * 24 * 3600 * 1000),
    "a number that no integer holds": _request(deadline_ms=1e300),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_bad_request_is_refused_and_its_connection_serves_on(serving: Daemon, kind: str) -> None:
    with Raw(serving.socket) as raw:
        raw.send(BAD_REQUESTS[kind])
        reply = raw.receive()
        assert (reply["id"], reply["error"]["code"]) == (7, InvalidArgument.code)
        assert len(reply["error"]["message"]) < 1000
        raw.call("status")


def test_hello_byte_by_byte_is_a_hello(serving: Daemon) -> None:
    with Raw(serving.socket, greet=False) as raw:
        for byte in encode(hello("test", pid=os.getpid())):
            raw.send(bytes([byte]))
        assert raw.receive()["hello"]["protocol"] == PROTOCOL_VERSION
        raw.call("status")


def test_half_a_frame_and_then_the_end_is_only_an_end(serving: Daemon) -> None:
    with Raw(serving.socket) as raw:
        raw.send(_request()[:10])


def test_requests_in_one_packet_are_all_answered(serving: Daemon) -> None:
    with Raw(serving.socket) as raw:
        raw.send(b"".join(_request(id=number) for number in range(20)))
        assert {raw.receive()["id"] for _ in range(20)} == set(range(20))


@pytest.mark.parametrize("count", [1, 2, MAX_FDS, 253])
def test_descriptors_that_no_request_wants_are_closed(serving: Daemon, count: int) -> None:
    reading, writing = os.pipe()
    with Raw(serving.socket) as raw:
        raw.send(encode({"id": 1, "op": "status", "args": {}, "deadline_ms": 1000, "fds": count}), [writing] * count)
        with suppress(EOFError, ConnectionResetError):
            raw.receive()
    os.close(writing)
    assert os.read(reading, 1) == b"", "the daemon holds on to one of them"
    os.close(reading)


def test_descriptors_on_a_frame_that_names_none_end_the_connection(serving: Daemon) -> None:
    reading, writing = os.pipe()
    with Raw(serving.socket) as raw:
        raw.send(_request(), [writing])
        raw.end()
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_descriptors_trickled_without_a_frame_are_bounded(serving: Daemon) -> None:
    reading, writing = os.pipe()
    with Raw(serving.socket) as raw:
        try:
            for _ in range(10):
                raw.send(b"\1", [writing] * 100)
            ended = raw.end() is not None
        except (BrokenPipeError, ConnectionResetError):
            ended = True
    assert ended
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def _unsealed(body: bytes) -> int:
    fd = os.memfd_create("unsealed")
    os.write(fd, body)
    return fd


def _named(path: str) -> int:
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("kind", ["unsealed", "a pipe", "a file", "another digest", "none", "two"])
def test_body_that_is_not_the_sealed_manifest_it_names_is_refused(serving: Daemon, kind: str) -> None:
    arguments = {
        "job": "j",
        "rank": 0,
        "world_size": 1,
        "epoch": "continue",
        "keep": 2,
        "after": None,
        "digest": "ab" * 32,
    }
    reading, writing = os.pipe()
    made = {
        "unsealed": [_unsealed(b"x")],
        "a pipe": [reading],
        "a file": [_named("/etc/passwd")],
        "another digest": [sealed_memfd("x", [b"x"])],
        "none": [],
        "two": [sealed_memfd("x", [b"x"]), sealed_memfd("x", [b"x"])],
    }
    with closing(Raw(serving.socket)) as raw:
        fds = made[kind]
        message = {
            "id": 1,
            "op": "write.register",
            "args": arguments | {"after": None, "mode": "auto", "lends": False},
            "deadline_ms": 1000,
        }
        raw.send(encode(message | ({"fds": len(fds)} if fds else {})), fds)
        reply = raw.receive()
        code = (reply.get("error") or reply["bye"])["code"]
        assert code in (ProtocolError.code, InvalidArgument.code)
    for fd in {fd for several in made.values() for fd in several} | {reading, writing}:
        os.close(fd)
    assert serving.ask("status")["jobs"] == []


def test_argument_numbers_out_of_range_are_refused(serving: Daemon) -> None:
    good: dict[str, Any] = {"job": "j", "rank": 0, "world_size": 1, "epoch": "continue", "keep": 2}
    bad: list[dict[str, Any]] = [
        {"rank": -1},
        {"rank": 1 << 40},
        {"rank": True},
        {"rank": 0.0},
        {"world_size": 0},
        {"keep": 0},
        {"keep": 17},
        {"epoch": 0},
        {"epoch": "newest"},
        {"epoch": None},
        {"digest": "AB" * 32},
        {"digest": "ab" * 31},
        {"digest": None},
    ]
    with Raw(serving.socket) as raw:
        for change in bad:
            error = raw.refused("write.register", body=b"m", **(good | change))
            assert isinstance(error, InvalidArgument), change


def test_segments_of_others_and_names_that_are_paths_cannot_be_opened(serving: Daemon) -> None:
    with writer(serving.socket, "mine") as own, writer(serving.socket, "other") as other:
        segment = other.begin(1)["segment"]
        for name in (segment, "../../etc/passwd", "/dev/shm/x", "0-0"):
            assert own.refused("segment.open", ids=[name]).code == AccessDenied.code
        own.call("segment.closed", ids=[segment, "nonsense"])
        own.call("job.close", job="mine")
        own.call("job.close", job="other")


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("write.ready", {}),
        ("write.begin", {"step": 1, "set": "ab" * 32}),
        ("write.seal", {"epoch": 1, "step": 1, "attempt": 1, "checksums": False}),
        ("write.abort", {"epoch": 1, "step": 1, "attempt": 1, "reason": ""}),
        ("write.committed", {"epoch": 1, "step": 1, "attempt": 1}),
        ("read.siblings", {}),
        ("read.resolve", {"step": None, "lease_ms": 1, "stage": False}),
        ("read.confirm", {"lease": "l1", **DONE}),
        ("read.release", {"lease": "l1", "dirty": True, "error": ["error", "why"]}),
        ("read.wait", {"step": 1}),
        ("segment.open", {"ids": ["x"]}),
    ],
)
def test_call_of_a_session_that_has_not_registered_is_refused(
    serving: Daemon, operation: str, arguments: dict[str, Any]
) -> None:
    with Raw(serving.socket) as raw:
        error = raw.refused(operation, **arguments)
        assert type(error) is not AwexdError, "a fault of the daemon's own"
