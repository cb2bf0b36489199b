"""What this node lets others fetch: versions, their memory, what of it is there, and who is using it now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from awexd.peers.link import Link
from awexd_transports.base import Memory, Piece, Subject
from awexd_transports.errors import ProtocolError, VersionUnavailable
from awexd_transports.ranges import Ranges


class Offered:
    """One version that may be fetched from here (``base.Offer``)."""

    def __init__(
        self,
        subject: Subject,
        memories: Mapping[int, Memory],
        arrived: Mapping[int, Ranges] | None,
        forget: Callable[[], None],
    ) -> None:
        self.subject = subject
        self._memories = dict(memories)
        if arrived is None:
            self._arrived = {rank: Ranges([(0, memory.nbytes)]) for rank, memory in memories.items()}
        else:
            self._arrived = {rank: arrived[rank].copy() if rank in arrived else Ranges() for rank in memories}
        self._rows: set[Piece] = set()
        self._promised: tuple[dict[int, Ranges], frozenset[Piece]] | None = None
        self._forget = forget
        self._changed = asyncio.Event()
        self._users: dict[asyncio.Task[None], Link] = {}
        self._busy: set[asyncio.Task[None]] = set()
        self._idle, self._unused = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._unused.set()
        self.withdrawn = self.used = False
        """``used``: some node has fetched from it, or is about to."""

    def include(self, memories: Mapping[int, Memory]) -> None:
        """More ranks, of which nothing is there yet."""
        for rank, memory in memories.items():
            self._memories[rank], self._arrived[rank] = memory, Ranges()

    def extend(self, rank: int, start: int, end: int) -> None:
        self._arrived[rank].add(start, end)
        self._change()

    def extend_rows(self, piece: Piece) -> None:
        self._rows.add(piece)
        self._change()

    def pass_on(self, piece: Piece) -> None:
        """It is there, though it cannot be compared yet: whoever fetches it compares it, too."""
        if piece.rows > 1:
            self.extend_rows(piece)
        else:
            self.extend(piece.rank, piece.offset, piece.end)

    def promise(self, ranges: Mapping[int, Ranges], rows: Iterable[Piece]) -> None:
        self._promised = {rank: wanted.copy() for rank, wanted in ranges.items()}, frozenset(rows)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def in_use(self) -> bool:
        """Whether any connection is bound to it."""
        return bool(self._users)

    def withdraw_unused(self) -> bool:
        """Ends it at once if no connection is bound to it; whether that is so."""
        if self._users:
            return False
        self.withdrawn = True
        self._forget()
        return True

    async def unused(self) -> None:
        """Returns once no connection is bound to it."""
        await self._unused.wait()

    async def withdraw(self, grace: float = 0.0) -> None:
        self.withdrawn = True
        self._forget()
        for user in self._users.keys() - self._busy:
            user.cancel()  # it says why, and ends
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for user in list(self._busy):
                self._users[user].abort()
            await self._idle.wait()

    @contextmanager
    def user(self, link: Link) -> Iterator[None]:
        """For as long as the connection of the current task is bound to this version."""
        task = _current()
        self._users[task] = link
        self.used = True
        self._unused.clear()
        try:
            yield
        finally:
            del self._users[task]
            if not self._users:
                self._unused.set()

    @contextmanager
    def sending(self, rank: int) -> Iterator[Memory]:
        """A rank's memory, which is in flight until this is left.

        Raises:
            VersionUnavailable: the version is withdrawn.
        """
        if self.withdrawn:
            raise self.gone()
        task = _current()
        self._busy.add(task)
        self._idle.clear()
        try:
            yield self._memories[rank]
        finally:
            self._busy.discard(task)
            if not self._busy:
                self._idle.set()

    def check(self, piece: Piece) -> None:
        """
        Raises:
            ProtocolError: it is no part of this version.
            VersionUnavailable: it is one that does not come here.
        """
        memory = self._memories.get(piece.rank)
        if memory is None or piece.end > memory.nbytes:
            raise ProtocolError(f"{self.subject} has no {piece} here")
        if self._promised is not None:
            ranges, rows = self._promised
            promised = ranges.get(piece.rank)
            if piece not in rows and (promised is None or not promised.covers(piece.offset, piece.end)):
                raise VersionUnavailable(f"only a part of {self.subject} is here, without {piece}")

    async def arrives(self, piece: Piece, within: float) -> bool:
        """Whether the piece is there, now or within that time."""
        try:
            async with asyncio.timeout(within):
                while not (piece in self._rows or self._arrived[piece.rank].covers(piece.offset, piece.end)):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def gone(self) -> VersionUnavailable:
        return VersionUnavailable(f"{self.subject} was withdrawn")


def _current() -> asyncio.Task[None]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a version is served by tasks")
    return task
