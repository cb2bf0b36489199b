"""What each writer rank writes, when several hold the same elements: every element once, bytes balanced. Pure.

Replicas of a box are the only freedom. Elements held by one rank are its load from the start; the rest, gathered by the
set of ranks that hold it, is filled like water over the lowest loads of that set, smallest sets first and again until
nothing moves (block-coordinate descent of the sum of squared loads, whose minimum also has the lowest maximum). Each
set's boxes are then dealt out in order, cut by rows where a rank's quota ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from awexd_transports.boxes import cells
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import Box, Entry, Manifest
from awexd_transports.plan import alias_groups, describe, same_tensor

MAX_SWEEPS = 64
SLACK = 128
"""No cut is made for less than the fullest rank's load divided by this (and by the sets that a rank is in)."""


@dataclass(slots=True)
class _Tensor:
    """A name (or names that are aliases wherever they are held): who declares it, and its boxes that are not empty."""

    first: Entry
    declared: list[tuple[int, int]] = field(default_factory=list)
    held: list[tuple[int, Box]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    aliases: list[_Tensor] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.first.tensor.dtype]

    @property
    def all_indices(self) -> list[list[int]]:
        """Entry numbers, one a held box, for this name and for each of its aliases."""
        return [self.indices, *(alias.indices for alias in self.aliases)]

    @property
    def atomic(self) -> bool:
        return self.first.layout is not None


@dataclass(slots=True)
class _Pattern:
    """How the boxes of a name lie to each other; layers repeat, so most names share a few.

    Attributes:
        cells: disjoint boxes of the union, each with the positions of the boxes that contain it.
        disjoint: no two boxes overlap: the cells are the boxes, in their order.
        numels: elements of each cell.
    """

    cells: list[tuple[Box, tuple[int, ...]]]
    disjoint: bool
    numels: list[int]

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> _Pattern:
        found = cells(boxes)
        return cls(found, all(len(within) == 1 for _, within in found), [box.numel for box, _ in found])


