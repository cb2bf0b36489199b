"""How a step becomes a version: attempts, seals, commits, and rolling back."""

from __future__ import annotations

from dataclasses import dataclass

from awexd.store.borrowing import check_same_kind
from awexd.store.model import (
    Attempt,
    Job,
    Segment,
    SegmentState,
    Version,
    VersionKey,
    Wait,
    Writer,
    describe_ranks,
    set_digest_of,
)
from awexd.store.registering import away, check_current, epoch_changed, ready
from awexd.store.slots import Shortfall, abort, give_up_slot, granted_to, take
from awexd_transports.errors import InvalidArgument, VersionConflict


@dataclass(frozen=True, slots=True)
class Begun:
    """A slot to write into, for this attempt."""

    attempt: Attempt
    segment: Segment


def grant(job: Job, writer: Writer) -> Segment | Shortfall | Wait:
    """A slot to be filled for a step that is named when it is begun.

    Raises:
        EpochChanged: a newer epoch has been opened.
        VersionConflict: nothing is reserved.
    """
    check_current(job, writer)
    if not writer.reserved:
        raise VersionConflict(f"{job.name}: rank {writer.rank} has reserved no memory", {"set_changed": True})
    return take(job, writer)


def begin(job: Job, writer: Writer, step: int, set_digest: str, next_attempt: int) -> Begun | Shortfall | Wait:
    """A slot for this rank's part of ``step``.

    Raises:
        EpochChanged: a newer epoch has been opened.
        VersionConflict: a step that is not after the last, that this rank has sealed, or that another rank has passed.
    """
    waiting = check_step(job, writer, step, set_digest)
    if waiting is not None:
        return waiting
    _leave_other_steps(job, writer, step)
    _check_unsealed(job, writer, step)
    segment = take(job, writer)
    return _join(job, writer, step, segment, next_attempt) if isinstance(segment, Segment) else segment


def begin_filled(job: Job, writer: Writer, step: int, set_digest: str, slot: str, next_attempt: int) -> Begun | Wait:
    """As ``begin``, with the slot that was granted before and has the step's bytes already.

    Raises:
        EpochChanged, VersionConflict: as ``begin``; or the slot is not granted any more.
    """
    waiting = check_step(job, writer, step, set_digest)
    if waiting is not None:
        return waiting
    segment = granted_to(job, writer)
    if segment is None or segment.id != slot:
        raise _not_granted(job, writer, slot)
    _leave_other_steps(job, writer, step)
    _check_unsealed(job, writer, step)
    return _join(job, writer, step, segment, next_attempt)


def begin_borrowed(job: Job, writer: Writer, step: int, segment: Segment, next_attempt: int) -> Begun:
    """As ``begin_filled``, with the rank's own memory; the step has been checked.

    Raises:
        VersionConflict: as ``begin``.
    """
    _leave_other_steps(job, writer, step)
    _check_unsealed(job, writer, step)
    return _join(job, writer, step, segment, next_attempt)


def sealed_in(job: Job, writer: Writer, step: int, slot: str) -> int | None:
    """The attempt at ``step`` in which this rank has sealed that slot, where a repeated request finds it done."""
    version = job.versions.get((job.epoch, step))
    if version is not None and slot in version.segments:
        return version.attempt
    attempt = job.attempts.get(step)
    done = attempt is not None and writer.rank in attempt.sealed and attempt.segments[writer.rank] == slot
    return attempt.number if attempt is not None and done else None


