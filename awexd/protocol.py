"""Frames and messages of the Unix socket, without I/O. ``docs/protocol.md`` is normative; this is its one definition.

A frame is a ``u32`` little-endian length and that many bytes of one JSON object. File descriptors ride on a frame's
first byte (SCM_RIGHTS) and are counted in the object's ``fds``. Any malformed frame ends the connection.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from awexd_transports.errors import AwexdError, InvalidArgument, ProtocolError

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 128
"""Descriptors on one frame (the kernel takes 253)."""
RECEIVE_BYTES = 64 << 10
"""Asked for at once. Larger ones malloc maps and unmaps again: 15 us a message."""
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
MAX_SOCKET_PATH_BYTES = 107
MAX_DEADLINE_MS = 24 * 3600 * 1000
MAX_WORLD_SIZE = 4096
MAX_KEEP = 16
MAX_STEP = 1 << 53
MAX_NODES = 1024
"""NUMA nodes."""
MAX_CHUNKS = 1 << 20
"""Physical allocations of one rank's virtual memory: of 2 MiB at least, 2 TiB."""
MODES = ("auto", "host", "direct")
WRITER_MODES = (*MODES, "nccl")
"""The last: its versions are exchanged, by their writers and whoever reads them."""
MAX_RING_BYTES = 1 << 40
PHASES = ("train", "rollout")
MAX_GPUS = 64
"""That one process sees, or claims for a phase."""
MAX_REASONS = 64
"""Kinds of reasons why an engine loads tensors itself that a worker tells."""
MAX_DIFFERENCES = 8
"""Tensors that are not a checkpoint's that a worker names: all workers of an engine fit one answer."""

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the message does not fit into a frame.
    """
    body = orjson.dumps(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came beside a message's bytes (see ``socket.recvmsg``)."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_descriptors(fds: Iterable[int]) -> None:
    """Closes descriptors that nobody takes."""
    for fd in fds:
        os.close(fd)


class Decoder:
    """Bytes and descriptors as they arrive, to messages. Owns descriptors until a message takes them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> Iterator[tuple[Message, list[int]]]:
        """Each whole message with its descriptors, which are then the caller's to close.

        Raises:
            ProtocolError: a malformed frame; the connection cannot be used after it.
        """
        self._fds.extend(fds)
        if not self._buffer and _is_one_frame(data):
            yield self._taken(decoded(memoryview(data)[_LENGTH.size :]))  # as nearly always
        else:
            self._buffer += data
        while (message := self._next()) is not None:
            yield self._taken(message)
        if self._fds and not self._buffer:
            raise ProtocolError(f"{len(self._fds)} descriptors that no message names")
        if len(self._fds) > MAX_FDS:
            raise ProtocolError(f"more than {MAX_FDS} descriptors on one message")

    def _taken(self, message: Message) -> tuple[Message, list[int]]:
        count = message.get("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise ProtocolError(f"a message that names {_shown(count)} descriptors and carries {len(self._fds)}")
        return message, [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Closes descriptors that no message took."""
        close_descriptors(self._fds)
        self._fds.clear()

    def _next(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        try:
            return decoded(memoryview(self._buffer)[_LENGTH.size : end])
        finally:
            del self._buffer[:end]


def _is_one_frame(data: bytes) -> bool:
    length = len(data) - _LENGTH.size
    return 0 <= length <= MAX_FRAME_BYTES and _LENGTH.unpack_from(data)[0] == length


def decoded(body: memoryview) -> Message:
    """A frame's object; releases ``body``.

    Raises:
        ProtocolError: it is none.
    """
    with body:
        try:
            message = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"a frame that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame with a JSON {type(message).__name__}; an object is needed")
    return message


def hello(version: str, **details: Any) -> Message:
    """The first message of either side."""
    return {"hello": {"protocol": PROTOCOL_VERSION, "version": version, "max_frame": MAX_FRAME_BYTES, **details}}


def check_hello(message: Message) -> Message:
    """The other side's hello.

    Raises:
        ProtocolError: not a hello, or another protocol version.
    """
    body = message.get("hello")
    if not isinstance(body, dict):
        raise ProtocolError("the first message is not a hello")
    if type(body.get("protocol")) is not int or body["protocol"] != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks protocol {_shown(body.get('protocol'))}, this one {PROTOCOL_VERSION}: "
            "run the same awexd version on both sides"
        )
    return body


def error_reply(request_id: int, error: AwexdError) -> Message:
    """The reply that carries a typed error."""
    body = {"code": error.code, "message": error.message, "details": error.details}
    return {"id": request_id, "error": body}


def bye(error: AwexdError) -> Message:
    """The last message of a session that is ended for that."""
    return {"bye": {"code": error.code, "reason": error.message}}


Check = Callable[[Any], bool]

_DIGEST = re.compile("[0-9a-f]{64}")


def _shown(value: object) -> str:
    """A value as a message may show it: nested ones may be too deep to print."""
    return repr(value)[:64] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _whole(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_FDS and all(_text(item) for item in value)


def _gpus(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_GPUS and all(map(_text, value))


def _some_gpus(value: Any) -> bool:
    return bool(value) and _gpus(value)


def _phase(value: Any) -> bool:
    return value in PHASES


def _numbers_up_to(high: int, value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1024 and all(_whole(0, high)(item) for item in value)


def _numbers(value: Any) -> bool:
    return _numbers_up_to(1 << 32, value)


def _digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _epoch(value: Any) -> bool:
    return value in ("new", "continue") or _whole(1, MAX_STEP)(value)


def _version(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_whole(0, MAX_STEP)(item) for item in value)


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _sentence(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 4096


def _failure(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _text(value[0]) and _sentence(value[1])


def _reasons(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_REASONS and all(map(_reason, value))


def _reason(value: Any) -> bool:
    return isinstance(value, list) and [type(item) for item in value] == [str, int, str] and len(str(value)) <= 1024


def _differences(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_DIFFERENCES and all(map(_difference, value))


def _difference(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 6:
        return False
    name, index, *texts, elements = value
    known = index is None or _numbers_up_to(MAX_STEP, index)
    return known and all(map(_sentence, (name, *texts))) and _whole(0, MAX_STEP)(elements)


def _plans(value: Any) -> bool:
    """Digests by number of the worker."""
    return isinstance(value, dict) and len(value) <= 2 * MAX_WORLD_SIZE and all(map(_digest, value.values()))


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


_STEP = _whole(0, MAX_STEP)
_DEADLINE = _whole(0, MAX_DEADLINE_MS)
_ATTEMPT = _whole(1, MAX_STEP)
_RANKS = {"rank": _whole(0, MAX_WORLD_SIZE - 1), "world_size": _whole(1, MAX_WORLD_SIZE)}
_PARCEL = {"job": _text, "rank": _whole(0, MAX_WORLD_SIZE - 1), "name": _text}
_ATTEMPTED = {"epoch": _ATTEMPT, "step": _STEP, "attempt": _ATTEMPT}

FORWARDED = ("write.", "read.", "group.", "job.", "park.pin", "park.unpin")
"""Operations of a session whose job has its home on another node that are carried out there."""

OPERATIONS: dict[str, dict[str, Check]] = {
    # a training process
    "write.register": {
        "job": _text,
        **_RANKS,
        "epoch": _epoch,
        "after": _optional(_STEP),
        "keep": _whole(1, MAX_KEEP),
        "mode": lambda value: value in WRITER_MODES,
        "lends": _boolean,
        "digest": _digest,
    },
    "write.ready": {},
    "write.reserve": {
        "set": _digest,
        "digest": _digest,
        "nbytes": _whole(0, 1 << 60),
        "node": _optional(_whole(0, MAX_NODES - 1)),
    },
    "write.slot": {},
    "write.publish": {"step": _STEP, "set": _digest, "segment": _text, "checksums": _boolean},
    "write.begin": {"step": _STEP, "set": _digest},
    "write.progress": {**_ATTEMPTED, "nbytes": _whole(0, 1 << 60), "checksums": _boolean},
    "write.seal": {**_ATTEMPTED, "checksums": _boolean},
    "write.abort": {
        **_ATTEMPTED,
        "attempt": _optional(_ATTEMPT),
        "reason": _sentence,
    },
    "write.committed": _ATTEMPTED,
    "write.lend": {"nbytes": _whole(1, 1 << 60), "devices": _gpus},
    "write.choose": {"step": _STEP, "set": _digest, "why_not": _optional(_sentence)},
    "write.borrow": {"step": _STEP, "set": _digest, "segment": _text, "checksums": _boolean},
    "write.affirm": {"step": _STEP, "attempt": _ATTEMPT, "good": _boolean},
    "write.captured": {**_ATTEMPTED, "at_once": _boolean},
    "write.revoke": {},
    "write.offer": {"step": _STEP, "set": _digest},
    "write.asked": {},
    "write.give": {"segment": _text, "number": _whole(0, MAX_CHUNKS + MAX_FDS)},
    "park.begin": {**_PARCEL, "nbytes": _whole(0, 1 << 60)},
    "park.open": _PARCEL,
    "park.seal": {**_PARCEL, "segment": _text},
    "park.drop": {**_PARCEL, "segment": _optional(_text), "keep": _boolean},
    "park.pin": {"version": _optional(_version)},
    "park.unpin": {},
    # an inference process
    "read.sources": {"job": _text, "set": _optional(_digest)},
    "read.register": {
        "job": _text,
        "engine": _text,
        **_RANKS,
        "digest": _digest,
        "version": _optional(_version),
        "updates": _optional(_STEP),
        "alone": _optional(_boolean),
        "aside": _optional(_reasons),
        "devices": _optional(_gpus),
    },
    "read.siblings": {},
    "read.resolve": {"step": _optional(_STEP), "lease_ms": _whole(1, MAX_DEADLINE_MS), "stage": _boolean},
    "read.arriving": {"step": _optional(_STEP), "arrival": _optional(_STEP), "landed": _STEP},
    "read.arrived": {"arrival": _STEP},
    "read.confirm": {"lease": _text, "nbytes": _STEP, "stage_us": _STEP, "pause_us": _STEP},
    "read.release": {"lease": _optional(_text), "dirty": _boolean, "error": _optional(_failure)},
    "read.wait": {"step": _STEP},
    "read.await": {"job": _text, "engine": _text, "step": _optional(_STEP)},
    "read.verified": {
        "token": _text,
        "checkpoint": _sentence,
        "tensors": _STEP,
        "nbytes": _STEP,
        "differing": _STEP,
        "differences": _differences,
    },
    "read.engine": {"job": _text, "engine": _text},
    "read.exchanges": {},
    # both
    "group.join": {
        "attempt": _optional(_ATTEMPT),
        "lease": _optional(_text),
        "device": _optional(_text),
        "sums": _boolean,
    },
    "group.manifests": {"exchange": _ATTEMPT},
    "group.publish": {"exchange": _ATTEMPT, "address": _sentence},
    "group.address": {"exchange": _ATTEMPT},
    "group.agree": {"exchange": _ATTEMPT, "format": _STEP, "ring": _whole(1, MAX_RING_BYTES), "plans": _plans},
    "group.watch": {"exchange": _ATTEMPT},
    "group.done": {"exchange": _ATTEMPT, "error": _optional(_sentence)},
    "phase.enter": {"job": _text, "who": _text, "gpus": _some_gpus, "phase": _phase, "token": _text},
    "phase.leave": {"token": _text},
    "segment.open": {"ids": _ids},
    "segment.closed": {"ids": _ids},
    "segment.dropped": {},
    "segment.chunks": {"id": _text, "first": _whole(0, MAX_CHUNKS), "count": _whole(1, MAX_FDS)},
    "session.home": {"job": _text, "join": _boolean},
    "goodbye": {},
    # a job's owner, and commands
    "job.close": {"job": _text},
    "job.grant": {"job": _text, "uids": _numbers, "gids": _numbers},
    "status": {},
    "versions": {"job": _optional(_text)},
    "sessions": {},
    "manifests": {"job": _text},
    "events": {"job": _optional(_text), "after": _optional(_STEP)},
    "drop": {"job": _text, "step": _optional(_STEP)},
    "rollback": {"job": _text, "step": _STEP},
    "gc": {},
}
"""Each operation's arguments; a request has exactly these."""


def parse_request(message: Message) -> tuple[int, str, Message, float]:
    """A request's id, operation, arguments and deadline in seconds from now.

    Raises:
        ProtocolError: no id to answer to.
        InvalidArgument: an unknown operation, or arguments that are not its own; ``details["id"]`` has the id.
    """
    request_id = message.get("id")
    if not isinstance(request_id, int) or not _STEP(request_id):
        raise ProtocolError("a request without an id")
    operation, arguments, deadline = message.get("op"), message.get("args", {}), message.get("deadline_ms")
    fields = OPERATIONS.get(operation) if isinstance(operation, str) else None
    if fields is None or not isinstance(arguments, dict):
        raise InvalidArgument(f"unknown operation {_shown(operation)}", {"id": request_id})
    if not isinstance(deadline, int) or not _DEADLINE(deadline):
        raise InvalidArgument(f"{operation}: deadline_ms must be 0 to {MAX_DEADLINE_MS}", {"id": request_id})
    if arguments.keys() != fields.keys():
        odd = sorted(str(name)[:64] for name in arguments.keys() ^ fields.keys())
        raise InvalidArgument(f"{operation}: arguments missing or unknown: {', '.join(odd)}", {"id": request_id})
    for name, check in fields.items():
        if not check(arguments[name]):
            raise InvalidArgument(f"{operation}: bad {name}: {_shown(arguments[name])}", {"id": request_id})
    return request_id, str(operation), arguments, deadline / 1000
