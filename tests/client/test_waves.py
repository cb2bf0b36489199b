"""What of a segment a wave reads, and whether that has landed: never said before every byte has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from awexd_client.waves import Here, Rows
from awexd_transports.view import View

SIZE = 4096


def bytes_of(view: View) -> set[int]:
    places = {view.address + at for at in range(view.itemsize)}
    for extent, stride in zip(view.shape, view.strides, strict=True):
        places = {place + number * stride for place in places for number in range(extent)}
    return places


@st.composite
def views(draw: st.DrawFn) -> View:
    """A box of a row-major array that begins somewhere in the segment."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    start = draw(st.integers(0, 64))
    whole = View.packed(start, shape, "float32", None)
    slices = []
    for extent in shape:
        low = draw(st.integers(0, extent - 1))
        slices.append(slice(low, draw(st.integers(low + 1, extent))))
    return whole.sub(slices)


@given(views())
def test_rows_have_every_byte_of_the_view_and_no_other_where_they_can(view: View) -> None:
    rows = Rows.of(view, 0)
    covered = {rows.offset + row * rows.stride + at for row in range(rows.rows) for at in range(rows.run)}
    wanted = bytes_of(view)
    assert wanted <= covered
    assert rows.end == max(wanted) + 1
    if len(view.shape) < 3:
        assert covered == wanted


@st.composite
def landings(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Of ranks 0 and 1, ranges and strips."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        rank, offset = draw(st.integers(0, 1)), draw(st.integers(0, 200))
        rows = draw(st.integers(1, 5))
        run = draw(st.integers(1, 40))
        stride = draw(st.integers(run, 60)) if rows > 1 else 0
        found.append((rank, offset, run * rows, rows, stride))
    return found


@given(landings(), st.lists(views(), min_size=1, max_size=4))
def test_never_says_that_what_has_not_landed_is_there(
    landed: list[tuple[int, int, int, int, int]], wanted: list[View]
) -> None:
    here, there = Here(), set[tuple[int, int]]()
    for rank, offset, nbytes, rows, stride in landed:
        here.add(rank, offset, nbytes, rows, stride)
        run = nbytes // rows
        there |= {(rank, offset + row * stride + at) for row in range(rows) for at in range(run)}
    for view in wanted:
        if here.has(0, Rows.of(view, 0)):
            assert {(0, place) for place in bytes_of(view)} <= there


@given(views(), st.integers(1, 5), st.integers(0, 8), st.randoms(use_true_random=False))
def test_knows_strips_that_come_in_blocks_of_rows(view: View, block: int, margin: int, order: object) -> None:
    rows = Rows.of(view, 0)
    if rows.rows == 1:
        return
    rows = rows._replace(offset=64 * rows.stride + rows.offset)
    margin = min(margin, rows.stride - rows.run)  # strips are whole cells: they may begin before what is read
    here = Here()
    blocks = [(first, min(block, rows.rows - first)) for first in range(0, rows.rows, block)]
    order.shuffle(blocks)  # type: ignore[attr-defined]
    for at, (first, count) in enumerate(blocks):
        assert not here.has(3, rows), at
        offset = rows.offset - margin + first * rows.stride
        here.add(3, offset, count * (rows.run + margin), count, rows.stride)
    assert here.has(3, rows)


def test_a_whole_view_is_one_run() -> None:
    assert Rows.of(View.packed(512, (8, 16, 4), "bfloat16", None), 256) == Rows(256, 1024, 1, 0)
