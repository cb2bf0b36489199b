"""Irregular names, one at a time: tied to each other, in a layout, or with boxes that overlap without being equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from awexd_transports.boxes import cells
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import ManifestMismatch
from awexd_transports.joined import Joined
from awexd_transports.layout import Box, Entry
from awexd_transports.names import Bools
from awexd_transports.shard import RESHAPES

Ranks = tuple[int, ...]


@dataclass(slots=True)
class Tensor:
    """A name, or names that are aliases wherever they are held. Holders are numbers of distinct manifests.

    Attributes:
        first: how it is declared.
        place: of its first declaration.
        declared, held: rows that declare it, and those of them that are not empty.
        boxes: of ``held``.
    """

    first: Entry
    place: int
    declared: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    aliases: list[Tensor] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.first.tensor.dtype]

    @property
    def atomic(self) -> bool:
        return self.first.layout is not None and self.first.layout not in RESHAPES


class Cell:
    """Elements that the same ranks hold: their box, and the positions in ``tensor.held`` of the boxes around it."""

    __slots__ = ("box", "nbytes", "ranks", "tensor", "within")

    def __init__(self, tensor: Tensor, box: Box, within: tuple[int, ...], ranks: Ranks) -> None:
        self.tensor = tensor
        self.box = box
        self.within = within
        self.ranks = ranks
        self.nbytes = box.numel * tensor.itemsize

    def rows(self, joined: Joined, manifest: int) -> list[int]:
        """Rows of that manifest which the cell lies in: one of the name, and one of each alias."""
        at = next(p for p in self.within if joined.manifest[self.tensor.held[p]] == manifest)
        return [tensor.held[at] for tensor in (self.tensor, *self.tensor.aliases)]


def ragged_cells(joined: Joined, irregular: Bools, ranks: Sequence[Ranks]) -> list[Cell]:
    """Cells of the irregular names, in order of appearance.

    Raises:
        ManifestMismatch: parts in a layout that overlap and are not the same.
    """
    if not irregular.any():
        return []
    tensors = _aliased_together(joined, _collect(joined, irregular))
    return list(_cells(joined, tensors, ranks))


def _collect(joined: Joined, irregular: Bools) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    for row in np.flatnonzero(irregular[joined.row_name]).tolist():
        name, entry = int(joined.row_name[row]), joined.entry(row)
        tensor = tensors.setdefault(name, Tensor(entry, int(joined.first[name])))
        tensor.declared.append(row)
        if entry.box.numel:
            tensor.held.append(row)
            tensor.boxes.append(entry.box)
    return sorted(tensors.values(), key=lambda tensor: tensor.place)


def _aliased_together(joined: Joined, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of names aliased on every rank that holds any, the first stands for all."""
    aliased = {int(joined.place[row]) for row in joined.aliased().tolist()}
    classes: dict[object, Tensor] = {}
    kept: list[Tensor] = []
    for tensor in tensors:
        if any(int(joined.place[row]) in aliased for row in tensor.declared):
            first = classes.setdefault(_signature(joined, tensor), tensor)
            if first is not tensor:
                first.aliases.append(tensor)
                continue
        kept.append(tensor)
    return kept


def _signature(joined: Joined, tensor: Tensor) -> object:
    """Equal for names that lie in the same pieces with the same boxes on all ranks. Sorts what ``tensor`` holds."""
    order = sorted(range(len(tensor.held)), key=lambda at: (joined.manifest[tensor.held[at]], tensor.boxes[at].offset))
    tensor.held = [tensor.held[at] for at in order]
    tensor.boxes = [tensor.boxes[at] for at in order]
    rows = tensor.held or tensor.declared
    spec = tensor.first.tensor
    places = tuple((int(joined.manifest[row]), joined.box(row), joined.piece(row)) for row in rows)
    return spec.shape, spec.dtype, tensor.first.layout, places


def _cells(joined: Joined, tensors: Iterable[Tensor], ranks: Sequence[Ranks]) -> Iterator[Cell]:
    known: dict[tuple[Box, ...], list[tuple[Box, tuple[int, ...]]]] = {}
    wrong: dict[str, str] = {}
    for tensor in tensors:
        holders = [int(joined.manifest[row]) for row in tensor.held]
        key = tuple(tensor.boxes)
        found = known.get(key)
        if found is None:
            found = known[key] = cells(tensor.boxes) if tensor.boxes else []
        for box, within in found:
            if tensor.atomic and any(tensor.boxes[p] != box for p in within):
                parts = sorted((rank, str(tensor.boxes[p])) for p in within for rank in ranks[holders[p]])
                held = ", ".join(f"rank {rank} {part}" for rank, part in parts)
                text = f"parts in layout {tensor.first.layout} overlap and are not the same: {held}"
                wrong.setdefault(tensor.first.tensor.name, text)
            of = tuple(sorted(rank for p in within for rank in ranks[holders[p]]))
            yield Cell(tensor, box, within, of)
    if wrong:
        raise ManifestMismatch.between("the writer's ranks contradict each other", mismatched=wrong)
