from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.boxes import BoxIndex, cells, subtract, subtract_all
from awexd_transports.layout import Box

Point = tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn, dims: int, least: int = 0) -> Box:
    offset = tuple(draw(st.integers(0, 5)) for _ in range(dims))
    return Box(offset, tuple(draw(st.integers(least, 4)) for _ in range(dims)))


@st.composite
def several(draw: st.DrawFn, least: int = 0) -> list[Box]:
    dims = draw(st.integers(0, 3))
    return draw(st.lists(boxes(dims, least), min_size=1, max_size=7))


def points(box: Box) -> set[Point]:
    return set(product(*(range(a, b) for a, b in zip(box.offset, box.end, strict=True))))


@given(several())
def test_hits_are_exactly_the_boxes_that_share_an_element(found: list[Box]) -> None:
    wanted, *held = found
    expected = {at: points(box) & points(wanted) for at, box in enumerate(held) if points(box) & points(wanted)}
    hits = BoxIndex(held).hits(wanted)
    assert [at for at, _ in hits] == sorted(expected)
    assert {at: points(common) for at, common in hits} == expected


@given(several())
def test_overlaps_are_exactly_the_pairs_that_share_an_element(found: list[Box]) -> None:
    pairs = {(a, b) for b in range(len(found)) for a in range(b) if points(found[a]) & points(found[b])}
    assert sorted(BoxIndex(found).overlaps()) == sorted(pairs)


@given(several())
def test_subtract_leaves_every_other_element_once(found: list[Box]) -> None:
    box, *holes = found
    rest = subtract_all(box, holes)
    assert sum(part.numel for part in rest) == len(set().union(*map(points, rest)))
    assert set().union(*map(points, rest)) == points(box).difference(*map(points, holes))
    if holes:
        assert len(subtract(box, holes[0])) <= max(1, 2 * len(box.offset))


@given(several(least=1))
def test_cells_cover_the_union_once_and_name_every_holder(found: list[Box]) -> None:
    seen: dict[Point, tuple[int, ...]] = {}
    for cell, within in cells(found):
        for point in points(cell):
            assert point not in seen
            seen[point] = within
    holders = {p: tuple(at for at, box in enumerate(found) if p in points(box)) for box in found for p in points(box)}
    assert seen == holders


def test_cells_of_boxes_that_do_not_overlap_are_the_boxes_themselves() -> None:
    held = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((0, 0), (2, 4))]
    assert cells(held) == [(held[0], (0, 2)), (held[1], (1,))]


def test_cells_of_one_box_across_two_are_two() -> None:
    assert cells([Box((0,), (6,)), Box((0,), (2,)), Box((2,), (4,))]) == [
        (Box((0,), (2,)), (0, 1)),
        (Box((2,), (4,)), (0, 2)),
    ]
