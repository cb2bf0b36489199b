"""Every job of a node, and the sessions and leases across them.

Methods are synchronous and do no I/O. What is to be done outside stands in :attr:`Store.to_unlink`,
:attr:`Store.to_clear` (segments whose header must no longer name a version) and :attr:`Store.touched` (jobs whose
waiters must look again); the daemon drains them after each call. A method that cannot succeed yet returns
:class:`Wait`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from awexd.store import joining, parking, reading, registering, slots, writing
from awexd.store.arriving import Arriving
from awexd.store.grouping import Grouping
from awexd.store.ledger import Session
from awexd.store.mirroring import Mirroring
from awexd.store.model import (
    Attempt,
    Job,
    Lease,
    Segment,
    SegmentState,
    Version,
    VersionKey,
    Wait,
    Worker,
    Writer,
    describe_ranks,
)
from awexd.store.slots import Shortfall
from awexd.store.spanning import Spanned
from awexd.store.writing import Begun
from awexd_transports.errors import AwexdError, EpochChanged, VersionUnavailable

B = TypeVar("B")


class Resolved(NamedTuple):
    """A version leased to a worker."""

    version: Version
    lease: Lease


class Store(Grouping, Mirroring, Spanned, Arriving):
    """The operations of writers, workers and commands on the ledger."""

    def end_session(self, session_id: str, *, unmapped: bool, why: str, now: float) -> None:
        self.leave_arrivals(session_id)
        super().end_session(session_id, unmapped=unmapped, why=why, now=now)

    # writing

    def job_for(self, name: str, owner_uid: int, now: float) -> Job:
        """The job, made if it is not there; idle until somebody registers."""
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = Job(name, owner_uid, idle_since=now)
        return job

    def register_writer(
        self,
        session: Session,
        job: Job,
        rank: int,
        digest: str,
        *,
        world_size: int,
        epoch: int | str,
        keep: int,
        mode: str = "auto",
        lends: bool = False,
        after: int | None = None,
    ) -> bool:
        """Registers a training process; True if that opened an epoch. See :func:`registering.register`."""
        self._check_role(session, job, writer_rank=rank)
        self._check_here(job)
        writer = Writer(session.id, session.pid, rank, digest, mode, lends, asked=epoch, after=after)
        try:
            if self.clustered and not job.alone:
                opened = joining.arrive(job, writer, world_size, epoch, keep, after)
            else:
                opened = registering.register(job, writer, world_size, epoch, keep, after)
        finally:
            self._forget_unused(job)
        session.writer = (job.name, writer)
        job.idle_since = None
        if job.joined is None and job.writers.get(rank) is writer:
            self._take_over(job)
        self._reclaim(job, rank, f"rank {rank} registered anew")
        if opened:
            for lent in [segment for segment in job.segments.values() if segment.borrowed]:
                self._reclaim(job, lent.rank, f"epoch {job.epoch} was opened")
            for segment in list(job.segments.values()):
                if segment.rank >= job.world_size and segment.state is SegmentState.FREE:
                    self._unlink(job, segment)
        self._settle(job)
        return opened

    def is_pending(self, session: Session) -> bool:
        """Whether the session's writer waits for other ranks to open a new epoch with it."""
        job, writer = self.writer_of(session)
        return job.writers.get(writer.rank) is not writer

    def ready(self, session: Session) -> Wait | tuple[str, list[str]]:
        """The digest of the registered manifests and the manifests' own, in rank order."""
        job, writer = self.writer_of(session)
        outcome = registering.ready(job, writer)
        if isinstance(outcome, Wait):
            return outcome
        digests = registering.present(job)
        return outcome, [digests[rank] for rank in range(job.world_size)]

    def reserve(self, session: Session, set_digest: str, segment_digest: str, nbytes: int) -> Shortfall:
        """Declares the session's segment layout; frees its slots of another size."""
        job, writer = self.writer_of(session)
        if set_digest != writer.reserved:
            self._abort_where(job, writer, f"rank {writer.rank} changed its layout")
        shortfall = registering.reserve(job, writer, set_digest, segment_digest, nbytes)
        for segment in job.slots(writer.rank):
            if segment.state is SegmentState.FREE and (segment.nbytes != nbytes or segment.unsafe):
                self._unlink(job, segment)
        self._trim(job)
        self.touched.add(job.name)
        return shortfall

    def add_segment(self, job: Job, segment: Segment) -> None:
        job.segments[segment.id] = segment
        self.touched.add(job.name)

    def grant(self, session: Session) -> Segment | Shortfall | Wait:
        """A slot that the session's writer may fill before it says for which step; the same until it is used."""
        job, writer = self.writer_of(session)
        self._replace_unsafe_grant(job, writer)
        return writing.grant(job, writer)

    def begin(self, session: Session, step: int, set_digest: str) -> Begun | Shortfall | Wait:
        job, writer = self.writer_of(session)
        self._replace_unsafe_grant(job, writer)
        before = _open_slots(job)
        try:
            return self._numbered(writing.begin(job, writer, step, set_digest, self._next_attempt))
        except EpochChanged:
            slots.give_up_slots(job, writer)
            self._settle(job)
            raise
        finally:
            # Waiters ask again at every change: one that changes nothing must not wake the others.
            if _open_slots(job) != before:
                self._settle(job)

    def begin_filled(
        self, session: Session, step: int, set_digest: str, slot: str, number: int | None = None
    ) -> Begun | Wait:
        """As ``begin``, with the granted slot, which has the step's bytes already.

        ``number``: of a joined job: the attempt, as the MetaServer has it.
        """
        job, writer = self.writer_of(session)
        try:
            if number is not None:
                self.begin_joined(job, step, number)
                return writing.begin_filled(job, writer, step, set_digest, slot, number)
            return self._numbered(writing.begin_filled(job, writer, step, set_digest, slot, self._next_attempt))
        except AwexdError as error:
            if isinstance(error, EpochChanged):
                slots.give_up_slots(job, writer)
            self._settle(job)
            raise

    def check_step(self, session: Session, step: int, set_digest: str) -> Wait | None:
        """Whether the session's writer may publish that step now; see :func:`writing.check_step`."""
        job, writer = self.writer_of(session)
        return writing.check_step(job, writer, step, set_digest)

    def begin_anew(self, session: Session, step: int) -> None:
        """The session's writer is about to begin that step; see :func:`writing.check_unwritten`."""
        job, writer = self.writer_of(session)
        if writing.check_unwritten(job, writer, step):
            slots.give_up_slot(job, writer)
            self._settle(job)

    def progress(
        self, session: Session, epoch: int, step: int, attempt: int, nbytes: int, checksums: bool
    ) -> tuple[Job, Attempt]:
        """How far the session's writer is; see :func:`writing.progress`. Waiters look again at the first word only."""
        job, writer = self.writer_of(session)
        known = job.attempts.get(step)
        first = known is None or writer.rank not in known.written
        found = writing.progress(job, writer, epoch, step, attempt, nbytes, checksums)
        if first:
            self.touched.add(job.name)
        return job, found

    def offer(self, segment: Segment) -> None:
        """Other nodes may fetch from it as it is written, or are in the middle of that, until ``offer_no_more``."""
        segment.offered = True

    def offer_no_more(self, job: Job, segments: Iterable[Segment]) -> None:
        for segment in segments:
            segment.offered = False
        if self.jobs.get(job.name) is job:
            self._settle(job)

    def sealed_in(self, session: Session, step: int, slot: str) -> int | None:
        job, writer = self.writer_of(session)
        return writing.sealed_in(job, writer, step, slot)

    def check_seal(self, session: Session, epoch: int, step: int, attempt: int) -> Segment | None:
        """The segment to seal, None if that is done. On an error the slot is free again."""
        job, writer = self.writer_of(session)
        try:
            return writing.check_seal(job, writer, epoch, step, attempt)
        except AwexdError:
            slots.give_up_slot(job, writer)
            self._settle(job)
            raise

    def seal(self, session: Session, step: int, checksums: bool) -> Version | None:
        job, writer = self.writer_of(session)
        version = writing.seal(job, writer, step, checksums)
        self._settle(job)
        return version

    def abort(self, session: Session, step: int, attempt: int | None, reason: str) -> None:
        """``attempt`` is None where the writer had not begun yet, or was not told: then it is the one at that step."""
        job, writer = self.writer_of(session)
        current = job.attempts.get(step)
        own = current is not None and current.number == attempt and writer.rank in current.segments
        if own or (attempt is None and job.writers.get(writer.rank) is writer):
            slots.abort(job, step, f"rank {writer.rank} aborted it: {reason}")
        slots.give_up_slot(job, writer)
        self._settle(job)

    def committed(self, session: Session, epoch: int, step: int, attempt: int) -> Wait | None:
        job, _ = self.writer_of(session)
        return writing.committed(job, epoch, step, attempt)

    def rollback(self, job: Job, step: int) -> list[Version]:
        parking.check_unpinned(job, [key for key in job.versions if key > (job.epoch, step)])
        withdrawn = writing.withdraw_newer(job, step)
        self._withdrawn(job)
        return withdrawn

    def drop(self, job: Job, step: int | None) -> list[Version]:
        """Withdraws the version of that step, or all of them.

        Raises:
            VersionUnavailable: none of that step is held.
        """
        dropped = [version for version in job.kept() if step is None or version.key[1] == step]
        if step is not None and not dropped:
            raise VersionUnavailable(f"{job.name}: step {step} is not held; {job.describe_held()}")
        parking.check_unpinned(job, [version.key for version in dropped])
        for version in dropped:
            version.withdrawn = True
        self._withdrawn(job)
        return dropped

    def close_job(self, job: Job) -> None:
        """Forgets the job: memory goes, its clients' next calls say that it was closed."""
        self._end_leases([lease.id for lease in self.leases.values() if lease.job == job.name])
        for segment in list(job.segments.values()):
            self._unlink(job, segment)
        parking.end_all(self, job)
        for session in self.sessions.values():
            if session.writer and session.writer[0] == job.name:
                session.writer = None
            if session.worker and session.worker[0] == job.name:
                session.worker = None
        del self.jobs[job.name]
        self.touched.add(job.name)

    def collect(self) -> None:
        """Unlinks free slots that no live writer can use, and what is only kept for later."""
        parking.give_up_spares(self)
        for job in self.jobs.values():
            for segment in list(job.segments.values()):
                writer = job.writers.get(segment.rank)
                followed = segment.mirrored and job.mirror is not None and job.engines
                idle = segment.state is SegmentState.FREE and not segment.borrowed and not followed
                if idle and (writer is None or writer.nbytes != segment.nbytes):
                    self._unlink(job, segment)

    def idle_jobs(self, now: float, ttl: float) -> list[Job]:
        """Jobs without a session for ``ttl`` seconds."""
        return [job for job in self.jobs.values() if (since := job.unused_since) is not None and now - since >= ttl]

    # reading

    def register_worker(
        self,
        session: Session,
        job: Job,
        engine: str,
        rank: int,
        *,
        world_size: int,
        digest: str,
        version: VersionKey | None = None,
        updates: int | None = None,
        alone: bool = False,
    ) -> None:
        """Registers an inference process.

        One that comes back after a restart of ours says what ``version`` it runs on and how many ``updates`` its engine
        had got with it, so that rounds go on where they were; ``alone``: all workers of its engine were on this node.
        """
        self._check_role(session, job, worker=(engine, rank))
        worker = Worker(session.id, session.pid, session.uid, engine, rank, digest, 0, 0)
        try:
            reading.check(job, worker, world_size)
        except AwexdError:
            self._forget_unused(job)
            raise
        if session.worker:
            self._end_leases([*session.leases, *reading.leave(job.engines[engine], session.worker[1])])
        reading.register(job, worker, world_size)
        job.engines[engine].whole |= alone
        if version:
            worker.state, worker.version, worker.epoch = "ready", version, version[0]
        if updates is not None:
            self._end_leases(reading.resume(job.engines[engine], worker, updates))
        session.worker = (job.name, worker)
        job.idle_since = None
        self.touched.add(job.name)

    def siblings(self, session: Session) -> Wait | list[str]:
        job, worker = self.worker_of(session)
        return reading.siblings(job, worker)

    def resolve(
        self,
        session: Session,
        step: int | None,
        lease_seconds: float,
        stage: bool,
        now: float,
        *,
        asked: float = 0.0,
        until: float = 0.0,
    ) -> Wait | Resolved:
        """Leases a version to the session's worker; see :func:`reading.choose`.

        ``asked``, ``until``: of the request, where an engine spans nodes; see :meth:`Spanned.agree_on`.
        """
        job, worker = self.worker_of(session)
        stale = [lease for lease in session.leases if self.leases[lease].stage == stage]
        if stale and not stage:
            stale += reading.give_up(job.engines[worker.engine], worker)
        self._end_leases(stale)
        engine = job.engines[worker.engine]
        if self.clustered and not stage and engine.absent:
            outcome: Wait | Version = self.agree_on(job, engine, worker, step, asked, now, until)
        else:
            outcome = reading.choose(job, worker, step, stage)
        if isinstance(outcome, Wait):
            return outcome
        lease = self._lease(job, outcome, session.id, now + lease_seconds, stage)
        session.leases.add(lease.id)
        if not stage:
            self._hold_round(job, worker, outcome, lease)
        return Resolved(outcome, lease)

    def confirm(self, session: Session, lease_id: str, now: float) -> Wait | VersionKey:
        """The update under that lease is done.

        Raises:
            VersionUnavailable: the lease has run out, or its version was withdrawn meanwhile. A worker that found both
                good after it had asked does not wait for this: so it counts as done until ``release`` says ``dirty``.
        """
        job, worker = self.worker_of(session)
        lease = self.leases.get(lease_id)
        if lease is None or lease.session != session.id or lease.stage:
            self._dirty(job, worker)
            raise VersionUnavailable(f"{job.name}: the lease of this update has run out; update again")
        version = job.versions[lease.key]
        if version.doubted and not version.withdrawn:
            return Wait(job.name, lambda: f"{describe_ranks(version.doubted)} to affirm {version}")
        ended = reading.confirm(job.engines[worker.engine], worker, lease.key)
        self._end_leases([lease_id, *ended])
        if version.withdrawn:
            raise VersionUnavailable(f"{job.name}: {version} was withdrawn during this update; {job.describe_held()}")
        if lease.expires <= now:
            raise VersionUnavailable(f"{job.name}: the lease of this update has run out; update again")
        return lease.key

    def leased_segments(self, session: Session) -> set[str]:
        """Of the versions that this session's worker has leased."""
        job, _ = self.worker_of(session)
        return {segment for lease in session.leases for segment in job.versions[self.leases[lease].key].segments}

    def release(self, session: Session, lease_id: str | None, dirty: bool) -> None:
        """The update under that lease was given up; ``dirty``: after it had touched the destination."""
        job, worker = self.worker_of(session)
        lease = self.leases.get(lease_id) if lease_id else None
        if lease is not None and lease.session == session.id:
            given_up = [] if lease.stage else reading.give_up(job.engines[worker.engine], worker)
            self._end_leases([lease.id, *given_up])
        if dirty:
            self._dirty(job, worker)
        self._settle(job)

    def newest_since(self, session: Session, step: int) -> Wait | VersionKey:
        job, worker = self.worker_of(session)
        newest = reading.newest_since(job, worker, step)
        if not isinstance(newest, Wait):
            worker.seen = newest
        return newest

    def await_version(self, session: Session, job: Job, engine: str, step: int | None, until: float) -> Wait | None:
        """The session drives that engine's workers, which are idle while it waits here, and will update them."""
        driven = job.engines.get(engine)
        waiting = reading.awaited(job, driven, step)
        if driven is not None and waiting is not None:
            driven.awaiting[session.id] = session.uid, until
        elif driven is not None:
            driven.awaiting.pop(session.id, None)
        return waiting

    def expire(self, now: float) -> None:
        """Ends leases that have run out; memory under them is not reused while its reader may still touch it."""
        for lease in [lease for lease in self.leases.values() if lease.expires <= now]:
            job = self.jobs[lease.job]
            if lease.session:
                for segment_id in job.versions[lease.key].segments:
                    if segment_id in job.segments and not job.segments[segment_id].borrowed:
                        job.segments[segment_id].unsafe = True
            self._end_leases([lease.id])
            self._give_up_round(lease)
            self._settle(job)
        self._expiry = min((lease.expires for lease in self.leases.values()), default=None)

    def next_expiry(self) -> float | None:
        """When the next lease may run out: never later than it does."""
        return self._expiry

    # adoption

    def adopt(self, job: Job, version: Version, segments: Iterable[Segment]) -> None:
        """Takes over a committed version of an earlier daemon. Who maps it is unknown: its memory is never reused."""
        for segment in segments:
            segment.state, segment.unsafe = SegmentState.HELD, True
            job.segments[segment.id] = segment
        job.versions[version.key] = version
        self._next_attempt = max(self._next_attempt, version.attempt + 1)  # whatever the clock says
        if not version.unsure:
            job.endings.commit(version.attempt, version.key)
        if version.key[0] == job.epoch and not version.unsure:
            job.high = max(job.high, version.key[1])
        self._settle(job)

    # internals

    def _numbered(self, outcome: B) -> B:
        if isinstance(outcome, Begun):
            self._next_attempt = max(self._next_attempt, outcome.attempt.number + 1)
        return outcome

    def _hold_round(self, job: Job, worker: Worker, version: Version, lease: Lease) -> None:
        engine = job.engines[worker.engine]
        fresh = worker.round not in engine.rounds
        self._end_leases(reading.open_round(engine, worker, version.key))
        current = engine.rounds.get(worker.round)
        if current is None or not fresh:
            return
        current.holds.append(self._lease(job, version, "", lease.expires).id)
        previous = job.versions.get(engine.completed) if engine.completed else None
        if previous is not None and previous is not version:
            current.holds.append(self._lease(job, previous, "", lease.expires).id)

    def _give_up_round(self, lease: Lease) -> None:
        session = self.sessions.get(lease.session)
        if session is None or session.worker is None or lease.stage:
            return
        job, worker = self.worker_of(session)
        self._end_leases(reading.give_up(job.engines[worker.engine], worker))

    def _abort_where(self, job: Job, writer: Writer, why: str) -> None:
        for step, attempt in list(job.attempts.items()):
            # What a rank of a joined job has sealed may be committed by now: the MetaServer knows.
            if writer.rank in attempt.segments and (job.joined is None or writer.rank not in attempt.sealed):
                slots.abort(job, step, why)

    def _replace_unsafe_grant(self, job: Job, writer: Writer) -> None:
        """Somebody who had the granted slot mapped has gone without a word: it is replaced, as a free one would be."""
        granted = slots.granted_to(job, writer)
        if granted is not None and granted.unsafe:
            self._free(job, granted)


def _open_slots(job: Job) -> list[tuple[int, int, str]]:
    return [(a.number, rank, segment) for a in job.attempts.values() for rank, segment in a.segments.items()]
