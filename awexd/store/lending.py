"""What writers that lend their memory ask for: declaring it, borrowed versions of it, and getting it back."""

from __future__ import annotations

from awexd.store import borrowing, writing
from awexd.store.ledger import Session
from awexd.store.model import Choice, Job, Segment, Version, Wait, Writer
from awexd.store.registering import check_current
from awexd.store.sessions import Sessions
from awexd.store.slots import abort


class Lending(Sessions):
    """The operations on borrowed segments; see :mod:`awexd.store.borrowing`."""

    def lend(self, session: Session, segment: Segment) -> None:
        """Declares the rank's memory, in place of what it declared before."""
        job, writer = self.writer_of(session)
        check_current(job, writer)
        self._reclaim(job, writer.rank, f"rank {writer.rank} declared other memory")
        segment.digest, segment.session = writer.segment_digest, session.id
        job.segments[segment.id] = segment
        writer.lends = writer.mode == "auto"
        self.touched.add(job.name)

    def choose(
        self, session: Session, step: int, set_digest: str, now: float, why_not: str | None = None
    ) -> Wait | Choice:
        """How all ranks publish that step. ``why_not``: this one does not lend its memory for it.

        Raises:
            EpochChanged, VersionConflict: as ``begin``.
        """
        job, writer = self.writer_of(session)
        waiting = writing.check_step(job, writer, step, set_digest)
        if waiting is not None:
            return waiting
        decided = borrowing.choice_of(job, step)
        if why_not is not None and (decided is None or job.lent(writer.rank) is None):
            return self._refuse(job, writer, step, why_not)
        chosen = decided or borrowing.choose(job, step, writer.mode, now)
        if isinstance(chosen, Choice):
            job.choice = chosen
        return chosen

    def _refuse(self, job: Job, writer: Writer, step: int, why_not: str) -> Choice:
        """Nobody lends for this step; and nobody waits any more for a rank that has nothing to declare."""
        writer.lends = writer.lends and job.lent(writer.rank) is not None
        attempt = job.attempts.get(step)
        if attempt is not None and attempt.borrowed:
            abort(job, step, why_not)
        job.choice = Choice(step, False, why_not)
        self._settle(job)
        return job.choice

    def borrow(
        self, session: Session, step: int, set_digest: str, segment_id: str, checksums: bool
    ) -> Wait | Version | int:
        """Begins and seals that step with the rank's own memory: the attempt, or the version if it was the last rank.

        The version borrowed before is withdrawn first, and its readers waited for.

        Raises:
            EpochChanged, VersionConflict: as ``begin``.
        """
        job, writer = self.writer_of(session)
        segment = borrowing.lent_by(job, writer, segment_id)
        done = writing.sealed_in(job, writer, step, segment_id)
        if done is not None:
            return job.versions.get((job.epoch, step)) or done
        waiting = writing.check_step(job, writer, step, set_digest)
        if waiting is not None:
            return waiting
        waiting = self._take_back(job, segment, step)
        if waiting is not None:
            return waiting
        forced = 'transport="nccl"' if segment.exchanged else 'mode="direct"'
        job.choice = borrowing.choice_of(job, step) or Choice(step, True, forced)
        begun = writing.begin_borrowed(job, writer, step, segment, self._next_attempt)
        begun.attempt.doubted.add(writer.rank)
        self._next_attempt = max(self._next_attempt, begun.attempt.number + 1)
        version = writing.seal(job, writer, step, checksums)
        self._settle(job)
        return version or begun.attempt.number

    def affirm(self, session: Session, step: int, attempt: int, good: bool) -> None:
        """The rank's memory is what it declared: only then is an update to that version a success.

        Not ``good``: the attempt is discarded on every rank, as if it had never become a version.
        """
        job, writer = self.writer_of(session)
        version = job.versions.get((job.epoch, step))
        current = job.attempts.get(step)
        for found in (version if version and version.attempt == attempt else None, current):
            if found is not None:
                found.doubted.discard(writer.rank)
        if not good and version is not None and version.attempt == attempt:
            self._undo(job, version)
        elif not good and current is not None and current.number == attempt:
            abort(job, step, f"rank {writer.rank}'s memory is not what it declared")
            job.endings.undo(attempt)  # it declares it anew: what the other ranks lend is still good
        self._settle(job)

    def _undo(self, job: Job, version: Version) -> None:
        self._end_leases(
            [lease.id for lease in self.leases.values() if (lease.job, lease.key) == (job.name, version.key)]
        )
        job.versions.pop(version.key, None)
        job.high = min(job.high, version.high)
        for segment_id in version.segments:
            if segment_id in job.segments:
                self._free(job, job.segments[segment_id])
        job.endings.undo(version.attempt)

    def captured(self, session: Session, epoch: int, step: int, attempt: int, at_once: bool) -> Wait | None:
        """None once the borrowed version is over: every engine has it, or (``at_once``) it is simply withdrawn.

        Raises:
            EpochChanged, VersionConflict: the attempt never became a version; or that was taken back by others.
        """
        job, writer = self.writer_of(session)
        key = (epoch, step)
        version = job.versions.get(key)
        if version is None or version.attempt != attempt:
            if job.endings.committed(attempt, key):
                if not at_once:
                    borrowing.check_not_lost(job, key, attempt)
                return None
            if at_once and job.attempts.get(step) is not None and job.attempts[step].number == attempt:
                abort(job, step, "it was withdrawn before every rank had sealed it")
                self._settle(job)
                return None
            return writing.committed(job, epoch, step, attempt)
        if not at_once:
            borrowing.check_not_lost(job, key, attempt)
        if not version.withdrawn:
            waiting = None if at_once else borrowing.unconfirmed(job, key)
            if waiting is not None:
                return waiting
            self._return(job, version, f"rank {writer.rank} withdrew it")
        return borrowing.leases_left(job, [version]) if key in job.versions else None

    def revoke(self, session: Session) -> Wait | None:
        """Gives the rank's memory up; None once no reader has it mapped any more."""
        job, writer = self.writer_of(session)
        self._reclaim(job, writer.rank, f"rank {writer.rank} took its memory back")
        mapped = [segment for segment in job.closing.values() if segment.rank == writer.rank]
        if not mapped:
            return None
        pids = sorted({self.sessions[user].pid for one in mapped for user in one.users if user in self.sessions})
        return Wait(job.name, lambda: f"processes {', '.join(map(str, pids))} to close rank {writer.rank}'s memory")

    def _take_back(self, job: Job, segment: Segment, step: int) -> Wait | None:
        """Frees the memory from what it was borrowed for before."""
        borrowing.abort_older(job, segment, step)
        versions = borrowing.live_of(job, segment)
        for version in versions:
            if not version.withdrawn:
                self._return(job, version, f"rank {segment.rank} went on to step {step}")
        left = [version for version in versions if version.key in job.versions]
        return borrowing.leases_left(job, left)

    def _return(self, job: Job, version: Version, why: str) -> None:
        """Its writers take it back: nobody reads it from here on, and those that have it keep it."""
        borrowing.lose(job, version, why)
        version.withdrawn = True
        job.returned = version.key
        self._withdrawn(job)
