"""Noticing, for less than a microsecond a tensor, that live tensors are no longer those that were registered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from awexd_client.adapters.base import is_dtensor
from awexd_client.adapters.live import mapping_of, modules_of
from awexd_client.adapters.names import is_derived_buffer
from awexd_transports.layout import Shard


class Watch:
    """What a target looked like when this was made: which tensor object lies where, and how.

    Args:
        target: as for ``shards_of``. Shards must come in a list or tuple; an iterator would be used up.
    """

    def __init__(self, target: object) -> None:
        self._tables: list[tuple[Mapping[str, Any], int]] = []
        self._objects: list[tuple[Mapping[str, Any], str, Any]] = []
        self._locals: list[tuple[Any, Any]] = []
        # With the two methods bound already, which is a third of a look's time.
        self._places: list[tuple[Any, Any, Any, int, tuple[int, ...], Any, Any]] = []
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
        """Whether an entry was added, removed or rebound, or a tensor's memory moved or was freed."""
        for table, size in self._tables:
            if len(table) != size:
                return True
        for table, key, value in self._objects:
            if table.get(key) is not value:
                return True
        for tensor, local in self._locals:
            if tensor._local_tensor is not local:
                return True
        # `p.data = p.data.t()` keeps the address: shape, strides and dtype say how it is read.
        for data_ptr, stride, tensor, address, strides, shape, dtype in self._places:
            if data_ptr() != address or stride() != strides or tensor.shape != shape or tensor.dtype != dtype:
                return True
        return False

    def _add_module(self, module: Any) -> None:
        self._add_table(module._modules, ())
        self._objects += [(module._modules, key, child) for key, child in module._modules.items()]
        self._add_table(module._parameters, module._parameters)
        # Rotary tables are rebound as sequences grow; they are no weights.
        self._add_table(module._buffers, [key for key in module._buffers if not is_derived_buffer(key)])

    def _add_table(self, table: Mapping[str, Any], keys: Iterable[str]) -> None:
        self._tables.append((table, len(table)))
        for key in keys:
            self._objects.append((table, key, table[key]))
            if table[key] is not None:
                self._add_tensor(table[key])

    def _add_tensor(self, tensor: Any) -> None:
        if is_dtensor(tensor):
            self._locals.append((tensor, tensor._local_tensor))
            tensor = tensor._local_tensor
        data_ptr, stride = tensor.data_ptr, tensor.stride
        self._places.append((data_ptr, stride, tensor, data_ptr(), stride(), tensor.shape, tensor.dtype))


def _shard_tensors(target: Iterable[object]) -> Iterator[Any]:
    return (item.tensor for item in target if isinstance(item, Shard))
