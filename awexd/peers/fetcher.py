"""Fetching a version from several sources at once: dealt, retried, compared, resumed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from operator import itemgetter

from awexd.peers.arrivals import Arrivals, Arrived, Came, RowsArrived, wanted_of
from awexd.peers.cells import Cells, Checked
from awexd.peers.pace import Pace, slowest
from awexd.peers.pieces import Pieces, cut_up
from awexd.peers.settings import PeerSettings
from awexd_transports.base import Connects, Lane, Memory, Piece, Source, Subject
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    IntegrityError,
    InvalidArgument,
    VersionUnavailable,
)
from awexd_transports.ranges import Ranges
from awexd_transports.turns import turn

FINAL = (AccessDenied, VersionUnavailable)
"""What another try at the same source does not mend."""
BACKOFF = 0.05
"""Seconds before the second try; twice as long before each that follows."""
TICK = 0.1
"""Seconds between two looks at the others' pace by a lane that has nothing to do."""


class Fetcher:
    """Brings the wanted bytes of one version into this node's memory, each once.

    ``run`` may be called again after it failed: it goes on with what is missing.

    Args:
        wants: by rank, bytes of its segment's data.
        memories: by rank, writable; nobody else writes to what is wanted.
        cells: by rank, where its writer stored checksums: what arrives is compared with those. Wanted bytes are rounded
            up to whole cells, and their table comes with them. Other ranks' bytes are summed by each source that sends.
        verify: False: neither is done.
        arrived: told of bytes that are there and right.
        here: by rank, what of it is there already, and right.
        rows: by rank, pieces of several rows that are wanted beside ``wants``; ``rows_arrived`` is told of those.
        room: awaited before each piece is asked for.
        came: where it is still written: it is asked for in the order of that, and tables of checksums only once it is
            ``sealed``. Told of bytes that are there and wait for that; they may be wrong, and come again.

    Attributes:
        delivered: bytes by source.
        failed: sources that the last run gave up, and why.
        again: bytes that were fetched more than once.
    """

    def __init__(
        self,
        transport: Connects,
        subject: Subject,
        wants: Mapping[int, Ranges],
        memories: Mapping[int, Memory],
        *,
        cells: Mapping[int, Cells] | None = None,
        verify: bool = True,
        arrived: Arrived = lambda rank, start, end: None,
        here: Mapping[int, Ranges] | None = None,
        rows: Mapping[int, Collection[Piece]] | None = None,
        rows_arrived: RowsArrived = lambda piece: None,
        room: Callable[[], Awaitable[None]] | None = None,
        settings: PeerSettings | None = None,
        came: Came | None = None,
    ) -> None:
        wanted_of(wants, memories)
        rows, here = rows or {}, here or {}
        self._transport, self._subject, self._verify = transport, subject, verify
        self._settings = settings or PeerSettings()
        checked = cells if verify and cells else {}
        self._ranks = {
            rank: Arrivals(
                rank,
                wanted,
                memories[rank],
                checked.get(rank),
                arrived,
                rows.get(rank, ()),
                rows_arrived,
                here.get(rank),
                came,
            )
            for rank, wanted in wants.items()
        }
        self._early = came is not None
        self._run: _Run | None = None
        self._running = False
        self._room = room
        self.delivered: Counter[str] = Counter()
        self.failed: dict[str, AwexdError] = {}
        self.again = 0

    @property
    def left(self) -> int:
        """Bytes that are not there yet, or not known to be right."""
        return sum(rank.left for rank in self._ranks.values())

    def left_of(self, rank: int) -> int:
        """Of one rank's."""
        return self._ranks[rank].left

    def wanted(self, rank: int) -> Ranges:
        """What of that rank is brought, beside rows."""
        return self._ranks[rank].wanted.copy()

    def right(self, rank: int) -> Ranges:
        """What is there and right."""
        return self._ranks[rank].right.copy()

    def sealed(self) -> None:
        """What is fetched early is complete at its sources now."""
        self._early = False
        if self._run is not None:
            self._run.ask_for_tables()

    async def run(self, sources: Iterable[Source], within: float) -> None:
        """Returns when all is there. However it ends, nothing is written or read any more.

        Where a source fails that alone has some of it, the others still give what they have.

        Raises:
            DeadlineExceeded: not within so many seconds.
            IntegrityError: no source is left, and one has sent wrong bytes.
            AccessDenied, DaemonUnavailable, VersionUnavailable, ProtocolError, DeadlineExceeded: no source is left; the
                error of the only one, or of all of them.
        """
        sources = list(sources)
        if self._running:
            raise InvalidArgument(f"{self._subject} is being fetched already")
        if len({source.node for source in sources}) < len(sources):
            raise InvalidArgument(f"{self._subject}: a source is named twice")
        if not self.left:
            return
        self._running = True
        try:
            self._run = _Run(self, sources)
            await self._run.to_its_end(within)
        finally:
            self._running, self._run = False, None


