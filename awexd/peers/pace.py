"""How fast each lane is, and which one would take so long that another should do its work."""

from __future__ import annotations

import time
from collections.abc import Iterable

from awexd_transports.base import Lane, Piece, Source

LONGER = 2.0
"""How many times longer than the other's time for the same bytes is too long."""
GRACE = 0.25
"""Seconds on top; a lane is not judged before it had as many."""


class Pace:
    """One lane's work. ``overtaken``: it was ended because another is faster."""

    def __init__(self, lane: Lane, source: Source) -> None:
        self.lane, self.source = lane, source
        self.overtaken = False
        self._asked: dict[Piece, None] = {}
        self._received = lane.received
        self._since = 0.0
        self._busy, self._moved = 0.0, 0

    def asked(self, piece: Piece) -> None:
        if not self._asked:
            self._since, self._received = time.monotonic(), self.lane.received
        self._asked[piece] = None

    def answered(self, piece: Piece) -> None:
        del self._asked[piece]
        if not self._asked:
            self._busy += time.monotonic() - self._since
            self._moved += self.lane.received - self._received

    @property
    def pieces(self) -> Iterable[Piece]:
        return self._asked

    def seconds(self, nbytes: int) -> float | None:
        """How long that many bytes should take; None where it has done too little to tell."""
        busy, moved = self._busy, self._moved
        if self._asked:
            busy += time.monotonic() - self._since
            moved += self.lane.received - self._received
        if busy < GRACE and not moved:
            return None
        return nbytes * busy / moved if moved else float("inf")


def slowest(mine: Pace, paces: Iterable[Pace]) -> Pace | None:
    """Of the lanes whose whole work this one's source could do in half the time, the slowest."""
    found: list[tuple[float, Pace]] = []
    for other in paces:
        nbytes = sum(piece.nbytes for piece in other.pieces)
        theirs, ours = other.seconds(nbytes), mine.seconds(nbytes)
        if other is mine or not nbytes or theirs is None or ours is None or other.overtaken:
            continue
        if all(map(mine.source.has, other.pieces)) and theirs > LONGER * ours + GRACE:
            found.append((theirs, other))
    return max(found, key=lambda one: one[0])[1] if found else None
