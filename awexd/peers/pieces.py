"""Which piece is asked of which source next: what fewest hold first, by each as fast as it is. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

from awexd_transports.base import Piece, Source


class Pieces:
    """Bytes that are wanted and not under way. A piece is cut by ``limit`` bytes, and where its holders change."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: dict[str, Source] = {}
        self._groups: dict[frozenset[str], deque[Piece]] = {}

    def __bool__(self) -> bool:
        return any(self._groups.values())

    def __iter__(self) -> Iterator[Piece]:
        return (piece for queue in self._groups.values() for piece in queue)

    def join(self, source: Source) -> None:
        self._sources[source.node] = source
        self._regroup()

    def leave(self, node: str) -> None:
        del self._sources[node]
        self._regroup()

    def add(self, piece: Piece, *, first: bool = False, whole: bool = False) -> None:
        """Wanted, of any length; ``first``: before what else its holders have; ``whole``: from one if one has all."""
        parts = list(self._cut(piece, whole))
        for part in reversed(parts) if first else parts:
            holders = frozenset(node for node, source in self._sources.items() if source.has(part))
            queue = self._groups.setdefault(holders, deque())
            if first:
                queue.appendleft(part)
            else:
                queue.append(part)

    def take(self, node: str) -> Piece | None:
        """What to ask that source for."""
        mine = [holders for holders, queue in self._groups.items() if queue and node in holders]
        return self._groups[min(mine, key=len)].popleft() if mine else None

    def nobodys(self) -> Piece | None:
        """One that no source holds."""
        return next(iter(self._groups.get(frozenset(), ())), None)

    def anybodys(self) -> bool:
        """Whether some source holds one of them."""
        return any(queue for holders, queue in self._groups.items() if holders)

    def _regroup(self) -> None:
        pieces = list(self)
        self._groups.clear()
        for piece in pieces:
            self.add(piece, whole=True)

    def _cut(self, piece: Piece, whole: bool) -> Iterator[Piece]:
        if piece.rows > 1 or (whole and any(source.has(piece) for source in self._sources.values())):
            yield piece
            return
        borders = {piece.offset, piece.end}
        for source in self._sources.values():
            held = source.holds.get(piece.rank) if source.holds is not None else None
            borders.update(border for part in (held.within(piece.offset, piece.end) if held else ()) for border in part)
        cuts = sorted(borders)
        for low, high in pairwise(cuts):
            for at in range(low, high, self._limit):
                yield Piece(piece.rank, at, min(self._limit, high - at))


def cut_up(pieces: Iterable[tuple[Piece, bool]], limit: int) -> Iterator[tuple[Piece, bool]]:
    """The same pieces, each with its mark, of at most ``limit`` bytes; rows stay together."""
    for piece, mark in pieces:
        if piece.rows > 1:
            yield piece, mark
            continue
        for at in range(piece.offset, piece.end, limit):
            yield Piece(piece.rank, at, min(limit, piece.end - at)), mark
