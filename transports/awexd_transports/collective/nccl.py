"""A group over NCCL: one communicator, used straight from its library, which the CUDA builds of torch bring along.

torch's own group ends the process when a member dies, from a thread of its own; here a communicator is aborted, and the
process goes on. Calls that wait leave the GIL alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from awexd_transports.collective.base import Lost, Wait

if TYPE_CHECKING:
    import torch

_UNIQUE_BYTES = 128
_UINT8 = 1
_LIBRARY = "libnccl.so.2"
_CALL_SECONDS = 2.0
"""A communicator goes under a call that takes longer: only that frees it."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_BYTES),)


@cache
def library() -> ctypes.CDLL | None:
    """NCCL, if it can be loaded: torch has loaded it, or it is on the loader's path."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        found = ctypes.CDLL(_LIBRARY)
        rank, pointer = ctypes.c_int, ctypes.c_void_p
        found.ncclGetErrorString.restype = ctypes.c_char_p
        found.ncclGetErrorString.argtypes = [ctypes.c_int]
        found.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        found.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), rank, _UniqueId, rank]
        for name in ("ncclSend", "ncclRecv"):
            getattr(found, name).argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, rank, pointer, pointer]
        found.ncclCommAbort.argtypes = [pointer]
    except (OSError, AttributeError):
        return None
    return found


def available() -> bool:
    """Whether this process can use NCCL."""
    return library() is not None


class NcclGroup:
    """See ``base.Group``.

    Args:
        device: this member's, by ordinal; no other member has the same. ``rank``, ``size``: its number, and how many
            they are.
    """

    def __init__(self, device: int, rank: int, size: int) -> None:
        import torch

        self._device, self._rank, self._size = device, rank, size
        self._comm: ctypes.c_void_p | None = None
        self._calling = threading.Lock()
        self._ending = threading.Lock()
        self._aborted = False
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def bind(self) -> str:
        """The first member's is what all connect by."""
        if self._rank:
            return ""
        unique = _UniqueId()
        self._check(_nccl().ncclGetUniqueId(ctypes.byref(unique)), "to listen")
        return bytes(unique).hex()

    def connect(self, addresses: Sequence[str], seconds: float) -> None:
        """``seconds`` is not kept by NCCL: a member that hangs just now holds this thread until it goes on or ends."""
        import torch

        unique, comm = _UniqueId.from_buffer_copy(bytes.fromhex(addresses[0])), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._check(_nccl().ncclCommInitRank(ctypes.byref(comm), self._size, unique, self._rank), "to connect")
        with self._ending:
            self._comm = comm
        if self._aborted:
            self.abort()
            raise Lost("this exchange was given up")

    def send(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin("ncclSend", peer, memory, after)

    def receive(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin("ncclRecv", peer, memory, after)

    def abort(self) -> None:
        self._aborted = True
        self._end()

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        """By an abort also where nothing is under way: ``ncclCommDestroy`` waits until every member calls it."""
        import torch

        with self._ending:
            comm, self._comm = self._comm, None
        if comm is None:
            return
        calling = self._calling.acquire(timeout=_CALL_SECONDS)
        try:
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
                _nccl().ncclCommAbort(comm)
        finally:
            if calling:
                self._calling.release()

    def _begin(self, call: str, peer: int, memory: torch.Tensor, after: Any) -> Wait:
        """On the group's own stream, after what has filled or emptied the memory."""
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._calling, torch.cuda.device(self._device):
            comm = self._comm
            if comm is None or self._aborted:
                raise Lost("this exchange was given up")
            if after is not None:
                self._stream.wait_event(after)
            stream = ctypes.c_void_p(self._stream.cuda_stream)
            code = getattr(_nccl(), call)(memory.data_ptr(), memory.numel(), _UINT8, peer, comm, stream)
            self._check(code, f"in {call} with member {peer}")
            done.record(self._stream)

        def wait() -> None:
            done.synchronize()
            if self._aborted:
                raise Lost("this exchange was given up")

        return wait

    def _check(self, code: int, doing: str) -> None:
        if code:
            text = _nccl().ncclGetErrorString(code)
            raise Lost(f"NCCL failed {doing}: {text.decode(errors='replace')}")


def _nccl() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise Lost(f"{_LIBRARY} cannot be loaded")
    return found
