"""Manifests that are in use, in memory and on disk. Those that nothing names any more go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from awexd.background import Background
from awexd.journal import Journal
from awexd.manifests import bundle, read_manifest
from awexd.store.model import Job
from awexd_transports.errors import ProtocolError
from awexd_transports.layout import body_digest

UNUSED_BYTES = 8 << 20
"""So much may lie about that nothing names, before it is looked for."""


class Shelf:
    """Bodies by digest; those that ``jobs`` name are in use."""

    def __init__(self, journal: Journal, background: Background, jobs: Mapping[str, Job]) -> None:
        self._journal = journal
        self._background = background
        self._jobs = jobs
        self._bodies: dict[str, bytes] = {}
        self._arriving: Counter[str] = Counter()
        self._disk = asyncio.Lock()

    async def load(self) -> dict[str, bytes]:
        """What an earlier daemon has kept."""
        self._bodies = await asyncio.to_thread(self._journal.load_manifests)
        return self._bodies

    @contextlib.contextmanager
    def arriving(self, digest: str) -> Iterator[None]:
        """Keeps a digest while the request that brings it has not told the store yet."""
        self._arriving[digest] += 1
        try:
            yield
        finally:
            self._arriving[digest] -= 1
            if not self._arriving[digest]:
                del self._arriving[digest]

    async def take(self, fd: int, digest: str) -> None:
        """Reads, checks and keeps a body.

        Raises:
            ProtocolError: not a sealed memfd of those bytes.
        """
        body = await asyncio.to_thread(read_manifest, fd, digest)
        # Goes on if its caller goes away: nothing may be pruned while it writes.
        await asyncio.shield(self._background.task(self._keep(digest, body)))

    async def add(self, digest: str, body: bytes) -> None:
        """Checks and keeps a body that came from another node.

        Raises:
            ProtocolError: its digest is another.
        """
        if await asyncio.to_thread(body_digest, body) != digest:
            raise ProtocolError("a manifest whose digest is another than the one asked for")
        await asyncio.shield(self._background.task(self._keep(digest, body)))

    async def _keep(self, digest: str, body: bytes) -> None:
        async with self._disk:
            await asyncio.to_thread(self._journal.save_manifest, digest, body)
            self._bodies[digest] = body

    def body(self, digest: str) -> bytes | None:
        return self._bodies.get(digest)

    def bundle(self, digests: Iterable[str]) -> tuple[list[list[str | int]], int]:
        """Their bodies in one memfd; see :func:`awexd.manifests.bundle`."""
        return bundle(digests, self._bodies)

    def _used(self) -> set[str]:
        return {digest for job in self._jobs.values() for digest in digests_of(job)}

    @property
    def heavy(self) -> bool:
        """Whether it is time to prune."""
        used = self._used()
        return sum(len(body) for digest, body in self._bodies.items() if digest not in used) > UNUSED_BYTES

    async def prune(self) -> None:
        """Drops what is neither used nor arriving."""
        async with self._disk:
            keep = self._used() | self._arriving.keys()
            self._bodies = {digest: body for digest, body in self._bodies.items() if digest in keep}
            await asyncio.to_thread(self._journal.prune_manifests, keep)


def digests_of(job: Job) -> Iterator[str]:
    """Every manifest that a job's writers, slots, attempts, versions and engines name."""
    for writer in (*job.writers.values(), *(job.pending.writers.values() if job.pending else ())):
        yield from (writer.digest, writer.segment_digest)
    yield from job.joined.ranks.values() if job.joined is not None else ()
    for segment in job.segments.values():
        yield segment.digest
    for attempt in job.attempts.values():
        yield from attempt.digests.values()
    for version in job.versions.values():
        yield from version.digests
    for engine in job.engines.values():
        yield from (worker.digest for worker in engine.workers.values())
        yield from engine.spanning.digests.values() if engine.spanning is not None else ()
