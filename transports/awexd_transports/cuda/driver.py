"""The few calls of CUDA's driver by which one process opens another's GPU memory. ctypes; nothing is loaded on import.

Signatures are those of cuda.h (12.x): CUdeviceptr is 64 bits, CUipcMemHandle 64 bytes passed by value.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from awexd_transports.errors import AwexdError
from awexd_transports.view import View

HANDLE_BYTES = 64
CHUNK = 2 << 20
"""What physical allocations are multiples of, and begin at multiples of."""
_POSIX_FD, _DEVICE, _READ_WRITE = 1, 1, 3
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE (reading
alone is not supported)."""
_ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""
_NO_FLAGS = ctypes.c_uint64(0)
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: what is on the default stream is not waited for."""
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is."""


class DriverError(AwexdError):
    """A call of CUDA's driver failed; names the call and CUDA's error."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Access(ctypes.Structure):
    """CUmemAccessDesc: a location's type and number, and what it may do there."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))


class CudaDriver:
    """CUDA as this process sees it. Devices are its own ordinals."""

    def devices(self) -> list[str]:
        """UUIDs of the devices that this process sees, by ordinal."""
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in range(count)]

    def numa_node(self, device: int) -> int | None:
        """The node whose memory is nearest to that device, as the kernel says; None where it does not say."""
        import torch

        known = torch.cuda.get_device_properties(device)
        numbers = [getattr(known, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None in numbers:
            return None
        domain, bus, number = numbers
        try:
            text = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0/numa_node").read_text()
        except OSError:  # a virtual machine may hide it
            return None
        return int(text) if int(text) >= 0 else None  # -1: there is but one

    def device_of(self, view: View) -> int | None:
        """The device whose memory that is; None: no device's."""
        return view.device

    def lies_on(self, view: View) -> int:
        """The device that has the memory which ``view.device`` can address."""
        found = ctypes.c_int()
        with self._current(view.device):
            address = ctypes.c_uint64(view.address)
            self._call("cuPointerGetAttribute", ctypes.byref(found), ctypes.c_int(_ORDINAL), address)
        return found.value

    def allocation(self, view: View) -> tuple[int, int]:
        """Address and bytes of the allocation that a view lies in."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current(view.device):
            found = ctypes.byref(base), ctypes.byref(nbytes)
            self._call("cuMemGetAddressRange_v2", *found, ctypes.c_uint64(view.address))
        return base.value, nbytes.value

    def freed(self, devices: Sequence[int]) -> tuple[int, ...]:
        """How often torch's allocator has given an allocation back to each of these devices so far."""
        import torch

        return tuple(torch.cuda.memory_stats_as_nested_dict(device).get("num_device_free", -1) for device in devices)

    def counts(self, bases: Sequence[tuple[int, int]]) -> bool:
        """Whether ``freed`` counts it when one of these allocations (device, address) goes: torch made all of them."""
        import torch

        if torch.cuda.get_allocator_backend() != "native" or -1 in self.freed(sorted({device for device, _ in bases})):
            return False
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return {*bases} <= {(segment["device"], segment["address"]) for segment in segments}

    def handle(self, device: int, base: int) -> bytes:
        """By which another process opens that allocation.

        Raises:
            DriverError: it cannot be given away so: made by a virtual memory API or from a pool.
        """
        handle = _Handle()
        with self._current(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def chunks(self, device: int, low: int, high: int) -> list[tuple[int, int]]:
        """Address and bytes of each physical allocation that is mapped between these addresses of virtual memory.

        Raises:
            DriverError: that is no virtual memory, or not all of it is mapped.
        """
        found: list[tuple[int, int]] = []
        with self._current(device):
            at = low // CHUNK * CHUNK
            handle = self._physical(at)
            while self._physical(at - CHUNK, missing=0) == handle:
                at -= CHUNK
            while at < high:
                start, handle = at, self._physical(at)
                while self._physical(at, missing=0) == handle:
                    at += CHUNK
                found.append((start, at - start))
        return found

    def export(self, device: int, address: int) -> int:
        """A descriptor of the physical allocation that is mapped there; it keeps the memory alive until it is closed.

        Raises:
            DriverError: it was not made to be shared.
        """
        fd = ctypes.c_int()
        with self._current(device):
            handle = ctypes.c_uint64(self._physical(address))
            self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_POSIX_FD), _NO_FLAGS)
        return fd.value

    def open_chunks(self, device: int, sizes: Sequence[int], fds: Sequence[int]) -> int:
        """Maps physical allocations of another process, on that device or a peer of it, one after another for it.

        Returns their address. ``fds`` stay the caller's.
        """
        address, total = ctypes.c_uint64(), ctypes.c_size_t(sum(sizes))
        zero = ctypes.c_size_t(0)
        with self._current(device):
            self._call("cuMemAddressReserve", ctypes.byref(address), total, zero, ctypes.c_uint64(0), _NO_FLAGS)
            done: list[int] = []
            try:
                for size, fd in zip(sizes, fds, strict=True):
                    handle = ctypes.c_uint64()
                    given = ctypes.c_void_p(fd)
                    self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), given, ctypes.c_int(_POSIX_FD))
                    try:
                        place = ctypes.c_uint64(address.value + sum(done))
                        self._call("cuMemMap", place, ctypes.c_size_t(size), zero, handle, _NO_FLAGS)
                    finally:  # what is mapped stays
                        self._call("cuMemRelease", handle)
                    done.append(size)
                access = _Access(_DEVICE, device, _READ_WRITE)
                self._call("cuMemSetAccess", address, total, ctypes.byref(access), ctypes.c_size_t(1))
            except BaseException:
                self._unmap(address.value, done, total.value)
                raise
        return address.value

    def close_chunks(self, device: int, address: int, sizes: Sequence[int]) -> None:
        """Ends such a mapping."""
        with self._current(device):
            self._unmap(address, sizes, sum(sizes))

    def open(self, device: int, handle: bytes) -> int:
        """The address, for that device, of another process's allocation on it or on a peer of it; to be closed."""
        address = ctypes.c_uint64()
        with self._current(device):
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, device: int, address: int) -> None:
        """Ends the mapping; whatever read there must be over."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def view(
        self, device: int, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str, owner: object
    ) -> View:
        """An array in opened memory; ``strides`` in bytes."""
        return View(address, tuple(shape), tuple(strides), dtype, owner, device)

    def synchronize(self, devices: Sequence[int]) -> None:
        """Everything that this process has in flight on these devices is done, on every stream."""
        import torch

        for device in devices:
            torch.cuda.synchronize(device)

    def stream(self, device: int, priority: int) -> int:
        """A new stream, which no other waits for unless told to."""
        made = ctypes.c_void_p()
        with self._current(device):
            flags = ctypes.c_uint(_NON_BLOCKING)
            self._call("cuStreamCreateWithPriority", ctypes.byref(made), flags, ctypes.c_int(priority))
        return made.value or 0

    def _unmap(self, address: int, sizes: Sequence[int], total: int) -> None:
        at = address
        for size in sizes:
            self._call("cuMemUnmap", ctypes.c_uint64(at), ctypes.c_size_t(size))
            at += size
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(total))

    def _physical(self, address: int, missing: int | None = None) -> int:
        """The handle of what is mapped there, which CUDA always names by the same number."""
        handle = ctypes.c_uint64()
        code = _library().cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        if code and missing is not None:
            return missing
        if code:
            raise DriverError(f"cuMemRetainAllocationHandle: {_error_name(code)}")
        self._call("cuMemRelease", handle)
        return handle.value

    @contextlib.contextmanager
    def _current(self, device: int | None) -> Iterator[None]:
        """The device's primary context, which is torch's, for what is called on this thread meanwhile."""
        context, number = ctypes.c_void_p(), ctypes.c_int(device or 0)
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(_library(), name)(*arguments)
        if code:
            raise DriverError(f"{name}: {_error_name(code)}")


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"CUDA's driver cannot be loaded: {error}") from error


def _error_name(code: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"").decode() or f"error {code}"


driver = CudaDriver()
