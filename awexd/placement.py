"""On which NUMA node this thread's new pages are put: near the GPU that will read and write them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
from collections.abc import Iterator

from awexd.protocol import MAX_NODES

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call (asm/unistd.h); libc has no function for it."""
_DEFAULT, _PREFERRED = 0, 1
"""MPOL_DEFAULT, MPOL_PREFERRED of linux/mempolicy.h: where that node is full, others are used."""
_BITS = 64
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """Pages that this thread makes meanwhile come from that node, if it has any; None: from wherever they come."""
    if node is None or not _prefer(node):
        yield
        return
    try:
        yield
    finally:
        _call(_DEFAULT, None)


def _prefer(node: int) -> bool:
    mask = (ctypes.c_uint64 * (MAX_NODES // _BITS))()
    mask[node // _BITS] = 1 << node % _BITS
    problem = _call(_PREFERRED, mask)
    if problem:
        _log.debug("memory is not put on NUMA node %d: %s", node, os.strerror(problem))
    return not problem


def _call(policy: int, mask: ctypes.Array[ctypes.c_uint64] | None) -> int:
    """errno, or 0."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    most = ctypes.c_ulong(MAX_NODES + 1 if mask is not None else 0)
    done: int = libc.syscall(ctypes.c_long(number), ctypes.c_long(policy), mask, most)
    return ctypes.get_errno() if done else 0
