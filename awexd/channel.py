"""One client's connection on the loop: frames in, frames out, descriptors with both.

asyncio's own transports drop or refuse descriptors, so this reads and writes a raw non-blocking socket.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Protocol

from awexd.access import Peer
from awexd.protocol import (
    ANCILLARY_BYTES,
    MAX_FDS,
    RECEIVE_BYTES,
    Decoder,
    Message,
    close_descriptors,
    descriptors_in,
    encode,
)
from awexd_transports.errors import ProtocolError

MAX_QUEUED_BYTES = 16 << 20
"""Replies that a client may leave unread before its connection is ended."""

MAX_FRAMES = 64
"""Frames that one call sends."""
MAX_GROUPS = 256
"""Python reads socket options of at most 1,024 bytes; a process of more groups is taken by its user's."""

_TRUNCATED, _CLOSED_BY_EXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)  # as enumerations they are slow
_SO_PEERGROUPS = 59
"""Linux 4.13; Python has no name for it."""
_SO_PEERPIDFD = 77
"""Linux 6.5; Python 3.11 has no name for it."""


class Client(Protocol):
    """The other end of a session: a process of this node, or one of another that its daemon speaks for.

    Attributes:
        node, host: of another node: its name, and where processes there can be reached from elsewhere.
    """

    peer: Peer
    node: str
    host: str

    @property
    def exited(self) -> bool: ...

    @property
    def ended(self) -> str: ...

    async def serve(self, take: Callable[[Message, list[int]], None]) -> None: ...

    async def process_exit(self, within: float) -> bool: ...

    def send(self, message: Message, fds: Sequence[int] = ()) -> None: ...

    def permit(self, operation: str, arguments: Message) -> None:
        """Raises AccessDenied: not for this client."""

    def close(self) -> None: ...


class Channel:
    """Owns the socket, the peer's pidfd and descriptors in flight; ``close`` releases all of them."""

    node = host = ""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._decoder = Decoder()
        self._outbox: deque[tuple[memoryview, list[int]]] = deque()
        self._queued = 0
        self._held_back = self._writing = False
        self._over = asyncio.Event()
        self._exit = asyncio.Event()
        self._ended: str | None = None
        self._failure: Exception | None = None
        self._broken = False
        self.peer = _peer(sock)
        self._pidfd = _pidfd(sock, self.peer.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._process_ended)

    @property
    def exited(self) -> bool:
        """The peer's process is gone."""
        return self._exit.is_set()

    @property
    def ended(self) -> str:
        """Why no more messages come; empty while they may."""
        return self._ended or ""

    async def serve(self, take: Callable[[Message, list[int]], None]) -> None:
        """Hands over each message with its descriptors, ``take``'s to close, until the connection or the process ends.

        ``take`` is called as soon as they arrive, by the loop itself. What it sends back on this channel leaves once
        all that came together is taken.

        Raises:
            ProtocolError: the peer sent a malformed frame.
            Exception: what ``take`` raised; it ends the connection.
        """
        if self._ended is None:
            self._loop.add_reader(self._sock.fileno(), self._readable, take)
        await self._over.wait()
        if self._failure:
            raise self._failure

    async def process_exit(self, within: float) -> bool:
        """Whether the process ends within that time; a dying process closes its sockets a moment before."""
        if self._pidfd is None:
            return False
        try:
            async with asyncio.timeout(within):
                await self._exit.wait()
        except TimeoutError:
            return False
        return True

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends one message, or queues what the socket does not take now. Takes over ``fds`` and closes them."""
        if self._broken:
            close_descriptors(fds)
            return
        if fds:
            message["fds"] = len(fds)
        try:
            frame = memoryview(encode(message))
        except ProtocolError:
            close_descriptors(fds)
            raise
        self._outbox.append((frame, list(fds)))
        self._queued += len(frame)
        if not self._writing and (fds or not self._held_back):  # descriptors must not pile up here
            self._flush()
        if self._queued > MAX_QUEUED_BYTES:
            self._end("it left its replies unread")

    def permit(self, operation: str, arguments: Message) -> None:
        """Whatever a process of this node asks for, the operations themselves allow or refuse."""

    def close(self) -> None:
        self._end("the connection was closed")
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._decoder.close()
        for _, fds in self._outbox:
            close_descriptors(fds)
        self._outbox.clear()
        self._sock.close()

    def _readable(self, take: Callable[[Message, list[int]], None]) -> None:
        """Takes what one read gives, and looks again: of a connection that was reset libuv tells only once."""
        if self._ended is not None:
            return
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, _CLOSED_BY_EXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"its connection failed: {error.strerror}")
            return
        fds = descriptors_in(ancillary) if ancillary else []
        if not data:
            close_descriptors(fds)
            self._end("its connection was closed")
            return
        self._held_back = True
        try:
            if flags & _TRUNCATED:
                close_descriptors(fds)
                raise ProtocolError(f"more than {MAX_FDS} descriptors on one message")
            for message, own in self._decoder.feed(data, fds):
                take(message, own)
        except ProtocolError as error:
            self._failure = error
            self._end(f"it broke the protocol: {error}", broken=False)  # it can still be told
        except Exception as error:  # noqa: BLE001 - raised by serve: it ends this session, never the daemon
            self._failure = error
            self._end("its request failed", broken=False)
        self._held_back = False
        if self._outbox and not self._writing:
            self._flush()
        self._loop.call_soon(self._readable, take)

    def _flush(self) -> None:
        while self._outbox:
            frames, fds = self._next_out()
            try:
                sent = socket.send_fds(self._sock, frames, fds) if fds else self._sock.sendmsg(frames)
            except (BlockingIOError, InterruptedError):
                if not self._writing:
                    self._loop.add_writer(self._sock.fileno(), self._flush)
                    self._writing = True
                return
            except OSError as error:
                self._end(f"its connection failed: {error.strerror}")
                return
            close_descriptors(fds)
            self._queued -= sent
            for frame in frames:
                if sent < len(frame):
                    self._outbox[0] = (frame[sent:], [])
                    break
                sent -= len(frame)
                self._outbox.popleft()
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
            self._writing = False

    def _next_out(self) -> tuple[list[memoryview], list[int]]:
        """What one call can send: a frame with its descriptors, or several without."""
        frame, fds = self._outbox[0]
        if fds or len(self._outbox) == 1:
            return [frame], fds
        plain = takewhile(lambda waiting: not waiting[1], islice(self._outbox, MAX_FRAMES))
        return [waiting for waiting, _ in plain], []

    def _process_ended(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        self._exit.set()
        self._end("its process ended")

    def _end(self, why: str, *, broken: bool = True) -> None:
        self._broken = self._broken or broken
        if self._ended is None:
            self._ended = why
            self._loop.remove_reader(self._sock.fileno())
        self._over.set()


def _peer(sock: socket.socket) -> Peer:
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        groups = array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * MAX_GROUPS))
    except OSError:
        return Peer(pid, uid, gid)
    return Peer(pid, uid, gid, frozenset(groups))


def _pidfd(sock: socket.socket, pid: int) -> int | None:
    """A descriptor that becomes readable when the peer's process ends; None where the kernel gives none."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
