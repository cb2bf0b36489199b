"""Random layouts, and real memory in which every element carries its identity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from awexd_transports.copy import CopyTable, Row
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.plan import Copy, Plan
from awexd_transports.view import View

Bytes = npt.NDArray[np.uint8]
GUARD = 0xA5
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12)

Drawn = st.DrawFn


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def one(name: str, shape: Sequence[int], box: Box | None = None, dtype: str = "bfloat16", piece: int = 0) -> Entry:
    """An entry of a test: the whole tensor unless a box is given."""
    return Entry(TensorSpec(name, tuple(shape), dtype), whole(shape) if box is None else box, piece)


def manifest(*entries: Entry) -> Manifest:
    """Entries numbered as separate pieces."""
    return Manifest.of(replace(entry, piece=at) for at, entry in enumerate(entries))


def chunks(extent: int, parts: int) -> list[tuple[int, int]]:
    """``torch.chunk``: equal rounded up, the last ones shorter or empty."""
    step = -(-extent // parts)
    return [(min(at * step, extent), min((at + 1) * step, extent)) for at in range(parts)]


def even(extent: int, parts: int) -> list[tuple[int, int]]:
    """As equal as can be."""
    return [(extent * at // parts, extent * (at + 1) // parts) for at in range(parts)]


@st.composite
def cuts(draw: Drawn, extent: int, parts: int) -> list[tuple[int, int]]:
    kind = draw(st.sampled_from(("chunks", "even", "uneven")))
    if kind != "uneven":
        return chunks(extent, parts) if kind == "chunks" else even(extent, parts)
    edges = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *edges], [*edges, extent], strict=True))


@st.composite
def mesh_boxes(draw: Drawn, shape: tuple[int, ...], ranks: int) -> list[Box | None]:
    """One box a rank: split along up to two dimensions, replicated over the rest; None for other pipeline stages."""
    stages = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])) if draw(st.booleans()) else 1
    stage, left = draw(st.integers(0, stages - 1)), ranks // stages
    splits: dict[int, list[tuple[int, int]]] = {}
    for dim in draw(st.permutations(range(len(shape))))[:2]:
        parts = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        splits[dim] = draw(cuts(shape[dim], parts))
        left //= parts
    axes = [list(range(len(spans))) for spans in splits.values()]
    held = [dict(zip(splits, at[:-1], strict=True)) for at in product(*axes, range(left))]
    held = draw(st.permutations(held)) if draw(st.booleans()) else held
    boxes: list[Box | None] = [None] * ranks
    for at, coordinates in enumerate(held):
        spans = [splits[d][coordinates[d]] if d in splits else (0, n) for d, n in enumerate(shape)]
        boxes[stage * len(held) + at] = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    return boxes


@st.composite
def specs(draw: Drawn) -> list[TensorSpec]:
    """One to five tensors of at most 240 elements, so that one byte tells all of a tensor's elements apart."""
    found = []
    for at in range(draw(st.integers(1, 5))):
        shape: list[int] = []
        for extent in draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13)), max_size=3)):
            shape.append(min(extent, 240 // max(1, math.prod(shape))))
        found.append(TensorSpec(f"model.layers.{at}.weight", tuple(shape), draw(st.sampled_from(sorted(ITEMSIZE)))))
    return found


@st.composite
def meshes(draw: Drawn, tensors: Sequence[TensorSpec], ranks: int | None = None) -> list[Manifest]:
    """A manifest a rank; all ranks together hold every element at least once."""
    ranks = draw(st.sampled_from(RANKS)) if ranks is None else ranks
    held: list[list[Entry]] = [[] for _ in range(ranks)]
    for spec in tensors:
        for rank, box in enumerate(draw(mesh_boxes(spec.shape, ranks))):
            if box is not None:
                held[rank].append(Entry(spec, box, len(held[rank])))
    return [Manifest.of(entries) for entries in held]


@st.composite
def ragged(draw: Drawn, tensors: Sequence[TensorSpec], ranks: int) -> list[Manifest]:
    """Ranks whose boxes overlap each other in any way (never within a rank)."""
    held: list[list[Entry]] = [[] for _ in range(ranks)]
    for spec in tensors:
        for entries in held:
            spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in spec.shape]
            box = Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
            entries.append(Entry(spec, box, len(entries)))
    return [Manifest.of(entries) for entries in held]


def identities(tensors: Iterable[TensorSpec]) -> dict[str, Bytes]:
    """Each tensor's true bytes, shape ``(*shape, itemsize)``: no two elements of a tensor are the same."""
    truth = {}
    for at, spec in enumerate(tensors):
        size = ITEMSIZE[spec.dtype]
        count = math.prod(spec.shape)
        numbers = (np.arange(count, dtype=np.uint64) + np.uint64(at * (29 if size == 1 else 257))).astype("<u8")
        raw = np.zeros((count, 16), np.uint8)
        raw[:, :8] = numbers.view(np.uint8).reshape(count, 8)
        raw[:, 8:] = raw[:, :8][:, ::-1] ^ 0x5A
        truth[spec.name] = np.ascontiguousarray(raw[:, :size]).reshape(*spec.shape, size)
    return truth


@dataclass
class Memory:
    """Guarded bytes and strided views in them."""

    raw: Bytes
    views: list[View] = field(default_factory=list)

    @property
    def address(self) -> int:
        return int(self.raw.ctypes.data)

    def untouched(self) -> bool:
        """Whether every byte that is in no view still is what it was."""
        mine = np.zeros(self.raw.size, bool)
        for view in self.views:
            starts = np.array([view.address - self.address])
            for n, step in zip(view.shape, view.strides, strict=True):
                starts = (starts[:, None] + np.arange(n) * step).reshape(-1)
            mine[(starts[:, None] + np.arange(view.itemsize)).reshape(-1)] = True
        return bool((self.raw[~mine] == GUARD).all())


def dense(boxes: Iterable[tuple[Box, str]]) -> Memory:
    """One packed, 256-byte aligned view a box, as in a segment."""
    placed, at = [], 0
    for box, dtype in boxes:
        placed.append((at, box, dtype))
        at += -(-box.numel * ITEMSIZE[dtype] // 256) * 256
    memory = Memory(np.full(at + 64, GUARD, np.uint8))
    memory.views = [View.packed(memory.address + at, box.shape, dtype, memory.raw) for at, box, dtype in placed]
    return memory


@st.composite
def strided(draw: Drawn, boxes: Sequence[tuple[Box, str]]) -> Memory:
    """A view a box with its dimensions in any order in memory and gaps between rows and elements."""
    plans, at = [], 16
    for box, dtype in boxes:
        size = ITEMSIZE[dtype]
        order = draw(st.permutations(range(len(box.shape))))
        strides, step = [0] * len(order), size
        for dim in order:
            step += size * draw(st.sampled_from((0, 0, 0, 1, 3)))
            strides[dim] = step
            step *= max(1, box.shape[dim])
        at = -(-at // size) * size
        plans.append((at, box.shape, tuple(strides), dtype))
        at += sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True) if n) + size * 4
    memory = Memory(np.full(at + 64, GUARD, np.uint8))
    memory.views = [View(memory.address + at, shape, steps, dtype, memory.raw) for at, shape, steps, dtype in plans]
    return memory


def part_of(truth: Bytes, box: Box) -> Bytes:
    return truth[box.relative_to((0,) * len(box.offset))]


def held_by(manifest: Manifest) -> list[tuple[Box, str]]:
    """Box and dtype of each stored piece."""
    return [(entry.box, entry.tensor.dtype) for entry in manifest.pieces]


def fill(manifest: Manifest, memory: Memory, truth: Mapping[str, Bytes]) -> None:
    """The true bytes of a rank's pieces into its memory."""
    for entry, view in zip(manifest.pieces, memory.views, strict=True):
        view.bytes_array()[...] = part_of(truth[entry.tensor.name], entry.box).view(np.int8)


def wrong(manifest: Manifest, memory: Memory, truth: Mapping[str, Bytes]) -> Iterator[str]:
    """Entries whose memory is not the true bytes."""
    for entry in manifest.entries:
        found = memory.views[entry.piece].bytes_array()
        if not np.array_equal(found, part_of(truth[entry.tensor.name], entry.box).view(np.int8)):
            yield f"{entry.tensor.name} {entry.box}"


def seal(registered: Manifest, held: Memory, segment: Manifest) -> Memory:
    """A writer rank's segment, copied from its own memory as a writer does."""
    memory = dense(held_by(segment))
    rows = []
    for entry, to in zip(segment.pieces, memory.views, strict=True):
        origin = next(
            e
            for e in registered.entries
            if e.tensor.name == entry.tensor.name and (e.box == entry.box or _inside(entry.box, e.box))
        )
        of = held.views[origin.piece].sub(entry.box.relative_to(origin.box.offset))
        rows.append(Row(to, of, entry.tensor.name))
    CopyTable(rows).run()
    return memory


def rows_of(
    plan: Plan,
    sources: Sequence[Manifest],
    segments: Sequence[Memory],
    destinations: Sequence[Manifest],
    memories: Sequence[Memory],
    copies: Sequence[Copy] | None = None,
) -> list[Row]:
    """The plan's copies (or these of it) over real memory."""
    rows = []
    for copy in plan.copies if copies is None else copies:
        source, destination = (
            sources[copy.source].entries[copy.source_entry],
            destinations[copy.destination].entries[copy.destination_entry],
        )
        of = segments[copy.source].views[source.piece].sub(copy.box.relative_to(source.box.offset))
        to = memories[copy.destination].views[destination.piece].sub(copy.box.relative_to(destination.box.offset))
        rows.append(Row(to, of, destination.tensor.name))
    return rows


def _inside(box: Box, outer: Box) -> bool:
    return box.numel > 0 and box.intersect(outer) == box
