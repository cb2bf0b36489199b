"""What of the wanted bytes is here, and what of that is known to be right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from awexd.peers.cells import Cells, Checked
from awexd.peers.threads import in_thread
from awexd_transports.base import Memory, Piece
from awexd_transports.errors import InvalidArgument
from awexd_transports.ranges import Ranges

Arrived = Callable[[int, int, int], None]
"""Called with rank, start and end of bytes that are there and right; each byte once."""
Came = Callable[[Piece], None]
RowsArrived = Callable[[Piece], None]
"""The same of pieces of several rows."""

COMPARED = 256 << 20
"""Bytes that are compared at once, where many have waited for their table."""


class Arrivals:
    """One rank's wanted bytes.

    Args:
        wanted: with ``cells``, rounded to whole cells, and with their table.
        cells: the rank's checksums; None: there are none, or they are not to be compared.
        rows: what is wanted beside that, each as it is: whole cells.
        here: what is there already, and right.

        came: the table is complete only later, and asked for only then: what comes before waits for it, and is told
            of here. It may be wrong, and come again.
    """

    def __init__(
        self,
        rank: int,
        wanted: Ranges,
        memory: Memory,
        cells: Cells | None,
        arrived: Arrived,
        rows: Iterable[Piece] = (),
        rows_arrived: RowsArrived = lambda piece: None,
        here: Ranges | None = None,
        came: Came | None = None,
    ) -> None:
        self._came = came
        self.rank, self.memory = rank, memory
        self._cells, self._arrived, self._rows_arrived = cells, arrived, rows_arrived
        self.wanted = wanted.copy()
        self.rows = {piece: cells.across(piece) if cells else [] for piece in rows}
        self._rows_of = {tile: piece for piece, tiles in self.rows.items() for tile in tiles}
        self._rows_here: dict[Piece, str] = {}
        self._rows_right: set[Piece] = set()
        if cells is not None and (wanted or self.rows):
            for start, end in wanted:
                self.wanted.add(*cells.whole(start, end))
            self.wanted.add(*cells.table)
        if any(end > memory.nbytes for _, end in self.wanted) or any(piece.end > memory.nbytes for piece in self.rows):
            raise InvalidArgument(f"rank {rank}: more is wanted than its memory of {memory.nbytes} bytes holds")
        self._here, self.right = Ranges(), here.copy() if here is not None else Ranges()
        self._of: dict[str, Ranges] = {}
        self._turn = asyncio.Lock()
        missing = (high - low for start, end in self.wanted for low, high in self.right.missing(start, end))
        self.left = sum(missing) + sum(piece.nbytes for piece in self.rows)

    def pieces(self) -> Iterator[tuple[Piece, bool]]:
        """What is not known to be right, as pieces of any length; and whether the others need it first.

        All of it is fetched anew: what came before and was not compared must not be taken for what will come. Of what
        is still written nothing could be compared, and all of it will be: that is not fetched twice.
        """
        if self._came is not None and self._cells is not None and not self.right.covers(*self._cells.table):
            yield from self._early_pieces(self._cells)
            return
        self._here, self._rows_here = self.right.copy(), {}
        yield from ((piece, False) for piece in self.rows if piece not in self._rows_right)
        table = self._cells.table if self._cells else (self.memory.nbytes, self.memory.nbytes)
        for start, end in self.wanted:
            for low, high in self.right.missing(start, end):
                cut = max(low, min(high, table[0]))
                if cut < high:
                    yield Piece(self.rank, cut, high - cut), True
                if low < cut:
                    yield Piece(self.rank, low, cut - low), False

    def _early_pieces(self, cells: Cells) -> Iterator[tuple[Piece, bool]]:
        """In the order in which they are written; the table last."""
        found = [piece for piece in self.rows if piece not in self._rows_here]
        for start, end in self.wanted:
            for low, high in self._here.missing(start, min(end, cells.table[0])):
                found.append(Piece(self.rank, low, high - low))
        yield from ((piece, False) for piece in sorted(found, key=lambda piece: piece.offset))
        start, end = cells.table
        if start < end:
            yield Piece(self.rank, start, end - start), True

    def has_cells(self, piece: Piece) -> bool:
        """Whether the table says what its bytes are; else they need a sum of their own."""
        return self._cells is not None and piece.offset < self._cells.table[0]

    async def take(self, piece: Piece, node: str) -> list[Checked]:
        """The piece is here, from that node. Returns the tiles that turn out wrong: they are wanted again."""
        if piece in self.rows:
            self._rows_here[piece] = node
            if self._cells is not None and not self.right.covers(*self._cells.table):
                return self._waits(piece)
            async with self._turn:
                return await self._compare_rows([piece])
        self._here.add(piece.offset, piece.end)
        for held in self._of.values():
            held.remove(piece.offset, piece.end)
        self._of.setdefault(node, Ranges()).add(piece.offset, piece.end)
        if self._cells is None:
            self._good(piece.offset, piece.end)
            return []
        table = self._cells.table
        if not self.has_cells(piece):
            self._good(piece.offset, piece.end)
            if not self.right.covers(*table):
                return []
            start, end = 0, table[0]  # what has waited for it
        elif not self.right.covers(*table):
            return self._waits(piece)
        else:
            start, end = piece.offset, piece.end
        wrong: list[Checked] = []
        for at in range(start, end, COMPARED):  # in parts, so that others are served meanwhile, and more may come
            async with self._turn:
                wrong += await self._compare(self._cells, at, min(end, at + COMPARED))
        for row in [] if self.has_cells(piece) else list(self._rows_here):
            async with self._turn:
                wrong += await self._compare_rows([row])
        return wrong

    def _waits(self, piece: Piece) -> list[Checked]:
        """For the table: none of it is known to be wrong yet."""
        if self._came is not None:
            self._came(piece)
        return []

    def again(self, tile: Checked) -> Piece:
        """Wrong bytes, as a piece."""
        return self._rows_of.get(tile) or Piece(self.rank, tile.start, tile.end - tile.start)

    def came_from(self, tile: Checked) -> list[str]:
        """The nodes that its bytes came from last."""
        if tile in self._rows_of:
            return [self._rows_here[self._rows_of[tile]]]
        return [node for node, held in self._of.items() if any(held.within(tile.start, tile.end))]

    def names(self, tile: Checked) -> str:
        return self._cells.names(tile) if self._cells else ""

    async def _compare(self, cells: Cells, start: int, end: int) -> list[Checked]:
        """Tiles of which every byte is here; what lies between tiles is nobody's."""
        here = list(self._here.within(start, end))
        right = Ranges(here)
        ready = []
        for low, high in here:
            for tile in cells.touching(low, high):
                right.remove(tile.start, tile.end)
                if self._here.covers(tile.start, tile.end) and not self.right.covers(tile.start, tile.end):
                    ready.append(tile)
        ready = list({tile.start: tile for tile in ready}.values())
        wrong = await in_thread(cells.wrong, self.memory, ready) if ready else []
        bad = {tile.start for tile in wrong}
        for tile in ready:
            if tile.start in bad:
                self._here.remove(tile.start, tile.end)
            else:
                right.add(tile.start, tile.end)
        for low, high in right:
            self._good(low, high)
        return wrong

    async def _compare_rows(self, pieces: Iterable[Piece]) -> list[Checked]:
        """The first wrong tile of each."""
        wrong: list[Checked] = []
        for piece in pieces:
            if piece in self._rows_right:
                continue
            found = await in_thread(self._cells.wrong, self.memory, self.rows[piece]) if self._cells else []
            if found:
                wrong.append(found[0])
            else:
                self._rows_right.add(piece)
                self.left -= piece.nbytes
                self._rows_arrived(piece)
        return wrong

    def _good(self, start: int, end: int) -> None:
        new = list(self.right.missing(start, end))
        self.right.add(start, end)
        for low, high in new:
            self.left -= high - low
            self._arrived(self.rank, low, high)


def wanted_of(wants: Mapping[int, Ranges], memories: Mapping[int, Memory]) -> None:
    """Raises InvalidArgument where a rank has no memory to fetch into."""
    for rank in wants:
        memory = memories.get(rank)
        if memory is None or not memory.writable:
            raise InvalidArgument(f"rank {rank} is wanted, and has no memory here that may be written")
