"""Which slot of shared memory a rank writes into, and when it is free again."""

from __future__ import annotations

from dataclasses import dataclass

from awexd.store.model import Job, Segment, SegmentState, Wait, Writer, describe_ranks


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Slots of this rank that must be made before it can write."""

    rank: int
    nbytes: int
    slots: int


def shortfall_of(job: Job, rank: int) -> Shortfall:
    """Slots that this rank's writer lacks now; none if it has gone."""
    writer = job.writers.get(rank)
    return Shortfall(rank, writer.nbytes, slots_missing(job, writer)) if writer else Shortfall(rank, 0, 0)


def take(job: Job, writer: Writer) -> Segment | Shortfall | Wait:
    """A slot that is this writer's from now on: the one granted to it before, else a free one."""
    granted = granted_to(job, writer)
    if granted is not None:
        return granted
    missing = slots_missing(job, writer)
    if missing:
        return Shortfall(writer.rank, writer.nbytes, missing)
    segment = next((s for s in job.slots(writer.rank) if s.state is SegmentState.FREE and _fits(s, writer)), None)
    if segment is None:
        return Wait(job.name, lambda: _who_holds(job, writer))
    segment.state, segment.digest, segment.checksums = SegmentState.GRANTED, writer.segment_digest, False
    segment.session = writer.session
    job.endings.taken(segment.id)
    return segment


def granted_to(job: Job, writer: Writer) -> Segment | None:
    """The slot that this writer may fill before it says for which step."""
    for segment in job.segments.values():
        if segment.state is SegmentState.GRANTED and segment.session == writer.session and not segment.borrowed:
            return segment
    return None


def mappable(job: Job, writer: Writer) -> list[Segment]:
    """Slots that this writer may map to write: those that it fills, and free ones that it alone will fill."""
    current = job.writers.get(writer.rank) is writer
    return [
        segment
        for segment in job.slots(writer.rank)
        if (segment.writable and segment.session == writer.session)
        or (segment.state is SegmentState.FREE and current and _fits(segment, writer))
    ]


def abort(job: Job, step: int, reason: str, *, told: bool = False) -> None:
    """Discards the open attempt at ``step`` on every rank, sealed segments too; ``told``: other nodes know."""
    attempt = job.attempts.pop(step, None)
    if attempt is None:
        return
    if job.choice is not None and job.choice.step == step:
        job.choice = None
    if job.joined is not None and not told:
        job.joined.aborts.append((attempt.epoch, step, attempt.number, reason))
    job.endings.abort(attempt.number, reason, attempt.segments.values())
    for rank, segment_id in attempt.segments.items():
        segment = job.segments.get(segment_id)
        # A rank that is still writing gives its slot back itself: it seals, aborts, begins anew or ends.
        if segment and rank in attempt.sealed:
            segment.state = SegmentState.FREE


def abort_unsealed(job: Job, writer: Writer, why: str) -> None:
    for step, attempt in list(job.attempts.items()):
        if writer.rank in attempt.segments and writer.rank not in attempt.sealed:
            abort(job, step, why)
    give_up_slots(job, writer)


def give_up_slot(job: Job, writer: Writer) -> None:
    """This process writes no more into slots that no open attempt names: they are free."""
    named = {attempt.segments.get(writer.rank) for attempt in job.attempts.values()}
    for segment in job.slots(writer.rank):
        if segment.state is SegmentState.WRITING and segment.session == writer.session and segment.id not in named:
            segment.state = SegmentState.FREE


def give_up_slots(job: Job, writer: Writer) -> None:
    """This process writes no more, nor into the slot that was granted to it."""
    give_up_slot(job, writer)
    granted = granted_to(job, writer)
    if granted is not None:
        granted.state = SegmentState.FREE


def _fits(segment: Segment, writer: Writer) -> bool:
    return segment.nbytes == writer.nbytes and not segment.unsafe and not segment.offered


def slots_missing(job: Job, writer: Writer) -> int:
    """Slots still to be made. One that an earlier process may still write into is none of this writer's."""
    if writer.mode in ("direct", "nccl"):
        return 0
    # A version that only a pin still keeps has left the rotation, for as long as that may take.
    kept = {
        segment
        for key in job.pins
        if key in job.versions and job.versions[key].leaving
        for segment in job.versions[key].segments
    }
    fitting = [
        segment
        for segment in job.slots(writer.rank)
        if segment.nbytes == writer.nbytes
        and segment.id not in kept
        and not (segment.state is SegmentState.FREE and segment.unsafe)
        and not (segment.writable and segment.session != writer.session)
    ]
    return max(0, job.keep + 1 - len(fitting))


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
    leased += [f"{v} (other nodes fetch it)" for v in job.versions.values() if v.served and v.leaving]
    waited = ([f"readers' leases on {', '.join(leased)}{readers}"] if leased else []) + (
        [f"the seal of {', '.join(unsealed)}"] if unsealed else []
    )
    holders = " and ".join(waited) or "versions that are being replaced"
    return f"a free slot of rank {writer.rank} (all {job.keep + 1} in use); {holders}"
