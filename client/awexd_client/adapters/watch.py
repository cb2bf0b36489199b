"""Noticing, for a fraction of a microsecond a tensor, that live tensors are no longer those that were registered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from awexd_client.adapters.base import is_dtensor
from awexd_client.adapters.live import mapping_of, modules_of
from awexd_client.adapters.names import is_derived_buffer
from awexd_transports.layout import Shard

Look = Callable[[Any], Any]


class Watch:
    """What a target looked like when this was made: which tensor object lies where, and how.

    Args:
        target: as for ``shards_of``. Shards must come in a list or tuple; an iterator would be used up.
    """

    def __init__(self, target: object) -> None:
        self._tables: list[tuple[Mapping[str, Any], int]] = []
        self._gets: list[Callable[[str], Any]] = []
        self._keys: list[str] = []
        self._objects: list[Any] = []
        self._locals: list[tuple[Any, Any]] = []
        self._tensors: list[Any] = []
        from torch import Tensor

        # The methods themselves, which are called at half the cost of a methodcaller's.
        self._place: Look = Tensor.data_ptr
        self._form: tuple[Look, ...] = (Tensor.stride, operator.attrgetter("shape"), operator.attrgetter("dtype"))
        self._known: dict[Look, list[Any]] = {look: [] for look in (self._place, *self._form)}
        mapping = mapping_of(target)
        modules = modules_of(target)
        if mapping is not None:
            self._add_table(mapping, mapping)
        elif modules is not None:
            for module in {id(m): m for root in modules for m in root.modules()}.values():
                self._add_module(module)
        elif isinstance(target, list | tuple):
            for tensor in _shard_tensors(target):
                self._add_tensor(tensor)

    def changed(self) -> bool:
        """Whether an entry was added, removed or rebound, or a tensor's memory moved, went or is read otherwise."""
        return self.moved() or self.rebound()

    def moved(self) -> bool:
        """Whether a tensor's memory moved or went: the cheap part, which finds nearly every change."""
        return list(map(self._place, self._tensors)) != self._known[self._place]

    def rebound(self) -> bool:
        """The rest. `p.data = p.data.t()` keeps the address."""
        for table, size in self._tables:
            if len(table) != size:
                return True
        if any(map(operator.is_not, map(operator.call, self._gets, self._keys), self._objects)):
            return True
        for tensor, local in self._locals:
            if tensor._local_tensor is not local:
                return True
        # Passes of C code in which nothing is kept: lists of new tuples would set the garbage collector off.
        return any(any(map(operator.ne, map(look, self._tensors), self._known[look])) for look in self._form)

    def _add_module(self, module: Any) -> None:
        self._add_table(module._modules, ())
        for key in module._modules:
            self._add_entry(module._modules, key)
        self._add_table(module._parameters, module._parameters)
        # Rotary tables are rebound as sequences grow; they are no weights.
        self._add_table(module._buffers, [key for key in module._buffers if not is_derived_buffer(key)])

    def _add_table(self, table: Mapping[str, Any], keys: Iterable[str]) -> None:
        self._tables.append((table, len(table)))
        for key in keys:
            self._add_entry(table, key)
            if table[key] is not None:
                self._add_tensor(table[key])

    def _add_entry(self, table: Mapping[str, Any], key: str) -> None:
        self._gets.append(table.get)
        self._keys.append(key)
        self._objects.append(table[key])

    def _add_tensor(self, tensor: Any) -> None:
        if is_dtensor(tensor):
            self._locals.append((tensor, tensor._local_tensor))
            tensor = tensor._local_tensor
        self._tensors.append(tensor)
        for look, known in self._known.items():
            known.append(look(tensor))


def _shard_tensors(target: Iterable[object]) -> Iterator[Any]:
    return (item.tensor for item in target if isinstance(item, Shard))
