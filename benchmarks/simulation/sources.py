"""From which nodes a node fetches: the MetaServer's rule. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

Chosen = dict[str, frozenset[int]]


def choose(has: Mapping[str, Collection[int]], wanted: Mapping[int, float], asked: Counter[str]) -> Chosen:
    """Nodes that together have the wanted ranks, few of them, the least asked first; and what to take from each.

    Args:
        has: ranks by node.
        wanted: bytes by rank.
        asked: bytes by node, so far; they are added to.
    """
    left, chosen = frozenset(wanted), Chosen()
    while left:
        best = min(has, key=lambda node: (-len(left.intersection(has[node])), asked[node], node))
        taken = left.intersection(has[best])
        if not taken:
            raise ValueError(f"no node has ranks {sorted(left)[:3]}")
        chosen[best] = taken
        left -= taken
    for node, ranks in chosen.items():
        asked[node] += int(sum(wanted[rank] for rank in ranks))
    return chosen
