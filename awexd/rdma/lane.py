"""A target's part: pieces are written into this node's memory by their source."""

from __future__ import annotations

import asyncio

from awexd.peers.link import Link
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import named, sum_of
from awexd.peers.threads import in_thread
from awexd.peers.wire import (
    ADDRESS,
    FRAME_BYTES,
    SUM,
    Frame,
    Kind,
    decode,
    decode_error,
    encode_attach,
)
from awexd.rdma.agent import Agent, Region
from awexd.rdma.child import Child, TransferFailed
from awexd_transports.base import Memory, Piece, Source, Subject
from awexd_transports.errors import AwexdError, DaemonUnavailable, IntegrityError, ProtocolError

TRIES = 3
"""Of one piece, each by another sidecar, before its lane is given up."""


class RdmaLane:
    """One connection over which pieces are asked for (``base.Lane``); answers come in the order of the questions.

    What may still be written when a piece fails is stopped by the death of this node's sidecar. That fails the pieces
    of other lanes, too: they are asked for again, by the next one.
    """

    depth = 2

    def __init__(self, link: Link, source: Source, subject: Subject, settings: PeerSettings, agent: Agent) -> None:
        self._link, self._agent = link, agent
        self._source, self._subject, self._settings = source, subject, settings
        self._asking = asyncio.Lock()
        self._turn: asyncio.Future[None] | None = None
        self._told: tuple[Child | None, set[int]] = None, set()
        self._closed = self._refused = False
        self.received = 0
        agent.hold()

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        try:
            if piece.end > memory.nbytes:
                raise ProtocolError(f"the memory here has no {piece}")
            shown = await self._fetched(piece, memory, summed)
        except (AwexdError, OSError, TransferFailed) as error:
            self._link.abort()
            if isinstance(error, TransferFailed):
                error = DaemonUnavailable(str(error))
            raise named(error, self._source, self._subject, f"fetch of {piece}") from error
        except BaseException:
            self._link.abort()
            raise
        if shown is not None and shown != await in_thread(sum_of, piece, memory):
            why = IntegrityError("the bytes are not those that were sent")
            raise named(why, self._source, self._subject, f"fetch of {piece}")

    async def close(self) -> None:
        self._link.abort()
        if not self._closed:
            self._closed = True
            self._agent.release()

    async def _fetched(self, piece: Piece, memory: Memory, summed: bool) -> int | None:
        failures: list[TransferFailed] = []
        while True:
            try:
                return await self._once(piece, memory, summed)
            except TransferFailed as error:
                failures.append(error)
                if len(failures) == TRIES:
                    raise

    async def _once(self, piece: Piece, memory: Memory, summed: bool) -> int | None:
        region = await self._agent.region(memory)
        asked = done = False
        turn: asyncio.Future[None] | None = None
        try:
            async with self._asking:
                await self._introduce(region)
                before, self._turn = self._turn, asyncio.get_running_loop().create_future()
                turn, asked = self._turn, True
                region.child.expect(1)
                frame = Frame(Kind.PUT, piece, summed).encode() + ADDRESS.pack(region.address + piece.offset)
                await self._link.send(frame, self._settings.stall)
            if before is not None and not before.done():
                await asyncio.wait([before])
            shown = await self._answer(piece, summed)
            done = True
            return shown
        finally:
            if asked:
                region.child.expect(-1)
            if asked and not done and not self._refused:
                await region.child.kill()  # or it may write to this memory later
            if turn is not None and not turn.done():
                turn.set_result(None)

    async def _introduce(self, region: Region) -> None:
        """The source must know where it may write."""
        if self._told[0] is not region.child:
            self._told = region.child, set()
        if region.key not in self._told[1]:
            await self._link.send(encode_attach(region.child.name, region.metadata), self._settings.stall)
            self._told[1].add(region.key)

    async def _answer(self, piece: Piece, summed: bool) -> int | None:
        """The sum that came with it, if one was asked for.

        Raises:
            TransferFailed: the source could not write it.
        """
        patience, written = self._settings.first_byte, 0
        while True:
            answer = await self._frame(patience)
            if answer.kind is Kind.WRITTEN:
                patience = self._settings.stall
                if answer.piece[:2] != piece[:2] or not written <= answer.piece.nbytes <= piece.nbytes:
                    raise ProtocolError(f"it answered with {answer.kind.name}: {answer.piece}")
                self.received += answer.piece.nbytes - written
                written = answer.piece.nbytes
            elif answer.kind is not Kind.WAITING:
                break
        if answer.kind in (Kind.ERROR, Kind.FAILED):
            body = bytearray(answer.piece.nbytes)
            await self._link.receive(memoryview(body), self._settings.stall)
            said = decode_error(body)
            # After an ERROR it writes nothing more, of this piece and of those that were asked for after it.
            self._refused = answer.kind is Kind.ERROR
            raise said if answer.kind is Kind.ERROR else TransferFailed(said.message)
        if answer != Frame(Kind.DONE, piece, summed):
            raise ProtocolError(f"it answered with {answer.kind.name}: {answer.piece}")
        self.received += piece.nbytes - written
        if not summed:
            return None
        tail = bytearray(SUM.size)
        await self._link.receive(memoryview(tail), self._settings.stall)
        return int(SUM.unpack(tail)[0])

    async def _frame(self, patience: float) -> Frame:
        head = bytearray(FRAME_BYTES)
        await self._link.receive(memoryview(head), patience)
        return decode(head)