def progress(job: Job, writer: Writer, epoch: int, step: int, number: int, nbytes: int, checksums: bool) -> Attempt:
    """So many bytes of this rank's segment, from its start, are as they will be sealed.

    Raises:
        EpochChanged, VersionConflict: this attempt is over, or the rank has sealed it.
        InvalidArgument: that is more than the segment has, or not what the rank has told before.
    """
    if epoch != job.epoch:
        raise epoch_changed(job, epoch)
    attempt, rank = job.attempts.get(step), writer.rank
    if attempt is None or attempt.number != number or rank not in attempt.segments:
        raise _attempt_over(job, step, number)
    segment = job.segments[attempt.segments[rank]]
    if rank in attempt.sealed or segment.session != writer.session:
        raise VersionConflict(f"{job.name}: rank {rank} has sealed step {step} already")
    before = attempt.written.get(rank)
    if not (before or 0) <= nbytes <= segment.nbytes or (before is not None and segment.checksums != checksums):
        raise InvalidArgument(
            f"{job.name}: rank {rank} tells of {nbytes} bytes of {segment.nbytes}, after {before or 0}, "
            f"{'with' if checksums else 'without'} checksums"
        )
    attempt.written[rank], segment.checksums = nbytes, checksums
    return attempt


def check_unwritten(job: Job, writer: Writer, step: int) -> bool:
    """Before this rank begins that step: what other nodes may have of an earlier try must not meet the next one's
    bytes. Whether there was one, which is discarded.
    """
    attempt = job.attempts.get(step)
    if attempt is None or writer.rank not in attempt.written or writer.rank in attempt.sealed:
        return False
    abort(job, step, f"rank {writer.rank} began it anew")
    return True


def check_seal(job: Job, writer: Writer, epoch: int, step: int, attempt: int) -> Segment | None:
    """The segment to be sealed, or None where a repeated request finds it done.

    Raises:
        EpochChanged, VersionConflict: this attempt is over, or unknown (the daemon restarted meanwhile).
    """
    if _is_committed(job, (epoch, step), attempt) or _unsure(job, (epoch, step), attempt):
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
    whole = len(attempt.sealed) == job.world_size and job.joined is None  # else the MetaServer says when it is
    return commit(job, attempt) if whole else None


def committed(job: Job, epoch: int, step: int, attempt: int) -> Wait | None:
    """None once that attempt has become a version.

    Raises:
        EpochChanged, VersionConflict: it never will.
    """
    version = job.versions.get((epoch, step))
    if version is not None and version.attempt == attempt and version.doubted and not version.withdrawn:
        return Wait(job.name, lambda: f"{describe_ranks(version.doubted)} to affirm {version}")
    if _is_committed(job, (epoch, step), attempt):
        return None
    if _unsure(job, (epoch, step), attempt):
        return Wait(job.name, lambda: f"the MetaServer to say whether step {step} was committed{away(job)}")
    current = job.attempts.get(step)
    if current is not None and current.number == attempt:
        return Wait(job.name, lambda: f"{_unsealed(job, current)} to seal step {step} of epoch {epoch}")
    if epoch != job.epoch:
        raise epoch_changed(job, epoch)
    raise _attempt_over(job, step, attempt)


def withdraw_newer(job: Job, step: int) -> list[Version]:
    """Rolls back to ``step``: the newer versions, withdrawn; their steps stay used.

    Raises:
        VersionConflict: that step is not held.
    """
    target = next((version for version in job.kept() if version.key[1] == step and not version.borrowed), None)
    if target is None:
        raise VersionConflict(f"{job.name}: no held version of step {step} to roll back to; {job.describe_held()}")
    newer = [version for version in job.kept() if version.key > target.key]
    for version in newer:
        version.withdrawn = True
    job.returned = None
    return newer


def check_step(job: Job, writer: Writer, step: int, set_digest: str) -> Wait | None:
    """Whether this rank may publish that step now.

    Raises:
        EpochChanged: a newer epoch has been opened.
        VersionConflict: the step is not after the last, or the ranks' manifests have changed.
    """
    now_ready = ready(job, writer)
    if isinstance(now_ready, Wait):
        return now_ready
    if any(version.unsure for version in job.versions.values()):
        return Wait(job.name, lambda: f"the MetaServer to say what was committed before the restart{away(job)}")
    if not set_digest == now_ready == writer.reserved:
        raise VersionConflict(f"{job.name}: the ranks' manifests have changed", {"set_changed": True})
    if step <= job.high:
        raise VersionConflict(
            f"{job.name}: step {step} is not after step {job.high} of epoch {job.epoch} ({job.describe_held()}); "
            'a restarted trainer opens a new epoch: all of its ranks pass epoch="new"',
            {"epoch": job.epoch, "high": job.high},
        )
    return None


