"""This process's mappings of segments: made once a segment, kept from version to version, given back when told."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from awexd.protocol import MAX_FDS
from awexd_transports.errors import IntegrityError

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Linux 5.14; Python has no names for them."""

OpenSegments = Callable[[Sequence[str]], list[int]]


class Mapping:
    """One mapped segment. Owns the mapping; ``close`` ends it, and every address in it."""

    __slots__ = ("_bytes", "_map", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        if os.fstat(fd).st_size != nbytes:
            raise IntegrityError(f"a segment of {os.fstat(fd).st_size} bytes where {nbytes} were promised")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=access)
        self._map.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # an older kernel: pages are faulted in by the first copy instead
            self._map.madvise(_MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
        # An array of the map pins it: closing the map under a tensor or view raises instead of crashing later.
        self._bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self._bytes.ctypes.data
        self.nbytes = nbytes

    def read(self, at: int, nbytes: int) -> memoryview:
        """Bytes of the segment, as they lie there."""
        return memoryview(self._map)[at : at + nbytes]

    def write(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def close(self) -> None:
        self._bytes = None
        self._map.close()


class Mappings:
    """Mappings by segment id. Thread-safe. ``open_segments`` asks the daemon for descriptors."""

    def __init__(self, *, writable: bool) -> None:
        self._writable = writable
        self._maps: dict[str, Mapping] = {}
        self._lock = threading.Lock()

    def get(self, wanted: Sequence[tuple[str, int]], open_segments: OpenSegments) -> list[Mapping]:
        """The mappings of these segments, given as (id, bytes); those that are not mapped yet are now."""
        with self._lock:
            new = [(segment_id, nbytes) for segment_id, nbytes in wanted if segment_id not in self._maps]
            for start in range(0, len(new), MAX_FDS):
                batch = new[start : start + MAX_FDS]
                fds = open_segments([segment_id for segment_id, _ in batch])
                try:
                    for (segment_id, nbytes), fd in zip(batch, fds, strict=True):
                        self._maps[segment_id] = Mapping(fd, nbytes, writable=self._writable)
                finally:
                    for fd in fds:
                        os.close(fd)
            return [self._maps[segment_id] for segment_id, _ in wanted]

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
