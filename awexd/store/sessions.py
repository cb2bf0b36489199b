"""Connections of clients: what each has mapped, and what ends with it."""

from __future__ import annotations

from collections.abc import Iterable

from awexd.store import parking, reading, registering
from awexd.store.ledger import Ledger, Session
from awexd.store.model import Job, Segment, SegmentState, Wait
from awexd.store.phases import CHANGED
from awexd_transports.errors import VersionConflict


class Sessions(Ledger):
    """The beginning and end of sessions on the ledger."""

    def open_session(self, session: Session) -> None:
        self.sessions[session.id] = session

    def end_session(self, session_id: str, *, unmapped: bool, why: str, now: float) -> None:
        """Ends a session, releasing all it has. ``unmapped``: it said goodbye, or its process has exited."""
        session = self.sessions.pop(session_id)
        if self.phases.end_session(session_id):
            self.touched.add(CHANGED)
        jobs = self._jobs_of(session)
        if session.writer:
            job, writer = self.jobs[session.writer[0]], session.writer[1]
            registering.leave(job, writer, f"{why} (rank {writer.rank}, process {session.pid})")
            lent = job.lent(writer.rank)
            if lent is not None and lent.session == session.id:
                self._reclaim(job, writer.rank, f"{why} (rank {writer.rank}, process {session.pid})")
            for segment in job.slots(writer.rank):
                if segment.state is SegmentState.FREE and job.writers.get(writer.rank) is None:
                    self._unlink(job, segment)
        if session.worker:
            job, worker = self.jobs[session.worker[0]], session.worker[1]
            engine = job.engines.get(worker.engine)
            if engine is not None:
                self._end_leases(reading.leave(engine, worker))
                if not engine.workers:
                    del job.engines[engine.name]
        self._end_leases(set(session.leases))
        for job in self.jobs.values():
            for driven in job.engines.values():
                driven.awaiting.pop(session_id, None)
            for segment in job.segments.values():
                if session_id in segment.users:
                    segment.users.discard(session_id)
                    segment.unsafe = segment.unsafe or not (unmapped or segment.borrowed)
            self._closed(job, session_id, list(job.closing))
        parking.end_session(self, session)
        for job in jobs:
            self._settle(job)
            if not self._sessions_of(job):
                job.idle_since = now
                self._forget_unused(job)

    def closed(self, session: Session, ids: Iterable[str]) -> None:
        """The session has unmapped these segments."""
        for segment_id in ids:
            session.to_drop.discard(segment_id)
            for job in self.jobs.values():
                if segment_id in job.segments:
                    job.segments[segment_id].users.discard(session.id)
                self._closed(job, session.id, [segment_id])

    def _closed(self, job: Job, session_id: str, ids: Iterable[str]) -> None:
        """Of borrowed segments that are given up: one reader fewer has them mapped."""
        for segment in [job.closing[segment_id] for segment_id in ids if segment_id in job.closing]:
            segment.users.discard(session_id)
            if not segment.users:
                del job.closing[segment.id]
            self.touched.add(job.name)

    def opened(self, session: Session, segment: Segment) -> None:
        """The session was given a descriptor of that segment."""
        segment.users.add(session.id)

    def leaving(self, job: Job, rank: int, engine: str | None = None) -> Wait | None:
        """Whether the holder of that writer's (or worker's) place is just leaving it."""
        known = job.engines.get(engine) if engine is not None else None
        pending = job.pending.writers.get(rank) if job.pending else None
        holders = [known.workers.get(rank)] if known else [] if engine is not None else [job.writers.get(rank), pending]
        for holder in holders:
            session = self.sessions.get(holder.session) if holder else None
            if session is not None and session.ending:
                return _end_of(session, job, rank)
        return None

    def _forget_unused(self, job: Job) -> None:
        """Forgets a job that nothing has come of: no epoch, no grant, nobody in it."""
        something = job.epoch or job.uids or job.gids or job.engines or job.pending or job.parcels
        if not something and self.jobs.get(job.name) is job:
            del self.jobs[job.name]

    def _check_role(
        self, session: Session, job: Job, writer_rank: int | None = None, worker: tuple[str, int] | None = None
    ) -> None:
        if session.writer and (session.writer[0], session.writer[1].rank) != (job.name, writer_rank):
            raise VersionConflict(f"this session writes {session.writer[0]} as rank {session.writer[1].rank} already")
        if session.worker:
            name, known = session.worker
            if (name, known.engine, known.rank) != (job.name, *(worker or ("", -1))):
                raise VersionConflict(f"this session reads {name} as rank {known.rank} of {known.engine} already")


def _end_of(session: Session, job: Job, rank: int) -> Wait:
    return Wait(job.name, lambda: f"the session of process {session.pid} that was rank {rank} to end")
