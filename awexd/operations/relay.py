"""Descriptors of virtual GPU memory on their way from the process that owns it to one that opens it.

Such a descriptor keeps the memory alive, so that none is kept: a reader's request is passed on to the owner, which
answers descriptor by descriptor; what the reader has not taken a moment later, or when the memory is given up, is
closed.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections import defaultdict

from awexd.protocol import MAX_FDS, close_descriptors
from awexd.service import Call, Reply, Service
from awexd.store import Wait
from awexd_transports.errors import InvalidArgument, ProtocolError

KEPT_SECONDS = 10.0


class Relay:
    """The operations ``segment.chunks`` of readers, ``write.asked`` and ``write.give`` of writers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._wanted: dict[str, set[int]] = defaultdict(set)
        self._asked: dict[str, set[int]] = defaultdict(set)
        self._given: dict[str, dict[int, int]] = defaultdict(dict)
        service.add({"segment.chunks": self._chunks, "write.asked": self._told, "write.give": self._give})
        service.taken_back = self._forget

    def _chunks(self, call: Call) -> Reply | Wait:
        job, _ = self._store.worker_of(call.session)
        segment = self._service.leased(call.session, call.arguments["id"])
        if not segment.borrowed:
            raise InvalidArgument(f"segment {segment.id} is in host memory, which has no chunks")
        first, count = call.arguments["first"], call.arguments["count"]
        numbers = range(first, first + count)
        given = self._given[segment.id]
        missing = set(numbers) - given.keys()
        new = missing - self._asked[segment.id] - self._wanted[segment.id]
        if new:
            self._wanted[segment.id] |= new
            self._store.touched.add(job.name)
        if missing:
            return Wait(job.name, lambda: f"rank {segment.rank} to hand over its GPU memory")
        return Reply({}, [given.pop(number) for number in numbers])

    def _told(self, call: Call) -> Reply | Wait:
        """The next chunks that a reader wants of this rank: a run of numbers."""
        job, writer = self._store.writer_of(call.session)
        segment = job.lent(writer.rank)
        wanted = self._wanted[segment.id] if segment is not None else set()
        if segment is not None:  # it is done with what it was asked for: what has not come is asked for again
            wanted |= self._asked.pop(segment.id, set())
        if segment is None or not wanted:
            return Wait(job.name, lambda: "a reader to ask for this rank's GPU memory")
        first = last = min(wanted)
        while last + 1 in wanted and last + 1 < first + MAX_FDS:
            last += 1
        run = set(range(first, last + 1))
        wanted -= run
        self._asked[segment.id] |= run
        return Reply({"segment": segment.id, "first": first, "count": len(run)})

    def _give(self, call: Call) -> Reply:
        job, writer = self._store.writer_of(call.session)
        segment_id, number = call.arguments["segment"], call.arguments["number"]
        segment = job.segments.get(segment_id)
        if len(call.fds) != 1 or segment is None or segment.session != writer.session:
            raise ProtocolError("one descriptor of a chunk of this session's own memory")
        if number not in self._asked[segment_id]:
            raise ProtocolError(f"chunk {number} of {segment_id} was not asked for")
        self._asked[segment_id].discard(number)
        fd = self._given[segment_id][number] = fcntl.fcntl(call.fds[0], fcntl.F_DUPFD_CLOEXEC, 0)
        self._service.background.later(KEPT_SECONDS, functools.partial(self._drop, segment_id, number, fd))
        self._store.touched.add(job.name)
        return Reply({})

    def _drop(self, segment_id: str, number: int, fd: int) -> None:
        """Closes what was not taken."""
        given = self._given.get(segment_id, {})
        if given.get(number) == fd:
            del given[number]
            os.close(fd)

    def _forget(self, segment_id: str) -> None:
        """Memory that is given up is not kept by what nobody has taken of it."""
        close_descriptors(self._given.pop(segment_id, {}).values())
        for kept in (self._asked, self._wanted):
            kept.pop(segment_id, None)
