"""HTTP/1.1 over an asyncio transport: the strict part of it that JSON requests need, and nothing more.

Written for two figures that aiohttp's server does not reach: requests a second, and one answer to a thousand waiters
at once, which here is a thousand writes of the same bytes. What a request may look like stands in ``parse``; all else
is refused and ends its connection, so that two readings of one request cannot differ. A request's body is read only
after its head was routed and its caller is known, and never beyond that route's limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

import orjson

from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    BudgetExceeded,
    DeadlineExceeded,
    VersionUnavailable,
)

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64
MAX_WAITING_BYTES = 1 << 20
"""Of an answer that its reader does not take, beyond which nothing more is written to it."""
MAX_RECEIVING_BYTES = 256 << 20
"""Of all bodies that are on their way."""
REQUEST_SECONDS = 30.0
"""From a request's first byte to its last; a large body has a second more for each ``SLOWEST_BYTES``."""
SLOWEST_BYTES = 1 << 20
IDLE_SECONDS = 120.0
STALL_SECONDS = 30.0
"""How long a reader may take nothing of what is written to it."""
SWEEP_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""How long what follows a refused request is read and dropped."""
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_KEPT_HEADS = 4096
_KEPT_HEAD_BYTES = 1024

REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 409: "Conflict", 411: "Length Required", 413: "Content Too Large",
    415: "Unsupported Media Type", 417: "Expectation Failed", 421: "Misdirected Request",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
    503: "Service Unavailable", 504: "Gateway Timeout", 505: "HTTP Version Not Supported", 507: "Insufficient Storage",
}  # fmt: skip
_STATUSES: dict[str, int] = {
    "invalid_argument": 400,
    "protocol_error": 400,
    "access_denied": 403,
    "version_unavailable": 404,
    "version_conflict": 409,
    "epoch_changed": 409,
    "daemon_unavailable": 503,
    "deadline_exceeded": 504,
    "budget_exceeded": 507,
}
_REQUEST_LINE = re.compile(rb"([A-Z]{3,8}) (/[!-~]{0,2047}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that goes no further: its status and typed error."""

    def __init__(self, status: int, message: str, code: str = "protocol_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Head(NamedTuple):
    """A request without its body.

    Attributes:
        path: as sent, without the query; nothing in it is decoded.
        headers: by lower-case name.
        length: bytes of the body.
        closes: the connection ends after it.
    """

    method: str
    path: str
    query: str
    headers: dict[str, str]
    length: int
    closes: bool


def parse(head: bytes) -> Head:
    """A request's head, without the empty line that ends it.

    Raises:
        Refused: anything that is not plain HTTP/1.1 with a body of a stated length.
    """
    request_line, *lines = head.split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise Refused(400, "not a request line of HTTP/1.1")
    if match[3] != b"1":
        raise Refused(505, "HTTP/1.1 is spoken here")
    if len(lines) > MAX_HEADERS:
        raise Refused(431, f"{len(lines)} headers; at most {MAX_HEADERS}")
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise Refused(400, "a malformed header")
        name = header[1].decode().lower()
        if name in headers:
            raise Refused(400, f"header {name} twice")
        headers[name] = header[2].decode("latin-1").strip(" \t")
    if "host" not in headers:
        raise Refused(400, "no Host header")
    if "transfer-encoding" in headers:
        raise Refused(501, "a body comes with its Content-Length, not in chunks")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) <= 15):
        raise Refused(400, "a malformed Content-Length")
    path, _, query = match[2].decode().partition("?")
    closes = "close" in headers.get("connection", "").lower()
    return Head(match[1].decode(), path, query, headers, int(length), closes)


class Target(Protocol):
    """Where a request goes, once its head is known."""

    @property
    def max_bytes(self) -> int: ...


Handle = Callable[["Connection", Head, Any, bytes], "bytes | Coroutine[Any, Any, bytes] | None"]


