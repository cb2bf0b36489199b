"""Segments in POSIX shared memory: made, locked, sealed, found again after a restart.

A segment is one object ``/awexd-<namespace>-<id>``: a header page, a rank's packed pieces, a table of checksums.
Only the daemon writes the header. The daemon reads and writes it with ``pread`` and ``pwrite`` and never dereferences a
mapping, which a client with a writable descriptor could truncate. Every method may block: call it from a thread, except
``seal``, ``clear`` and ``descriptor``, which touch one resident page.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import itertools
import logging
import mmap
import os
import re
import stat
import struct
import time
from dataclasses import dataclass
from typing import Any

import orjson
import posix_ipc

from awexd.budget import SHM_DIRECTORY, Budget
from awexd.placement import preferring
from awexd_transports.errors import BudgetExceeded, IntegrityError
from awexd_transports.segment import HEADER_BYTES, MAGIC

FORMAT = 3
"""Raised whenever what a segment holds means something else; segments of another format are unlinked, not adopted."""

_PREFIX = struct.Struct("<8sII16s")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Region:
    """One object that this daemon holds open. ``mapping`` is the address of the locked mapping, 0 if not locked."""

    name: str
    fd: int
    nbytes: int
    mapping: int = 0

    @property
    def locked(self) -> bool:
        return self.mapping != 0


@dataclass(frozen=True, slots=True)
class Found:
    """A sealed segment of an earlier daemon: its id and what its header says."""

    id: str
    nbytes: int
    header: dict[str, Any]
    locked: bool


class Memory:
    """This daemon's segments. ``key`` authenticates headers, so that a client cannot forge one."""

    def __init__(self, namespace: str, key: bytes, budget: Budget, *, lock: bool = True) -> None:
        self.namespace = namespace
        self.budget = budget
        self.lock_problem = "" if lock else "switched off"
        self._key = key
        self._regions: dict[str, Region] = {}
        self._ids = (f"{time.time_ns() // 1_000_000:x}-{n:x}" for n in itertools.count())

    @property
    def total_nbytes(self) -> int:
        return sum(region.nbytes for region in list(self._regions.values()))

    def create(self, nbytes: int, node: int | None = None) -> tuple[str, bool]:
        """A new segment with room for ``nbytes``, every page reserved; its id, and whether its pages are locked.

        ``node``: the NUMA node that they should be on.

        The caller has checked the budget: this only fails where the kernel itself has no page left.

        Raises:
            BudgetExceeded: no room; nothing was made.
        """
        size = HEADER_BYTES + nbytes
        segment_id = next(self._ids)
        name = f"/awexd-{self.namespace}-{segment_id}"
        fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0).fd
        try:
            os.set_inheritable(fd, False)
            with preferring(node):
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            posix_ipc.unlink_shared_memory(name)
            raise BudgetExceeded(
                f"{size} bytes of shared memory could not be reserved: {os.strerror(error.errno or 0)}; "
                f"{self.budget.explain(self.total_nbytes)}",
                {"needed": size},
            ) from error
        region = self._regions[segment_id] = Region(name, fd, size)
        self._lock(region)
        return segment_id, region.locked

    def descriptor(self, segment_id: str, *, writable: bool) -> int:
        """A new descriptor of that segment for a client; the caller closes it."""
        region = self._regions[segment_id]
        if writable:
            return os.dup(region.fd)
        return os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def seal(self, segment_id: str, header: dict[str, Any]) -> None:
        """Writes the header of a complete segment: from here on a restarted daemon may find it."""
        body = orjson.dumps(header)
        page = _PREFIX.pack(MAGIC, FORMAT, len(body), self._mac(segment_id, body)) + body
        try:
            os.pwrite(self._regions[segment_id].fd, page, 0)
        except OSError as error:  # only where its writer has truncated it
            raise IntegrityError(f"segment {segment_id} was damaged by its writer: {error.strerror}") from error

    def clear(self, segment_id: str) -> None:
        """Marks a segment as holding nothing: a restarted daemon will not take it for a version."""
        with contextlib.suppress(OSError):  # no page: its writer has truncated it, and a hole reads as nothing
            os.pwrite(self._regions[segment_id].fd, bytes(_PREFIX.size), 0)

    def unlink(self, segment_id: str) -> None:
        """Gives the memory back once no client maps it any more."""
        region = self._regions.pop(segment_id)
        if region.mapping:
            _libc.munmap(region.mapping, region.nbytes)
        os.close(region.fd)
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(region.name)

    def close(self) -> None:
        """Lets go of every segment without unlinking it: a later daemon finds the sealed ones."""
        for region in self._regions.values():
            if region.mapping:
                _libc.munmap(region.mapping, region.nbytes)
            os.close(region.fd)
        self._regions.clear()

    def adopt(self) -> list[Found]:
        """Opens the sealed segments of earlier daemons of this namespace; unlinks their other ones."""
        pattern = re.compile(rf"awexd-{re.escape(self.namespace)}-([0-9a-f]+-[0-9a-f]+)")
        found = []
        for entry in sorted(os.listdir(SHM_DIRECTORY)):
            match = pattern.fullmatch(entry)
            if match:
                segment = self._adopt_one(match[1], f"/{entry}")
                found += [segment] if segment else []
        return found

    def _adopt_one(self, segment_id: str, name: str) -> Found | None:
        fd = _open_own(name)
        if fd is None:
            _log.warning("%s%s is not of this daemon's making; left as it is", SHM_DIRECTORY, name)
            return None
        self._regions[segment_id] = region = Region(name, fd, os.fstat(fd).st_size)
        header = self._read_header(segment_id, fd)
        if header is None or header.get("size") != region.nbytes:
            _log.info("segment %s holds no sealed bytes; unlinked", segment_id)
            self.unlink(segment_id)
            return None
        self._lock(region)
        return Found(segment_id, region.nbytes - HEADER_BYTES, header, region.locked)

    def _read_header(self, segment_id: str, fd: int) -> dict[str, Any] | None:
        page = os.pread(fd, HEADER_BYTES, 0)
        if len(page) < HEADER_BYTES:
            return None
        magic, version, length, mac = _PREFIX.unpack_from(page)
        body = page[_PREFIX.size : _PREFIX.size + length]
        if magic != MAGIC or version != FORMAT or not hmac.compare_digest(mac, self._mac(segment_id, body)):
            return None
        header = orjson.loads(body)
        return header if isinstance(header, dict) else None

    def _mac(self, segment_id: str, body: bytes) -> bytes:
        return hashlib.blake2b(segment_id.encode() + b"\n" + body, key=self._key, digest_size=16).digest()

    def _lock(self, region: Region) -> None:
        """Keeps the pages resident, where the memlock limit allows; the first refusal is logged and shown in status."""
        if self.lock_problem:
            return
        address = _libc.mmap(None, region.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, region.fd, 0)
        if address in (None, _MAP_FAILED):
            self._unlocked("mmap")
        elif _libc.mlock(address, region.nbytes):
            self._unlocked("mlock")
            _libc.munmap(address, region.nbytes)
        else:
            region.mapping = address

    def _unlocked(self, call: str) -> None:
        self.lock_problem = f"{call}: {os.strerror(ctypes.get_errno())} (see LimitMEMLOCK= or ulimit -l)"
        _log.warning("segments are not locked in memory: %s", self.lock_problem)


def _open_own(name: str) -> int | None:
    """An object of ours; None for what somebody else has put there under such a name (a pipe, a link, a folder)."""
    try:
        fd = os.open(SHM_DIRECTORY + name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    return None


_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = _libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