class _Cell:
    """Elements that the same ranks hold: their box, the positions in ``tensor.held`` and the ranks."""

    __slots__ = ("box", "nbytes", "ranks", "tensor", "within")

    def __init__(self, tensor: _Tensor, box: Box, within: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.box = box
        self.within = within
        self.ranks = tuple(tensor.held[at][0] for at in within)
        self.nbytes = box.numel * tensor.itemsize


def share(manifests: Sequence[Manifest]) -> tuple[Manifest, ...]:
    """Each rank's segment manifest: the part of what it holds that it writes.

    Every element that any rank holds is in exactly one segment. Each box lies inside one entry of that rank's own
    manifest, in whose order it stands; where nothing is replicated and nothing empty, the manifests come back as they
    are. Parts that a rank stores once under several names stay so.

    Args:
        manifests: what each writer rank registered, in rank order.

    Raises:
        ManifestMismatch: ranks disagree on a name's dtype, global shape or layout, or on the boxes of a layout.
    """
    tensors = _aliased_together(manifests, _collect(manifests))
    taken: list[list[tuple[int, Box]]] = [[] for _ in manifests]
    loads = [0] * len(manifests)
    replicated: list[_Cell] = []
    for tensor, pattern in _patterns(tensors):
        if pattern.disjoint:
            for (rank, box), numel, *indices in zip(tensor.held, pattern.numels, *tensor.all_indices, strict=True):
                taken[rank] += ((index, box) for index in indices)
                loads[rank] += numel * tensor.itemsize
        else:
            replicated += (_Cell(tensor, box, within) for box, within in pattern.cells)
        if 0 in tensor.first.tensor.shape:
            for name in (tensor, *tensor.aliases):
                rank, index = name.declared[0]
                taken[rank].append((index, manifests[rank].entries[index].box))
    for rank, cell, box in _deal(replicated, loads):
        at = next(p for p in cell.within if cell.tensor.held[p][0] == rank)
        taken[rank] += ((indices[at], box) for indices in cell.tensor.all_indices)
    return tuple(_segment(manifest, parts) for manifest, parts in zip(manifests, taken, strict=True))


def _collect(manifests: Sequence[Manifest]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    wrong: dict[str, str] = {}
    for rank, manifest in enumerate(manifests):
        for index, entry in enumerate(manifest.entries):
            tensor = tensors.get(entry.tensor.name)
            if tensor is None:
                tensor = tensors[entry.tensor.name] = _Tensor(entry)
            elif not same_tensor(tensor.first, entry):
                one, other = describe(tensor.first), describe(entry)
                text = f"rank {tensor.declared[0][0]} has {one}, rank {rank} has {other}"
                wrong.setdefault(entry.tensor.name, text)
            tensor.declared.append((rank, index))
            if 0 not in entry.box.shape:
                tensor.held.append((rank, entry.box))
                tensor.indices.append(index)
    if wrong:
        raise ManifestMismatch.between("the writer's ranks contradict each other", mismatched=wrong)
    return tensors


def _aliased_together(manifests: Sequence[Manifest], tensors: Mapping[str, _Tensor]) -> list[_Tensor]:
    """Tensors in order of appearance; of names aliased on every rank that holds any, the first stands for all."""
    aliased = {m.entries[at].tensor.name for m in manifests for group in alias_groups(m) for at in group}
    classes: dict[object, _Tensor] = {}
    kept: list[_Tensor] = []
    for name, tensor in tensors.items():
        if name in aliased:
            first = classes.setdefault(_signature(manifests, tensor), tensor)
            if first is not tensor:
                first.aliases.append(tensor)
                continue
        kept.append(tensor)
    return kept


def _signature(manifests: Sequence[Manifest], tensor: _Tensor) -> object:
    """Equal for names that lie in the same pieces with the same boxes on all ranks. Sorts what ``tensor`` holds."""
    order = sorted(range(len(tensor.held)), key=lambda at: (tensor.held[at][0], tensor.held[at][1].offset))
    tensor.held = [tensor.held[at] for at in order]
    tensor.indices = [tensor.indices[at] for at in order]
    ranks = [rank for rank, _ in tensor.held]
    places = list(zip(ranks, tensor.indices, strict=True)) if ranks else tensor.declared
    entries = [(rank, manifests[rank].entries[index]) for rank, index in places]
    spec = tensor.first.tensor
    return spec.shape, spec.dtype, tensor.first.layout, tuple((rank, e.box, e.piece) for rank, e in entries)


def _patterns(tensors: Iterable[_Tensor]) -> Iterator[tuple[_Tensor, _Pattern]]:
    known: dict[tuple[tuple[int, Box], ...], _Pattern] = {}
    wrong: dict[str, str] = {}
    for tensor in tensors:
        key = tuple(tensor.held)
        pattern = known.get(key)
        if pattern is None:
            pattern = known[key] = _Pattern.of([box for _, box in tensor.held])
        for box, within in pattern.cells if tensor.atomic else ():
            if any(tensor.held[p][1] != box for p in within):
                held = ", ".join(f"rank {rank} {part}" for rank, part in (tensor.held[p] for p in within))
                text = f"parts in layout {tensor.first.layout} overlap and are not the same: {held}"
                wrong.setdefault(tensor.first.tensor.name, text)
        yield tensor, pattern
    if wrong:
        raise ManifestMismatch.between("the writer's ranks contradict each other", mismatched=wrong)


def _deal(replicated: Iterable[_Cell], loads: list[int]) -> Iterator[tuple[int, _Cell, Box]]:
    """Rank, cell and the part of the cell that the rank writes; ``loads`` are what the ranks write already."""
    whole: list[_Cell] = []
    sets: dict[tuple[int, ...], list[_Cell]] = {}
    for cell in replicated:
        if len(cell.ranks) == 1:
            loads[cell.ranks[0]] += cell.nbytes
            yield cell.ranks[0], cell, cell.box
        elif cell.tensor.atomic or cell.box.numel == 1:
            whole.append(cell)
        else:
            sets.setdefault(cell.ranks, []).append(cell)
    for cell in sorted(whole, key=lambda cell: -cell.nbytes):
        rank = min(cell.ranks, key=lambda rank: (loads[rank], rank))
        loads[rank] += cell.nbytes
        yield rank, cell, cell.box
    quotas = _fill({holders: sum(cell.nbytes for cell in held) for holders, held in sets.items()}, loads)
    crowd = max((sum(rank in holders for holders in sets) for rank in range(len(loads))), default=0)
    slack = max(loads, default=0) // (SLACK * max(crowd, 1))
    for holders, held in sets.items():
        yield from _cut(held, holders, quotas[holders], slack)


def _fill(sets: Mapping[tuple[int, ...], int], loads: list[int]) -> dict[tuple[int, ...], list[int]]:
    """Bytes of each set for each of its ranks; ``loads`` comes back with them added."""
    quotas = {holders: [0] * len(holders) for holders in sorted(sets, key=lambda holders: (len(holders), holders))}
    for _ in range(MAX_SWEEPS):
        moved = 0
        for holders, before in quotas.items():
            for rank, quota in zip(holders, before, strict=True):
                loads[rank] -= quota
            after = _level([loads[rank] for rank in holders], sets[holders])
            for rank, quota in zip(holders, after, strict=True):
                loads[rank] += quota
            moved += sum(abs(a - b) for a, b in zip(after, before, strict=True))
            quotas[holders] = after
        if moved * 1000 <= max(loads, default=0):
            break
    return quotas


def _level(loads: Sequence[int], amount: int) -> list[int]:
    """``amount`` poured over ``loads`` so that the lowest rise to one level."""
    order = sorted(range(len(loads)), key=lambda at: loads[at])
    below = 0
    for count, at in enumerate(order, start=1):
        below += loads[at]
        if count == len(order) or amount + below <= loads[order[count]] * count:
            break
    level, over = divmod(amount + below, count)
    poured = [0] * len(loads)
    for place, at in enumerate(order[:count]):
        poured[at] = level + (place < over) - loads[at]
    return poured


def _cut(
    held: Sequence[_Cell], holders: Sequence[int], quotas: Sequence[int], slack: int
) -> Iterator[tuple[int, _Cell, Box]]:
    """The set's cells dealt out in order; one is cut where a quota ends, unless within ``slack`` bytes of its edge."""
    shares = [(rank, quota) for rank, quota in zip(holders, quotas, strict=True) if quota > 0]
    turn, due, given = 0, shares[0][1], 0
    for cell in held:
        size = cell.tensor.itemsize
        rest = [cell.box]
        while rest:
            box = rest.pop()
            nbytes = box.numel * size
            while turn + 1 < len(shares) and due - given <= slack and due - given < nbytes:
                turn += 1
                due += shares[turn][1]
            if turn + 1 == len(shares) or nbytes <= due - given + slack:
                given += nbytes
                yield shares[turn][0], cell, box
                continue
            head, tail = _split(box, (due - given + size // 2) // size, slack // size)
            given += sum(part.numel for part in head) * size
            yield from ((shares[turn][0], cell, part) for part in head)
            rest += reversed(tail)
            turn += 1
            due += shares[turn][1]


def _split(box: Box, count: int, slack: int) -> tuple[list[Box], list[Box]]:
    """``box`` in two: its first ``count`` elements, give or take ``slack``, and the others.

    Cut between rows of the first dimension that has more than one; inside a row only where ``slack`` is exceeded.
    """
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if dim is None:
        return ([box], []) if count > 0 else ([], [box])
    rows, over = divmod(count, box.numel // box.shape[dim])
    row = box.numel // box.shape[dim]
    if min(over, row - over) <= slack or row == 1:
        rows += 2 * over > row
        return _rows(box, dim, 0, rows), _rows(box, dim, rows, box.shape[dim])
    head, tail = _split(_rows(box, dim, rows, rows + 1)[0], over, slack)
    return _rows(box, dim, 0, rows) + head, tail + _rows(box, dim, rows + 1, box.shape[dim])


def _rows(box: Box, dim: int, low: int, high: int) -> list[Box]:
    low, high = max(low, 0), min(high, box.shape[dim])
    if low >= high:
        return []
    offset = (*box.offset[:dim], box.offset[dim] + low, *box.offset[dim + 1 :])
    return [Box(offset, (*box.shape[:dim], high - low, *box.shape[dim + 1 :]))]


def _segment(manifest: Manifest, parts: list[tuple[int, Box]]) -> Manifest:
    """A manifest of these boxes in the rank's own order; equal parts of one piece stay one piece."""
    entries = manifest.entries
    parts.sort(key=lambda part: (part[0], part[1].offset))
    if len(parts) == len(entries) and all(entries[index].box == box for index, box in parts):
        return manifest
    pieces: dict[object, int] = {}
    made: list[Entry] = []
    for index, box in parts:
        entry = entries[index]
        place = tuple(a - b for a, b in zip(box.offset, entry.box.offset, strict=True))
        piece = pieces.setdefault((entry.piece, place, box.shape), len(pieces))
        made.append(Entry(entry.tensor, box, piece, entry.layout))
    return Manifest(tuple(made))