def _check_unsealed(job: Job, writer: Writer, step: int) -> None:
    attempt = job.attempts.get(step)
    if attempt and writer.rank in attempt.sealed:
        rest = _unsealed(job, attempt)
        raise VersionConflict(f"{job.name}: rank {writer.rank} has sealed step {step} already; {rest} to seal")


def _join(job: Job, writer: Writer, step: int, segment: Segment, next_attempt: int) -> Begun:
    attempt = job.attempts.get(step)
    if attempt is None:
        attempt = Attempt(next_attempt, job.epoch, step, segment.borrowed)
    check_same_kind(job, attempt, segment)
    job.attempts[step] = attempt
    segment.state = SegmentState.WRITING
    attempt.segments[writer.rank], attempt.digests[writer.rank] = segment.id, writer.digest
    return Begun(attempt, segment)


def _not_granted(job: Job, writer: Writer, slot: str) -> VersionConflict:
    # As for a seal: what went with a daemon may be written again unasked, what another rank aborted may not.
    discarded = job.endings.why_discarded(slot)
    why = discarded or "the daemon restarted meanwhile"
    return VersionConflict(
        f"{job.name}: the slot that rank {writer.rank} has filled is not its own any more: {why}; publish it again",
        {"retry": discarded is None},
    )


def _leave_other_steps(job: Job, writer: Writer, step: int) -> None:
    check_unwritten(job, writer, step)
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


def commit(job: Job, attempt: Attempt) -> Version:
    """Every rank has sealed it, on whichever node."""
    del job.attempts[attempt.step]
    job.endings.commit(attempt.number, (attempt.epoch, attempt.step))
    segments = [job.segments[segment_id] for _, segment_id in sorted(attempt.segments.items())]
    for segment in segments:
        segment.state = SegmentState.HELD
    digests = tuple(segment.digest for segment in segments)
    version = Version(
        key=(attempt.epoch, attempt.step),
        attempt=attempt.number,
        segments=tuple(segment.id for segment in segments),
        digests=digests,
        set_digest=set_digest_of(digests),
        nbytes=sum(segment.nbytes for segment in segments),
        borrowed=attempt.borrowed,
        exchanged=segments[0].exchanged,
        doubted=attempt.doubted,
        high=job.high,
        reason=job.choice.reason if job.choice is not None and job.choice.step == attempt.step else "",
        partial=len(segments) < job.world_size,
    )
    job.versions[version.key] = version
    job.high = max(job.high, attempt.step)
    return version


def _attempt_over(job: Job, step: int, attempt: int) -> VersionConflict:
    # Only what was lost with a daemon may be written again unasked: after an abort the other ranks' bytes may be new.
    aborted = job.endings.why_aborted(attempt)
    why = aborted or "the daemon restarted before every rank had sealed it"
    details = {"retry": aborted is None}
    return VersionConflict(f"{job.name}: this attempt at step {step} is over: {why}; publish it again", details)


def _is_committed(job: Job, key: VersionKey, attempt: int) -> bool:
    version = job.versions.get(key)
    here = version is not None and version.attempt == attempt and not version.unsure
    return job.endings.committed(attempt, key) or here


def _unsure(job: Job, key: VersionKey, attempt: int) -> bool:
    version = job.versions.get(key)
    return version is not None and version.attempt == attempt and version.unsure


def _unsealed(job: Job, attempt: Attempt) -> str:
    missing = set(range(job.world_size)) - attempt.sealed
    if job.joined is None:
        return describe_ranks(missing)
    if attempt.missing:
        missing &= set(attempt.missing)
    return f"{describe_ranks(missing) if missing else 'the other nodes'}{away(job)}"
