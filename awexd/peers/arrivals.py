"""What of the wanted bytes is here, and what of that is known to be right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from awexd.peers.cells import Cells, Checked
from awexd.peers.threads import in_thread
from awexd_transports.base import Memory, Piece
from awexd_transports.errors import InvalidArgument
from awexd_transports.ranges import Ranges

Arrived = Callable[[int, int, int], None]
"""Called with rank, start and end of bytes that are there and right; each byte once."""


class Arrivals:
    """One rank's wanted bytes.

    Args:
        wanted: with ``cells``, rounded to whole cells, and with their table.
        cells: the rank's checksums; None: there are none, or they are not to be compared.
    """

    def __init__(self, rank: int, wanted: Ranges, memory: Memory, cells: Cells | None, arrived: Arrived) -> None:
        self.rank, self.memory = rank, memory
        self._cells, self._arrived = cells, arrived
        self.wanted = wanted.copy()
        if cells is not None and wanted:
            for start, end in wanted:
                self.wanted.add(*cells.whole(start, end))
            self.wanted.add(*cells.table)
        if any(end > memory.nbytes for _, end in self.wanted):
            raise InvalidArgument(f"rank {rank}: more is wanted than its memory of {memory.nbytes} bytes holds")
        self._here, self.right = Ranges(), Ranges()
        self._of: dict[str, Ranges] = {}
        self._turn = asyncio.Lock()
        self.left = self.wanted.total

    def pieces(self) -> Iterator[tuple[Piece, bool]]:
        """What is not known to be right, as pieces of any length; and whether the others need it first.

        All of it is fetched anew: what came before and was not compared must not be taken for what will come.
        """
        self._here = self.right.copy()
        table = self._cells.table if self._cells else (self.memory.nbytes, self.memory.nbytes)
        for start, end in self.wanted:
            for low, high in self.right.missing(start, end):
                cut = max(low, min(high, table[0]))
                if cut < high:
                    yield Piece(self.rank, cut, high - cut), True
                if low < cut:
                    yield Piece(self.rank, low, cut - low), False

    def has_cells(self, piece: Piece) -> bool:
        """Whether the table says what its bytes are; else they need a sum of their own."""
        return self._cells is not None and piece.offset < self._cells.table[0]

    async def take(self, piece: Piece, node: str) -> list[Checked]:
        """The piece is here, from that node. Returns the tiles that turn out wrong: they are wanted again."""
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
            return []
        else:
            start, end = piece.offset, piece.end
        async with self._turn:
            return await self._compare(self._cells, start, end)

    def again(self, tile: Checked) -> Piece:
        """Wrong bytes, as a piece."""
        return Piece(self.rank, tile.start, tile.end - tile.start)

    def came_from(self, tile: Checked) -> list[str]:
        """The nodes that its bytes came from last."""
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
