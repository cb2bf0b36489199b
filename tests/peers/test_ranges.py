from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.ranges import Ranges

SPAN = 40
places = st.integers(0, SPAN)
steps = st.lists(st.tuples(st.booleans(), places, places), max_size=12)


@given(steps, places, places)
def test_ranges_are_sets_of_numbers(steps: list[tuple[bool, int, int]], start: int, end: int) -> None:
    ranges, numbers = Ranges(), set[int]()
    for adds, low, high in steps:
        if adds:
            ranges.add(low, high)
            numbers |= set(range(low, high))
        else:
            ranges.remove(low, high)
            numbers -= set(range(low, high))
        assert {n for a, b in ranges for n in range(a, b)} == numbers
        assert ranges.total == len(numbers)
        spans = list(ranges)
        assert all(a < b for a, b in spans)
        assert all(left[1] < right[0] for left, right in pairwise(spans))
    asked = set(range(start, end))
    assert ranges.covers(start, end) == (asked <= numbers)
    assert {n for a, b in ranges.within(start, end) for n in range(a, b)} == numbers & asked
    assert {n for a, b in ranges.missing(start, end) for n in range(a, b)} == asked - numbers
    assert ranges.copy() == ranges == Ranges(ranges)
