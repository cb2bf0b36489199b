"""Which nodes a version is fetched from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from awexd.metaserver.model import Piece, Version
from awexd.metaserver.sources import SLACK, choose

MB = 1 << 20


def version_of(sizes: list[int]) -> Version:
    pieces = {rank: Piece("d", size) for rank, size in enumerate(sizes)}
    return Version((1, 1), 1, len(sizes), pieces)


def fetched_by_all(sizes: list[int], nodes: int, engines: int) -> Version:
    """As many engines' nodes as that fetch all of it, one after the other, from a trainer on so many nodes."""
    version = version_of(sizes)
    writers = {rank: f"t{rank % nodes}" for rank in range(len(sizes))}
    has = {node: [rank for rank, own in writers.items() if own == node] for node in set(writers.values())}
    for number in range(engines):
        chosen = choose(version, has, range(len(sizes)), lambda node: 0, writers)
        assert chosen is not None
        taken = sorted(rank for ranks in chosen.values() for rank in ranks)
        assert taken == list(range(len(sizes)))  # each once
        assert all(set(ranks) <= set(has[node]) for node, ranks in chosen.items())
        has[f"e{number}"] = list(range(len(sizes)))
    return version


@given(st.lists(st.integers(1, 64 * MB), min_size=1, max_size=24), st.integers(1, 8), st.integers(1, 24))
def test_no_writers_node_sends_more_than_an_engines_receives(sizes: list[int], nodes: int, engines: int) -> None:
    version = fetched_by_all(sizes, nodes, engines)
    total = sum(sizes)
    assert sum(version.asked.values()) == engines * total
    for node, asked in version.asked.items():
        if node.startswith("t"):
            assert asked <= SLACK * total
        else:
            assert asked < engines * total  # it never sends to itself


def test_writers_nodes_carry_all_while_they_are_as_many_as_the_engines() -> None:
    version = fetched_by_all([MB] * 16, 8, 8)
    assert version.asked == {f"t{number}": 16 * MB for number in range(8)}


def test_one_writers_node_sends_it_once_however_many_fetch() -> None:
    version = fetched_by_all([MB] * 4, 1, 24)
    assert version.asked["t0"] == 4 * MB
    assert max(version.asked.values()) == 4 * MB  # each passes it on to one other


def test_ranks_whose_writer_has_gone_come_from_who_has_them() -> None:
    version = version_of([MB, MB])
    assert choose(version, {"a": [0], "e": [0, 1]}, [0, 1], lambda node: 0, {0: "a"}) == {
        "a": frozenset([0]),
        "e": frozenset([1]),
    }
    assert choose(version, {"a": [0]}, [0, 1], lambda node: 0, {0: "a", 1: "gone"}) is None
