from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.dealing import SLACK, Dealing
from awexd_transports.layout import Box
from awexd_transports.level import fill, split

SETS = ((0, 1), (0, 1, 2), (1, 2, 3), (3,))


def deal(
    sizes: Sequence[int], held_by: Sequence[int], itemsize: int = 2, loads: Sequence[int] = (0, 0, 0, 0)
) -> tuple[list[int], list[tuple[int, int, Box]]]:
    """Cells of so many elements, in rows of four where that goes."""
    made = Dealing(
        loads,
        SETS,
        np.array(held_by),
        np.array(sizes) * itemsize,
        np.full(len(sizes), itemsize),
        np.array(sizes) == 1,
        lambda cell: box(sizes[cell]),
    )
    return made.owner.tolist(), made.cuts


def box(size: int) -> Box:
    return Box((0, 0), (size // 4, 4)) if size % 4 == 0 else Box((0,), (size,))


def one_by_one(sizes: Sequence[int], held_by: Sequence[int], itemsize: int = 2) -> Iterator[tuple[int, int, Box]]:
    """Reference: the same rules, a cell at a time."""
    loads = [0] * 4
    cells = {holders: [c for c, at in enumerate(held_by) if SETS[at] == holders] for holders in SETS}
    for cell in cells.pop((3,)):
        loads[3] += sizes[cell] * itemsize
        yield 3, cell, box(sizes[cell])
    for cell, at in enumerate(held_by):
        if sizes[cell] == 1 and at != 3:
            rank = min(SETS[at], key=lambda rank: (loads[rank], rank))
            loads[rank] += itemsize
            yield rank, cell, box(1)
    kept = {holders: [c for c in some if sizes[c] > 1] for holders, some in cells.items()}
    kept = {holders: some for holders, some in kept.items() if some}
    quotas = fill({holders: sum(sizes[c] for c in some) * itemsize for holders, some in kept.items()}, loads)
    crowd = max((sum(rank in holders for holders in kept) for rank in range(4)), default=1)
    slack = max(loads) // (SLACK * max(crowd, 1))
    for holders, some in kept.items():
        shares = [(rank, quota) for rank, quota in zip(holders, quotas[holders], strict=True) if quota]
        turn, due, given = 0, shares[0][1], 0
        for cell in some:
            rest = [box(sizes[cell])]
            while rest:
                part = rest.pop()
                nbytes = part.numel * itemsize
                while turn + 1 < len(shares) and due - given <= slack and due - given < nbytes:
                    turn += 1
                    due += shares[turn][1]
                if turn + 1 == len(shares) or nbytes <= due - given + slack:
                    given += nbytes
                    yield shares[turn][0], cell, part
                    continue
                head, tail = split(part, (due - given + itemsize // 2) // itemsize, slack // itemsize)
                given += sum(piece.numel for piece in head) * itemsize
                yield from ((shares[turn][0], cell, piece) for piece in head)
                rest += reversed(tail)
                turn += 1
                due += shares[turn][1]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from((1, 2, 3, 5, 8, 40, 400, 401, 4000, 4004, 12_000)), st.integers(0, 3)), max_size=30
    )
)
def test_cells_are_dealt_out_together_as_one_by_one(cells: list[tuple[int, int]]) -> None:
    sizes, held_by = [size for size, _ in cells], [at for _, at in cells]
    owner, cuts = deal(sizes, held_by) if cells else ([], [])
    found = [(rank, cell, box(sizes[cell])) for cell, rank in enumerate(owner) if rank >= 0]
    assert {cell for _, cell, _ in cuts}.isdisjoint(cell for _, cell, _ in found)
    expected = sorted(one_by_one(sizes, held_by), key=repr) if cells else []
    assert sorted(found + cuts, key=repr) == expected


def test_ranks_with_a_load_of_their_own_are_given_less() -> None:
    assert deal([4000, 4000], [0, 0], loads=[16_000, 0, 0, 0]) == ([1, 1], [])
    assert deal([1, 1], [0, 0], loads=[1, 0, 0, 0]) == ([1, 0], [])
    owner, cuts = deal([4000, 4000], [0, 0], loads=[4000, 0, 0, 0])
    assert owner == [-1, 1]
    assert [(rank, part.shape) for rank, _, part in cuts] == [(0, (750, 4)), (1, (250, 4))]


def test_what_ends_within_the_slack_is_not_cut() -> None:
    """Ten rows more than half: cutting them off would gain less than it costs."""
    assert deal([4020, 3980], [0, 0]) == ([0, 1], [])
    assert deal([3980, 4020], [0, 0]) == ([0, 1], [])
    owner, cuts = deal([5000, 3000], [0, 0])
    assert owner == [-1, 1]
    assert [(rank, part.shape) for rank, _, part in cuts] == [(0, (1000, 4)), (1, (250, 4))]
