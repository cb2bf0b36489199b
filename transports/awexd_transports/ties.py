"""Names that are aliases of one storage: which of a destination's is written, and what must be compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from awexd_transports.joined import Joined
from awexd_transports.layout import Box
from awexd_transports.moves import Moves

if TYPE_CHECKING:
    from awexd_transports.cover import Cover


def alias_groups(joined: Joined, manifests: Iterable[int]) -> list[list[int]]:
    """Rows that share one piece of their manifest, for the pieces with more than one, in order of first appearance."""
    wanted = set(manifests)
    grouped: dict[tuple[int, int], list[int]] = {}
    for row in joined.aliased().tolist():
        at = int(joined.manifest[row])
        if at in wanted:
            grouped.setdefault((at, joined.piece(row)), []).append(row)
    return list(grouped.values())


def followers_of(joined: Joined, split: int) -> dict[int, int]:
    """Rows of destinations that are not written, to the row that is: the first of the group whose name is published."""
    end = joined.place_start[split]
    followers: dict[int, int] = {}
    for group in alias_groups(joined, range(split, len(joined.manifests))):
        offered = [row for row in group if joined.first[joined.row_name[row]] < end]
        leader = (offered or group)[0]
        followers |= {row: leader for row in group if row != leader}
    return followers


def checks_of(joined: Joined, split: int, cover: Cover, followers: dict[int, int]) -> Moves:
    """What followers would be given that their leader was not given from the same stored bytes."""
    rows = cover.moves.destination_entry + joined.row_start[split + cover.moves.destination]
    leading = np.flatnonzero(np.isin(rows, list(set(followers.values()))))
    brought: dict[int, set[object]] = {}
    for at in leading.tolist() if followers else ():
        row = int(rows[at])
        brought.setdefault(row, set()).add(_stored_bytes(joined, cover.moves, at, joined.box(row)))
    kept: dict[int, list[int]] = {}
    of_follower = cover.further.destination_entry + joined.row_start[split + cover.further.destination]
    for at, row in enumerate(of_follower.tolist()):
        if _stored_bytes(joined, cover.further, at, joined.box(row)) not in brought.get(followers[row], ()):
            kept.setdefault(row, []).append(at)
    order = [at for row in sorted(followers, key=lambda row: joined.manifest[row]) for at in kept.get(row, ())]
    return cover.further[np.array(order, np.int64)]


def _stored_bytes(joined: Joined, moves: Moves, at: int, destination: Box) -> object:
    """Which stored bytes go to which place of the destination: equal for names that the source aliases too."""
    source, dims = int(moves.source[at]), int(moves.ndim[at])
    row = int(joined.row_start[source]) + int(moves.source_entry[at])
    offset = moves.offset[at, :dims].tolist()
    taken = tuple(a - b for a, b in zip(offset, joined.box(row).offset, strict=True))
    put = tuple(a - b for a, b in zip(offset, destination.offset, strict=True))
    return source, joined.piece(row), taken, put, tuple(moves.shape[at, :dims].tolist())
