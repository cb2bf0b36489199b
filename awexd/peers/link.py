"""One connection's bytes, plain or by TLS: received straight into memory, with a watchdog on every wait.

Failures are the standard kinds ConnectionError and TimeoutError with a few words; who uses a link adds the names.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from awexd.peers.rows import scatter

CHUNK = 1 << 20
"""Bytes moved by one turn of the loop: 0.2 ms of it."""
VECTOR = 1024
"""Rows that the kernel takes at once."""

T = TypeVar("T")
Step = Callable[[], bool]
"""Moves what can be moved now; whether that was all."""
Watch = Callable[..., object]
Forget = Callable[[int], object]
_RESET = struct.pack("ii", 1, 0)


class Link(Protocol):
    """Owned by one task in each direction. After ``abort``, or when a call is cancelled, no memory is touched."""

    reads_memory: bool
    """What is sent is read by this process, not by the kernel."""
    received: int

    async def receive(self, into: memoryview, within: float) -> None:
        """Fills ``into``; at most ``within`` seconds pass without a byte.

        Raises:
            ConnectionError, TimeoutError: the other side is gone, or silent.
        """

    async def send(self, data: memoryview | bytes, within: float) -> None:
        """Returns when the kernel has all of it.

        Raises:
            ConnectionError, TimeoutError: as ``receive``.
        """

    async def send_rows(self, data: memoryview, run: int, stride: int, within: float) -> None:
        """Sends ``run`` bytes of every ``stride`` of ``data``, which ends with a row.

        Raises:
            ConnectionError, TimeoutError: as ``receive``.
        """

    async def receive_rows(self, into: memoryview, run: int, stride: int, within: float) -> None:
        """Fills ``run`` bytes of every ``stride`` of ``into``, which ends with a row.

        Raises:
            ConnectionError, TimeoutError: as ``receive``.
        """

    def abort(self) -> None:
        """Ends it at once; the other side is told by a reset. Whoever waits gets a ConnectionError."""

    async def close(self) -> None:
        """Ends it; what was sent still arrives."""


async def connect(host: str, port: int, tls: ssl.SSLContext | None, within: float, handshake: float) -> Link:
    """A link to there.

    Raises:
        ConnectionError, TimeoutError: there is none; says why.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = await _connected(found)
    except TimeoutError:
        raise TimeoutError(f"no connection within {within:g} s") from None
    except OSError as error:
        raise ConnectionError(f"no connection: {error.strerror or error}") from error
    if tls is None:
        return SocketLink(sock)
    return await _tls(sock, tls, handshake, server_hostname=host)


async def _connected(found: Sequence[tuple[int, int, int, str, tuple[Any, ...]]]) -> socket.socket:
    """To the first of these addresses that answers."""
    failure: OSError = ConnectionError("no address")
    for family, kind, number, _, address in found:
        sock = socket.socket(family, kind, number)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def accepted(sock: socket.socket, tls: ssl.SSLContext | None, handshake: float) -> Link:
    """A link over a socket that was accepted.

    Raises:
        ConnectionError, TimeoutError: TLS fails.
    """
    sock.setblocking(False)
    return SocketLink(sock) if tls is None else await _tls(sock, tls, handshake)


class SocketLink:
    """Over a raw socket: the kernel copies between it and the memory given."""

    reads_memory = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._moves: set[_Move] = set()
        self._over = False
        self.received = 0

    async def receive(self, into: memoryview, within: float) -> None:
        at = 0

        def step() -> bool:
            nonlocal at
            with into[at : at + CHUNK] as part:  # released at once: nobody here keeps memory from being unmapped
                count = self._sock.recv_into(part)
            if not count:
                raise ConnectionError("it closed the connection")
            at += count
            self.received += count
            return at == len(into)

        if len(into):
            await self._moved(step, self._loop.add_reader, self._loop.remove_reader, within)

    async def send(self, data: memoryview | bytes, within: float) -> None:
        at = 0

        def step() -> bool:
            nonlocal at
            with view[at : at + CHUNK] as part:
                at += self._sock.send(part)
            return at == len(view)

        with memoryview(data) as view:
            if len(view):
                await self._moved(step, self._loop.add_writer, self._loop.remove_writer, within)

    async def send_rows(self, data: memoryview, run: int, stride: int, within: float) -> None:
        rows = _Rows(data, run, stride)

        def step() -> bool:
            with rows.left() as parts:
                return rows.went(self._sock.sendmsg(parts))

        await self._moved(step, self._loop.add_writer, self._loop.remove_writer, within)

    async def receive_rows(self, into: memoryview, run: int, stride: int, within: float) -> None:
        rows = _Rows(into, run, stride)

        def step() -> bool:
            with rows.left() as parts:
                count = self._sock.recvmsg_into(parts)[0]
            if not count:
                raise ConnectionError("it closed the connection")
            self.received += count
            return rows.went(count)

        await self._moved(step, self._loop.add_reader, self._loop.remove_reader, within)

    async def _moved(self, step: Step, watch: Watch, forget: Forget, within: float) -> None:
        if self._over:
            raise ConnectionError("the connection is closed")
        move = _Move(self._loop, partial(watch, self._sock.fileno()), partial(forget, self._sock.fileno()), step)
        self._moves.add(move)
        try:
            await move.made(within)
        finally:
            self._moves.discard(move)

    def abort(self) -> None:
        if not self._over:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._end()

    async def close(self) -> None:
        if not self._over:
            self._end()

    def _end(self) -> None:
        self._over = True
        for move in self._moves:
            move.fail(ConnectionError("the connection was ended here"))
        self._sock.close()


