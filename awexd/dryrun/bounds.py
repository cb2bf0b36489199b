"""How even loads can be at best: replicas are the only freedom, and some bytes are held by few ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from awexd_transports.holders import Holders
from awexd_transports.joined import Joined, classes
from awexd_transports.layout import Manifest
from awexd_transports.level import fill
from awexd_transports.ragged import ragged_cells

Ranks = tuple[int, ...]


def held_by(manifests: Sequence[Manifest]) -> dict[Ranks, int]:
    """Bytes by the set of ranks that hold them, each element once."""
    distinct, of_rank = classes(manifests)
    joined = Joined(distinct)
    members: list[list[int]] = [[] for _ in distinct]
    for rank, at in enumerate(of_rank.tolist()):
        members[at].append(rank)
    ranks = [tuple(each) for each in members]
    holders = Holders(joined, ranks)
    counted = np.zeros(len(holders.sets), np.int64)
    np.add.at(counted, holders.set, holders.nbytes)
    sets: dict[Ranks, int] = {}
    for held, nbytes in zip(holders.sets, counted.tolist(), strict=True):
        sets[held] = sets.get(held, 0) + nbytes
    for cell in ragged_cells(joined, holders.irregular, ranks):
        sets[cell.ranks] = sets.get(cell.ranks, 0) + cell.nbytes
    return {held: nbytes for held, nbytes in sets.items() if nbytes}


def lower_bound(sets: dict[Ranks, int], ranks: int) -> float:
    """Bytes that some rank must carry, whoever shares out.

    What only the ranks of a group hold, they carry among them: the mean of any group is a bound. Tried are all ranks,
    each set, and the most loaded ranks of a level sharing out, for each number of them.
    """
    loads = [0] * ranks
    fill(sets, loads)
    masks = [(_mask(held), nbytes) for held, nbytes in sets.items()]
    groups = {_mask(held) for held in sets} | {_mask(range(ranks))}
    group = 0
    for rank in sorted(range(ranks), key=lambda rank: -loads[rank]):
        group |= 1 << rank
        groups.add(group)
    return max(
        (sum(nbytes for mask, nbytes in masks if not mask & ~group) / group.bit_count() for group in groups if group),
        default=0.0,
    )


def _mask(ranks: Sequence[int]) -> int:
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask
