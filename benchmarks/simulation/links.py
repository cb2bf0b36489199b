"""Simulated time, and links that serve what passes over them in turn."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

Hops = tuple[tuple[int, int], ...]
"""Links in the order in which bytes pass them, and the class of those bytes on each."""


class Clock:
    """Calls in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, call, args))

    def run(self) -> None:
        """Until nothing is left to be called."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call, args = pop(heap)
            call(*args)


class _Piece:
    """Bytes under way."""

    __slots__ = ("args", "at", "done", "finish", "hops", "nbytes")

    def __init__(self, hops: Hops, nbytes: float, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.hops, self.nbytes, self.done, self.args = hops, nbytes, done, args
        self.at = 0
        self.finish = 0.0


class _Link:
    """Pieces wait by class; of the classes that wait the one that has had the least is served next.

    That is start-time fair queueing: a class that comes back has no claim to what it did not ask for meanwhile.
    """

    __slots__ = ("carried", "cost", "free", "served", "virtual", "waiting", "waits")

    def __init__(self, rate: float, classes: int) -> None:
        self.cost = 1.0 / rate
        self.free = 0.0
        self.carried = 0.0
        self.waiting: list[deque[_Piece]] = [deque() for _ in range(classes)]
        self.served = [0.0] * classes
        self.waits = 0
        self.virtual = 0.0

    def add(self, piece: _Piece, kind: int) -> None:
        self.waiting[kind].append(piece)
        self.waits += 1

    def next(self) -> tuple[_Piece, int]:
        """The piece to be served now, and its class; there is one that waits."""
        waiting, served = self.waiting, self.served
        best = -1
        for at, queue in enumerate(waiting):
            if queue and (best < 0 or served[at] < served[best]):
                best = at
        self.waits -= 1
        return waiting[best].popleft(), best


class Links:
    """Each serves pieces one after the other: those of a class in the order in which their first bytes arrive, and the
    classes of a link fairly, by bytes.

    A piece is passed on while it still arrives, so one alone takes as long as its slowest hop. A link that is faster
    than the one before it is busy for its own time only, and serves others meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: list[_Link] = []

    def add(self, rate: float, classes: int = 1) -> int:
        """A link of so many bytes a second; its number."""
        self._links.append(_Link(rate, classes))
        return len(self._links) - 1

    def carried(self, link: int) -> float:
        """Bytes that have passed it."""
        return self._links[link].carried

    def send(self, hops: Hops, nbytes: float, done: Callable[..., None], *args: Any) -> None:
        """``done`` is called when the last byte has passed the last hop."""
        self._arrive(_Piece(hops, nbytes, done, args))

    def stream(
        self, hops: Hops, nbytes: float, piece: float, passed: Callable[[float], None], *, window: int = 2
    ) -> None:
        """Bytes in pieces, ``window`` of them under way; ``passed`` is told how many bytes have come, after each."""
        _Stream(self, hops, nbytes, piece, passed).start(window)

    def _arrive(self, piece: _Piece) -> None:
        number, kind = piece.hops[piece.at]
        link = self._links[number]
        if not link.waiting[kind]:
            link.served[kind] = max(link.served[kind], link.virtual)
        if not link.waits:
            if link.free <= self._clock.now:
                self._serve(link, piece, kind)
                return
            self._clock.at(link.free, self._go_on, link)
        link.add(piece, kind)

    def _go_on(self, link: _Link) -> None:
        self._serve(link, *link.next())
        if link.waits:
            self._clock.at(link.free, self._go_on, link)

    def _serve(self, link: _Link, piece: _Piece, kind: int) -> None:
        clock, nbytes = self._clock, piece.nbytes
        link.free = end = clock.now + nbytes * link.cost
        link.carried += nbytes
        link.virtual = link.served[kind]
        link.served[kind] += nbytes
        if end > piece.finish:
            piece.finish = end
        piece.at += 1
        if piece.at < len(piece.hops):
            clock.at(clock.now, self._arrive, piece)
        else:
            clock.at(piece.finish, piece.done, *piece.args)


class _Stream:
    def __init__(self, links: Links, hops: Hops, nbytes: float, piece: float, passed: Callable[[float], None]) -> None:
        self._links, self._hops, self._piece, self._passed = links, hops, piece, passed
        self._left = nbytes
        self._here = 0.0

    def start(self, window: int) -> None:
        if not self._left:
            self._passed(0.0)
        for _ in range(window):
            self._next()

    def _next(self) -> None:
        nbytes = min(self._piece, self._left)
        if nbytes > 0:
            self._left -= nbytes
            self._links.send(self._hops, nbytes, self._came, nbytes)

    def _came(self, nbytes: float) -> None:
        self._here += nbytes
        self._passed(self._here)
        self._next()


class Queue:
    """One who serves requests in turn, each in the same time.

    Attributes:
        served: how many.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free = 0.0
        self.served = 0

    def take(self, earliest: float) -> float:
        """When a request that is there at that time will have been served."""
        self._free = max(self._free, earliest) + self._seconds
        self.served += 1
        return self._free