class _Rows:
    """How far ``run`` bytes of every ``stride`` of some memory have been moved."""

    def __init__(self, memory: memoryview, run: int, stride: int) -> None:
        self._memory, self._run, self._stride = memory, run, stride
        self._rows = (len(memory) - run) // stride + 1
        self._most = min(VECTOR, max(1, CHUNK // run))
        self._at = 0

    @contextlib.contextmanager
    def left(self) -> Iterator[list[memoryview]]:
        """The next of them, as many as are moved at once."""
        row, begun = divmod(self._at, self._run)
        starts = range(row * self._stride, min(self._rows, row + self._most) * self._stride, self._stride)
        parts = [self._memory[start : start + self._run] for start in starts]
        try:
            if begun:
                with parts[0] as whole:
                    parts[0] = whole[begun:]
            yield parts
        finally:
            for part in parts:
                part.release()

    def went(self, count: int) -> bool:
        """Whether that was all."""
        self._at += count
        return self._at == self._rows * self._run


class _Move:
    """Steps until it is done, fails, or nothing has moved for so long.

    The loop is asked to watch the socket only when it has nothing, and anew each time: libuv calls back once for one
    that was reset and then stops watching it, though there may be much to read before the reset.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watch: Callable[[Callable[[], None]], object],
        forget: Callable[[], object],
        step: Step,
    ) -> None:
        self._loop, self._watch, self._forget, self._step = loop, watch, forget, step
        self._done: asyncio.Future[None] = loop.create_future()
        self._watching = False
        self._last = loop.time()

    async def made(self, within: float) -> None:
        self._go_on()
        if self._done.done():
            return self._done.result()
        self._timer = self._loop.call_later(within, self._look, within)
        try:
            await self._done
        finally:
            self._timer.cancel()
            self._ready()

    def fail(self, error: Exception) -> None:
        self._ready()
        if not self._done.done():
            self._done.set_exception(error)

    def _go_on(self) -> None:
        self._ready()
        if self._done.done():
            return
        try:
            finished = self._step()
        except (BlockingIOError, InterruptedError):
            self._watching = True
            self._watch(self._go_on)
            return
        except OSError as error:
            failed = ConnectionError(_text(error))
            failed.__cause__ = error
            self._done.set_exception(failed)
            return
        self._last = self._loop.time()
        if finished:
            self._done.set_result(None)
        else:
            self._loop.call_soon(self._go_on)

    def _ready(self) -> None:
        if self._watching:
            self._watching = False
            self._forget()

    def _look(self, within: float) -> None:
        left = self._last + within - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look, within)
        else:
            self.fail(TimeoutError(f"not a byte moved for {within:g} s"))


class TlsLink:
    """Over asyncio's streams. ``reads_memory``: TLS encrypts in this process."""

    reads_memory = True

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._over = False
        self.received = 0

    async def receive(self, into: memoryview, within: float) -> None:
        at = 0
        while at < len(into):
            data = await self._within(partial(self._reader.read, min(CHUNK, len(into) - at)), within)
            if not data:
                raise ConnectionError("it closed the connection")
            into[at : at + len(data)] = data
            at += len(data)
            self.received += len(data)

    async def send(self, data: memoryview | bytes, within: float) -> None:
        view = memoryview(data)
        for at in range(0, len(view), CHUNK):
            self._check()
            self._writer.write(view[at : at + CHUNK])
            await self._within(self._writer.drain, within)

    async def send_rows(self, data: memoryview, run: int, stride: int, within: float) -> None:
        for at in range(0, len(data), stride):
            await self.send(data[at : at + run], within)

    async def receive_rows(self, into: memoryview, run: int, stride: int, within: float) -> None:
        rows, most = (len(into) - run) // stride + 1, max(1, CHUNK // run)
        staged = memoryview(bytearray(min(rows, most) * run))
        for first in range(0, rows, most):
            part = staged[: min(most, rows - first) * run]
            await self.receive(part, within)
            scatter(part, into, first, run, stride)

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._writer.transport.abort()

    async def close(self) -> None:
        self._over = True
        self._writer.close()

    async def _within(self, work: Callable[[], Awaitable[T]], within: float) -> T:
        self._check()
        try:
            async with asyncio.timeout(within):
                result = await work()
        except TimeoutError:
            raise TimeoutError(f"not a byte moved for {within:g} s") from None
        except OSError as error:
            raise ConnectionError(_text(error)) from error
        self._check()
        return result

    def _check(self) -> None:
        if self._over:
            raise ConnectionError("the connection was ended here")


async def _tls(sock: socket.socket, tls: ssl.SSLContext, within: float, server_hostname: str | None = None) -> TlsLink:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(within):
            if server_hostname is None:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
            else:
                transport, _ = await loop.create_connection(
                    lambda: protocol, sock=sock, ssl=tls, server_hostname=server_hostname
                )
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no TLS within {within:g} s") from None
        if isinstance(error, OSError):
            text = _text(error) if isinstance(error, ssl.SSLError) else f"TLS failed: it ended the connection {error}"
            raise ConnectionError(text.strip()) from error
        raise
    return TlsLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def _text(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {getattr(error, 'verify_message', '') or error.reason or error}"
    return error.strerror or str(error) or type(error).__name__
