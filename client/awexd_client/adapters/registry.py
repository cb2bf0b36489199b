"""Choosing the adapter of a target: our own, and those of the entry-point group ``awexd.adapters``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from awexd_client.adapters.base import Adapter, EngineWeights
from awexd_client.adapters.experts import in_pairs
from awexd_client.adapters.fsdp import FSDPAdapter
from awexd_client.adapters.hf import HFAdapter
from awexd_client.adapters.megatron import MegatronAdapter
from awexd_client.adapters.sglang import SGLangAdapter
from awexd_client.adapters.vllm import VLLMAdapter
from awexd_client.adapters.watch import Watch
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

GROUP = "awexd.adapters"
BUILT_IN: dict[str, type[Adapter]] = {
    "megatron": MegatronAdapter,
    "vllm": VLLMAdapter,
    "sglang": SGLangAdapter,
    "fsdp": FSDPAdapter,
    "hf": HFAdapter,
}
"""In the order in which they are asked; the first three take only models of theirs, FSDPAdapter only what has DTensors,
HFAdapter any module or mapping."""


def shards_of(target: object, adapter: str | Adapter | None = None) -> list[Shard]:
    """This process's shards: views of live memory under checkpoint names.

    Args:
        target: a module, a list of modules (pipeline chunks, whose names are each module's own checkpoint names), a
            mapping of names to tensors, or an iterable of Shard, which is given back as it is; but see ``in_pairs``.
        adapter: None to choose by the target; else a name, or an adapter.

    Raises:
        InvalidArgument: nothing understands the target, no adapter of that name (says which there are), two adapters of
            one name, or a tensor that cannot be handed out (by name).
    """
    return list(weights_of(target, adapter).direct)


def weights_of(target: object, adapter: str | Adapter | None = None, *, to_fill: bool = False) -> EngineWeights:
    """As ``shards_of``, with what else the adapter says of them.

    Args:
        to_fill: for a reader: an engine's adapter may have its engine load some itself.
    """
    found = _weights_of(target, adapter, to_fill)
    return replace(found, direct=list(map(in_pairs, found.direct)), aside=list(map(in_pairs, found.aside)))


def _weights_of(target: object, adapter: str | Adapter | None, to_fill: bool) -> EngineWeights:
    if adapter is not None:
        chosen = find(adapter) if isinstance(adapter, str) else _checked(adapter, "the adapter given")
    else:
        given = _given_shards(target)
        if given is not None:
            return EngineWeights(given)
        chosen = _choose(target)
    by_engine = getattr(chosen, "engine_weights", None) if to_fill else None
    if by_engine is not None:
        found: EngineWeights = by_engine(target)
        return found
    return EngineWeights(list(chosen.shards(target)), check=getattr(chosen, "check_current", None))


def watch(target: object) -> Watch:
    """Notices when the target's tensors are rebound or moved; see :class:`Watch`."""
    return Watch(target)


def find(name: str) -> Adapter:
    """The adapter of that name; one of another package is imported only now.

    Raises:
        InvalidArgument: there is none, or it cannot be loaded.
    """
    built_in, others = BUILT_IN.get(name), _plug_ins()
    if built_in is not None:
        return built_in()
    if name not in others:
        known = sorted({*BUILT_IN, *others})
        raise InvalidArgument(f"no adapter is called {name!r}; known: {', '.join(known)}")
    return _load(others[name])


def _given_shards(target: object) -> list[Shard] | None:
    """The target's items if all are Shards; None if the target is of another kind."""
    from torch import Tensor
    from torch.nn import Module

    if isinstance(target, Module | Mapping | Tensor | str | bytes) or not isinstance(target, Iterable):
        return None
    items = list(target)
    if all(isinstance(item, Shard) for item in items):
        return items
    if isinstance(target, list | tuple) and not any(isinstance(item, Shard) for item in items):
        return None
    strange = next(item for item in items if not isinstance(item, Shard))
    raise InvalidArgument(f"an iterable must hold nothing but Shards, or modules; it has a {type(strange).__name__}")


def _choose(target: object) -> Adapter:
    """Other packages' adapters first: ours would take any module."""
    found = [plug_in for plug_in in map(_load, _plug_ins().values()) if plug_in.matches(target)]
    if len(found) > 1:
        names = ", ".join(plug_in.name for plug_in in found)
        raise InvalidArgument(f"several adapters take a {type(target).__name__} ({names}); name one with adapter=")
    candidates = [*found, *(built_in() for built_in in BUILT_IN.values())]
    for candidate in candidates:
        if candidate.matches(target):
            return candidate
    raise InvalidArgument(
        f"cannot read weights from a {type(target).__name__}; give an nn.Module, a list of modules, a mapping of names"
        " to tensors, an iterable of Shard, or name an adapter with adapter="
    )


def _plug_ins() -> dict[str, EntryPoint]:
    """Entry points of other packages by name.

    Raises:
        InvalidArgument: a name that is taken.
    """
    ours = {name: f"{cls.__module__}:{cls.__qualname__}" for name, cls in BUILT_IN.items()}
    found: dict[str, EntryPoint] = {}
    for point in _installed(tuple(sys.path)):
        if point.name in BUILT_IN and _names(point, BUILT_IN[point.name]):
            continue
        taken = ours.get(point.name) or (found[point.name].value if point.name in found else point.value)
        if taken != point.value:
            raise InvalidArgument(f"two adapters are called {point.name!r}: {taken} and {point.value}; uninstall one")
        found[point.name] = point
    return found


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Looking through all that is installed takes milliseconds, and parts of an update are looked up one by one."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


def _load(point: EntryPoint) -> Adapter:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"adapter {point.name!r} ({point.value}) cannot be loaded: {error}") from error
    return _checked(loaded() if isinstance(loaded, type) else loaded, f"adapter {point.name!r}")


def _checked(adapter: Any, what: str) -> Adapter:
    if isinstance(adapter, type) or not isinstance(adapter, Adapter):
        raise InvalidArgument(f"{what} has no name, matches() and shards(): {adapter!r}")
    return adapter


def _names(point: EntryPoint, built_in: type) -> bool:
    """Whether an entry point is that class, from its own module or from a package around it."""
    module, _, name = point.value.partition(":")
    return name == built_in.__qualname__ and f"{built_in.__module__}.".startswith(f"{module}.")
