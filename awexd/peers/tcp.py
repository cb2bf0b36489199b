"""The transport that is always there: our own channel over TCP, with or without TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from awexd.peers.greeting import introduce
from awexd.peers.link import Link, connect
from awexd.peers.server import TcpServer
from awexd.peers.settings import PeerSettings
from awexd.peers.sums import Sum
from awexd.peers.threads import in_thread
from awexd.peers.wire import FRAME_BYTES, SUM, Frame, Kind, decode, decode_error
from awexd_transports.base import Admission, Capabilities, Memory, Piece, Source, Subject
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    IntegrityError,
    ProtocolError,
)

T = TypeVar("T")


class Tcp:
    """Stateless: makes servers and lanes (``base.Transport``)."""

    name: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(always=True)

    def __init__(self, settings: PeerSettings | None = None) -> None:
        self._settings = settings or PeerSettings()

    def serve(self, host: str, port: int, admission: Admission) -> TcpServer:
        return TcpServer(host, port, admission, self._settings)

    async def connect(self, source: Source, subject: Subject) -> TcpLane:
        link, _ = await greeted(source, subject, self._settings)
        return TcpLane(link, source, subject, self._settings)


class TcpLane:
    """One connection (``base.Lane``). Answers come in the order of the questions; any failure ends all of it."""

    depth = 2

    def __init__(self, link: Link, source: Source, subject: Subject, settings: PeerSettings) -> None:
        self._link = link
        self._source, self._subject, self._settings = source, subject, settings
        self._asking = asyncio.Lock()
        self._turn: asyncio.Future[None] | None = None

    @property
    def received(self) -> int:
        return self._link.received

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        before, self._turn = self._turn, asyncio.get_running_loop().create_future()
        mine = self._turn
        try:
            async with self._asking:
                await self._link.send(Frame(Kind.WANT, piece, summed).encode(), self._settings.stall)
            if before is not None and not before.done():
                await asyncio.wait([before])
            with memory.view[piece.offset : piece.end] as into:
                shown = await self._receive(piece, into, summed)
        except (AwexdError, OSError) as error:
            self._link.abort()
            raise named(error, self._source, self._subject, f"fetch of {piece}") from error
        except BaseException:
            self._link.abort()
            raise
        finally:
            if not mine.done():
                mine.set_result(None)
        if shown is not None and shown != await in_thread(sum_of, piece, memory):
            why = IntegrityError("the bytes are not those that were sent")
            raise named(why, self._source, self._subject, f"fetch of {piece}")

    async def close(self) -> None:
        self._link.abort()

    async def _receive(self, piece: Piece, into: memoryview, summed: bool) -> int | None:
        """The sum that came with it, if one was asked for."""
        head = bytearray(FRAME_BYTES)
        while True:
            await self._link.receive(memoryview(head), self._settings.first_byte)
            answer = decode(head)
            if answer.kind is not Kind.WAITING:
                break
        if answer.kind is Kind.ERROR:
            body = bytearray(answer.piece.nbytes)
            await self._link.receive(memoryview(body), self._settings.stall)
            raise decode_error(body)
        if answer != Frame(Kind.BYTES, piece, summed):
            raise ProtocolError(f"it answered with {answer.kind.name}: {answer.piece}")
        if piece.rows > 1:
            await self._link.receive_rows(into, piece.run, piece.stride, self._settings.stall)
        else:
            await self._link.receive(into, self._settings.stall)
        if not summed:
            return None
        tail = bytearray(SUM.size)
        await self._link.receive(memoryview(tail), self._settings.stall)
        return int(SUM.unpack(tail)[0])


async def greeted(source: Source, subject: Subject, settings: PeerSettings) -> tuple[Link, tuple[str, ...]]:
    """A connection on which both sides are proven, and the transports by which the source serves beside ``tcp``.

    Raises:
        AwexdError: as ``Transport.connect``.
    """
    phase = "connect"
    link: Link | None = None
    try:
        link = await connect(source.host, source.port, settings.client_tls, settings.connect, settings.handshake)
        phase = "handshake"
        serves = await within(introduce(link, source, settings.handshake), settings.handshake)
    except (AwexdError, OSError) as error:
        _abort(link)
        if isinstance(error, ConnectionError) and phase == "handshake" and settings.client_tls is not None:
            error = ConnectionError(f"TLS failed, if it does not accept this node's certificate: {error}")
        raise named(error, source, subject, phase) from error
    except BaseException:
        _abort(link)
        raise
    return link, serves


def sum_of(piece: Piece, memory: Memory) -> int:
    """Of a piece that is here, as its source sums it. Blocks."""
    total = Sum(memory.nbytes)
    for start, end in piece.runs():
        with memory.view[start:end] as held:
            total.add(held, start)
    return total.value


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"not done within {seconds:g} s") from None


def _abort(link: Link | None) -> None:
    if link is not None:
        link.abort()


def named(error: AwexdError | OSError, source: Source, subject: Subject, phase: str) -> AwexdError:
    """The error as one of ours, which names the peer, the job, the version and the phase."""
    where = f"{subject} from {source.node} ({source.host} port {source.port}), {phase}"
    details = {"peer": source.node, "job": subject.job, "epoch": subject.epoch, "step": subject.step}
    if isinstance(error, AwexdError):
        return type(error)(f"{where}: {error.message}", {**error.details, **details})
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"{where}: {error}", details)
    return DaemonUnavailable(f"{where}: {error}", details)
