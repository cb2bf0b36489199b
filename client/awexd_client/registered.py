"""The storages under what a writer has registered, and which of its entries they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from awexd_client.adapters.live import mapping_of, modules_of
from awexd_client.holding import Holding
from awexd_client.storages import Stored, Tensors, named, storages_of
from awexd_transports.errors import InvalidArgument, ManifestMismatch
from awexd_transports.view import View, covers


def stored_under(holding: Holding) -> list[Stored]:
    """The storages under what is registered, with all tensors of its target that lie in them."""
    registered: dict[str, Any] = {}
    for entry, shard in zip(holding.manifest.entries, holding.weights.direct, strict=True):
        name = entry.tensor.name
        registered[f"{name} {entry.box}" if name in registered else name] = shard.tensor
    found = storages_of(registered)
    own = {one.storage._cdata: one for one in found}
    for name, tensor in _target_tensors(holding.target).items():
        one = own.get(tensor.untyped_storage()._cdata)
        if one is not None:
            one.tensors.setdefault(name, tensor)
    return found


def _target_tensors(target: object) -> Tensors:
    modules = modules_of(target)
    if modules is not None:
        return _named_in(modules)
    mapping = mapping_of(target)
    return named(mapping) if mapping else {}


def _named_in(modules: Sequence[Any]) -> Tensors:
    """Parameters and buffers of modules that are plain memory."""
    found: dict[str, Any] = {}
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            try:
                found |= {f"{number}.{given}": local for given, local in named({name: tensor}).items()}
            except InvalidArgument:  # nothing that is registered lies in it
                continue
    return found


def names_of(holding: Holding) -> list[str]:
    """What entries are called in a parcel."""
    return [
        f"{entry.tensor.name} {list(entry.box.offset)} {list(entry.box.shape)}" for entry in holding.manifest.entries
    ]


def storage_of(holding: Holding, stored: Sequence[Stored]) -> list[Stored]:
    """The storage of each entry."""
    own = {one.storage._cdata: one for one in stored}
    return [own[shard.tensor.untyped_storage()._cdata] for shard in holding.weights.direct]


def by_entry(holding: Holding, rest: Sequence[Stored]) -> list[Stored]:
    """The same storages, their tensors called as a later process would call them."""
    own = {one.storage._cdata: Stored(one.storage, one.nbytes) for one in rest}
    for name, shard in zip(names_of(holding), holding.weights.direct, strict=True):
        one = own.get(shard.tensor.untyped_storage()._cdata)
        if one is not None:
            one.tensors[name] = shard.tensor
    return list(own.values())


def check_covered(holding: Holding, numbers: Sequence[int]) -> None:
    """Raises ManifestMismatch where these entries are not all that is registered; names what is left out."""
    stored = storages_of({str(number): shard.tensor for number, shard in enumerate(holding.weights.direct)})
    of = storage_of(holding, stored)
    short = {id(one) for one in stored if one.nbytes and not made_of(one, holding, numbers, of)}
    names = [entry.tensor.name for number, entry in enumerate(holding.manifest.entries) if id(of[number]) in short]
    if names:
        raise ManifestMismatch.between(
            "an earlier process has offloaded other tensors than are registered", missing=names, mismatched={}
        )


def made_of(one: Stored, holding: Holding, numbers: Sequence[int], of: Sequence[Stored]) -> bool:
    """Whether every byte of a storage is in one of these entries."""
    views: list[View] = [holding.views[number] for number in numbers if of[number] is one]
    return bool(views) and covers(views, one.storage.data_ptr(), one.nbytes)
