"""Serving versions to other nodes' daemons over TCP: who is let in, what they may ask for, and what they get."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

from awexd.peers import greeting
from awexd.peers.link import CHUNK, Link, accepted
from awexd.peers.offers import Offered
from awexd.peers.rows import chunks
from awexd.peers.settings import PeerSettings
from awexd.peers.sums import Sum
from awexd.peers.wire import FRAME_BYTES, NOTHING, SUM, Frame, Kind, decode, encode_error
from awexd.tickets import SESSION, Ticket
from awexd_transports.base import Admission, Memory, Piece, Subject
from awexd_transports.errors import AwexdError, IntegrityError, InvalidArgument, ProtocolError, VersionUnavailable
from awexd_transports.ranges import Ranges

BACKLOG = 512
HEARTBEAT = 1.0
"""Seconds between two words to a target that waits for bytes that have not arrived here yet."""
REFUSAL_SECONDS = 0.2
"""Before a refusal is answered: guessing is slow, and what was wrong does not show in the time it took."""
ACCEPT_RETRY_SECONDS = 0.5

_log = logging.getLogger(__name__)


class TcpServer:
    """Listens from the start; ``run`` serves. Owns its socket.

    Attributes:
        serves: transports by which it does.
        refused: connections that were not let in.
        sent: bytes of pieces.
    """

    serves: tuple[str, ...] = ("tcp",)

    def __init__(self, host: str, port: int, admission: Admission, settings: PeerSettings) -> None:
        self._admission = admission
        self._settings = settings
        self._offers: dict[Subject, Offered] = {}
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._proven = 0
        self.refused = self.sent = 0
        self.unproven_tls: Callable[[str], None] = lambda text: None
        """Told of connections whose TLS fails."""
        self.sessions: Callable[[Link, Ticket], Awaitable[None]] | None = None
        """Serves clients' sessions that come from another node."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self._listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
        except OSError as error:
            raise InvalidArgument(f"cannot listen for other nodes at {host} port {port}: {error.strerror}") from error
        self._listener.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def offer(self, subject: Subject, memories: Mapping[int, Memory], arrived: Mapping[int, Ranges] | None) -> Offered:
        if subject in self._offers:
            raise InvalidArgument(f"{subject} is offered already")
        made = Offered(subject, memories, arrived, lambda: self._forget(made))
        self._offers[subject] = made
        return made

    def _forget(self, offer: Offered) -> None:
        if self._offers.get(offer.subject) is offer:
            del self._offers[offer.subject]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        sock, address = await loop.sock_accept(self._listener)
                    except OSError as error:
                        _log.error("cannot accept other nodes' connections: %s", error)
                        await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                        continue
                    if len(self._unproven) >= self._settings.unproven:
                        oldest = next(iter(self._unproven))
                        del self._unproven[oldest]  # at once: it ends a little later
                        self.refused += 1
                        oldest.cancel()
                    task = group.create_task(self._connection(sock, f"{address[0]} port {address[1]}"))
                    self._unproven[task] = None
                    task.add_done_callback(lambda done: self._unproven.pop(done, None))
        finally:
            self.close()

    def close(self) -> None:
        """Stops listening; ``run`` does so at its end."""
        self._listener.close()

    async def _connection(self, sock: socket.socket, who: str) -> None:
        """Whatever happens in here ends this connection and nothing else."""
        link: Link | None = None
        try:
            async with asyncio.timeout(self._settings.handshake):
                link = await self._accepted(sock, who)
                ticket = await self._admitted(link, who)
            if ticket is not None:
                await self._proven_connection(link, ticket)
        except (ConnectionError, TimeoutError) as error:
            _log.info("the connection of %s ended: %s", who, error)
        except AwexdError as error:
            _log.info("the connection of %s was ended: %s", who, error)
        except Exception:  # noqa: BLE001 - a fault of ours ends this connection, never the daemon
            _log.exception("the connection of %s failed", who)
        finally:
            self.refused += _current() in self._unproven
            if link is None:
                sock.close()
            else:
                link.abort()

    async def _accepted(self, sock: socket.socket, who: str) -> Link:
        try:
            return await accepted(sock, self._settings.server_tls, self._settings.handshake)
        except ConnectionError as error:
            self.unproven_tls(f"{who} was not let in: {error}")
            raise

    async def _admitted(self, link: Link, who: str) -> Ticket | None:
        try:
            ticket = await greeting.admit(link, self._admission, self._settings.handshake)
        except AwexdError as error:
            _log.warning("%s was not let in: %s", who, error)
            await asyncio.sleep(REFUSAL_SECONDS)
            await link.send(greeting.REFUSED, self._settings.handshake)
            await link.close()
            return None
        self._unproven.pop(_current(), None)
        return ticket

    async def _proven_connection(self, link: Link, ticket: Ticket) -> None:
        subject = Subject(ticket.job, ticket.epoch, ticket.step, ticket.attempt)
        stall = self._settings.stall
        sessions = self.sessions if subject == Subject(ticket.job, *SESSION) else None
        offer = self._offers.get(subject)
        unserved = offer is None and sessions is None
        if unserved or self._proven >= self._settings.connections:
            why = f"{subject} is not served here" if unserved else "too many connections"
            await link.send(greeting.refusal(VersionUnavailable(why)), stall)
            await link.close()
            return
        self._proven += 1
        try:
            if sessions is not None:
                await link.send(greeting.ready(self.serves), stall)
                await sessions(link, ticket)
            elif offer is not None:
                with offer.user(link):
                    await link.send(greeting.ready(self.serves), stall)
                    await self._serve(link, offer)
        finally:
            self._proven -= 1

    async def _serve(self, link: Link, offer: Offered) -> None:
        task = _current()
        try:
            await self._answer(link, offer)
        except asyncio.CancelledError:
            if not offer.withdrawn or task.uncancel():
                raise  # it is the server that ends
            await self._last_word(link, offer.gone())
        except (ProtocolError, VersionUnavailable) as error:
            await self._last_word(link, error)
            raise

    async def _last_word(self, link: Link, error: AwexdError) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await link.send(encode_error(error), self._settings.stall)
        await link.close()

    async def _answer(self, link: Link, offer: Offered) -> None:
        """Pieces, in the order in which they are asked for, until the target closes."""
        frame = bytearray(FRAME_BYTES)
        while True:
            if offer.withdrawn:
                raise offer.gone()
            await link.receive(memoryview(frame), self._settings.idle)
            await self._piece(link, offer, decode(frame))

    async def _piece(self, link: Link, offer: Offered, frame: Frame) -> None:
        kind, piece, summed = frame
        if kind is not Kind.WANT:
            raise ProtocolError(f"a target that sends {kind.name}")
        offer.check(piece)
        while not await offer.arrives(piece, HEARTBEAT):
            await link.send(Frame(Kind.WAITING, NOTHING).encode(), self._settings.stall)
        with offer.sending(piece.rank) as memory:
            await link.send(Frame(Kind.BYTES, piece, summed).encode(), self._settings.stall)
            await self._send(link, memory, piece, summed)
        self.sent += piece.nbytes

    async def _send(self, link: Link, memory: Memory, piece: Piece, summed: bool) -> None:
        stall = self._settings.stall
        if not (summed or link.reads_memory):
            try:
                with memory.view[piece.offset : piece.end] as held:
                    if piece.rows > 1:
                        await link.send_rows(held, piece.run, piece.stride, stall)
                    else:
                        await link.send(held, stall)
            except ConnectionError as error:
                raise _named(error) from error
            return
        total = Sum(memory.nbytes)
        for part in chunks(piece, CHUNK):
            data = [(start, memory.read(start, end - start)) for start, end in part]
            if summed:
                await asyncio.to_thread(total.add_runs, data)
            await link.send(b"".join(row for _, row in data), stall)
        if summed:
            await link.send(SUM.pack(total.value), stall)


def _named(error: ConnectionError) -> Exception:
    """A client that truncates its segment makes the kernel refuse to read it."""
    cause = error.__cause__
    truncated = isinstance(cause, OSError) and cause.errno == errno.EFAULT
    return IntegrityError("a segment was truncated by its writer") if truncated else error


def _current() -> asyncio.Task[None]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("connections are served by tasks")
    return task
