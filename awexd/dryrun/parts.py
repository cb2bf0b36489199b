"""A rank's boxes by kind of tensor, and the manifest that they make: columns at once, not an object a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from awexd.dryrun.models import OUTSIDE, Tensors
from awexd_client.adapters.rules import Run
from awexd_transports.columns import Columns, check
from awexd_transports.layout import Manifest
from awexd_transports.names import FIELD, MAX_NUMBER, Ints, Names
from awexd_transports.shard import Box


@dataclass(frozen=True)
class Part:
    """What a rank has of tensors that are alike: the same boxes of each.

    Attributes:
        layers, experts: which of the tensors it has; those that are outside of layers, or no single expert's, have one.
        alias: they are the bytes of the part before, under other names.
    """

    tensors: Tensors
    boxes: tuple[Box, ...]
    layers: Sequence[int] = (0,)
    experts: Sequence[int] = (0,)
    alias: bool = False


def part_of(
    tensors: Tensors,
    boxes: Iterable[Box],
    layers: Sequence[int],
    experts: Sequence[int] | None = None,
) -> Part:
    """What a rank has of ``tensors``, given the layers that are here.

    Args:
        experts: those that are here; None: all.
    """
    own = range(tensors.experts) if experts is None else experts
    wanted = set(layers)
    return Part(
        tensors,
        tuple(boxes),
        (0,) if tensors.kind in OUTSIDE else [layer for layer in tensors.layers if layer in wanted],
        own if tensors.experts else (0,),
    )


def whole(shape: Sequence[int]) -> list[Box]:
    return [Box((0,) * len(shape), tuple(shape))]


def along(shape: Sequence[int], dim: int, runs: Iterable[Run]) -> list[Box]:
    """A box for each run of real indices along ``dim``; all of the other dimensions."""
    found: list[Box] = []
    for run in runs:
        if run.name and run.length:
            offset, extent = [0] * len(shape), list(shape)
            offset[dim], extent[dim] = run.start, run.length
            found.append(Box(tuple(offset), tuple(extent)))
    return found


def tied(part: Part, other: Tensors | None) -> list[Part]:
    """The part, and once more under the name of what is tied to it."""
    return [part] if other is None else [part, replace(part, tensors=other, alias=True)]


def manifest_of(parts: Iterable[Part]) -> Manifest:
    """A checked manifest of these parts, in their order."""
    kept = [part for part in parts if part.boxes and len(part.layers) and len(part.experts)]
    if not kept:
        return Manifest.of(())
    dims = max(len(part.tensors.extent) for part in kept)
    tables = [_names(part) for part in kept]
    width = max(table.shape[1] for _, table in tables)
    counts = [len(table) for _, table in tables]
    templates: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    codes = [templates.setdefault(template, len(templates)) for template, _ in tables]
    kinds = [dtypes.setdefault(part.tensors.dtype, len(dtypes)) for part in kept]
    layouts: dict[str | None, int] = {None: 0}
    layout = [layouts.setdefault(part.tensors.layout, len(layouts)) for part in kept]
    columns = Columns(
        names=Names(tuple(templates), np.repeat(codes, counts), np.concatenate([_wide(t, width) for _, t in tables])),
        dtypes=tuple(dtypes),
        layouts=tuple(each for each in layouts if each),
        dtype=np.repeat(kinds, counts),
        layout=np.repeat(layout, counts),
        ndim=np.repeat([len(part.tensors.extent) for part in kept], counts),
        extent=np.repeat([_filled(part.tensors.extent, dims, 1) for part in kept], counts, axis=0),
        **_entries(kept, counts, dims),
    )
    check(columns)
    return Manifest(columns)


def _entries(kept: Sequence[Part], counts: Sequence[int], dims: int) -> Mapping[str, Ints]:
    name, offset, shape, piece = [], [], [], []
    names = pieces = 0
    for part, count in zip(kept, counts, strict=True):
        boxes = len(part.boxes)
        name.append(np.repeat(np.arange(names, names + count), boxes))
        offset.append(np.tile(np.array([_filled(box.offset, dims, 0) for box in part.boxes], np.int64), (count, 1)))
        shape.append(np.tile(np.array([_filled(box.shape, dims, 1) for box in part.boxes], np.int64), (count, 1)))
        names += count
        pieces -= count * boxes if part.alias else 0
        piece.append(np.arange(pieces, pieces + count * boxes))
        pieces += count * boxes
    return {
        "name": np.concatenate(name),
        "offset": np.concatenate(offset),
        "shape": np.concatenate(shape),
        "piece": np.concatenate(piece),
    }


def _names(part: Part) -> tuple[str, Ints]:
    """The template of the part's names, and the numbers of each of them."""
    template, model, layer_at, expert_at = _template(part.tensors.name)
    numbers = np.tile(np.array(model, np.int64), (len(part.layers) * len(part.experts), 1))
    if layer_at is not None:
        numbers[:, layer_at] = np.repeat(np.array(part.layers, np.int64), len(part.experts))
    if expert_at is not None:
        numbers[:, expert_at] = np.tile(np.array(part.experts, np.int64), len(part.layers))
    return template, numbers


@lru_cache(maxsize=1024)
def _template(name: str) -> tuple[str, list[int], int | None, int | None]:
    """A name's template as manifests have it, its numbers, and which of them are the layer's and the expert's.

    Other digits in a name (``w1``) are numbers of the template too.
    """
    layer, expert = MAX_NUMBER, MAX_NUMBER - 1
    found = Names.of([name.format(layer=layer, expert=expert)])
    numbers = found.numbers[0, : found.templates[0].count(FIELD)].tolist()
    places = [numbers.index(number) if number in numbers else None for number in (layer, expert)]
    return found.templates[0], numbers, places[0], places[1]


def _wide(table: Ints, width: int) -> Ints:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])))


def _filled(row: Sequence[int], dims: int, fill: int) -> list[int]:
    return [*row, *[fill] * (dims - len(row))]
