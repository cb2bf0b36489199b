"""Segments that this daemon itself maps, since other nodes fetch from them or they are filled from there."""

from __future__ import annotations

import os
from collections import Counter

from awexd.memory import Memory as Segments
from awexd.service import Service
from awexd.store import Segment
from awexd_transports.base import Memory


class Mapped:
    """One mapping a segment, made when it is first used and closed once it is unlinked and nobody uses it."""

    def __init__(self, service: Service) -> None:
        self._segments: Segments = service.memory
        self._open: dict[str, Memory] = {}
        self._uses: Counter[str] = Counter()
        self._gone: set[str] = set()
        service.unlinked.append(self._unlinked)

    def use(self, segment: Segment) -> Memory:
        """Its data; ``drop`` it once nothing of it is in flight.

        Raises:
            InvalidArgument: its writer has truncated it.
            OSError: the kernel does not map it.
        """
        memory = self._open.get(segment.id)
        if memory is None:
            fd = self._segments.descriptor(segment.id, writable=segment.mirrored)
            try:
                memory = Memory(fd, segment.nbytes, writable=segment.mirrored)
            finally:
                os.close(fd)
            self._open[segment.id] = memory
        self._uses[segment.id] += 1
        return memory

    def drop(self, segment_id: str) -> None:
        self._uses[segment_id] -= 1
        if not self._uses[segment_id]:
            del self._uses[segment_id]
            if segment_id in self._gone:
                self._close(segment_id)

    def close(self) -> None:
        """Nothing is in flight any more."""
        for segment_id in list(self._open):
            self._close(segment_id)

    def _unlinked(self, segment_id: str) -> None:
        if segment_id not in self._open:
            return
        self._gone.add(segment_id)
        if segment_id not in self._uses:
            self._close(segment_id)

    def _close(self, segment_id: str) -> None:
        self._gone.discard(segment_id)
        self._open.pop(segment_id).close()
