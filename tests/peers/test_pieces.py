from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from awexd.peers.pieces import Pieces, cut_up
from awexd_transports.base import Piece, Source
from awexd_transports.ranges import Ranges

SPAN = 60
NODES = "abc"


def source(node: str, held: Ranges | None) -> Source:
    return Source(node, "host", 1, b"", b"", None if held is None else {0: held})


ranges = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=4).map(Ranges)
holdings = st.lists(st.none() | ranges, min_size=1, max_size=3)


@given(holdings, ranges, st.integers(1, 20), st.randoms(use_true_random=False))
def test_every_byte_is_dealt_once_to_who_holds_it(
    holds: list[Ranges | None], wanted: Ranges, limit: int, random: Random
) -> None:
    pieces, sources = Pieces(limit), [source(node, held) for node, held in zip(NODES, holds, strict=False)]
    for one in sources:
        pieces.join(one)
    for start, end in wanted:
        pieces.add(Piece(0, start, end - start))
    taken: list[int] = []
    live = list(sources)
    while live:
        one = random.choice(live)
        piece = pieces.take(one.node)
        if piece is None:
            live.remove(one)
            continue
        assert one.has(piece)
        assert 0 < piece.nbytes <= limit
        taken += range(piece.offset, piece.end)
    everywhere = {n for one in sources for n in range(SPAN) if one.has(Piece(0, n, 1))}
    assert sorted(taken) == [n for start, end in wanted for n in range(start, end) if n in everywhere]
    assert bool(pieces) == bool(pieces.nobodys()) == (len(taken) < wanted.total)


def test_what_fewest_hold_is_dealt_first_and_the_others_share_the_rest() -> None:
    pieces = Pieces(10)
    pieces.join(source("a", None))
    pieces.join(source("b", Ranges([(0, 20)])))
    pieces.add(Piece(0, 0, 40))
    assert [pieces.take("a") for _ in range(2)] == [Piece(0, 20, 10), Piece(0, 30, 10)]
    assert pieces.take("b") == Piece(0, 0, 10)
    assert pieces.take("a") == Piece(0, 10, 10)
    assert pieces.take("a") is pieces.take("b") is None


def test_what_a_source_that_leaves_held_alone_is_nobodys() -> None:
    pieces = Pieces(10)
    pieces.join(source("a", None))
    pieces.join(source("b", Ranges([(0, 20)])))
    pieces.add(Piece(0, 0, 30))
    assert pieces.nobodys() is None
    pieces.leave("a")
    assert pieces.nobodys() == Piece(0, 20, 10)
    assert pieces.take("b") == Piece(0, 0, 10)
    pieces.join(source("c", Ranges([(25, 30)])))
    assert pieces.take("c") == Piece(0, 25, 5)
    assert pieces.nobodys() == Piece(0, 20, 5)


def test_what_comes_first_is_dealt_first_in_its_order() -> None:
    pieces = Pieces(10)
    pieces.join(source("a", None))
    pieces.add(Piece(0, 0, 10))
    pieces.add(Piece(0, 50, 20), first=True)
    assert [pieces.take("a") for _ in range(3)] == [Piece(0, 50, 10), Piece(0, 60, 10), Piece(0, 0, 10)]


def test_long_pieces_are_cut_and_keep_their_marks() -> None:
    rows = Piece(0, 5, 40, 4, 20)
    found = list(cut_up([(Piece(0, 3, 25), False), (rows, True), (Piece(1, 0, 10), True)], 10))
    assert found == [
        (Piece(0, 3, 10), False),
        (Piece(0, 13, 10), False),
        (Piece(0, 23, 5), False),
        (rows, True),
        (Piece(1, 0, 10), True),
    ]
