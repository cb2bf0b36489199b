"""A GPU for tests without one: its driver's calls, over host memory that processes really share.

Allocations are files of one folder; a handle is a file's name. What a process has open can be seen, and what CUDA
refuses can be refused. Only NVIDIA's side is played: everything of ours runs as it is.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from awexd_transports.cuda import driver
from awexd_transports.cuda.driver import HANDLE_BYTES, CudaDriver, DriverError
from awexd_transports.view import View


class SharedMemoryDriver:
    """In the place of ``driver.CudaDriver``. ``refuse``: names of calls that fail."""

    def __init__(self, folder: str | Path, uuids: Sequence[str] = ("GPU-0",), refuse: Sequence[str] = ()) -> None:
        self.folder = Path(folder)
        self.uuids = list(uuids)
        self.refuse = set(refuse)
        self.opened: dict[int, mmap.mmap | None] = {}
        self.virtual: dict[int, list[int]] = {}
        self.allocations: dict[int, tuple[int, str, mmap.mmap]] = {}
        self.made = 0
        self._names = itertools.count()

    def install(self) -> SharedMemoryDriver:
        driver.driver = self  # type: ignore[assignment]
        return self

    def tensors(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of these, all in one new allocation, at odd distances."""
        places = list(itertools.accumulate((256 * (1 + t.nbytes // 256) for t in values.values()), initial=256))
        name = f"{os.getpid()}-{next(self._names)}"
        held = self._map(name, places[-1])
        base = np.frombuffer(held, np.uint8).ctypes.data
        self.allocations[base] = places[-1], name, held
        self.made += 1
        made = {}
        for (key, tensor), at in zip(values.items(), places, strict=False):
            flat = torch.frombuffer(memoryview(held)[at : at + tensor.nbytes], dtype=tensor.dtype)
            made[key] = flat.view(tensor.shape).copy_(tensor)
        return made

    def devices(self) -> list[str]:
        return self.uuids

    def device_of(self, view: View) -> int | None:
        return 0 if self._found(view.address) is not None else None

    def allocation(self, view: View) -> tuple[int, int]:
        base = self._found(view.address)
        assert base is not None, "not ours"
        return base, self.allocations[base][0]

    def freed(self, devices: Sequence[int]) -> tuple[int, ...]:
        return (self.made - len(self.allocations),)

    def counts(self, bases: Sequence[tuple[int, int]]) -> bool:
        return all(base in self.allocations for _, base in bases)

    def handle(self, device: int, base: int) -> bytes:
        self._may("handle")
        return self.allocations[base][1].encode().ljust(HANDLE_BYTES, b"\0")

    def chunks(self, device: int, low: int, high: int) -> list[tuple[int, int]]:
        raise DriverError("chunks: CUDA_ERROR_INVALID_VALUE")

    def open(self, device: int, handle: bytes) -> int:
        self._may("open")
        held = self._map(handle.rstrip(b"\0").decode(), 0)
        address = np.frombuffer(held, np.uint8).ctypes.data
        self.opened[address] = held
        return address

    def close(self, device: int, address: int) -> None:
        self.opened.pop(address)

    def view(
        self, device: int, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str, owner: object
    ) -> View:
        return View(address, tuple(shape), tuple(strides), dtype, owner)

    def synchronize(self, devices: Sequence[int]) -> None:
        pass

    def _found(self, address: int) -> int | None:
        return next((base for base, (nbytes, *_) in self.allocations.items() if base <= address < base + nbytes), None)

    def _map(self, name: str, nbytes: int) -> mmap.mmap:
        with open(self.folder / name, "a+b") as file:
            if nbytes:
                file.truncate(nbytes)
            return mmap.mmap(file.fileno(), 0)

    def _may(self, call: str) -> None:
        if call in self.refuse:
            raise DriverError(f"{call}: CUDA_ERROR_INVALID_VALUE")


class WatchedCudaDriver(CudaDriver):
    """A real GPU's, which can be watched and made to refuse in the same way."""

    def __init__(self, folder: str | Path, uuids: Sequence[str] = (), refuse: Sequence[str] = ()) -> None:
        self.refuse = set(refuse)
        self.opened: dict[int, int] = {}

    def install(self) -> WatchedCudaDriver:
        driver.driver = self
        return self

    def tensors(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.cuda() for name, tensor in values.items()}

    def handle(self, device: int, base: int) -> bytes:
        if "handle" in self.refuse:
            raise DriverError("handle: CUDA_ERROR_INVALID_VALUE")
        return super().handle(device, base)

    def open(self, device: int, handle: bytes) -> int:
        if "open" in self.refuse:
            raise DriverError("open: CUDA_ERROR_INVALID_VALUE")
        address = super().open(device, handle)
        self.opened[address] = device
        return address

    def close(self, device: int, address: int) -> None:
        super().close(device, address)
        del self.opened[address]

    def open_chunks(self, device: int, sizes: Sequence[int], fds: Sequence[int]) -> int:
        address = super().open_chunks(device, sizes, fds)
        self.opened[address] = device
        return address

    def close_chunks(self, device: int, address: int, sizes: Sequence[int]) -> None:
        super().close_chunks(device, address, sizes)
        del self.opened[address]


class ExpandableCudaDriver(WatchedCudaDriver):
    """The same, and this process's own memory comes from torch's ``expandable_segments``."""

    def install(self) -> WatchedCudaDriver:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        return super().install()


class VirtualMemoryDriver(SharedMemoryDriver):
    """The same, but for memory that is mapped piece by piece and has no handle, as ``expandable_segments`` makes it."""

    def tensors(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = list(itertools.accumulate((256 * (1 + t.nbytes // 256) for t in values.values()), initial=256))
        count = -(-places[-1] // mmap.PAGESIZE) + 1
        fds = [os.memfd_create("chunk", os.MFD_CLOEXEC) for _ in range(count)]
        for fd in fds:
            os.ftruncate(fd, mmap.PAGESIZE)
        base = self.open_chunks(0, [mmap.PAGESIZE] * count, fds)
        del self.opened[base]
        self.virtual[base] = fds
        made = {}
        for (key, tensor), at in zip(values.items(), places, strict=False):
            memory = (ctypes.c_ubyte * tensor.nbytes).from_address(base + at)
            made[key] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        return made

    def device_of(self, view: View) -> int | None:
        return 0 if self._base(view.address) else None

    def allocation(self, view: View) -> tuple[int, int]:
        base = self._base(view.address)
        return base, len(self.virtual[base]) * mmap.PAGESIZE

    def handle(self, device: int, base: int) -> bytes:
        raise DriverError("handle: CUDA_ERROR_INVALID_VALUE")

    def chunks(self, device: int, low: int, high: int) -> list[tuple[int, int]]:
        first = low - low % mmap.PAGESIZE
        return [(at, mmap.PAGESIZE) for at in range(first, high, mmap.PAGESIZE)]

    def export(self, device: int, address: int) -> int:
        self._may("export")
        base = self._base(address)
        return os.dup(self.virtual[base][(address - base) // mmap.PAGESIZE])

    def open_chunks(self, device: int, sizes: Sequence[int], fds: Sequence[int]) -> int:
        self._may("open")
        address = _mmap(None, sum(sizes), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        at = address
        for size, fd in zip(sizes, fds, strict=True):
            _mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
            at += size
        self.opened[address] = None
        return address

    def close_chunks(self, device: int, address: int, sizes: Sequence[int]) -> None:
        self.opened.pop(address)
        assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(sum(sizes))) == 0

    def _base(self, address: int) -> int:
        spans = ((base, len(fds) * mmap.PAGESIZE) for base, fds in self.virtual.items())
        return next((base for base, nbytes in spans if base <= address < base + nbytes), 0)


_MAP_FIXED = 16


def _mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    found = call(address, nbytes, access, flags, fd, 0)
    assert found not in (None, ctypes.c_void_p(-1).value)
    return int(found)