class _Run:
    """One call of ``Fetcher.run``."""

    def __init__(self, fetcher: Fetcher, sources: list[Source]) -> None:
        self._fetcher = fetcher
        self._settings = fetcher._settings
        self._sources = sources
        self._pieces = Pieces(self._settings.piece_bytes)
        for source in sources:
            self._pieces.join(source)
        # Ranks in turn: whoever passes on what it is still fetching has some of each early, not the last at its end;
        # and who copies what has come knows what comes together.
        wanted = {
            turn(number): list(cut_up(rank.pieces(), self._settings.piece_bytes))
            for number, rank in fetcher._ranks.items()
        }
        in_turn = [(at / len(parts), when, *part) for when, parts in wanted.items() for at, part in enumerate(parts)]
        self._tables: list[Piece] = []
        for _, _, piece, first in sorted(in_turn, key=itemgetter(0, 1)):
            if first and fetcher._early:
                self._tables.append(piece)
            else:
                self._pieces.add(piece, first=first)
        self._streams = {source.node: self._settings.streams for source in sources}
        self._paces: dict[Lane, Pace] = {}
        self._strikes: Counter[str] = Counter()
        self._under_way = 0
        self._doubted: set[tuple[int, int]] = set()
        self._failures = fetcher.failed = dict[str, AwexdError]()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    def ask_for_tables(self) -> None:
        """They are there now; what has waited for them is compared, and the rest as it comes."""
        tables, self._tables = self._tables, []
        for piece in tables:
            self._pieces.add(piece, first=True)
        self._change()

    async def to_its_end(self, within: float) -> None:
        fetcher, sources = self._fetcher, self._sources
        try:
            async with asyncio.timeout(within), asyncio.TaskGroup() as group:
                every = [source for source in sources for _ in range(self._settings.streams)]
                streams = [group.create_task(self._stream(source)) for source in every]
                try:
                    if streams and not self._stranded():
                        await self._ended.wait()
                finally:
                    self._ended.set()
                for stream in streams:
                    stream.cancel()
        except TimeoutError:
            who = ", ".join(source.node for source in sources)
            raise DeadlineExceeded(
                f"{fetcher._subject}: {fetcher.left} bytes have not come within {within:g} s from {who}{self._said()}",
                {"job": fetcher._subject.job, "sources": [source.node for source in sources]},
            ) from None
        if fetcher.left:
            raise self._failure()

    async def _stream(self, source: Source) -> None:
        """One connection after the other, until the source is of no more use."""
        node, failures = source.node, 0
        try:
            while failures <= self._settings.retries and self._strikes[node] < self._settings.strikes:
                if self._ended.is_set():
                    return
                before = self._fetcher.delivered[node]
                lane: Lane | None = None
                try:
                    lane = await self._fetcher._transport.connect(source, self._fetcher._subject)
                    await self._use(lane, source)
                except AwexdError as error:
                    overtaken = lane is not None and self._paces[lane].overtaken
                    if not overtaken:
                        failures = 1 if self._fetcher.delivered[node] > before else failures + 1
                        self._failures[node] = error
                    if isinstance(error, FINAL) or self._ended.is_set():
                        return  # a group that ends for an error forgets that it was cancelled meanwhile
                finally:
                    if lane is not None:
                        self._paces.pop(lane, None)
                        await lane.close()
                await asyncio.sleep(BACKOFF * 2**failures)
        finally:
            self._leave(node)

    def _leave(self, node: str) -> None:
        self._streams[node] -= 1
        if not self._streams[node]:
            self._pieces.leave(node)
        self._change()
        if not any(self._streams.values()) or self._stranded():
            self._ended.set()

    def _stranded(self) -> bool:
        """Whether no source can give more: what is left is nobody's."""
        if self._under_way or self._pieces.anybodys():
            return False
        return not self._tables or self._pieces.nobodys() is not None

    async def _use(self, lane: Lane, source: Source) -> None:
        self._paces[lane] = Pace(lane, source)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lane.depth):
                    group.create_task(self._pull(lane, source))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None

    async def _pull(self, lane: Lane, source: Source) -> None:
        while self._strikes[source.node] < self._settings.strikes:
            if self._fetcher._room is not None:
                await self._fetcher._room()
            piece = self._pieces.take(source.node)
            if piece is None:
                await self._idle(lane)
                continue
            self._under_way += 1
            try:
                await self._fetch(lane, source, piece)
            finally:
                self._under_way -= 1
                if not self._fetcher.left or self._stranded():
                    self._ended.set()

    async def _fetch(self, lane: Lane, source: Source, piece: Piece) -> None:
        rank, pace = self._fetcher._ranks[piece.rank], self._paces[lane]
        summed = self._fetcher._verify and not rank.has_cells(piece)
        pace.asked(piece)
        try:
            await lane.fetch(piece, rank.memory, summed=summed)
        except IntegrityError as error:
            self._strike(source.node, error)
            self._want_again(piece)
            return
        except BaseException:
            self._want_again(piece, delivered=False)
            raise
        finally:
            pace.answered(piece)
        self._fetcher.delivered[source.node] += piece.nbytes
        for tile in await rank.take(piece, source.node):
            self._blame(rank, tile)
            self._want_again(rank.again(tile))
        self._change()

    def _blame(self, rank: Arrivals, tile: Checked) -> None:
        """Of a tile from two sources, either may be wrong: it comes again, from one if one has all of it."""
        nodes, place = rank.came_from(tile), (rank.rank, tile.start)
        if len(nodes) == 1 or place in self._doubted:
            what = f"{rank.names(tile)} (rank {rank.rank}) is not what its writer stored"
            for node in nodes:
                self._strike(node, IntegrityError(f"{self._fetcher._subject} from {node}: {what}"))
        self._doubted.add(place)

    def _strike(self, node: str, error: IntegrityError) -> None:
        self._strikes[node] += 1
        self._failures[node] = error

    def _want_again(self, piece: Piece, *, delivered: bool = True) -> None:
        self._fetcher.again += piece.nbytes if delivered else 0
        self._pieces.add(piece, first=True, whole=True)
        self._change()

    async def _idle(self, lane: Lane) -> None:
        """Until there may be something to do; a source that would take much longer than this one is overtaken."""
        pace = self._paces[lane]
        slow = slowest(pace, self._paces.values())
        if slow is not None:
            slow.overtaken = True
            await slow.lane.close()  # what it has under way comes back, to whoever waits
        changed = self._changed
        try:
            async with asyncio.timeout(TICK):
                await changed.wait()
        except TimeoutError:
            return

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _failure(self) -> AwexdError:
        failures, subject = list(self._failures.values()), self._fetcher._subject
        unheld = self._pieces.nobodys()
        if not failures:
            return VersionUnavailable(f"{subject}: no source holds {unheld}", {"job": subject.job})
        kinds = {type(error) for error in failures}
        kind = IntegrityError if IntegrityError in kinds else kinds.pop() if len(kinds) == 1 else DaemonUnavailable
        if len(failures) == 1:
            return failures[0]
        return kind(f"{subject}: no source is left{self._said()}", {"job": subject.job, "sources": [*self._failures]})

    def _said(self) -> str:
        return "".join(f"; {error}" for error in self._failures.values())


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
