"""Host memory registered with CUDA: page-locked for this process's devices, which then copy at the link's rate."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

MOST = 64 << 30
"""Bytes that one call registers."""
_PORTABLE, _READ_ONLY = 1, 8
"""cudaHostRegisterPortable: for every device's context; cudaHostRegisterReadOnly: pages that may not be written."""
_log = logging.getLogger(__name__)


def register(address: int, nbytes: int, *, read_only: bool) -> bool:
    """Whether all of it is registered now; if not, none is, and a warning says why."""
    done: list[int] = []
    for at, size in _parts(address, nbytes):
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        problem = _call("cudaHostRegister", at, size, flags)
        if problem:
            for other in reversed(done):
                _call("cudaHostUnregister", other)
            _log.warning("%d bytes of host memory cannot be registered with CUDA, copies are slower: %s", size, problem)
            return False
        done.append(at)
    return True


def unregister(address: int, nbytes: int) -> None:
    for at, _ in reversed(list(_parts(address, nbytes))):
        problem = _call("cudaHostUnregister", at)
        if problem:
            _log.debug("host memory stays registered with CUDA: %s", problem)


def _parts(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, MOST):
        yield address + at, min(MOST, nbytes - at)


def _call(name: str, *arguments: int) -> str | None:
    """What went wrong, or nothing."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = getattr(runtime, name)(*arguments)
    if int(error) == 0:
        return None
    # CUDA keeps the error, and torch raises it at its next launch, whatever that is: here.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return str(error)
