"""The trainer's side of a job: registration, epochs, attempts, commits and retirement."""

from __future__ import annotations

from dataclasses import dataclass

from awexd.store.model import (
    Attempt,
    Job,
    Rendezvous,
    Segment,
    SegmentState,
    Version,
    VersionKey,
    Wait,
    Writer,
    describe_ranks,
)
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict
from awexd_transports.layout import digest_of


@dataclass(frozen=True, slots=True)
class Begun:
    """A slot to write into, for this attempt."""

    attempt: Attempt
    segment: Segment


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Slots of this rank that must be made before it can write."""

    rank: int
    nbytes: int
    slots: int


def register(job: Job, writer: Writer, world_size: int, epoch: int | str, keep: int, after: int | None = None) -> bool:
    """Registers one rank; True if that opened an epoch.

    ``epoch`` is ``"continue"``, ``"new"`` (the epoch opens when every rank has come) or the number of the epoch that a
    reconnecting client was in. ``after``: the epoch that was current when a reconnecting client first asked for a new
    one; if it has opened since, the client belongs to it.

    Raises:
        InvalidArgument: the rank is not in the world.
        VersionConflict: another live process has that rank, or the world's size or keep differs.
        EpochChanged: the epoch to be resumed is over.
    """
    if writer.rank >= world_size:
        raise InvalidArgument(f"rank {writer.rank} in a world of {world_size}")
    if isinstance(epoch, int) and epoch != job.epoch:
        raise epoch_changed(job, epoch)
    opened_since = after is not None and job.epoch > after
    if epoch == "new" and not opened_since and not _already_in(job, writer):
        return _arrive(job, writer, world_size, keep)
    _leave_rendezvous(job, writer)
    opened = job.epoch == 0
    if opened:
        job.epoch, job.world_size, job.keep = 1, world_size, keep
    elif world_size != job.world_size:
        raise VersionConflict(
            f"{job.name}: epoch {job.epoch} has {job.world_size} writer ranks, not {world_size}; "
            'a trainer of another size opens a new epoch: all of its ranks pass epoch="new"'
        )
    _check_free(job.writers, writer, job.name)
    others = [other for other in job.writers.values() if other.rank != writer.rank]
    if keep != job.keep and others:
        raise VersionConflict(f"{job.name}: rank {others[0].rank} keeps {job.keep} versions, not {keep}")
    job.keep = keep
    if epoch == "continue" and not _already_in(job, writer):
        # A version is of one incarnation of the trainer: what earlier processes sealed must not meet this one's bytes.
        for step in list(job.attempts):
            abort(job, step, f"rank {writer.rank} was started anew (process {writer.pid})")
    _replace(job, writer)
    return opened


def ready(job: Job, writer: Writer) -> Wait | str:
    """The digest of all ranks' manifests, once the epoch is open and every rank has registered."""
    if job.pending and job.pending.writers.get(writer.rank) is writer:
        absent = describe_ranks(job.pending.absent)
        return Wait(f"{job.name}: {absent} of the new epoch's {job.pending.world_size} to register{_hint(job)}")
    _check_current(job, writer)
    digests = present(job)
    absent_ranks = [rank for rank in range(job.world_size) if rank not in digests]
    if absent_ranks:
        absent = describe_ranks(absent_ranks)
        return Wait(f"{job.name}: {absent} of {job.world_size} to register in epoch {job.epoch}{_hint(job)}")
    return digest_of(digests[rank] for rank in range(job.world_size))


def _hint(job: Job) -> str:
    """Where some ranks ask for a new epoch and others do not, both sides would wait for ever without knowing why."""
    if not job.pending or not job.writers:
        return ""
    new, old = describe_ranks(job.pending.writers), describe_ranks(job.writers)
    return f' ({new} asked for a new epoch, {old} did not: all ranks or none pass epoch="new")'


def present(job: Job) -> dict[int, str]:
    """The registered manifests by rank. A rank that has sealed an open attempt counts, even if it has left since."""
    sealed = {rank: a.digests[rank] for a in job.attempts.values() for rank in a.sealed}
    return sealed | {rank: writer.digest for rank, writer in job.writers.items()}


