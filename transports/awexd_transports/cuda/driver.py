"""The few calls of CUDA's driver by which one process opens another's GPU memory. ctypes; nothing is loaded on import.

Signatures are those of cuda.h (12.x): CUdeviceptr is 64 bits, CUipcMemHandle 64 bytes passed by value.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from awexd_transports.errors import AwexdError
from awexd_transports.view import View

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is."""


class DriverError(AwexdError):
    """A call of CUDA's driver failed; names the call and CUDA's error."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """CUDA as this process sees it. Devices are its own ordinals."""

    def devices(self) -> list[str]:
        """UUIDs of the devices that this process sees, by ordinal."""
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in range(count)]

    def device_of(self, view: View) -> int | None:
        """The device whose memory that is; None: no device's."""
        return view.device

    def allocation(self, view: View) -> tuple[int, int]:
        """Address and bytes of the allocation that a view lies in."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current(view.device):
            found = ctypes.byref(base), ctypes.byref(nbytes)
            self._call("cuMemGetAddressRange_v2", *found, ctypes.c_uint64(view.address))
        return base.value, nbytes.value

    def handle(self, device: int, base: int) -> bytes:
        """By which another process opens that allocation.

        Raises:
            DriverError: it cannot be given away so: made by a virtual memory API or from a pool.
        """
        handle = _Handle()
        with self._current(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """The address of another process's allocation in this one; to be closed. ``device``: the one it is on."""
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
