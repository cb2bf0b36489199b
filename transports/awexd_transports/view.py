"""Memory of this process, or of a CUDA device, seen as a strided array: what copies read and write.

torch is imported in functions only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from awexd_transports.dtypes import ITEMSIZE, dtype_name
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
ITEMS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}
Loop = tuple[int, int]
"""Extent and stride in bytes."""


class _Memory:
    """Lets NumPy see an address; whoever holds the array must hold the memory's owner too."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, item: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": item,
            "shape": shape,
            "strides": strides,
            "data": (address, False),
        }


def array_at(address: int, unit: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Items of ``unit`` bytes at an address; strides in bytes. Does not keep the memory.

    Items are signed integers of 1, 2, 4 or 8 bytes; of 16, complex128, the only item of that size (never compare those:
    NaN differs from itself).
    """
    return np.asarray(_Memory(address, ITEMS[unit], shape, strides))


@dataclass(frozen=True, slots=True)
class View:
    """A strided array in this process's host memory, or in a device's.

    Attributes:
        address: of its first element.
        shape: in elements.
        strides: in bytes.
        dtype: torch's name.
        owner: kept alive as long as the view is; looked at only if it is a CUDA tensor of that dtype.
        device: its CUDA ordinal in this process; None: host memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: object = field(default=None, repr=False, compare=False)
    device: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The memory of a CPU or CUDA tensor, any strides; it keeps the tensor alive.

        Raises:
            InvalidArgument: not plain memory: another kind of device, sparse, quantised, lazily conjugated or negated,
                distributed (give its local tensor), without storage, or of an unknown dtype.
        """
        problem = _why_not_plain(tensor)
        if problem:
            raise InvalidArgument(f"a tensor that cannot be copied: {problem}")
        size = tensor.element_size()
        return cls(
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(step * size for step in tensor.stride()),
            dtype_name(tensor.dtype),
            tensor,
            tensor.device.index if tensor.device.type == "cuda" else None,
        )

    @classmethod
    def packed(cls, address: int, shape: Sequence[int], dtype: str, owner: object) -> View:
        """A row-major array without gaps."""
        steps, step = [], ITEMSIZE[dtype_name(dtype)]
        for extent in reversed(shape):
            steps.append(step)
            step *= extent
        return cls(address, tuple(shape), tuple(reversed(steps)), dtype, owner)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def sub(self, slices: Sequence[slice]) -> View:
        """The part with these slices, one a dimension, step 1.

        Raises:
            InvalidArgument: another number of slices, or one that is not inside the view.
        """
        if len(slices) != len(self.shape):
            raise InvalidArgument(f"{len(slices)} slices for a view of shape {list(self.shape)}")
        address, shape = self.address, []
        for part, extent, step in zip(slices, self.shape, self.strides, strict=True):
            if part.step not in (None, 1) or not 0 <= part.start <= part.stop <= extent:
                raise InvalidArgument(f"{part} is not inside a view of shape {list(self.shape)}")
            address += part.start * step
            shape.append(part.stop - part.start)
        return View(address, tuple(shape), self.strides, self.dtype, self.owner, self.device)

    def bytes_array(self) -> Array:
        """The view as bytes, with a last dimension of the element's bytes. Host memory only."""
        return array_at(self.address, 1, (*self.shape, self.itemsize), (*self.strides, 1))

    def tensor(self) -> torch.Tensor:
        """A torch tensor over the same memory. In host memory it does not keep the owner: hold this view as long.

        Raises:
            InvalidArgument: strides that torch cannot have (negative, or not whole elements); not that device's memory.
        """
        import ctypes

        import torch

        size = self.itemsize
        owner = self.owner
        if isinstance(owner, torch.Tensor) and owner.is_cuda and owner.dtype == getattr(torch, self.dtype):
            offset = owner.storage_offset() + (self.address - owner.data_ptr()) // size
            live: torch.Tensor = owner.as_strided(self.shape, tuple(step // size for step in self.strides), offset)
            return live
        if any(step < 0 or step % size for step in self.strides):
            raise InvalidArgument(f"strides of {list(self.strides)} bytes are not a torch tensor's")
        if not self.numel:
            where = "cpu" if self.device is None else f"cuda:{self.device}"
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=where)
        span = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + size
        if self.device is None:
            raw = torch.frombuffer((ctypes.c_ubyte * span).from_address(self.address), dtype=torch.uint8)
        else:
            raw = _device_bytes(self.address, span, self.device, self.owner)
        flat = raw.view(getattr(torch, self.dtype))
        return flat.as_strided(self.shape, tuple(step // size for step in self.strides))


class _DeviceMemory:
    """Lets torch see an address on a device; torch holds this, and so the owner."""

    __slots__ = ("__cuda_array_interface__", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "strides": None,
            "data": (address, False),
        }


def _device_bytes(address: int, nbytes: int, device: int, owner: object) -> torch.Tensor:
    import torch

    with torch.inference_mode(False), torch.cuda.device(device):
        raw = torch.as_tensor(_DeviceMemory(address, nbytes, owner), device=f"cuda:{device}")
    if raw.data_ptr() != address:  # torch has made a copy: to write there would be lost
        raise InvalidArgument(f"{nbytes} bytes said to be on cuda:{device} are not that device's memory")
    return raw


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"{type(tensor).__name__} is not a tensor"
    if hasattr(tensor, "to_local"):
        return f"a {type(tensor).__name__}; give its local tensor (to_local())"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on device {tensor.device}; only host memory and CUDA devices are known"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"layout {'nested' if tensor.is_nested else tensor.layout}, not strided"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype}); give its int_repr() and its scales"
    if tensor.is_conj() or tensor.is_neg():
        return "lazily conjugated or negated; give resolve_conj() or resolve_neg() of it"
    try:
        held = tensor.untyped_storage().nbytes()
        tensor.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        return f"it has no memory of its own ({error})"
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (tensor.storage_offset() + last + 1) * tensor.element_size() > held:
        return f"its storage has been freed or shrunk to {held} bytes"
    return None


def overlapping(views: Sequence[tuple[str, View]]) -> tuple[str, str] | None:
    """Labels of two views whose memory has a byte in common (twice the same: a view that overlaps itself), or None.

    Exact for strided views. Byte intervals are swept first; only where those meet are the bytes themselves marked, at
    the coarsest grain that all strides and runs of the group share.
    """
    placed = [_Placed(label, view) for label, view in views if view.numel]
    for one in placed:
        if one.overlaps_itself():
            return one.label, one.label
    placed.sort(key=lambda one: one.low)
    for group in _groups(placed):
        clash = _dense_clash(group)
        if clash is None and not all(one.dense for one in group):
            clash = _marked_twice(group)
        if clash is not None:
            return clash
    return None


def covers(views: Iterable[View], address: int, nbytes: int) -> bool:
    """Whether every one of these bytes is in one of the views, which lie within them."""
    placed = [_Placed("", _unrepeated(view)) for view in views if view.numel]
    end = address
    for one in sorted((one for one in placed if one.dense), key=lambda one: one.low):
        if one.low > end:
            break
        end = max(end, one.high)
    if end >= address + nbytes:
        return True
    steps = [step for one in placed for _, step in one.loops]
    grain = math.gcd(nbytes, *(one.low - address for one in placed), *(one.run for one in placed), *steps)
    board = np.zeros(nbytes // max(1, grain), np.uint8)
    for one in placed:
        one.marks(board, address, grain)[...] = 1
    return bool(board.all())


def _unrepeated(view: View) -> View:
    """Without the dimensions along which the same elements are seen again."""
    kept = [(n, step) for n, step in zip(view.shape, view.strides, strict=True) if step]
    return replace(view, shape=tuple(n for n, _ in kept), strides=tuple(step for _, step in kept))


class _Placed:
    """A view's bytes: interval, nested loops outermost first, length of the contiguous run inside them."""

    __slots__ = ("dense", "high", "label", "loops", "low", "run")

    def __init__(self, label: str, view: View) -> None:
        self.label = label
        self.low = view.address + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True) if s < 0)
        loops = [(n, abs(s)) for n, s in zip(view.shape, view.strides, strict=True) if n > 1]
        loops.sort(key=lambda loop: loop[1])
        self.run = view.itemsize
        while loops and loops[0][1] == self.run:
            self.run *= loops.pop(0)[0]
        self.loops: list[Loop] = loops[::-1]
        self.high = self.low + sum((n - 1) * s for n, s in loops) + self.run
        self.dense = not loops

    def overlaps_itself(self) -> bool:
        extent = self.run
        nested = True
        for n, step in reversed(self.loops):
            nested = nested and step >= extent
            extent += (n - 1) * step
        if nested:
            return False
        if any(step == 0 for _, step in self.loops):
            return True
        grain = math.gcd(self.run, *(step for _, step in self.loops))
        starts = self.offsets(grain).reshape(-1, 1) + np.arange(self.run // grain)
        return bool(np.unique(starts).size < starts.size)

    def offsets(self, grain: int) -> npt.NDArray[np.int64]:
        """Where each run starts, in grains from ``low``."""
        found = np.zeros(1, np.int64)
        for n, step in self.loops:
            found = (found[:, None] + np.arange(n, dtype=np.int64) * (step // grain)).reshape(-1)
        return found

    def marks(self, board: Array, origin: int, grain: int) -> Array:
        """This view's grains as a view of ``board``, whose first grain is at address ``origin``."""
        shape = (*(n for n, _ in self.loops), self.run // grain)
        strides = (*(s // grain for _, s in self.loops), 1)
        return np.lib.stride_tricks.as_strided(board[(self.low - origin) // grain :], shape, strides)


def _groups(placed: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    """Views in address order whose byte intervals meet, at least two."""
    group: list[_Placed] = []
    high = 0
    for one in placed:
        if group and one.low >= high:
            if len(group) > 1:
                yield group
            group = []
        high = max(high, one.high) if group else one.high
        group.append(one)
    if len(group) > 1:
        yield group


def _dense_clash(group: Iterable[_Placed]) -> tuple[str, str] | None:
    """Two views without gaps whose intervals meet: no bytes need marking for those."""
    last: _Placed | None = None
    for one in group:
        if not one.dense:
            continue
        if last is not None and one.low < last.high:
            return last.label, one.label
        last = one
    return None


def _marked_twice(group: Sequence[_Placed]) -> tuple[str, str] | None:
    origin = group[0].low
    steps = [step for one in group for _, step in one.loops]
    grain = math.gcd(*(one.low - origin for one in group), *(one.run for one in group), *steps)
    board = np.zeros((max(one.high for one in group) - origin) // grain, np.uint8)
    for at, one in enumerate(group):
        marks = one.marks(board, origin, grain)
        if marks.any():
            return next((other.label, one.label) for other in group[:at] if _meet(other, one, board, origin, grain))
        marks[...] = 1
    return None


def _meet(one: _Placed, other: _Placed, board: Array, origin: int, grain: int) -> bool:
    board[...] = 0
    one.marks(board, origin, grain)[...] = 1
    return bool(other.marks(board, origin, grain).any())
