"""Which nodes a version is fetched from: few, and those that were asked for the least of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from awexd.metaserver.model import Version


def choose(
    version: Version,
    has: Mapping[str, Collection[int]],
    wanted: Collection[int],
    busy: Callable[[str], int],
) -> dict[str, frozenset[int]] | None:
    """Nodes that together have the wanted ranks, and which of them to take from each; None where they do not.

    Args:
        has: ranks by node.
        busy: tickets that a node was named in, of any job: which of two goes first where all else is equal.
    """
    left, chosen = frozenset(wanted), dict[str, frozenset[int]]()
    while left:
        asked = version.asked
        best = min(
            has, key=lambda node: (-len(left.intersection(has[node])), asked[node], busy(node), node), default=None
        )
        taken = left.intersection(has[best]) if best is not None else frozenset()
        if best is None or not taken:
            return None
        chosen[best] = taken
        left -= taken
    for node, ranks in chosen.items():
        version.asked[node] += max(1, sum(version.pieces[rank].nbytes for rank in ranks if rank in version.pieces))
    return chosen


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
