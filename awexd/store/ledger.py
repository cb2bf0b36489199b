"""What the store knows, and what follows from a change of it: retirement, freed slots, ended leases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from awexd.store.borrowing import lose
from awexd.store.exchanging import review
from awexd.store.model import Job, Lease, Segment, SegmentState, Version, Worker, Writer
from awexd.store.phases import Phases
from awexd.store.slots import abort
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import digest_of


@dataclass(slots=True)
class Session:
    """One client's connection: what it registered, and what it was told to unmap.

    ``node``, ``host``: of a client on another node: that, and where it can be reached. ``parks``: jobs that it has
    parked memory for. ``ending``: the connection is gone; whether its process is too is being found out.
    """

    id: str
    pid: int
    uid: int
    node: str = ""
    host: str = ""
    writer: tuple[str, Writer] | None = None
    worker: tuple[str, Worker] | None = None
    parks: set[str] = field(default_factory=set)
    ending: bool = False
    leases: set[str] = field(default_factory=set)
    to_drop: set[str] = field(default_factory=set)


class Ledger:
    """Jobs, sessions and leases. ``first_attempt``: a number that no earlier daemon has used, nor any above it.

    What is to be done outside stands in ``to_unlink``, ``to_clear`` (segments whose header must no longer name a
    version) and ``touched`` (jobs whose waiters must look again).
    """

    def __init__(self, first_attempt: int = 1) -> None:
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[str, Session] = {}
        self.leases: dict[str, Lease] = {}
        self.phases = Phases()
        self.to_unlink: list[Segment] = []
        self.to_clear: list[Segment] = []
        self.touched: set[str] = set()
        self._expiry: float | None = None
        self._next_attempt = first_attempt
        self._ids = itertools.count(1)

    def writer_of(self, session: Session) -> tuple[Job, Writer]:
        if session.writer is None:
            raise InvalidArgument("this session has no registered writer (not registered, or its job was closed)")
        return self.jobs[session.writer[0]], session.writer[1]

    def worker_of(self, session: Session) -> tuple[Job, Worker]:
        if session.worker is None:
            raise InvalidArgument("this session has no registered reader (not registered, or its job was closed)")
        return self.jobs[session.worker[0]], session.worker[1]

    def current_set(self, job: Job) -> list[str] | None:
        """Digests of the segment manifests that the next version will follow, if every rank has reserved."""
        writers = [job.writers[rank] for rank in sorted(job.writers)]
        if not writers or len(writers) != job.world_size or any(not w.segment_digest for w in writers):
            return None
        return [w.segment_digest for w in writers]

    def find_set(self, job: Job, set_digest: str | None) -> list[str] | None:
        """The manifests of that set; None: of the next version, or else of the newest."""
        current = self.current_set(job)
        candidates = [current] if current else []
        whole = [version for _, version in sorted(job.versions.items(), reverse=True) if not version.partial]
        candidates += [list(version.digests) for version in whole]
        for digests in candidates:
            if set_digest is None or digest_of(digests) == set_digest:
                return digests
        return None

    def _lease(self, job: Job, version: Version, session: str, expires: float, stage: bool = False) -> Lease:
        lease = Lease(f"l{next(self._ids)}", job.name, version.key, session, expires, stage)
        self.leases[lease.id] = lease
        version.leases.add(lease.id)
        self._expiry = expires if self._expiry is None else min(self._expiry, expires)
        return lease

    def _withdrawn(self, job: Job) -> None:
        """Rounds fixed to a withdrawn version hold it no longer; updates under way keep its memory, not its name."""
        gone = (version.attempt for version in job.versions.values() if version.withdrawn)
        job.withdrawn.extend(attempt for attempt in gone if attempt not in job.withdrawn)
        for lease in list(self.leases.values()):
            if lease.job == job.name and not lease.session and job.versions[lease.key].withdrawn:
                self._end_leases([lease.id])
        self._settle(job)

    def _dirty(self, job: Job, worker: Worker) -> None:
        worker.state, worker.version = "dirty", None
        self.touched.add(job.name)

    def _end_leases(self, ids: Iterable[str]) -> None:
        ended = [lease for lease_id in ids if (lease := self.leases.pop(lease_id, None)) is not None]
        for lease in ended:
            job = self.jobs[lease.job]
            if lease.key in job.versions:
                job.versions[lease.key].leases.discard(lease.id)
            if lease.session in self.sessions:
                self.sessions[lease.session].leases.discard(lease.id)
        for name in {lease.job for lease in ended}:
            self._settle(self.jobs[name])

    def _settle(self, job: Job) -> None:
        """Retires versions beyond ``keep`` and frees what no lease holds."""
        self.touched.add(job.name)
        if len(job.versions) > max(job.keep, 1):
            for version in [version for version in job.kept() if not version.borrowed][max(job.keep, 1) :]:
                version.retired = not self._agreed_on(job, version)
        for version in [v for v in job.versions.values() if v.leaving and not _in_use(job, v)]:
            del job.versions[version.key]
            for segment_id in version.segments:
                if segment_id in job.segments:  # a borrowed one may have been taken back
                    self._free(job, job.segments[segment_id])
        free = [segment for segment in job.segments.values() if segment.state is SegmentState.FREE]
        for segment in free:
            self._free(job, segment)
        self._trim(job)
        review(job, self.sessions.keys(), self.leases)

    def _agreed_on(self, job: Job, version: Version) -> bool:
        """An engine on several nodes is to get it: some of them may still fetch it from here."""
        if any(self.leases[lease].spans for lease in version.leases):
            return True
        known = [engine.spanning for engine in job.engines.values() if engine.spanning is not None]
        rounds = [agreed for one in known for agreed in one.rounds.values() if agreed.key == version.key]
        return any(not (agreed.settled and agreed.holds) for agreed in rounds)

    def _trim(self, job: Job) -> None:
        """A lowered ``keep`` needs fewer slots."""
        for segment in [one for one in job.segments.values() if one.state is SegmentState.FREE and not one.borrowed]:
            writer = job.writers.get(segment.rank)
            if writer is not None and writer.nbytes == segment.nbytes:
                alike = [s for s in job.slots(segment.rank) if s.nbytes == segment.nbytes]
                if len(alike) > job.keep + 1:
                    self._unlink(job, segment)

    def _free(self, job: Job, segment: Segment) -> None:
        if segment.borrowed:  # its writer's, until that takes it back
            segment.state = SegmentState.FREE
            return
        if segment.state is SegmentState.HELD:
            self.to_clear.append(segment)
        segment.state, segment.digest, segment.checksums = SegmentState.FREE, "", False
        writer = job.writers.get(segment.rank)
        if writer is None:
            useless = job.mirror is None or not segment.mirrored
        else:
            useless = writer.reserved != "" and writer.nbytes != segment.nbytes
        if segment.unsafe or useless or segment.rank >= job.world_size:
            self._unlink(job, segment)

    def _unlink(self, job: Job, segment: Segment) -> None:
        del job.segments[segment.id]
        segment.state = SegmentState.FREE
        for session_id in segment.users:
            if session_id in self.sessions:
                self.sessions[session_id].to_drop.add(segment.id)
        self.to_unlink.append(segment)
        if segment.borrowed and segment.users:
            job.closing[segment.id] = segment
        self.touched.add(job.name)

    def _reclaim(self, job: Job, rank: int, why: str) -> None:
        """Takes a rank's own memory back: versions that borrow it are withdrawn, and readers told to close it."""
        segment = job.lent(rank)
        if segment is None:
            return
        for step, attempt in list(job.attempts.items()):
            if segment.id in attempt.segments.values():
                abort(job, step, why)
        gone = [version for version in job.versions.values() if segment.id in version.segments]
        for version in gone:
            lose(job, version, why)
            version.withdrawn = True
        self._unlink(job, segment)
        self._withdrawn(job)

    def _jobs_of(self, session: Session) -> list[Job]:
        names = {role[0] for role in (session.writer, session.worker) if role} | session.parks
        return [self.jobs[name] for name in names if name in self.jobs]

    def _sessions_of(self, job: Job) -> bool:
        return any(job in self._jobs_of(session) for session in self.sessions.values())


def _in_use(job: Job, version: Version) -> bool:
    return bool(version.leases) or version.served or version.extending or version.key in job.pins
