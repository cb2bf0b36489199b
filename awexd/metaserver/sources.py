"""Which nodes a version is fetched from: its writers', up to a bound, then others that have it. Pure.

What a writers' node sends passes the host memory of nobody else on its way to the engines, and costs that node a read.
What a node passes on that has fetched it costs it a third pass of its memory, while its own engines read theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from awexd.metaserver.model import Version

SLACK = 1.25
"""Of what whoever asks takes in: a trainer's nodes do not have exactly as much each."""


def choose(
    version: Version,
    has: Mapping[str, Collection[int]],
    wanted: Collection[int],
    busy: Callable[[str], int],
    writers: Mapping[int, str],
) -> dict[str, frozenset[int]] | None:
    """Nodes that together have the wanted ranks, and which of them to take from each; None where they do not.

    A rank comes from the node of its writer as long as that is asked for no more, by all nodes together, than whoever
    asks takes in (and SLACK): so it sends about what an engine's node receives at most, however many there are. All
    else comes from few nodes, those that were asked for the least.

    Args:
        has: ranks by node.
        busy: tickets that a node was named in, of any job: which of two goes first where all else is equal.
        writers: the node of each rank that is written there now.
    """
    left, chosen = frozenset(wanted), dict[str, frozenset[int]]()
    room = _nbytes(version, left)
    for node in {writers[rank]: None for rank in sorted(left) if rank in writers}:
        own = frozenset(rank for rank in left.intersection(has.get(node, ())) if writers.get(rank) == node)
        if own and version.asked[node] + _nbytes(version, own) <= SLACK * room:
            chosen[node] = own
            left -= own
    while left:
        asked = version.asked
        best = min(
            has, key=lambda node: (-len(left.intersection(has[node])), asked[node], busy(node), node), default=None
        )
        taken = left.intersection(has[best]) if best is not None else frozenset()
        if best is None or not taken:
            return None
        chosen[best] = chosen.get(best, frozenset()) | taken
        left -= taken
    for node, ranks in chosen.items():
        version.asked[node] += max(1, _nbytes(version, ranks))
    return chosen


def _nbytes(version: Version, ranks: Collection[int]) -> int:
    return sum(version.pieces[rank].nbytes for rank in ranks if rank in version.pieces)


def before(version: Version, name: str, parts: str | None) -> list[str]:
    """Nodes that began to fetch that version before this one, which begins now if it had not.

    Whoever asks may serve only those that ask after it: no two can wait for each other.
    """
    if len(version.holders.get(name, ())) == version.world_size:
        return []
    last = max(version.fetching.values(), default=0)
    number = version.fetching.setdefault(name, last + 1)
    if parts is not None:
        version.parts[name] = parts
    else:
        version.parts.pop(name, None)
    return [node for node, begun in version.fetching.items() if begun < number]
