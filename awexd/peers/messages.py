"""A session's messages between two daemons: frames of the socket over a link, each with the bodies that go with it.

A frame is that of :mod:`awexd.protocol`. What its ``fds`` counts follows it, each as a ``u64`` little-endian length and
so many bytes: sealed memfds on either side. An empty frame says that the other daemon is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Sequence

from awexd.manifests import read_sealed, sealed_memfd
from awexd.peers.link import Link
from awexd.protocol import MAX_FRAME_BYTES, Message, close_descriptors, decoded, encode
from awexd_transports.errors import ProtocolError

HEARTBEAT = 1.0
"""Seconds after which something is said."""
MAX_BODIES = 1
MAX_BODY_BYTES = 1 << 30
MAX_QUEUED_BYTES = 64 << 20
"""Of frames that the other daemon has not taken."""
CHUNK = 1 << 20

_LENGTH, _BODY = struct.Struct("<I"), struct.Struct("<Q")
_NOTHING = _LENGTH.pack(0)


class Messages:
    """Both directions of one session. ``run`` once.

    Args:
        stall: seconds without a word after which the other daemon is gone.
    """

    def __init__(self, link: Link, stall: float) -> None:
        self._link, self._stall = link, stall
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._queued = 0
        self._wake, self._sent = asyncio.Event(), asyncio.Event()
        self._ended = False

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queues a message. Takes over ``fds``, which are closed once their bytes are sent.

        Raises:
            ProtocolError: too large, too many bodies, or what is no sealed memfd.
        """
        try:
            if len(fds) > MAX_BODIES:
                raise ProtocolError(f"{len(fds)} descriptors on a message of a session on another node")
            if fds:
                message["fds"] = len(fds)
            frame = encode(message)
        except ProtocolError:
            close_descriptors(fds)
            raise
        if self._ended:
            close_descriptors(fds)
            return
        self._outbox.append((frame, list(fds)))
        self._queued += len(frame)
        self._wake.set()
        if self._queued > MAX_QUEUED_BYTES:
            self.end()

    async def run(self, take: Callable[[Message, list[int]], None]) -> None:
        """Sends, and hands over what comes, until it is cancelled or ended here.

        Raises:
            ConnectionError, TimeoutError: the other daemon is gone, or silent.
            ProtocolError: it sent what is no message.
        """
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send())
                await self._receive(take)
                sending.cancel()
        except BaseExceptionGroup as failed:
            error: BaseException = failed
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if self._ended and isinstance(error, ConnectionError):
                return
            raise error from None
        finally:
            self.end()

    def end(self) -> None:
        """Ends it at once; what is queued is not sent any more."""
        self._ended = True
        self._link.abort()
        for _, fds in self._outbox:
            close_descriptors(fds)
        self._outbox.clear()
        self._sent.set()

    async def finish(self, within: float) -> None:
        """Ends it once all that was queued is sent, or that time is over. ``run`` is to be running."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._queued and not self._ended:
                    self._sent.clear()
                    await self._sent.wait()
        self._ended = True
        await self._link.close()

    async def _send(self) -> None:
        while True:
            self._wake.clear()
            if not self._outbox:
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await self._wake.wait()
                except TimeoutError:
                    await self._link.send(_NOTHING, self._stall)
                continue
            frame, fds = self._outbox.popleft()
            try:
                await self._link.send(frame, self._stall)
                for fd in fds:
                    body = await asyncio.to_thread(read_sealed, fd, MAX_BODY_BYTES)
                    await self._link.send(_BODY.pack(len(body)), self._stall)
                    await self._link.send(body, self._stall)
            finally:
                close_descriptors(fds)
            self._queued -= len(frame)
            self._sent.set()

    async def _receive(self, take: Callable[[Message, list[int]], None]) -> None:
        while True:
            (length,) = _LENGTH.unpack(await self._bytes(_LENGTH.size))
            if not length:
                continue
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
            message = decoded(memoryview(await self._bytes(length)))
            count = message.get("fds", 0)
            if type(count) is not int or not 0 <= count <= MAX_BODIES:
                raise ProtocolError("a message that names more bodies than one")
            take(message, [await self._body() for _ in range(count)])

    async def _body(self) -> int:
        (length,) = _BODY.unpack(await self._bytes(_BODY.size))
        if length > MAX_BODY_BYTES:
            raise ProtocolError(f"a body of {length} bytes; at most {MAX_BODY_BYTES}")
        body = await self._bytes(length)
        return await asyncio.to_thread(sealed_memfd, "awexd-forwarded", [body])

    async def _bytes(self, count: int) -> bytes:
        into = bytearray(count)
        await self._link.receive(memoryview(into), self._stall)
        return bytes(into)
