"""Jobs whose writers are on another node: what is known of them, and slots that the daemon fills from there.

Readers find a mirrored version as they find any other. A listed one that is not here yet is waited for by its step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from awexd.store.elsewhere import Listing, Mirror
from awexd.store.joining import Joining
from awexd.store.lending import Lending
from awexd.store.model import (
    Job,
    Part,
    Segment,
    SegmentState,
    Version,
    VersionKey,
    Wait,
    Worker,
    set_digest_of,
)
from awexd_transports.errors import VersionConflict, VersionUnavailable

NOTHING: VersionKey = (0, -1)
"""Older than any version."""


def newest_listed(job: Job) -> VersionKey:
    """The newest version that is committed elsewhere; ``NOTHING`` where there is none."""
    return max(job.mirror.listed, default=NOTHING) if job.mirror is not None else NOTHING


def check_failed(job: Job) -> None:
    """Raises why the newest version could not be brought here."""
    if job.mirror is not None and (error := job.mirror.failed.get(newest_listed(job))) is not None:
        raise error


def brought(job: Job, step: int) -> Wait | None:
    """A wait for that step of the current epoch, if it is committed elsewhere; it is brought here for that.

    Raises:
        AwexdError: that has failed.
    """
    mirror, key = job.mirror, (job.epoch, step)
    if mirror is not None and not mirror.informed:
        return Wait(job.name, lambda: f"word of step {step}: {mirror.doing()}")
    here = job.versions.get(key)
    partial = here is not None and here.partial and not here.leaving
    listed = mirror is not None and key in mirror.listed and mirror.listed[key].attempt not in job.withdrawn
    if mirror is None or not (partial or listed):
        return None
    if key in mirror.failed:
        raise mirror.failed[key]
    if step not in mirror.asked:
        mirror.asked[step] = None
        mirror.ask()
    return Wait(job.name, lambda: f"step {step} of epoch {job.epoch} to be brought here: {mirror.doing()}")


def rest(job: Job, worker: Worker, version: Version) -> Wait:
    """A wait for what that worker reads of a version of which only a part is here; it is brought here for that.

    Raises:
        AwexdError: that has failed.
        VersionUnavailable: no other node has that version any more.
    """
    mirror, key = job.mirror, version.key
    who = f"rank {worker.rank} of engine {worker.engine}"
    if mirror is not None and key in mirror.failed:
        raise mirror.failed[key]
    if mirror is None or (mirror.informed and key not in mirror.listed):
        raise VersionUnavailable(
            f"{job.name}: of {version} this node has only what other workers read, without what {who} does, and it is "
            f"listed nowhere else any more; {job.describe_held()}"
        )
    if key not in mirror.lacking:
        mirror.lacking[key] = None
        mirror.ask()
    return Wait(job.name, lambda: f"what {who} reads of {version} to be brought here too: {mirror.doing()}")


class Mirroring(Lending, Joining):
    """The operations on mirrored jobs, and on versions that other nodes fetch from here."""

    def follow(self, job: Job) -> Mirror:
        """The job is decided elsewhere from now on."""
        if job.mirror is None:
            job.mirror, job.alone = Mirror(), False
            self.touched.add(job.name)
        return job.mirror

    def rest(self, job: Job) -> None:
        """Nobody here reads it any more: what it holds stays, slots for more go."""
        for segment in list(job.segments.values()):
            if segment.mirrored and segment.state is SegmentState.FREE:
                self._unlink(job, segment)
        if job.mirror is not None:
            job.mirror.listed, job.mirror.asked, job.mirror.failed, job.mirror.lacking = {}, {}, {}, {}
            if not job.epoch:
                job.mirror = None

    def mirror(
        self,
        job: Job,
        *,
        epoch: int,
        world_size: int,
        keep: int,
        high: int,
        nodes: Iterable[str],
        listed: Mapping[VersionKey, Listing],
        local: str | None = None,
    ) -> bool:
        """What is so elsewhere; True if that is a new epoch here. Waiters look again if anything has changed."""
        mirror = self.follow(job)
        before = job.epoch, job.world_size, job.keep, job.high, mirror.nodes, mirror.listed, mirror.informed
        mirror.informed = True
        opened = epoch > job.epoch
        if opened:
            job.epoch, job.high, job.choice, job.returned = epoch, -1, None, None
            mirror.asked.clear()
        if epoch == job.epoch and epoch:
            job.world_size, job.keep, job.high = world_size, keep, max(job.high, high)
        mirror.nodes, mirror.local, mirror.listed = tuple(sorted(nodes)), local, dict(listed)
        mirror.asked = {step: None for step in mirror.asked if self._may_come(job, step)}
        mirror.lacking = {key: None for key in mirror.lacking if key in job.versions and key in mirror.listed}
        if before != (job.epoch, job.world_size, job.keep, job.high, mirror.nodes, mirror.listed, True):
            self._settle(job)
        return opened

    def withdraw_attempts(self, job: Job, attempts: Collection[int]) -> list[Version]:
        """The versions of these attempts were taken back elsewhere: they are good for nobody."""
        gone = [version for version in job.kept() if version.attempt in attempts and not version.borrowed]
        for version in gone:
            version.withdrawn = True
        if gone:
            self._withdrawn(job)
        return gone

    def mirror_slot(self, job: Job, rank: int, nbytes: int) -> Segment | Wait | None:
        """A slot to fill; None where one is to be made. It is the caller's until ``give_back`` or a commit."""
        alike = []
        for segment in [one for one in job.slots(rank) if one.mirrored]:
            if segment.state is SegmentState.FREE and (segment.nbytes != nbytes or segment.unsafe):
                self._unlink(job, segment)
            elif segment.nbytes == nbytes:
                alike.append(segment)
        for segment in alike:
            if segment.state is SegmentState.FREE:
                segment.state = SegmentState.WRITING
                return segment
        # Beyond those, only what somebody may still look at after its version has gone: like a writer, it waits.
        if len(alike) > max(job.keep, 1):
            return Wait(job.name, lambda: _who_holds(job, rank))
        return None

    def give_back(self, job: Job, segments: Iterable[Segment]) -> None:
        """Nothing is written into these slots any more; they hold no version."""
        for segment in segments:
            if job.segments.get(segment.id) is segment and segment.state is SegmentState.WRITING:
                segment.state = SegmentState.FREE
                self.to_clear.append(segment)
        self._settle(job)

    def commit_mirrored(
        self, job: Job, key: VersionKey, attempt: int, segments: list[Segment], part: Part | None = None
    ) -> Version:
        """Every byte of that version is here, or of that part of it: ``segments`` in order of their ranks."""
        for segment in segments:
            segment.state = SegmentState.HELD
        partial = job.versions.get(key)
        if partial is not None:
            self.complete(job, partial, segments)
            partial.part = part
            if job.mirror is not None:
                job.mirror.asked.pop(key[1], None)
            self._settle(job)
            return partial
        digests = tuple(segment.digest for segment in segments)
        version = job.versions[key] = Version(
            key=key,
            attempt=attempt,
            segments=tuple(segment.id for segment in segments),
            digests=digests,
            set_digest=set_digest_of(digests),
            nbytes=sum(segment.nbytes for segment in segments),
            high=job.high,
            part=part,
        )
        job.endings.commit(attempt, key)
        if key[0] == job.epoch:
            job.high = max(job.high, key[1])
            if job.mirror is not None:
                job.mirror.asked.pop(key[1], None)
        self._settle(job)
        return version

    def extend(self, version: Version) -> None:
        """More of it is brought into its own slots, until ``extended``."""
        version.extending = True

    def extended(self, job: Job, version: Version, part: Part | None) -> None:
        """That is what is here of it now: what was, if no more came."""
        version.extending, version.part = False, part
        if job.mirror is not None:
            job.mirror.lacking.pop(version.key, None)
        if self.jobs.get(job.name) is job:
            self._settle(job)

    def serve(self, version: Version) -> None:
        """Other nodes may fetch it from now on: its memory stays as it is until ``serve_no_more``."""
        version.served = True

    def serve_no_more(self, job: Job, version: Version) -> None:
        version.served = False
        if self.jobs.get(job.name) is job:
            self._settle(job)

    # internals

    def _check_here(self, job: Job) -> None:
        """
        Raises:
            VersionConflict: its writers are all on another node.
        """
        if job.mirror is not None and job.mirror.local in job.mirror.nodes:
            raise VersionConflict(
                f"{job.name}: its trainer is on node {job.mirror.local}, with all its ranks; it moves to other nodes "
                "once they have ended there"
            )

    def _take_over(self, job: Job) -> None:
        """Its writers are on this node from now on."""
        if job.mirror is not None:
            job.mirror = None
            for segment in job.segments.values():
                segment.mirrored = False

    @staticmethod
    def _may_come(job: Job, step: int) -> bool:
        key = job.epoch, step
        return job.mirror is not None and key in job.mirror.listed and job.held_of(*key) is None


def _who_holds(job: Job, rank: int) -> str:
    held = ", ".join(str(version) for version in job.versions.values() if version.leases or version.served)
    return f"a free slot for rank {rank} (all {job.keep + 1} in use); held: {held or 'by versions that are replaced'}"
