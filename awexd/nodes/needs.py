"""What a node's engines read of a job's versions: planned in a thread, once for each set of writers and of readers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from awexd.peers.threads import in_thread
from awexd.shelf import Shelf
from awexd.store.model import Job
from awexd_transports import needs
from awexd_transports.errors import ProtocolError
from awexd_transports.layout import Manifest
from awexd_transports.needs import Need, Needs

STAYS_SECONDS = 10.0
"""A worker that has gone still counts for so long: it may only be restarting."""
SETTLE_SECONDS = 0.2
"""After a worker has come, for the others of its engine, so that what they read is brought at once."""
REMEMBERED = 16
EVERYTHING = Manifest.of(()).digest
"""What readers register that look at versions as they are held: they may read all."""


class Published(NamedTuple):
    """What a version's segments are: their manifests' digests in rank order, and which ranks stored checksums."""

    digests: tuple[str, ...]
    summed: frozenset[int]


class Readers:
    """The manifests that a job's workers on this node have registered."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self._present: set[str] = set()
        self._seen: dict[str, float] = {}
        self._grown = 0.0

    def look(self) -> frozenset[str]:
        """Those that count now. To be called whenever the job has changed."""
        now = self._clock()
        present = {worker.digest for engine in self._job.engines.values() for worker in engine.workers.values()}
        if present - self._seen.keys():
            self._grown = now
        self._seen.update(dict.fromkeys(present | self._present, now))
        self._present = present
        if present:
            self._seen = {digest: at for digest, at in self._seen.items() if now - at <= STAYS_SECONDS}
        return frozenset(self._seen)

    def settles(self) -> float:
        """Seconds for which more of an engine are waited for."""
        missing = any(engine.workers and engine.absent for engine in self._job.engines.values())
        return max(0.0, self._grown + SETTLE_SECONDS - self._clock()) if missing else 0.0


class Planner:
    """Remembers what it has planned."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._known: OrderedDict[tuple[Published, frozenset[str]], Needs] = OrderedDict()

    def known(self, readers: Collection[str]) -> frozenset[str]:
        """Of these manifests those that are still here."""
        return frozenset(digest for digest in readers if self._shelf.body(digest) is not None)

    async def needs(self, of: Published, readers: frozenset[str]) -> Needs:
        """What of these segments is read.

        Args:
            readers: manifests that are ``known``.

        Raises:
            ProtocolError: one of the segments' manifests is not here.
        """
        if EVERYTHING in readers:
            readers = frozenset([EVERYTHING])
        key = of, readers
        if key not in self._known:
            self._known[key] = await in_thread(_needs, self._bodies(of), self._bodies(key[1]), of.summed)
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[key]

    async def beyond(self, of: Published, more: Needs, here: Needs | None) -> Mapping[int, Need]:
        """What ``more`` has of these segments that is not ``here``."""
        return await in_thread(_beyond, self._bodies(of), more, here or Needs({}, ""), of.summed)

    def by_digest(self, digest: str) -> Needs | None:
        """What was planned, if it is still known."""
        return next((found for found in self._known.values() if found.digest == digest), None)

    def _bodies(self, digests: Published | Collection[str]) -> list[tuple[str, bytes]]:
        found = []
        for digest in digests.digests if isinstance(digests, Published) else sorted(digests):
            body = self._shelf.body(digest)
            if body is None:
                raise ProtocolError(f"manifest {digest[:12]} is not here any more")
            found.append((digest, body))
        return found


def _decoded(bodies: Sequence[tuple[str, bytes]]) -> list[Manifest]:
    known = {digest: Manifest.decode(body, digest) for digest, body in dict(bodies).items()}
    return [known[digest] for digest, _ in bodies]


def _needs(sources: Sequence[tuple[str, bytes]], readers: Sequence[tuple[str, bytes]], summed: frozenset[int]) -> Needs:
    segments, found = _decoded(sources), _decoded(readers)
    return needs.whole(segments) if EVERYTHING in dict(readers) else needs.needs(segments, found, summed)


def _beyond(
    sources: Sequence[tuple[str, bytes]], more: Needs, here: Needs, summed: frozenset[int]
) -> Mapping[int, Need]:
    return needs.beyond(_decoded(sources), more, here, summed)
