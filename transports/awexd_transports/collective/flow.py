"""What one member of an exchange sends, or receives: prepared once for the same partners, run every step.

Chunks go in the order of ``rounds``, through the slots of a ring by turns. A sender fills one while others are on their
way; a receiver empties one while the next are arriving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from awexd_transports.collective.base import Group, Guard, Wait
from awexd_transports.collective.chunks import Part, chunks
from awexd_transports.collective.rings import SLOTS, Bytes, Pairs, Ring, compared
from awexd_transports.copy import Difference
from awexd_transports.errors import ManifestMismatch
from awexd_transports.view import View


@dataclass(frozen=True, slots=True)
class Load:
    """What goes between this member and one other, in the order in which both name it.

    Attributes:
        peer: the other's number.
        views: where each box lies here; the other's have the same shapes and dtypes. ``labels``: their names.
        tail: bytes that follow, of host memory: sent from there, or received there.
        same: what is received is only compared with what is here.
    """

    peer: int
    views: Sequence[View]
    labels: Sequence[str]
    tail: Bytes | None = None
    same: bool = False


@dataclass(frozen=True, slots=True)
class _Item:
    """One message. ``run``: fills or empties its slot, and gives what that has to come before."""

    peer: int
    nbytes: int
    run: Callable[[], Any]


class Flow:
    """Args: ``into``: it receives."""

    def __init__(self, ring: Ring, loads: Iterable[Load], *, into: bool) -> None:
        self._ring = ring
        self._items: list[_Item] = []
        self._chunks: list[Pairs] = []
        self._into = into
        self.nbytes = 0
        for load in loads:
            boxes = [(view.shape, view.itemsize) for view in load.views]
            for chunk in chunks(boxes, ring.room):
                pairs = [self._pair(load, part) for part in chunk.parts]
                self._items.append(_Item(load.peer, chunk.nbytes, self._run_of(load, pairs, chunk.parts)))
            if load.tail is not None:
                self._add_tail(load.peer, load.tail)
            self.nbytes += sum(view.nbytes for view in load.views)
        self._copies = ring.copies(self._chunks)

    @property
    def messages(self) -> int:
        return len(self._items)

    def send(self, group: Group, guard: Guard, left: Callable[[], float]) -> None:
        """Returns once all of it has been received, or is out of this process's memory.

        Args:
            left: seconds.

        Raises:
            Lost: a partner has gone, or this was given up.
        """
        sent: deque[Wait] = deque()
        for number, item in enumerate(self._items):
            if len(sent) == SLOTS:
                sent.popleft()()
            with guard.touching():
                filled = item.run()
            sent.append(group.send(item.peer, self._ring.memory(number, item.nbytes), filled, left()))
        for wait in sent:
            wait()

    def receive(self, group: Group, guard: Guard, left: Callable[[], float]) -> None:
        """Returns once all of it is where it belongs.

        Raises:
            Lost: a partner has gone, or this was given up.
            ManifestMismatch: what was to be compared differs.
        """

        def post(number: int, emptied: Any) -> None:
            if number < len(self._items):
                item = self._items[number]
                memory = self._ring.memory(number, item.nbytes)
                coming.append(group.receive(item.peer, memory, emptied, left()))

        coming: deque[Wait] = deque()
        for number in range(SLOTS):
            post(number, None)
        for number, item in enumerate(self._items):
            coming.popleft()()
            with guard.touching():
                emptied = item.run()
            post(number + SLOTS, emptied)
        self._ring.finish()

    def _pair(self, load: Load, part: Part) -> tuple[View, View]:
        view = load.views[part.box]
        own = view.sub([slice(a, b) for a, b in zip(part.low, part.high, strict=True)]) if view.shape else view
        there = self._ring.view(len(self._items), part.at, own)
        return (own, there) if self._into else (there, own)

    def _run_of(self, load: Load, pairs: Pairs, parts: Sequence[Part]) -> Callable[[], Any]:
        if load.same and self._into:
            table = compared(pairs, [load.labels[part.box] for part in parts])
            return partial(_check_same, table.first_difference)
        self._chunks.append(pairs)
        return partial(self._copy, len(self._chunks) - 1)

    def _copy(self, number: int) -> Any:
        return self._copies.run(number)

    def _add_tail(self, peer: int, tail: Bytes) -> None:
        for at in range(0, tail.nbytes, self._ring.room):
            part = tail[at : at + self._ring.room]
            run = self._ring.read if self._into else self._ring.write
            self._items.append(_Item(peer, part.nbytes, partial(run, len(self._items), part)))


def _check_same(first_difference: Callable[[], Difference | None]) -> None:
    difference = first_difference()
    if difference is not None:
        raise ManifestMismatch.between(
            "one tensor here is published with two values",
            mismatched={difference.label: f"they differ first at {list(difference.index)} of their part"},
        )
