"""A source's part: what one target asks for is written into its memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from typing import Any

from awexd.peers.link import CHUNK, Link
from awexd.peers.offers import Offered
from awexd.peers.rows import chunks
from awexd.peers.server import HEARTBEAT
from awexd.peers.settings import PeerSettings
from awexd.peers.sums import Sum
from awexd.peers.wire import (
    ADDRESS,
    FRAME_BYTES,
    NOTHING,
    SUM,
    Frame,
    Kind,
    decode,
    decode_attach,
    encode_error,
)
from awexd.rdma.agent import Agent, Region
from awexd.rdma.child import Child, TransferFailed
from awexd_transports.base import Memory, Piece
from awexd_transports.errors import DaemonUnavailable, IntegrityError, ProtocolError

PREPARING_SECONDS = 0.2
"""Between two words to a target while memory is registered and its agent made known."""
MAX_REGIONS = 4096
"""Of one target: segments that it may be written to."""
GONE_SECONDS = 1.0
"""For a write to a target that has gone away to fail by itself; then the sidecar is killed."""

Known = Counter[tuple[Child, str]]
"""Targets' agents that each sidecar knows, and how many connections need them."""


class Writes:
    """One target's connection. ``close`` it."""

    def __init__(self, agent: Agent, known: Known, link: Link, offer: Offered, settings: PeerSettings) -> None:
        self._agent, self._known = agent, known
        self._link, self._offer, self._settings = link, offer, settings
        self._ahead: asyncio.Task[Frame] | None = None
        self._target: tuple[str, list[bytes]] = "", []
        self._attached: tuple[Child, str] | None = None

    async def frame(self) -> Frame:
        """What the target says next."""
        if self._ahead is None:
            return await self._next()
        try:
            return await self._ahead
        finally:
            self._ahead = None

    async def take(self, frame: Frame) -> int:
        """Does it; bytes written.

        Raises:
            ProtocolError, VersionUnavailable, IntegrityError: told to the target, then its end.
        """
        kind, piece, summed = frame
        if kind is Kind.ATTACH:
            await self._attach(piece.nbytes)
            return 0
        if kind is not Kind.PUT:
            raise ProtocolError(f"a target that sends {kind.name}")
        stall, body = self._settings.stall, bytearray(ADDRESS.size)
        await self._link.receive(memoryview(body), stall)
        self._offer.check(piece)
        while not await self._offer.arrives(piece, HEARTBEAT):
            await self._link.send(Frame(Kind.WAITING, NOTHING).encode(), stall)
        try:
            with self._offer.sending(piece.rank) as memory:
                total = await self._write(memory, piece, ADDRESS.unpack(body)[0], summed)
        except TransferFailed as error:
            await self._link.send(encode_error(DaemonUnavailable(str(error)), Kind.FAILED), stall)
            return 0
        tail = b"" if total is None else SUM.pack(total)
        await self._link.send(Frame(Kind.DONE, piece, summed).encode() + tail, stall)
        return piece.nbytes

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        self._detach()

    async def _next(self) -> Frame:
        head = bytearray(FRAME_BYTES)
        await self._link.receive(memoryview(head), self._settings.idle)
        return decode(head)

    async def _attach(self, nbytes: int) -> None:
        body = bytearray(nbytes)
        await self._link.receive(memoryview(body), self._settings.stall)
        name, metadata = decode_attach(body)
        if name != self._target[0]:
            self._target = name, []
        self._detach()
        if len(self._target[1]) == MAX_REGIONS:
            raise ProtocolError("a target with too many regions")
        self._target[1].append(metadata)

    def _detach(self) -> None:
        if self._attached is None:
            return
        self._known[self._attached] -= 1
        if not self._known[self._attached]:
            del self._known[self._attached]
            child, name = self._attached
            child.tell("detach", agent=name)
        self._attached = None

    async def _write(self, memory: Memory, piece: Piece, address: int, summed: bool) -> int | None:
        """Returns when the bytes are there: their sum, if it is wanted. However it ends, the memory is read no more."""
        if os.fstat(memory.fd).st_size < memory.base + memory.nbytes:
            raise IntegrityError("a segment was truncated by its writer")
        region = await self._prepared(memory)
        moved = asyncio.Event()
        written = 0

        def progress(at: int) -> None:
            nonlocal written
            written = at
            moved.set()

        where: dict[str, Any] = {
            "offset": piece.offset,
            "nbytes": piece.nbytes,
            "address": address,
            "agent": self._target[0],
        }
        if piece.rows > 1:
            where |= {"rows": piece.rows, "run": piece.run, "stride": piece.stride}
        put = asyncio.ensure_future(region.child.call("put", key=region.key, within=None, progress=progress, **where))
        summing = asyncio.ensure_future(_sum(memory, piece)) if summed else None
        try:
            while not put.done():
                moved.clear()
                await self._look(put, moved, region.child)
                if moved.is_set():
                    told = Frame(Kind.WRITTEN, Piece(piece.rank, piece.offset, written))
                    await self._link.send(told.encode(), self._settings.stall)
            put.result()
            return await summing if summing is not None else None
        finally:
            await self._end(put, region.child)
            if summing is not None and not summing.done():
                summing.cancel()
                await asyncio.wait([summing])

    async def _look(self, put: asyncio.Future[Any], moved: asyncio.Event, child: Child) -> None:
        """Until the write gets on or ends; the connection's end, and a write that gets nowhere, are its end too.

        Raises:
            ConnectionError: the target is gone, or was cut off.
            TransferFailed: it got nowhere.
        """
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(self._next())
        moving = asyncio.ensure_future(moved.wait())
        heard = [self._ahead] if not self._ahead.done() else []
        try:
            done, _ = await asyncio.wait(
                [put, moving, *heard], timeout=self._settings.stall, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            moving.cancel()
        if not done and not child.mapping:
            await child.kill()
            raise TransferFailed(f"nothing was written for {self._settings.stall:g} s")
        error = self._ahead.exception() if self._ahead.done() else None
        if isinstance(error, ConnectionError):
            raise error
        if isinstance(error, TimeoutError):  # it has nothing to ask meanwhile
            self._ahead = None

    async def _end(self, put: asyncio.Future[Any], child: Child) -> None:
        """Nothing of it is under way any more."""
        if not put.done() and not self._offer.withdrawn:
            await asyncio.wait([put], timeout=GONE_SECONDS)
        if not put.done():
            await child.kill()
            await asyncio.wait([put])
        with contextlib.suppress(TransferFailed):
            put.result()

    async def _prepared(self, memory: Memory) -> Region:
        """Its memory, in a sidecar that knows the target."""
        preparing = asyncio.ensure_future(self._prepare(memory))
        try:
            while not (await asyncio.wait([preparing], timeout=PREPARING_SECONDS))[0]:
                await self._link.send(Frame(Kind.WAITING, NOTHING).encode(), self._settings.stall)
            return preparing.result()
        finally:
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait([preparing])

    async def _prepare(self, memory: Memory) -> Region:
        region = await self._agent.region(memory)
        name, blobs = self._target
        if not blobs:
            raise ProtocolError("a target that names no agent to write to")
        wanted = region.child, name
        if self._attached != wanted:
            self._detach()
            for blob in blobs:
                found = (await region.child.call("attach", metadata=blob.hex()))["agent"]
                if found != name:
                    region.child.tell("detach", agent=found)
                    raise ProtocolError("an agent whose metadata is another's")
            self._known[wanted] += 1
            self._attached = wanted
        return region


async def _sum(memory: Memory, piece: Piece) -> int:
    total = Sum(memory.nbytes)
    for part in chunks(piece, CHUNK):
        await asyncio.to_thread(total.add_runs, [(start, memory.read(start, end - start)) for start, end in part])
    return total.value