def reserve(job: Job, writer: Writer, set_digest: str, segment_digest: str, nbytes: int) -> Shortfall:
    """Declares this rank's segment layout, made for ``set_digest``; says how many slots are to be made."""
    _check_current(job, writer)
    writer.reserved, writer.segment_digest, writer.nbytes = set_digest, segment_digest, nbytes
    return shortfall_of(job, writer.rank)


def shortfall_of(job: Job, rank: int) -> Shortfall:
    """Slots that this rank's writer lacks now; none if it has gone."""
    writer = job.writers.get(rank)
    return Shortfall(rank, writer.nbytes, _slots_missing(job, writer)) if writer else Shortfall(rank, 0, 0)


def begin(job: Job, writer: Writer, step: int, set_digest: str, next_attempt: int) -> Begun | Shortfall | Wait:
    """A slot for this rank's part of ``step``.

    Raises:
        EpochChanged: a newer epoch has been opened.
        VersionConflict: a step that is not after the last, that this rank has sealed, or that another rank has passed.
    """
    now_ready = ready(job, writer)
    if isinstance(now_ready, Wait):
        return now_ready
    if not set_digest == now_ready == writer.reserved:
        raise VersionConflict(f"{job.name}: the ranks' manifests have changed", {"set_changed": True})
    if step <= job.high:
        raise VersionConflict(
            f"{job.name}: step {step} is not after step {job.high} of epoch {job.epoch} ({job.describe_held()}); "
            'a restarted trainer opens a new epoch: all of its ranks pass epoch="new"',
            {"epoch": job.epoch, "high": job.high},
        )
    _leave_other_steps(job, writer, step)
    attempt = job.attempts.get(step)
    if attempt and writer.rank in attempt.sealed:
        rest = describe_ranks(set(range(job.world_size)) - attempt.sealed)
        raise VersionConflict(f"{job.name}: rank {writer.rank} has sealed step {step} already; {rest} to seal")
    if _slots_missing(job, writer):
        return Shortfall(writer.rank, writer.nbytes, _slots_missing(job, writer))
    segment = next((s for s in job.slots(writer.rank) if s.state is SegmentState.FREE and _fits(s, writer)), None)
    if segment is None:
        return Wait(_who_holds(job, writer))
    if attempt is None:
        attempt = job.attempts[step] = Attempt(next_attempt, job.epoch, step)
    segment.state, segment.digest, segment.checksums = SegmentState.WRITING, writer.segment_digest, False
    segment.session = writer.session
    attempt.segments[writer.rank], attempt.digests[writer.rank] = segment.id, writer.digest
    return Begun(attempt, segment)


def check_seal(job: Job, writer: Writer, epoch: int, step: int, attempt: int) -> Segment | None:
    """The segment to be sealed, or None where a repeated request finds it done.

    Raises:
        EpochChanged, VersionConflict: this attempt is over, or unknown (the daemon restarted meanwhile).
    """
    if _is_committed(job, (epoch, step), attempt):
        return None
    if epoch != job.epoch:
        raise epoch_changed(job, epoch)
    current = job.attempts.get(step)
    if current is None or current.number != attempt or writer.rank not in current.segments:
        raise _attempt_over(job, step, attempt)
    if writer.rank in current.sealed:
        return None
    return job.segments[current.segments[writer.rank]]


def seal(job: Job, writer: Writer, step: int, checksums: bool) -> Version | None:
    """Marks this rank's segment as complete; the version, if that was the last rank."""
    attempt = job.attempts[step]
    segment = job.segments[attempt.segments[writer.rank]]
    segment.state, segment.checksums = SegmentState.SEALED, checksums
    attempt.sealed.add(writer.rank)
    return _commit(job, attempt) if len(attempt.sealed) == job.world_size else None


def abort(job: Job, step: int, reason: str) -> None:
    """Discards the open attempt at ``step`` on every rank, sealed segments too."""
    attempt = job.attempts.pop(step, None)
    if attempt is None:
        return
    job.endings.abort(attempt.number, reason)
    for rank, segment_id in attempt.segments.items():
        segment = job.segments.get(segment_id)
        # A rank that is still writing gives its slot back itself: it seals, aborts, begins anew or ends.
        if segment and rank in attempt.sealed:
            segment.state = SegmentState.FREE