class Server:
    """The connections of one listener.

    Args:
        route: finds a head's target, or raises what refuses it.
        handle: answers a request: with the whole answer's bytes; later, by a coroutine; or with None, and then by the
            connection's ``finish``.
        headers: of every answer.
    """

    def __init__(
        self, route: Callable[[Head], Target], handle: Handle, headers: dict[str, str], max_connections: int
    ) -> None:
        self.route = route
        self.handle = handle
        self.max_connections = max_connections
        self.connections: set[Connection] = set()
        self.requests = 0
        self.receiving = 0
        self.stopping = False
        self._common = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._heads: dict[bytes, tuple[Head, Target]] = {}
        self._prefixes: dict[tuple[int, str, bool], bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: list[Connection] = []

    def __call__(self) -> Connection:
        return Connection(self)

    def answer(self, status: int, body: bytes, kind: str = "application/json", *, last: bool = False) -> bytes:
        """A whole answer. ``last``: the connection ends after it."""
        prefix = self._prefixes.get((status, kind, last))
        if prefix is None:
            closing = "Connection: close\r\n" if last else ""
            prefix = self._prefixes[status, kind, last] = (self.head(status, kind) + closing).encode()
        if status == 204:
            return prefix + b"\r\n"
        return b"%sContent-Length: %d\r\n\r\n%s" % (prefix, len(body), body)

    def head(self, status: int, kind: str) -> str:
        """The beginning of an answer, without its length and its end."""
        content = "" if status == 204 else f"Content-Type: {kind}\r\n"
        if kind.startswith("text/html"):
            content += f"Content-Security-Policy: {PAGE_POLICY}\r\n"
        return f"HTTP/1.1 {status} {REASONS[status]}\r\n{content}{self._common}"

    def error(self, error: AwexdError | Refused, *, last: bool = False) -> bytes:
        """The answer that carries a typed error."""
        if isinstance(error, Refused):
            status, body = error.status, {"code": error.code, "message": str(error), "details": {}}
        else:
            status = _STATUSES.get(error.code, 500)
            body = {"code": error.code, "message": error.message, "details": error.details}
        return self.answer(status, orjson.dumps(body), last=last)

    def accepted(self, head: bytes) -> tuple[Head, Target]:
        """A head and where it goes. Clients that keep their connection send the same one again and again.

        It is found by a keyed hash of all its bytes, which tells nobody how much of a token was right.

        Raises:
            Refused, AwexdError: it is not taken.
        """
        found = self._heads.get(head)
        if found is None:
            parsed = parse(head)
            target = self.route(parsed)
            if parsed.length > target.max_bytes:
                text = f"a body of {parsed.length} bytes; this route takes {target.max_bytes}"
                raise Refused(413, text, "invalid_argument")
            if parsed.headers.get("expect", "100-continue").lower() != "100-continue":
                raise Refused(417, "an expectation that is not known")
            found = parsed, target
            if len(head) <= _KEPT_HEAD_BYTES:
                if len(self._heads) >= _KEPT_HEADS:
                    self._heads.clear()
                self._heads[head] = found
        return found

    def answers(self, connection: Connection) -> None:
        """It has an answer to write, which goes out with all others of this turn of the loop.

        One after another they wake a client that has many connections once, and not for each.
        """
        self._answering.append(connection)
        if len(self._answering) == 1:
            asyncio.get_running_loop().call_soon(self._write_answers)

    def _write_answers(self) -> None:
        answering, self._answering = self._answering, []
        for connection in answering:
            connection.flush()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def sweep(self) -> None:
        """Ends connections that are late, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = loop.time()
            for connection in list(self.connections):
                connection.look(now)

    async def stop(self) -> None:
        """Ends every connection and what they had asked for."""
        self.stopping = True
        for connection in list(self.connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))


class Connection(asyncio.Protocol):
    """One client's connection: its requests, one after another.

    Attributes:
        closed: called once it is lost, for whoever waits on its behalf.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._head: Head | None = None
        self._target: Any = None
        self._parts: list[bytes] = []
        self._missing = 0
        self._busy = False
        self._last = False
        self._due = self._loop.time() + REQUEST_SECONDS
        self._stalled: float | None = None
        self._transport: asyncio.Transport
        self._fd = -1
        self._answer_bytes = b""
        self.closed: Callable[[], None] | None = None

    # of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        if sock is not None:
            _keep_alive(sock)
            if transport.get_extra_info("sslcontext") is None:
                self._fd = sock.fileno()
        if self._server.stopping or len(self._server.connections) >= self._server.max_connections:
            self._refuse(Refused(503, f"{self._server.max_connections} connections are open", BudgetExceeded.code))
            return
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._last, self._buffer = True, b""
        if self._head is not None:
            self._release(self._head)
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed()

    def eof_received(self) -> None:
        self.flush()  # the transport closes now

    def pause_writing(self) -> None:
        self._stalled = self._loop.time()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled = None
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._last and not self._busy:
            return
        if self._head is not None and not self._busy:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data, self._parts = b"".join(self._parts), []
        self._buffer = self._buffer + data if self._buffer else data
        if self._busy:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self.abort()  # nobody pipelines so much behind a request that waits
            return
        self._proceed()

    # of the server

    def look(self, now: float) -> None:
        """Ends it where it is late."""
        if self._stalled is not None and now - self._stalled > STALL_SECONDS:
            self.abort()
        elif not self._busy and now > self._due:
            if (self._buffer or self._head is not None) and not self._last:
                self._refuse(Refused(400, "the request did not come to its end in time", DeadlineExceeded.code))
            else:
                self._transport.close()

    def abort(self) -> None:
        self._last = True
        self._transport.abort()

    def write(self, data: bytes) -> bool:
        """Part of an answer; False where its reader is too slow for it, which ends the connection."""
        if self._transport.is_closing():
            return False
        if self._transport.get_write_buffer_size() + len(data) > MAX_WAITING_BYTES:
            self.abort()
            return False
        self._send(data)
        return True

    def finish(self, answer: bytes) -> None:
        """The answer to a request that was left open; the next one of this connection follows."""
        self.closed = None
        if self._transport.is_closing():
            return
        self._send(answer)
        self._done()
        if self._buffer:
            self._loop.call_soon(self._proceed)

    def flush(self) -> None:
        """Writes what it has to answer."""
        if self._answer_bytes and not self._transport.is_closing():
            self._send(b"")

    # internals

    def _send(self, data: bytes) -> None:
        """After what it has to answer; at once where the kernel takes it, which the transport would do later."""
        transport = self._transport
        if self._answer_bytes:
            data, self._answer_bytes = self._answer_bytes + data, b""
        # Once it is closing, its descriptor may be another connection's.
        if self._fd >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            try:
                sent = os.write(self._fd, data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.abort()
                return
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

    def _proceed(self) -> None:
        while not self._busy and not self._last:
            if self._head is None and not self._take_head():
                return
            head = self._head
            if head is None or self._parts:
                return
            body, self._buffer = self._buffer[: head.length], self._buffer[head.length :]
            self._release(head)
            self._answer(head, body)

    def _take_head(self) -> bool:
        if not self._buffer:
            return False
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
        if end < 0:
            if len(self._buffer) >= MAX_HEAD_BYTES + 4:
                self._refuse(Refused(431, f"a head of more than {MAX_HEAD_BYTES} bytes"))
            elif self._due > self._loop.time() + REQUEST_SECONDS:
                self._due = self._loop.time() + REQUEST_SECONDS
            return False
        try:
            head, target = self._server.accepted(self._buffer[:end])
            if head.length and head.length + self._server.receiving > MAX_RECEIVING_BYTES:
                raise Refused(503, "too many large bodies at once", BudgetExceeded.code)
        except (Refused, AwexdError) as error:
            self._refuse(error)
            return False
        self._buffer = self._buffer[end + 4 :]
        self._head, self._target = head, target
        self._server.receiving += head.length
        self._missing = head.length - len(self._buffer)
        if self._missing > 0:
            self._parts, self._buffer = [self._buffer], b""
            self._due = self._loop.time() + REQUEST_SECONDS + head.length / SLOWEST_BYTES
            if "expect" in head.headers:
                self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _answer(self, head: Head, body: bytes) -> None:
        server = self._server
        server.requests += 1
        self._last = head.closes
        self._busy = True
        try:
            outcome = server.handle(self, head, self._target, body)
        except (Refused, AwexdError) as error:
            outcome = server.error(error)
        except Exception:  # noqa: BLE001 - a fault of ours ends this request, never the server
            _log.exception("%s %s failed", head.method, head.path)
            outcome = server.error(AwexdError("a fault of the MetaServer's own; its log has more"))
        if isinstance(outcome, bytes):
            if self._last or self._answer_bytes:
                self._send(outcome)
            else:
                self._answer_bytes = outcome
                server.answers(self)
            self._done()
        elif outcome is not None:
            server.start(self._later(head, outcome))

    async def _later(self, head: Head, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            answer = await work
        except (Refused, AwexdError) as error:
            answer = self._server.error(error)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("%s %s failed", head.method, head.path)
            answer = self._server.error(AwexdError("a fault of the MetaServer's own; its log has more"))
        self.finish(answer)

    def _release(self, head: Head) -> None:
        self._server.receiving -= head.length
        self._head, self._parts = None, []

    def _done(self) -> None:
        self._busy = False
        self._due = self._loop.time() + IDLE_SECONDS
        if self._last:
            self._transport.close()

    def _refuse(self, error: Refused | AwexdError) -> None:
        """Nothing more of this connection is understood. What still comes is dropped for a moment.

        Closed at once with bytes unread, the kernel would reset it, and the answer be lost.
        """
        self._last, self._buffer = True, b""
        if self._head is not None:
            self._release(self._head)
        self._due = self._loop.time() + LINGER_SECONDS
        self._send(self._server.error(error, last=True))
        if self._transport.can_write_eof():
            self._transport.write_eof()


def unauthorized(message: str) -> Refused:
    return Refused(401, message, AccessDenied.code)


def not_found(message: str) -> Refused:
    return Refused(404, message, VersionUnavailable.code)


def _keep_alive(sock: socket.socket) -> None:
    """A peer that is gone without a word is noticed within a minute, also while it only waits."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 20),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
