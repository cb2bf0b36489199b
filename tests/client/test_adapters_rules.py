from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from awexd_client import InvalidArgument
from awexd_client.adapters.rules import (
    Run,
    gated,
    grouped_heads,
    heads,
    shards_along,
    split,
    stacked,
    vocabulary,
    within,
)

NAMES = ("q", "k", "v")
SMALL = st.integers(1, 6)


def rows_of(runs: list[Run]) -> list[tuple[str | None, int]]:
    """(name, index) of each index in memory: what a list of runs says, one by one."""
    return [(run.name, run.start + i) for run in runs for i in range(run.length)]


def check_every_row_once(of_rank: Callable[[int], list[Run]], parts: int, wanted: dict[str, int]) -> None:
    rows = [row for rank in range(parts) for row in rows_of(of_rank(rank))]
    assert sorted(rows, key=str) == sorted(((name, n) for name, total in wanted.items() for n in range(total)), key=str)
    totals = {(run.name, run.total) for rank in range(parts) for run in of_rank(rank)}
    assert totals <= set(wanted.items())


@given(parts=SMALL, length=SMALL)
def test_split_gives_every_row_to_one_rank(parts: int, length: int) -> None:
    check_every_row_once(lambda rank: split("w", parts * length, rank, parts), parts, {"w": parts * length})


@given(parts=SMALL, a=SMALL, b=SMALL)
def test_stacked_cuts_each_tensor_alike(parts: int, a: int, b: int) -> None:
    wanted = {"a": a * parts, "b": b * parts}
    check_every_row_once(lambda rank: stacked(wanted.items(), rank, parts), parts, wanted)
    assert rows_of(stacked(wanted.items(), 0, parts))[:a] == [("a", n) for n in range(a)]


@given(parts=SMALL, per_rank=SMALL, r=SMALL, d=SMALL, dv=SMALL)
def test_heads_with_no_more_ranks_than_groups(parts: int, per_rank: int, r: int, d: int, dv: int) -> None:
    g = parts * per_rank

    def of_rank(rank: int) -> list[Run]:
        return heads(*NAMES, h=g * r, g=g, d=d, dv=dv, part=rank, parts=parts)

    check_every_row_once(of_rank, parts, {"q": g * r * d, "k": g * d, "v": g * dv})


@given(g=SMALL, copies=st.integers(2, 4), per_rank=SMALL, d=SMALL)
def test_heads_with_more_ranks_than_groups_share_a_group_among_neighbours(
    g: int, copies: int, per_rank: int, d: int
) -> None:
    parts = g * copies
    for rank in range(parts):
        queries, keys, values = heads(*NAMES, h=parts * per_rank, g=g, d=d, part=rank, parts=parts)
        assert (queries.start, queries.length) == (rank * per_rank * d, per_rank * d)
        for run in (keys, values):
            assert (run.start, run.length, run.total) == (rank // copies * d, d, g * d)


@given(g=SMALL, r=SMALL, d=SMALL, parts=SMALL)
def test_grouped_heads_are_cut_anywhere(g: int, r: int, d: int, parts: int) -> None:
    assume(g * (r + 2) * d % parts == 0)

    def of_rank(rank: int) -> list[Run]:
        return grouped_heads(*NAMES, h=g * r, g=g, d=d, part=rank, parts=parts)

    check_every_row_once(of_rank, parts, {"q": g * r * d, "k": g * d, "v": g * d})
    whole = [row for rank in range(parts) for row in rows_of(of_rank(rank))]
    for f, (name, row) in enumerate(whole):  # the formula, row by row
        group, o = divmod(f, (r + 2) * d)
        if o < r * d:
            assert (name, row) == ("q", group * r * d + o)
        elif o < (r + 1) * d:
            assert (name, row) == ("k", group * d + o - r * d)
        else:
            assert (name, row) == ("v", group * d + o - (r + 1) * d)


@given(parts=SMALL, blocks=SMALL, block=SMALL)
def test_gated_halves_and_interleaved_blocks(parts: int, blocks: int, block: int) -> None:
    f = parts * blocks * block

    def plain(rank: int) -> list[Run]:
        return gated("gate", "up", f=f, part=rank, parts=parts)

    def interleaved(rank: int) -> list[Run]:
        return gated("gate", "up", f=f, part=rank, parts=parts, interleave=block)

    check_every_row_once(plain, parts, {"gate": f, "up": f})
    check_every_row_once(interleaved, parts, {"gate": f, "up": f})
    n = blocks * block
    assert [name for name, _ in rows_of(plain(0))] == ["gate"] * n + ["up"] * n
    for at, (name, row) in enumerate(rows_of(interleaved(0))):
        number = at // block
        assert (name, row) == (("gate", "up")[number % 2], number // 2 * block + at % block)


@given(rows=st.integers(1, 40), parts=SMALL, multiple=SMALL)
def test_vocabulary_leaves_padding_out(rows: int, parts: int, multiple: int) -> None:
    padded = -(-rows // (parts * multiple)) * parts * multiple
    each = padded // parts
    found = [row for rank in range(parts) for row in rows_of(vocabulary("embed", rows, rank * each, each))]
    assert [row for name, row in found if name] == list(range(rows))
    assert len(found) == padded


def test_within_cuts_runs_at_both_ends() -> None:
    runs = [Run("a", 10, 3, 4), Run(None, 0, 0, 2), Run("b", 5, 0, 5)]
    assert within(runs, 2, 6) == [Run("a", 10, 5, 2), Run(None, 0, 0, 2), Run("b", 5, 0, 2)]
    assert within(runs, 11, 4) == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: split("w", 5, 0, 2),
        lambda: heads(*NAMES, h=4, g=2, d=2, part=0, parts=3),
        lambda: heads(*NAMES, h=6, g=2, d=2, part=0, parts=3),
        lambda: grouped_heads(*NAMES, h=3, g=2, d=2, part=0, parts=1),
        lambda: gated("gate", "up", f=8, part=0, parts=1, interleave=3),
    ],
)
def test_what_does_not_divide_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        wrong()


def test_shards_are_views_with_their_boxes() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    runs = [Run("a", 9, 3, 2), Run(None, 0, 0, 1), Run("b", 3, 0, 3)]
    a, b = shards_along(tensor, runs, cross={1: (4, 12)})
    assert (a.name, a.global_shape, a.offset) == ("a", (9, 12), (3, 4))
    assert (b.name, b.global_shape, b.offset) == ("b", (3, 12), (0, 4))
    assert a.tensor.data_ptr() == tensor.data_ptr()
    assert torch.equal(b.tensor, tensor[3:])
    (columns,) = shards_along(tensor, [Run("c", 8, 4, 4)], dim=1)
    assert (columns.global_shape, columns.offset) == ((6, 8), (0, 4))


def test_tensor_of_another_length_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"layer\.w: 5 indices expected along dimension 0, in memory it is \[6\]"):
        list(shards_along(torch.zeros(6), [Run("layer.w", 5, 0, 5)]))
