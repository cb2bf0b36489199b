"""Messages between the demo's processes: JSON frames over a Unix socket pair, and the loop that answers them.

A frame is a little-endian u32 length and that many bytes of JSON. The parent asks, a child answers; the end of the
stream ends the child.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]
Handler = Callable[[Message], Message]

LENGTH = struct.Struct("<I")
MAX_FRAME = 16 << 20
IDLE_SECONDS = 900.0
SEND_SECONDS = 60.0

log = logging.getLogger(__name__)


class Channel:
    """One end of a socket pair. It owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def inherited(cls, descriptor: int) -> Channel:
        """The child's end, whose number the parent passed on the command line."""
        os.set_inheritable(descriptor, False)
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: Message) -> None:
        body = json.dumps(message).encode()
        if len(body) > MAX_FRAME:
            raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
        self._connection.settimeout(SEND_SECONDS)
        self._connection.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, within: float) -> Message:
        """The next message.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: it did not come within that many seconds.
        """
        deadline = time.monotonic() + within
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if length > MAX_FRAME:
            raise ValueError(f"a message of {length} bytes is over the limit of {MAX_FRAME}")
        message: Message = json.loads(self._read(length, deadline))
        return message

    def _read(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = self._connection.recv(size - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other side has closed the channel")
            parts += part
        return bytes(parts)


def answer(channel: Channel, handlers: Mapping[str, Handler]) -> int:
    """Answers the parent's requests until it closes the channel; the exit status to end with.

    A request that fails is answered with the error, and ends the process: the demo has no use for half of a job.
    """
    while True:
        try:
            request = channel.receive(IDLE_SECONDS)
        except EOFError:
            return 0
        try:
            reply = handlers[request["do"]](request)
        except Exception as error:
            log.exception("%s failed", request["do"])
            channel.send({"error": f"{type(error).__name__}: {error}"})
            return 1
        channel.send({"result": reply})
