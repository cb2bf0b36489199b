"""Bringing more of a version of which a part is here: for a reader that came later, into the same slots.

What is here is not written again: whoever reads that goes on.
"""

from __future__ import annotations

from awexd.nodes.landing import Landing
from awexd.nodes.mirroring import Bringing, Means, rows_of
from awexd.store import Version
from awexd.store.elsewhere import Listing, Mirror
from awexd.store.model import Job, Part, VersionKey
from awexd_transports.base import Memory
from awexd_transports.needs import Needs
from awexd_transports.ranges import Ranges


class Extending(Bringing):
    """What the readers here need of a version of which ``part`` is held, beside those that it was brought for."""

    def __init__(
        self,
        means: Means,
        job: Job,
        mirror: Mirror,
        key: VersionKey,
        listing: Listing,
        readers: frozenset[str],
        version: Version,
        part: Part,
    ) -> None:
        super().__init__(means, job, mirror, key, listing, readers | part.covers)
        self._version, self._before = version, part

    @property
    def good(self) -> bool:
        job = self._job
        known = self._store.jobs.get(job.name) is job and job.mirror is self._mirror
        return known and job.versions.get(self._key) is self._version and not self._version.withdrawn

    async def _bring(self, needs: Needs) -> None:
        self._check_wanted(whole=True)
        version, means, after = self._version, self._means, self._before
        self._store.extend(version)
        memories: dict[int, Memory] = {}
        whole: Part | None = after
        try:
            here = await self._known()
            missing = await means.planner.beyond(self._published, needs, here)
            segments = [self._job.segments[segment_id] for segment_id in version.segments]
            for segment in [segment for segment in segments if segment.mirrored]:  # of its own ranks it has all
                memories[segment.rank] = means.mapped.use(segment)
                self._segments[segment.rank] = segment
            tables = self._tables(here) if here is not None else {}
            wanted = {rank: need for rank, need in missing.items() if rank in memories}
            await self._all(wanted, memories, tables, Landing(None, None, means.service.changes))
            self._check_wanted(whole=True)
            self._fetched(f"{version} extended")
            self._wanted += self._before.nbytes
            whole = self._part(needs)
            self._seal(self._segments.values(), len(segments), whole)
            if means.serving is not None:
                rows = [row for rank, need in needs.ranks.items() for row in rows_of(rank, need)]
                own = {one.rank: Ranges([(0, one.nbytes)]) for one in segments if not one.mirrored}
                means.serving.extend(self._job, version, self._ranges(needs) | own, rows)
        finally:
            for rank in memories:
                means.mapped.drop(self._segments[rank].id)
            self._store.extended(self._job, version, whole)
            means.service.settle()

    async def _known(self) -> Needs | None:
        """What is here; None: a daemon before this one has brought it, for readers that are gone."""
        planner, covers = self._means.planner, self._before.covers
        here = planner.by_digest(self._before.digest)
        if here is None and planner.known(covers) == covers:
            here = await planner.needs(self._published, covers)
        return here if here is not None and here.digest == self._before.digest else None

    def _tables(self, needs: Needs) -> dict[int, Ranges]:
        """The tables of checksums that came with these."""
        known = ((rank, self._means.known[self._listed.pieces[rank][0]].cells) for rank in needs.ranks)
        return {rank: Ranges([cells.table]) for rank, cells in known if cells is not None}

    def _ranges(self, needs: Needs) -> dict[int, Ranges]:
        tables = self._tables(needs)
        return {rank: Ranges([*need.ranges, *tables.get(rank, Ranges())]) for rank, need in needs.ranks.items()}
