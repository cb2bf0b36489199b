"""Sets of bytes: sorted half-open intervals that neither overlap nor touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Ranges:
    """A set of numbers from 0 on, kept as intervals."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and (self._starts, self._ends) == (other._starts, other._ends)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"

    @property
    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def remove(self, start: int, end: int) -> None:
        if start >= end:
            return
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return
        left = [(a, b) for a, b in ((self._starts[first], start), (end, self._ends[last - 1])) if a < b]
        self._starts[first:last], self._ends[first:last] = [a for a, _ in left], [b for _, b in left]

    def covers(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The intervals of what of it lies between the two."""
        for at in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            yield max(start, self._starts[at]), min(end, self._ends[at])

    def missing(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The intervals between the two that are not in it."""
        for low, high in self.within(start, end):
            if start < low:
                yield start, low
            start = high
        if start < end:
            yield start, end

    def copy(self) -> Ranges:
        made = Ranges()
        made._starts, made._ends = self._starts[:], self._ends[:]
        return made
