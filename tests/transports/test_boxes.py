from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.boxes import BoxIndex, cells, entangled, subtract, subtract_all
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


def rows_entangled(groups: list[list[Box]]) -> set[tuple[int, int]]:
    """(group, position) of the boxes that straight cuts do not tell apart."""
    labels = [(group, at) for group, boxes in enumerate(groups) for at in range(len(boxes))]
    flat = [box for boxes in groups for box in boxes]
    dims = len(flat[0].offset)
    offset, shape = (
        np.array([getattr(box, side) for box in flat], np.int64).reshape(len(flat), dims)
        for side in ("offset", "shape")
    )
    return {labels[row] for row in entangled(np.array([group for group, _ in labels]), offset, shape).tolist()}


@given(
    st.integers(0, 3).flatmap(
        lambda dims: st.lists(st.lists(boxes(dims, 1), min_size=1, max_size=6), min_size=1, max_size=3)
    )
)
def test_boxes_of_one_group_that_share_an_element_are_entangled(groups: list[list[Box]]) -> None:
    found = rows_entangled(groups)
    for group, held in enumerate(groups):
        for at, box in enumerate(held):
            others = (other for o, other in enumerate(held) if o != at)
            if any(points(box) & points(other) for other in others):
                assert (group, at) in found


@given(several(least=1))
def test_boxes_at_large_coordinates_are_told_apart_as_small_ones_are(found: list[Box]) -> None:
    far = [Box(tuple(o << 58 for o in box.offset), tuple(n << 58 for n in box.shape)) for box in found]
    assert rows_entangled([far] * 5) == rows_entangled([found] * 5)


def test_grids_cut_further_are_not_entangled() -> None:
    """Columns, each cut at other rows, one of them inside a row."""
    held = [Box((0, 0), (3, 2)), Box((3, 0), (5, 2)), Box((0, 2), (6, 2)), Box((6, 2), (1, 1)), Box((6, 3), (1, 1))]
    held.append(Box((7, 2), (1, 2)))
    assert sum(box.numel for box in held) == 8 * 4
    assert not rows_entangled([held, held[::-1]])
    assert rows_entangled([held, [*held, Box((0, 0), (1, 1))]]) == {(1, 0), (1, 6)}


def test_sails_of_a_windmill_are_entangled_though_disjoint() -> None:
    sails = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert len(rows_entangled([[Box(*sail) for sail in sails]])) == 5
