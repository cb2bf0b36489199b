"""Bringing a version here while its ranks still write it, so that it is here soon after it is committed.

Until the MetaServer has committed that very attempt it is in slots that are nobody's to read, and goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from awexd.nodes.landing import Landing
from awexd.nodes.mirroring import Bringing, Means
from awexd.store.elsewhere import Listing, Mirror
from awexd.store.model import Job, VersionKey
from awexd_transports.base import Memory
from awexd_transports.errors import VersionConflict
from awexd_transports.needs import Need
from awexd_transports.ranges import Ranges


def newest_coming(job: Job, mirror: Mirror) -> VersionKey | None:
    """The step that may be fetched while it is written, if it would be brought once it is committed."""
    key = max(mirror.coming, default=None)
    if key is None or key in job.versions or key <= max(mirror.listed, default=(job.epoch, job.high)):
        return None
    if key[0] != job.epoch or key[1] <= job.high or mirror.coming[key].attempt in job.withdrawn:
        return None
    attempt = job.attempts.get(key[1])
    own = attempt.segments.keys() if attempt is not None and attempt.number == mirror.coming[key].attempt else set()
    # What this node's own ranks write is part of it: without it here, the attempt is over.
    return key if job.joined is None or job.writers.keys() <= own else None


class Early(Bringing):
    """What the readers here need of an attempt that may never be committed. ``run`` ends with it."""

    early = True

    def __init__(
        self, means: Means, job: Job, mirror: Mirror, key: VersionKey, listing: Listing, readers: frozenset[str]
    ) -> None:
        super().__init__(means, job, mirror, key, listing, readers)
        attempt = job.attempts.get(key[1])
        own = attempt.segments if attempt is not None and attempt.number == listing.attempt else {}
        self._here = {rank: job.segments[segment_id] for rank, segment_id in own.items()}
        self._committed = False

    @property
    def committed(self) -> bool:
        """That attempt, with those bytes; it stays so where it is listed no more: who is in the middle has a grace."""
        listed = self._mirror.listed.get(self._key)
        self._committed = self._committed or (listed is not None and listed[:2] == self._listed[:2])
        return self._committed

    @property
    def good(self) -> bool:
        job, number = self._job, self._listed.attempt
        if self._store.jobs.get(job.name) is not job or job.mirror is not self._mirror or number in job.withdrawn:
            return False
        here = job.versions.get(self._key)
        if here is not None and not (here.attempt == number and here.partial and not here.leaving):
            return False
        if self.committed:
            return True
        coming, listed = self._mirror.coming.get(self._key), self._mirror.listed.get(self._key)
        if listed is None:
            return coming is not None and coming[:2] == self._listed[:2]
        return listed.attempt == number and not listed.pieces  # of which the MetaServer has yet to be told

    def _check_wanted(self, *, whole: bool = False) -> None:
        if self.committed:
            super()._check_wanted(whole=whole)
        elif not self.good:
            raise VersionConflict(f"{self.doing()}: that attempt is over")

    async def _all(
        self,
        wanted: Mapping[int, Need],
        memories: dict[int, Memory],
        here: Mapping[int, Ranges],
        landing: Landing,
    ) -> None:
        watch = asyncio.ensure_future(self._watch())
        try:
            await super()._all(wanted, memories, here, landing)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        """From its commit on, what is here can be compared."""
        while not self.committed:
            await self._means.service.changes.next(self._job.name)
        if self._arrival is not None:
            self._arrival.committed = True
        if self._fetcher is not None:
            self._fetcher.sealed()

    async def _settled(self) -> None:
        while not self._readable():
            self.phase = "all ranks of it to seal, and its commit"
            await self._means.service.changes.next(self._job.name)
            self._check_wanted()

    def _readable(self) -> bool:
        """Whether it is committed, and what is here of it is known to be."""
        own = self._job.versions.get(self._key)
        mine = own is not None and {segment.id for segment in self._here.values()} == set(own.segments)
        return self.committed and (mine or (own is None and not self._here))
