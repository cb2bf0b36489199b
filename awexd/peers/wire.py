"""What daemons say to each other: a greeting in JSON, then small binary frames and raw bytes. No I/O.

``docs/transports.md`` has the frames in one table.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

from awexd_transports.base import Piece
from awexd_transports.errors import AwexdError, ProtocolError, from_wire

PROTOCOL = 1
MAX_GREETING = 4096
MAX_ERROR = 4096
MAX_PIECE = 1 << 30
MAX_METADATA = 32 << 10
"""Of an agent: opaque bytes."""
MAX_ATTACH = 2 * MAX_METADATA + 1024
MAX_AGENT = 100
LENGTH = struct.Struct("<I")
SUM = struct.Struct("<Q")
ADDRESS = struct.Struct("<Q")
_FRAME = struct.Struct("<BBHIQQII")
FRAME_BYTES = _FRAME.size


class Kind(IntEnum):
    """What a frame is. ``WANT``, ``ATTACH`` and ``PUT`` go to the source, the others come from it."""

    WANT = 1
    BYTES = 2
    WAITING = 3
    ERROR = 4
    ATTACH = 5
    PUT = 6
    WRITTEN = 7
    DONE = 8
    FAILED = 9


class Frame(NamedTuple):
    """A frame's header. ``summed``: eight bytes follow the piece's own, their sum."""

    kind: Kind
    piece: Piece
    summed: bool = False

    def encode(self) -> bytes:
        return _FRAME.pack(self.kind, self.summed, 0, *self.piece)


NOTHING = Piece(0, 0, 0)
_LIMITS: dict[int, int] = {Kind.ERROR: MAX_ERROR, Kind.FAILED: MAX_ERROR, Kind.ATTACH: MAX_ATTACH}


def decode(frame: bytes | bytearray) -> Frame:
    """A frame from the wire.

    Raises:
        ProtocolError: it is none.
    """
    kind, summed, zero, rank, offset, nbytes, rows, stride = _FRAME.unpack(frame)
    alone = rows == 1 and not stride
    apart = rows > 1 and nbytes and not nbytes % rows and nbytes // rows <= stride
    if kind not in Kind.__members__.values() or summed > 1 or zero or not (alone or apart):
        raise ProtocolError("a malformed frame")
    if nbytes > _LIMITS.get(kind, MAX_PIECE):
        raise ProtocolError(f"a frame of {nbytes} bytes")
    return Frame(Kind(kind), Piece(rank, offset, nbytes, rows, stride), bool(summed))


def encode_error(error: AwexdError, kind: Kind = Kind.ERROR) -> bytes:
    """An ERROR or FAILED frame with its body."""
    body = orjson.dumps({"code": error.code, "message": error.message[: MAX_ERROR // 8]})
    return Frame(kind, Piece(0, 0, len(body))).encode() + body


def encode_attach(agent: str, metadata: bytes) -> bytes:
    """An ATTACH frame with its body."""
    body = orjson.dumps({"agent": agent, "metadata": metadata.hex()})
    return Frame(Kind.ATTACH, Piece(0, 0, len(body))).encode() + body


def decode_attach(body: bytes | bytearray) -> tuple[str, bytes]:
    """An agent's name and metadata.

    Raises:
        ProtocolError: there are none.
    """
    try:
        said = orjson.loads(body)
        agent, metadata = said["agent"], bytes.fromhex(said["metadata"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError("an agent that cannot be read") from error
    if type(agent) is not str or not 0 < len(agent) <= MAX_AGENT or not 0 < len(metadata) <= MAX_METADATA:
        raise ProtocolError("an agent whose name or metadata is of another length")
    return agent, metadata


def decode_error(body: bytes | bytearray) -> AwexdError:
    """What a source said went wrong."""
    try:
        return error_of(orjson.loads(body))
    except ValueError:
        return ProtocolError("an error that is no JSON")


def error_of(said: object) -> AwexdError:
    """The error of an object with its code and message."""
    if isinstance(said, dict) and isinstance(said.get("code"), str) and isinstance(said.get("message"), str):
        return from_wire(said["code"], said["message"], {})
    return ProtocolError("an error that cannot be read")


def encode_greeting(message: dict[str, Any]) -> bytes:
    body = orjson.dumps(message)
    return LENGTH.pack(len(body)) + body


def decode_greeting(body: bytes | bytearray) -> dict[str, Any]:
    """One message of the greeting.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message = orjson.loads(body)
    except ValueError as error:
        raise ProtocolError("a greeting that is no JSON") from error
    if type(message) is not dict:
        raise ProtocolError("a greeting that is no object")
    return message
