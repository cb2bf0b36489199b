"""This process's mappings of segments: made once a segment, kept from version to version, given back when told."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar, cast

import numpy as np

from awexd.protocol import MAX_FDS
from awexd_transports.cuda.lent import Opened
from awexd_transports.cuda.pinning import register, unregister
from awexd_transports.errors import IntegrityError
from awexd_transports.layout import Manifest
from awexd_transports.segment import MAGIC, checksums_at, piece_at
from awexd_transports.threads import default_threads, spread
from awexd_transports.view import View

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Linux 5.14; Python has no names for them."""
_POPULATE_THREADS = 4
_POPULATE_BYTES = 32 << 20
"""Bytes that one call faults in; the kernel takes a lock of the whole address space for each."""

OpenSegments = Callable[[Sequence[str]], list[int]]


class Mapping:
    """One mapped segment. Owns the mapping; ``close`` ends it, and every address in it."""

    __slots__ = ("_bytes", "_map", "_pinned", "_writable", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        if os.fstat(fd).st_size != nbytes:
            raise IntegrityError(f"a segment of {os.fstat(fd).st_size} bytes where {nbytes} were promised")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        self._map.madvise(mmap.MADV_DONTFORK)
        # An array of the map pins it: closing the map under a tensor or view raises instead of crashing later.
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self._bytes.ctypes.data
        self.nbytes = nbytes
        self._writable = writable
        self._pinned: bool | None = None
        _populate(self.address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)

    def piece(self, manifest: Manifest, number: int) -> View:
        """Where that piece of the segment's manifest lies."""
        entry = manifest.pieces[number]
        return View.packed(self.address + piece_at(manifest, number), entry.box.shape, entry.tensor.dtype, self)

    def table(self, manifest: Manifest) -> int:
        """The address of the table of checksums."""
        return self.address + checksums_at(manifest)

    def read(self, at: int, nbytes: int) -> memoryview:
        """Bytes of the segment, as they lie there."""
        return memoryview(self._map)[at : at + nbytes]

    def write(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    @property
    def sealed(self) -> bool:
        """Its header still says that these are a version's bytes."""
        return self._map[: len(MAGIC)] == MAGIC

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def pin(self) -> None:
        """Registers the memory with CUDA, so that devices copy from and to it themselves; tried once.

        Where it is refused, copies are staged by the driver, which is slower.
        """
        if self._pinned is None:
            self._pinned = register(self.address, self.nbytes, read_only=not self._writable)

    def close(self) -> None:
        if self._pinned:
            unregister(self.address, self.nbytes)
        self._bytes = None
        self._map.close()


def _populate(address: int, nbytes: int, advice: int) -> None:
    """Faults the pages in, on a few threads; each call leaves the GIL alone, as ``mmap.madvise`` does not.

    Best effort: on an older kernel, or where memory is short, the first copy faults them in instead (or fails).
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    starts = range(0, nbytes, _POPULATE_BYTES)
    threads = min(default_threads(), _POPULATE_THREADS)
    spread(starts, lambda at: madvise(address + at, min(_POPULATE_BYTES, nbytes - at), advice), threads)


Segment = Mapping | Opened
"""What a version's bytes are read from: mapped host memory, or GPU memory that is lent."""
S = TypeVar("S", Mapping, Opened)


class Mappings:
    """Mappings by segment id. Thread-safe. ``open_segments`` asks the daemon for descriptors."""

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._maps: dict[str, Segment] = {}
        self._lock = threading.Lock()

    def get(self, wanted: Sequence[tuple[str, int]], open_segments: OpenSegments) -> list[Mapping]:
        """The mappings of these segments, given as (id, bytes); those that are not mapped yet are now."""
        return self._get(wanted, open_segments, lambda at, fd: Mapping(fd, wanted[at][1], writable=self._writable))

    def open(
        self,
        wanted: Sequence[tuple[str, int]],
        manifests: Sequence[Manifest],
        open_segments: OpenSegments,
        fetch: Callable[[str, int, int], list[int]],
        device: int | None,
    ) -> list[Opened]:
        """The same of segments that are borrowed: the memory that their descriptions name, opened.

        ``fetch``: asks for a segment's chunks, from that number on so many. ``device``: see ``Opened``.
        """

        def make(at: int, fd: int) -> Opened:
            return Opened(fd, wanted[at][1], manifests[at], partial(fetch, wanted[at][0]), device=device)

        return self._get(wanted, open_segments, make)

    def _get(
        self, wanted: Sequence[tuple[str, int]], open_segments: OpenSegments, make: Callable[[int, int], S]
    ) -> list[S]:
        with self._lock:
            new = [at for at, (segment_id, _) in enumerate(wanted) if segment_id not in self._maps]
            for start in range(0, len(new), MAX_FDS):
                batch = new[start : start + MAX_FDS]
                fds = open_segments([wanted[at][0] for at in batch])
                try:
                    for at, fd in zip(batch, fds, strict=True):
                        self._maps[wanted[at][0]] = make(at, fd)
                finally:
                    for fd in fds:
                        os.close(fd)
            return [cast("S", self._maps[segment_id]) for segment_id, _ in wanted]

    def known(self, segment_id: str) -> Mapping | None:
        """The mapping of that segment of host memory, if there is one."""
        with self._lock:
            found = self._maps.get(segment_id)
        return found if isinstance(found, Mapping) else None

    def discard(self, ids: Iterable[str]) -> None:
        """Unmaps those of these segments that are mapped. Whoever holds views into them must have let go."""
        with self._lock:
            for segment_id in ids:
                if segment_id in self._maps:
                    self._maps.pop(segment_id).close()

    def close(self) -> None:
        with self._lock:
            for mapping in self._maps.values():
                mapping.close()
            self._maps.clear()
