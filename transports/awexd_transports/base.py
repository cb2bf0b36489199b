"""What a transport between nodes is: how one daemon lets bytes of a version be fetched, and another fetches them.

Both sides name bytes by rank and by offset from the start of that rank's segment's data (``segment.HEADER_BYTES`` into
its object). A transport moves pieces; which pieces, from whom, and whether they are right is its user's business.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from awexd_transports.errors import IntegrityError, InvalidArgument
from awexd_transports.ranges import Ranges
from awexd_transports.segment import HEADER_BYTES


class Subject(NamedTuple):
    """The version that is fetched."""

    job: str
    epoch: int
    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job} ({self.epoch}, {self.step})"


class Piece(NamedTuple):
    """``nbytes`` bytes of one rank's segment: neighbours, or ``rows`` of equal length that begin ``stride`` apart."""

    rank: int
    offset: int
    nbytes: int
    rows: int = 1
    stride: int = 0

    @property
    def run(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.rows

    @property
    def end(self) -> int:
        """Of the last row."""
        return self.offset + (self.rows - 1) * self.stride + self.run

    def runs(self) -> Iterator[tuple[int, int]]:
        """Where each row begins and ends."""
        for start in range(self.offset, self.end, self.stride or self.nbytes or 1):
            yield start, start + self.run

    def __str__(self) -> str:
        rows = f" ({self.rows} rows of {self.run})" if self.rows > 1 else ""
        return f"rank {self.rank}, bytes {self.offset} to {self.end}{rows}"


class Memory:
    """A segment's data on this node: mapped once, for all the versions that will lie in it. ``close`` unmaps it.

    Args:
        fd: of its object; duplicated.
        nbytes: of data.
        base: where in the object they begin.
        writable: it is fetched into, and nobody but this process can truncate it.

    Raises:
        InvalidArgument: the object is shorter than that.
    """

    def __init__(self, fd: int, nbytes: int, *, base: int = HEADER_BYTES, writable: bool = False) -> None:
        if nbytes < 0 or os.fstat(fd).st_size < base + nbytes:
            raise InvalidArgument(f"an object of {os.fstat(fd).st_size} bytes has no {nbytes} bytes after byte {base}")
        self.fd = os.dup(fd)
        self.base, self.nbytes, self.writable = base, nbytes, writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapped = mmap.mmap(self.fd, max(1, base + nbytes), mmap.MAP_SHARED, protection) if base + nbytes else None
        self.view = memoryview(self._mapped or b"")[base : base + nbytes]
        self.address = 0
        """Of the first byte of data; only of what is writable."""
        self.closing: list[Callable[[Memory], None]] = []
        """Called when it is closed, by whoever else has mapped it."""
        if writable and nbytes:
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy, made by the kernel: a client that truncates the object does this process no harm.

        Raises:
            IntegrityError: it has done so.
        """
        data = os.pread(self.fd, nbytes, self.base + offset)
        if len(data) < nbytes:
            raise IntegrityError("a segment was truncated by its writer")
        return data

    def close(self) -> None:
        """Nobody may be sending or receiving any more."""
        if self.fd < 0:
            return
        for told in list(self.closing):
            told(self)
        self.view.release()
        if self._mapped is not None:
            self._mapped.close()
        os.close(self.fd)
        self.fd = -1


@dataclass(frozen=True, slots=True)
class Source:
    """A node that serves a version.

    Attributes:
        node: its name, as in the ticket.
        host, port: where it listens.
        ticket, key: the encoded ticket, and its key (never on the wire).
        holds: what it has or will have, by rank; None: all.
    """

    node: str
    host: str
    port: int
    ticket: bytes = field(repr=False)
    key: bytes = field(repr=False)
    holds: Mapping[int, Ranges] | None = None

    def has(self, piece: Piece) -> bool:
        if self.holds is None:
            return True
        held = self.holds.get(piece.rank)
        return held is not None and held.covers(piece.offset, piece.end)


@dataclass(slots=True)
class Admission:
    """Whom a serving node lets in.

    Attributes:
        node: its own name.
        key: its key at the MetaServer; replaced when that gives it another.
        now_ms: the clock of the MetaServer's process with that name (``Ticket.run``), in milliseconds; None where that
            is not the current one.
    """

    node: str
    key: bytes = field(repr=False)
    now_ms: Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do.

    Attributes:
        always: it works between any two nodes that reach each other.
        one_sided: the source's process does not touch the bytes.
        device: it moves GPU memory.
    """

    always: bool = False
    one_sided: bool = False
    device: bool = False


class Offer(Protocol):
    """A version that may be fetched from here."""

    def extend(self, rank: int, start: int, end: int) -> None:
        """These bytes are there now, and right."""

    def extend_rows(self, piece: Piece) -> None:
        """As ``extend``, of rows: they are served as this one piece."""

    def promise(self, ranges: Mapping[int, Ranges], rows: Iterable[Piece]) -> None:
        """Nothing else than this will be there: whoever asks for more is refused, and does not wait."""

    async def withdraw(self, grace: float = 0.0) -> None:
        """Ends it. When this returns, nothing of its memories is in flight: they may be reused.

        Args:
            grace: seconds for pieces that are on their way; then their connections are cut.
        """


class Server(Protocol):
    """The serving side of a transport on this node."""

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""

    def offer(self, subject: Subject, memories: Mapping[int, Memory], arrived: Mapping[int, Ranges] | None) -> Offer:
        """Lets whoever has a ticket fetch that version, until it is withdrawn.

        Args:
            memories: by rank; they stay as they are until ``withdraw`` has returned.
            arrived: what is there already; None: all.
        """

    async def run(self) -> None:
        """Serves until it is cancelled."""


class Lane(Protocol):
    """A way from one source into this node's memory."""

    @property
    def depth(self) -> int:
        """Pieces that should be asked for at once."""

    @property
    def received(self) -> int:
        """Bytes that have come so far; it grows while a piece arrives."""

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        """Returns when the piece is in ``memory``, at its own place. However it ends otherwise, nothing is written
        from then on.

        Args:
            summed: the source sums what it sends, and the sum is compared.

        Raises:
            IntegrityError: the sum differs; the lane is still good. After any other error, and when this is cancelled,
                it is not.
            DaemonUnavailable, DeadlineExceeded, VersionUnavailable, ProtocolError: the source is gone or silent, or
                has it no more, or is broken; the text names it, the job, the version and the phase.
        """

    async def close(self) -> None:
        """Ends it; pieces under way fail."""


class Connects(Protocol):
    """The fetching side of a transport, or of several."""

    async def connect(self, source: Source, subject: Subject) -> Lane:
        """A lane on which both sides have proven who they are.

        Raises:
            AccessDenied, DaemonUnavailable, DeadlineExceeded, VersionUnavailable, ProtocolError: as ``Lane.fetch``.
        """


class Transport(Connects, Protocol):
    """Moves pieces between nodes."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def serve(self, host: str, port: int, admission: Admission) -> Server:
        """Listens at once; ``run`` of what is returned serves.

        Raises:
            InvalidArgument: not an address of this machine, or taken.
        """
