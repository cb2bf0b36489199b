"""A group over TCP, for processes on different hosts.

Whoever connects is asked first: the accepting side sends a nonce; the other its number, a nonce and a proof; the first
its proof. A proof is an HMAC by the group's key, which itself is never sent. This says who is there; what is sent
afterwards is neither encrypted nor signed, as with the peers' ``tcp`` without TLS.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from awexd_transports.collective.base import Lost
from awexd_transports.collective.streams import StreamGroup
from awexd_transports.errors import InvalidArgument

NONCE_BYTES = 32
HELLO = struct.Struct(f"<I{NONCE_BYTES}s32s")
"""What the connecting side sends: its number, its nonce, its proof."""
PROOF_BYTES = 32
UNPROVEN = 64
"""Connections that may be unproven at once; one more ends the oldest, so that silent ones keep no member out."""
OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Whoever receives from a host that is gone notices within 25 s; whoever sends to it, at the deadline.

No TCP_USER_TIMEOUT: Linux counts by it also how long a live peer reads nothing, as one does who still hears others. No
sizes of buffers: a fixed one is limited by ``net.core.rmem_max``, often far below what the kernel's tuning reaches.
"""

_log = logging.getLogger(__name__)
_RANKS = struct.Struct("<2I")


class TcpGroup(StreamGroup):
    """See ``base.Group``. Connections that do not prove that they know the key are dropped.

    Args:
        key: the group's, known to its members only. ``rank``, ``size``: this member's number, and how many they are.
        host: name or address by which the other members reach this one.
    """

    name = "TCP"

    def __init__(self, key: str, rank: int, size: int, host: str) -> None:
        super().__init__(rank, size)
        if not key:
            raise InvalidArgument("a group without a key")
        self._key, self._host = key.encode(), host
        self._missing = {*range(size)} - {rank}
        self._knock: Callable[[], object] | None = None
        """While members connect: has this one look again at who is missing, who knocks, and whether it goes on."""
        self._unproven: dict[asyncio.Task[None], socket.socket] = {}

    def bind(self) -> str:
        """Listens on all interfaces; returns ``host:port``, an IPv6 address in brackets."""
        backlog = self._size + UNPROVEN
        try:
            listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        except (OSError, ValueError):  # no IPv6 here
            listener = socket.create_server(("", 0), backlog=backlog)
        port = self._kept(listener).getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def connect(self, addresses: Sequence[str], seconds: float) -> None:
        try:
            # Not the policy's loop, which engines set to uvloop: that one keeps a socket which it has watched.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._meet(addresses, seconds))
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, OSError):
                raise self._lost("to connect", error) from error
            raise error from None
        except TimeoutError as error:
            missing = ", ".join(map(str, sorted(self._missing)))
            raise self._lost("to connect", f"not within {seconds:g} s with member {missing}") from error
        finally:
            if self._listener is not None:
                self._listener.close()

    def _wake(self) -> None:
        with self._lock:
            if self._knock is not None:
                self._knock()

    async def _meet(self, addresses: Sequence[str], seconds: float) -> None:
        """Returns once no member is missing."""
        if self._listener is None:
            raise Lost("this member has not listened")
        loop, knocked = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + seconds
        with self._lock:
            self._check()
            self._knock = partial(loop.call_soon_threadsafe, knocked.set)
        try:
            async with asyncio.timeout_at(end), asyncio.TaskGroup() as tasks:
                for rank in range(self._rank):
                    tasks.create_task(self._reach(rank, addresses[rank], end))
                self._listener.setblocking(False)
                loop.add_reader(self._listener, knocked.set)
                try:
                    while self._missing:
                        await knocked.wait()
                        knocked.clear()
                        self._check()
                        self._admit(self._listener, tasks)
                finally:
                    loop.remove_reader(self._listener)
                    for task in self._unproven:
                        task.cancel()
        finally:
            with self._lock:
                self._knock = None

    async def _reach(self, rank: int, address: str, end: float) -> None:
        """Connects to a lower rank, by whichever of its addresses answers."""
        failure: OSError = ConnectionError("no address")
        try:
            host, _, port = address.rpartition(":")
            if not 0 < int(port) < 1 << 16:
                raise ValueError("no such port")
            found = await asyncio.wrap_future(_resolve(host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise self._lost(f"to connect to member {rank} at {address!r}", error) from error
        for at, (family, kind, number, _, where) in enumerate(found):
            share = (end - asyncio.get_running_loop().time()) / (len(found) - at)
            try:
                async with asyncio.timeout(share):
                    await self._ask(rank, socket.socket(family, kind, number), where)
                return
            except OSError as error:
                failure = error
        raise self._lost(f"to connect to member {rank} at {address!r}", _why(failure)) from failure

    async def _ask(self, rank: int, one: socket.socket, where: tuple[Any, ...]) -> None:
        loop = asyncio.get_running_loop()
        try:
            _prepare(one)
            await loop.sock_connect(one, where)
            theirs, own = await _read(one, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            hello = HELLO.pack(self._rank, own, self._proof("connects", self._rank, rank, own, theirs))
            await loop.sock_sendall(one, hello)
            shown = await _read(one, PROOF_BYTES)
            if not hmac.compare_digest(shown, self._proof("accepts", self._rank, rank, own, theirs)):
                raise ConnectionError("who answers there does not know the group's key")
            self._arrived(rank, one)
        except BaseException:
            one.close()
            raise

    def _admit(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        try:
            one, where = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        task = tasks.create_task(self._answer(one, where[0]))
        self._unproven[task] = one
        task.add_done_callback(self._drop)
        if len(self._unproven) > UNPROVEN:
            next(iter(self._unproven)).cancel()

    def _drop(self, task: asyncio.Task[None]) -> None:
        """Here, as a task that was cancelled early never ran."""
        one = self._unproven.pop(task)
        if one not in self._peers.values():
            one.close()

    async def _answer(self, one: socket.socket, where: str) -> None:
        """Keeps it if it is a higher rank's."""
        own = secrets.token_bytes(NONCE_BYTES)
        try:
            _prepare(one)
            await asyncio.get_running_loop().sock_sendall(one, own)
            rank, theirs, shown = HELLO.unpack(await _read(one, HELLO.size))
            if not hmac.compare_digest(shown, self._proof("connects", rank, self._rank, theirs, own)):
                raise ConnectionError("it does not know the group's key")
            self._admits(rank)
            one.send(self._proof("accepts", rank, self._rank, theirs, own))  # so few fit, and nobody comes between
        except OSError as error:
            _log.info("a connection from %s to member %d was dropped: %s", where, self._rank, error)
        else:
            self._arrived(rank, one)

    def _arrived(self, rank: int, one: socket.socket) -> None:
        self._kept(one, rank)
        self._missing.discard(rank)
        self._wake()

    def _proof(self, role: str, connects: int, accepts: int, nonce: bytes, other: bytes) -> bytes:
        """What the side of this role shows; numbers and nonces are of the side that connects, then of the other."""
        said = b"awexd group\0" + role.encode() + b"\0" + _RANKS.pack(connects, accepts) + nonce + other
        return hmac.digest(self._key, said, "sha256")


def _prepare(one: socket.socket) -> None:
    one.setblocking(False)
    for level, option, value in OPTIONS:
        one.setsockopt(level, option, value)


async def _read(one: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(one, count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def _resolve(host: str, port: int) -> Future[list[Any]]:
    """In a thread of its own, which nobody waits for: nothing frees it before the resolver gives up."""
    found: Future[list[Any]] = Future()
    found.set_running_or_notify_cancel()

    def look() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            found.set_exception(error)

    threading.Thread(target=look, name="awexd-resolver", daemon=True).start()
    return found


def _why(error: OSError) -> str:
    """asyncio's own words leave out what the kernel said."""
    return os.strerror(error.errno) if error.errno else str(error) or "no answer in time"
