"""Borrowed versions: their bytes are the writers' live parameters, which readers on this node open themselves.

A rank's memory is declared once, as a segment whose ``borrowed`` is true; of it there is one version at a time. That
is taken back before the parameters change: once every engine has it, by the next step, or when its writer goes.
"""

from __future__ import annotations

from awexd.store.model import (
    Attempt,
    Choice,
    Engine,
    Job,
    Segment,
    Version,
    VersionKey,
    Wait,
    Worker,
    Writer,
    describe_ranks,
)
from awexd.store.slots import abort
from awexd_transports.errors import VersionConflict


def choice_of(job: Job, step: int) -> Choice | None:
    """What has been decided of how that step is published."""
    attempt = job.attempts.get(step)
    if job.choice is not None and job.choice.step == step:
        return job.choice
    if attempt is None:
        return None
    return Choice(step, attempt.borrowed, _unable(job) or "as its other ranks")


def choose(job: Job, step: int, mode: str, now: float) -> Choice | Wait:
    """Decides for all ranks; the first one that asks. Each must have declared its memory: those that will are awaited.

    A rank does so in its first ``publish``, once all have registered: the first to come would find itself alone.
    """
    if mode == "direct":
        return Choice(step, True, 'mode="direct"')
    why_not = _why_not(job, now)
    undeclared = [rank for rank in range(job.world_size) if job.lent(rank) is None]
    if why_not is None and undeclared:
        return Wait(job.name, lambda: f"{describe_ranks(undeclared)} to declare GPU memory")
    return Choice(step, why_not is None, why_not or "every engine waits, on this node's GPUs")


def _why_not(job: Job, now: float) -> str | None:
    """Why this step goes through host memory, whatever ranks will still declare."""
    if job.joined is not None:
        return "its trainer is on several nodes"
    unable = _unable(job)
    if unable is not None:
        return unable
    if job.abroad:
        return "an engine is on another node"
    workers = [(engine, worker) for engine in job.engines.values() for worker in engine.workers.values()]
    if not workers:
        return "no engine is registered"
    lent = filter(None, map(job.lent, range(job.world_size)))
    needed = {uuid for segment in lent for uuid in segment.devices}
    for engine, worker in workers:
        if engine.absent:
            return f"{describe_ranks(engine.absent)} of engine {engine.name} not registered"
        if not needed <= worker.devices:
            return f"{_named(engine, worker)} cannot open memory of {sorted(needed - worker.devices)[0]}"
        if not engine.waits(worker, now):
            return f"{_named(engine, worker)} does not wait for it"
    return None


def _unable(job: Job) -> str | None:
    ranks = [rank for rank in range(job.world_size) if job.lent(rank) is None and not _will_lend(job, rank)]
    return f"{describe_ranks(ranks)} cannot lend its GPU memory" if ranks else None


def _will_lend(job: Job, rank: int) -> bool:
    writer = job.writers.get(rank)
    return writer is not None and writer.lends


def lent_by(job: Job, writer: Writer, segment_id: str) -> Segment:
    """That writer's own memory.

    Raises:
        VersionConflict: it is not declared, or was given up.
    """
    segment = job.segments.get(segment_id)
    if segment is None or not segment.borrowed or segment.session != writer.session:
        raise VersionConflict(f"{job.name}: rank {writer.rank} has not declared this memory; publish again")
    return segment


def live_of(job: Job, segment: Segment) -> list[Version]:
    """Versions whose bytes are there."""
    return [version for version in job.versions.values() if segment.id in version.segments]


def abort_older(job: Job, segment: Segment, step: int) -> None:
    """An attempt at another step that counts on this memory can no longer commit."""
    for other, attempt in list(job.attempts.items()):
        if other != step and segment.id in attempt.segments.values():
            abort(job, other, f"rank {segment.rank} went on to step {step}: its memory was only borrowed")


def leases_left(job: Job, versions: list[Version]) -> Wait | None:
    if not any(version.leases for version in versions):
        return None
    named = ", ".join(str(version) for version in versions)
    return Wait(job.name, lambda: f"readers in the middle of {named}, which is withdrawn, to end{_updating(job)}")


def unconfirmed(job: Job, key: VersionKey) -> Wait | None:
    """None once every registered worker that can read that borrowed version runs on it, or on a later one."""
    version = job.versions[key]
    able = [worker for engine in job.engines.values() for worker in engine.workers.values() if worker.takes(version)]
    if not able:
        what = 'with transport="nccl"' if version.exchanged else "on this node's GPUs"
        return Wait(job.name, lambda: f"an engine {what} to update to step {key[1]} of epoch {key[0]}")
    if all(_has(worker, key) for worker in able):
        return None
    return Wait(job.name, lambda: _awaited(job, version))


def lose(job: Job, version: Version, why: str) -> None:
    """That version is about to be withdrawn: who waits for its engines is told, if they have not all got it."""
    if not version.withdrawn and unconfirmed(job, version.key) is not None:
        job.endings.lose(version.attempt, why)


def check_not_lost(job: Job, key: VersionKey, attempt: int) -> None:
    """
    Raises:
        VersionConflict: it was taken back before every engine had it.
    """
    why = job.endings.why_lost(attempt)
    if why is not None:
        raise VersionConflict(
            f"{job.name}: step {key[1]} of epoch {key[0]} was taken back before every engine had it: {why}; "
            "publish the next step"
        )


def _awaited(job: Job, version: Version) -> str:
    key = version.key
    late = [
        f"{_named(engine, worker)}{_why_late(worker)}"
        for engine in job.engines.values()
        for worker in engine.workers.values()
        if worker.takes(version) and not _has(worker, key)
    ]
    return f"{', '.join(late[:4])}{', ...' if len(late) > 4 else ''} to update to step {key[1]} of epoch {key[0]}"


def _has(worker: Worker, key: VersionKey) -> bool:
    return worker.version is not None and worker.version >= key


def _why_late(worker: Worker) -> str:
    return f" ({worker.failure.message})" if worker.failure else ""


def _named(engine: Engine, worker: Worker) -> str:
    return f"rank {worker.rank} of engine {engine.name}"


def _updating(job: Job) -> str:
    active = [
        f"{describe_ranks(current.active)} of engine {engine.name}"
        for engine in job.engines.values()
        for current in engine.rounds.values()
        if current.active
    ]
    return f" ({', '.join(active)})" if active else ""


def check_same_kind(job: Job, attempt: Attempt, segment: Segment) -> None:
    """One version's ranks all lend their memory, or none does.

    Raises:
        VersionConflict: they do not.
    """
    if attempt.borrowed != segment.borrowed:
        how = "lend their memory" if attempt.borrowed else "copy theirs into host memory"
        raise VersionConflict(
            f"{job.name}: the other ranks {how} for step {attempt.step}: publish it with publish() on all, "
            "or in the long form on all"
        )
