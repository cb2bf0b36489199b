"""What a process registered: its shards, where their bytes lie, and the manifest that describes them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from awexd_client.adapters.base import Adapter, EngineWeights
from awexd_client.adapters.registry import watch, weights_of
from awexd_client.adapters.watch import Watch
from awexd_transports.copy import View, overlapping
from awexd_transports.cuda import driver as cuda
from awexd_transports.cuda import gather
from awexd_transports.dtypes import dtype_name
from awexd_transports.errors import InvalidArgument, ManifestMismatch
from awexd_transports.layout import Box, Entry, Manifest, Shard, TensorSpec

Casts = object
"""None, one dtype for every floating-point tensor, or {name pattern: dtype}."""

_FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class Holding:
    """Live memory of a process. ``views[i]`` is where the bytes of ``manifest.entries[i]`` lie, in their own dtype.

    Attributes:
        weights: what the adapter said. Entries from number ``len(weights.direct)`` on are those of ``weights.aside``.
    """

    target: object
    adapter: str | Adapter | None
    weights: EngineWeights
    manifest: Manifest
    views: tuple[View, ...]
    watch: Watch

    @classmethod
    def of(cls, target: object, adapter: str | Adapter | None = None, casts: Casts = None) -> Holding:
        """Looks the target of a writer up; nothing is copied.

        Raises:
            InvalidArgument: nothing understands the target, or a tensor that cannot be moved, by name.
            ManifestMismatch: two shards that contradict each other.
        """
        target = _reusable(target)
        return cls._of(target, adapter, weights_of(target, adapter), casts)

    @classmethod
    def to_fill(cls, target: object, adapter: str | Adapter | None = None) -> Holding:
        """Looks the target of a reader up, likewise."""
        target = _reusable(target)
        return cls._of(target, adapter, weights_of(target, adapter, to_fill=True), None)

    @classmethod
    def _of(cls, target: object, adapter: str | Adapter | None, weights: EngineWeights, casts: Casts) -> Holding:
        shards = [*weights.direct, *weights.aside]
        if not shards:
            raise InvalidArgument("nothing to register: the target has no tensors")
        wire = _wire_dtypes(shards, casts)
        views = tuple(view_of(shard) for shard in shards)
        entries = _entries(shards, views, wire)
        return cls(target, adapter, weights, Manifest.of(entries), views, watch(target))

    @property
    def first_aside(self) -> int:
        """Number of the first entry that is not live memory."""
        return len(self.weights.direct)

    @cached_property
    def on_device(self) -> bool:
        """Whether a part of it lies in a device's memory."""
        return any(view.device is not None for view in self.views)

    @property
    def reading_device(self) -> int | None:
        """The one device that has all of it and copies by a kernel, which reads whatever it can address."""
        devices = {view.device for view in self.views}
        return devices.pop() if len(devices) == 1 and gather.available() else None

    @property
    def node(self) -> int | None:
        """The NUMA node of the first device that has a part of it, if that can be told."""
        device = next((view.device for view in self.views if view.device is not None), None)
        return None if device is None else cuda.driver.numa_node(device)

    @cached_property
    def index(self) -> dict[tuple[str, Box], int]:
        """Entry numbers by name and box."""
        return {(entry.tensor.name, entry.box): number for number, entry in enumerate(self.manifest.entries)}

    def piece_views(self) -> list[View]:
        """Where each piece lies, by piece number."""
        views: dict[int, View] = {}
        for entry, view in zip(self.manifest.entries, self.views, strict=True):
            views.setdefault(entry.piece, view)
        return [views[number] for number in range(len(views))]

    def labels(self) -> list[tuple[str, View]]:
        return [(entry.tensor.name, view) for entry, view in zip(self.manifest.entries, self.views, strict=True)]

    def check_disjoint(self) -> None:
        """A destination must not be written twice.

        Raises:
            ManifestMismatch: two tensors share memory without being aliases of each other.
        """
        pieces: dict[int, tuple[str, View]] = {}
        for entry, label in zip(self.manifest.entries, self.labels(), strict=True):
            pieces.setdefault(entry.piece, label)
        clash = overlapping(list(pieces.values()))
        if clash:
            raise ManifestMismatch.between(
                "tensors to be written share memory", mismatched={clash[0]: f"overlaps {clash[1]} in memory"}
            )


def view_of(shard: Shard) -> View:
    """Where a shard's bytes lie.

    Raises:
        InvalidArgument: not in this process's plain host memory; names the shard.
    """
    try:
        return View.of(shard.tensor)
    except InvalidArgument as error:
        raise InvalidArgument(f"{shard.name}: {error}") from error


def _entries(shards: list[Shard], views: tuple[View, ...], wire: list[str]) -> Iterable[Entry]:
    """Names over the very same memory become aliases of one piece."""
    pieces: dict[object, int] = {}
    for number, (shard, view, dtype) in enumerate(zip(shards, views, wire, strict=True)):
        same = (view.address, view.shape, view.strides, view.dtype, dtype) if view.numel else number
        piece = pieces.setdefault(same, len(pieces))
        yield Entry(TensorSpec(shard.name, shard.global_shape, dtype), shard.box, piece, shard.layout)


def _wire_dtypes(shards: list[Shard], casts: Casts) -> list[str]:
    own = [dtype_name(shard.tensor.dtype) for shard in shards]
    if casts is None:
        return own
    if not isinstance(casts, Mapping):
        asked = dtype_name(casts)
        return [asked if dtype in _FLOATING else dtype for dtype in own]
    rules = {pattern: dtype_name(dtype) for pattern, dtype in casts.items()}
    used: set[str] = set()
    wire = []
    for shard, dtype in zip(shards, own, strict=True):
        # A pattern means floating-point tensors; whoever means another names it exactly.
        fits = (pattern for pattern in rules if fnmatch.fnmatchcase(shard.name, pattern))
        rule = next((pattern for pattern in fits if dtype in _FLOATING or pattern == shard.name), None)
        used.update([rule] if rule else [])
        wire.append(rules[rule] if rule else dtype)
    unused = rules.keys() - used
    if unused:
        raise InvalidArgument(f"dtype= has patterns that match no tensor first: {', '.join(sorted(unused))}")
    return wire


def _reusable(target: object) -> object:
    """An iterator of shards would be used up by the first look."""
    from torch.nn import Module

    if isinstance(target, Module | Mapping | list | tuple) or not isinstance(target, Iterable):
        return target
    return list(target)