def give_up_slot(job: Job, writer: Writer) -> None:
    """This process writes no more into slots that no open attempt names: they are free."""
    named = {attempt.segments.get(writer.rank) for attempt in job.attempts.values()}
    for segment in job.slots(writer.rank):
        if segment.state is SegmentState.WRITING and segment.session == writer.session and segment.id not in named:
            segment.state = SegmentState.FREE


def committed(job: Job, epoch: int, step: int, attempt: int) -> Wait | None:
    """None once that attempt has become a version.

    Raises:
        EpochChanged, VersionConflict: it never will.
    """
    if _is_committed(job, (epoch, step), attempt):
        return None
    current = job.attempts.get(step)
    if current is not None and current.number == attempt:
        rest = set(range(job.world_size)) - current.sealed
        return Wait(f"{job.name}: {describe_ranks(rest)} to seal step {step} of epoch {epoch}")
    if epoch != job.epoch:
        raise epoch_changed(job, epoch)
    raise _attempt_over(job, step, attempt)


def withdraw_newer(job: Job, step: int) -> list[Version]:
    """Rolls back to ``step``: the newer versions, withdrawn; their steps stay used.

    Raises:
        VersionConflict: that step is not held.
    """
    target = next((version for version in job.held() if version.key[1] == step), None)
    if target is None:
        raise VersionConflict(f"{job.name}: no held version of step {step} to roll back to; {job.describe_held()}")
    newer = [version for version in job.held() if version.key > target.key]
    for version in newer:
        version.withdrawn = True
    return newer


def leave(job: Job, writer: Writer, why: str) -> None:
    """A writer's session has ended: what it had not sealed is discarded, what it had sealed stays."""
    _leave_rendezvous(job, writer)
    if job.writers.get(writer.rank) is writer:
        del job.writers[writer.rank]
        _abort_unsealed(job, writer, why)
    else:
        give_up_slot(job, writer)


def epoch_changed(job: Job, seen: int) -> EpochChanged:
    """The error for a caller who last saw epoch ``seen``."""
    newest = job.held()[0] if job.held() else None
    step = newest.key[1] if newest and newest.key[0] == job.epoch else None
    return EpochChanged(
        f"{job.name} is in epoch {job.epoch} now, not in epoch {seen}; {job.describe_held()}",
        {"epoch": job.epoch, "step": step},
    )


def _already_in(job: Job, writer: Writer) -> bool:
    """The same process registers again (other tensors, say): that is no new run of the trainer."""
    current = job.writers.get(writer.rank)
    return current is not None and current.session == writer.session


def _leave_rendezvous(job: Job, writer: Writer) -> None:
    pending = job.pending
    if pending is None:
        return
    for rank in [rank for rank, other in pending.writers.items() if other.session == writer.session]:
        del pending.writers[rank]
    if not pending.writers:
        job.pending = None


def _arrive(job: Job, writer: Writer, world_size: int, keep: int) -> bool:
    pending = job.pending or Rendezvous(world_size, keep)
    if (pending.world_size, pending.keep) != (world_size, keep):
        raise VersionConflict(
            f"{job.name}: the new epoch's ranks disagree: world_size {pending.world_size} keep {pending.keep}, "
            f"and world_size {world_size} keep {keep}"
        )
    _check_free(pending.writers, writer, job.name)
    job.pending = pending
    pending.writers[writer.rank] = writer
    if pending.absent:
        return False
    for step in list(job.attempts):
        abort(job, step, f"epoch {job.epoch + 1} was opened")
    for segment in job.segments.values():
        if segment.state is SegmentState.WRITING:
            segment.unsafe = True  # a process of the old epoch may hang in the middle of it
    job.writers, job.pending = pending.writers, None
    job.epoch, job.world_size, job.keep, job.high = job.epoch + 1, world_size, keep, -1
    return True


def _check_free(writers: dict[int, Writer], writer: Writer, name: str) -> None:
    holder = writers.get(writer.rank)
    if holder is not None and holder.session != writer.session:
        raise VersionConflict(f"{name}: rank {writer.rank} is registered by process {holder.pid}, which lives")


def _replace(job: Job, writer: Writer) -> None:
    previous = job.writers.get(writer.rank)
    job.writers[writer.rank] = writer
    if previous is not None:
        _abort_unsealed(job, writer, f"rank {writer.rank} registered anew")


def _abort_unsealed(job: Job, writer: Writer, why: str) -> None:
    for step, attempt in list(job.attempts.items()):
        if writer.rank in attempt.segments and writer.rank not in attempt.sealed:
            abort(job, step, why)
    give_up_slot(job, writer)


def _check_current(job: Job, writer: Writer) -> None:
    if job.writers.get(writer.rank) is not writer:
        raise epoch_changed(job, job.epoch - 1)


def _leave_other_steps(job: Job, writer: Writer, step: int) -> None:
    this = job.attempts.get(step)
    sealed_this = this.sealed if this else set()
    for other, attempt in list(job.attempts.items()):
        ahead = attempt.segments.keys() - {writer.rank} - sealed_this
        if other < step and writer.rank not in attempt.sealed:
            abort(job, other, f"rank {writer.rank} went on to step {step} without sealing step {other}")
        elif other == step and writer.rank in attempt.segments and writer.rank not in attempt.sealed:
            del attempt.segments[writer.rank]
        elif other > step and ahead:
            raise VersionConflict(
                f"{job.name}: {describe_ranks(ahead)} went on to step {other} without sealing step {step}: "
                "it can no longer commit"
            )
        elif other > step and writer.rank in attempt.segments:
            abort(job, other, f"rank {writer.rank} went back to step {step}")
    give_up_slot(job, writer)


def _fits(segment: Segment, writer: Writer) -> bool:
    return segment.nbytes == writer.nbytes and not segment.unsafe


def _slots_missing(job: Job, writer: Writer) -> int:
    """Slots still to be made. One that an earlier process may still write into is none of this writer's."""
    fitting = [
        segment
        for segment in job.slots(writer.rank)
        if segment.nbytes == writer.nbytes
        and not (segment.state is SegmentState.FREE and segment.unsafe)
        and not (segment.state is SegmentState.WRITING and segment.session != writer.session)
    ]
    return max(0, job.keep + 1 - len(fitting))


def _commit(job: Job, attempt: Attempt) -> Version:
    del job.attempts[attempt.step]
    job.endings.commit(attempt.number, (attempt.epoch, attempt.step))
    segments = [job.segments[attempt.segments[rank]] for rank in range(job.world_size)]
    for segment in segments:
        segment.state = SegmentState.HELD
    digests = tuple(segment.digest for segment in segments)
    version = Version(
        key=(attempt.epoch, attempt.step),
        attempt=attempt.number,
        segments=tuple(segment.id for segment in segments),
        digests=digests,
        set_digest=digest_of(digests),
        nbytes=sum(segment.nbytes for segment in segments),
    )
    job.versions[version.key] = version
    job.high = attempt.step
    return version


def _attempt_over(job: Job, step: int, attempt: int) -> VersionConflict:
    # Only what was lost with a daemon may be written again unasked: after an abort the other ranks' bytes may be new.
    aborted = job.endings.why_aborted(attempt)
    why = aborted or "the daemon restarted before every rank had sealed it"
    details = {"retry": aborted is None}
    return VersionConflict(f"{job.name}: this attempt at step {step} is over: {why}; publish it again", details)


def _is_committed(job: Job, key: VersionKey, attempt: int) -> bool:
    version = job.versions.get(key)
    return job.endings.committed(attempt, key) or (version is not None and version.attempt == attempt)


def _who_holds(job: Job, writer: Writer) -> str:
    leased = [str(v) for v in job.versions.values() if v.leases]
    updating = [
        f"{describe_ranks(rest)} of engine {engine.name}"
        for engine in job.engines.values()
        for current in engine.rounds.values()
        if (rest := set(range(engine.world_size)) - current.confirmed)
    ]
    readers = f" ({', '.join(dict.fromkeys(updating))} to finish updating)" if updating else ""
    unsealed = [
        f"step {step} by {describe_ranks(set(range(job.world_size)) - attempt.sealed)}"
        for step, attempt in job.attempts.items()
    ]
    waited = ([f"readers' leases on {', '.join(leased)}{readers}"] if leased else []) + (
        [f"the seal of {', '.join(unsealed)}"] if unsealed else []
    )
    holders = " and ".join(waited) or "versions that are being replaced"
    return f"{job.name}: a free slot of rank {writer.rank} (all {job.keep + 1} in use); {holders}"
