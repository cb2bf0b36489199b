"""The ranks of a trainer: who is in which epoch, with what, and how an epoch opens."""

from __future__ import annotations

from awexd.store.model import Job, Rendezvous, Wait, Writer, describe_ranks, set_digest_of
from awexd.store.slots import Shortfall, abort, abort_unsealed, give_up_slots, shortfall_of
from awexd_transports.errors import EpochChanged, InvalidArgument, VersionConflict


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
    if epoch == "new" and not opened_since and not already_in(job, writer):
        return _arrive(job, writer, world_size, keep)
    leave_rendezvous(job, writer)
    opened = job.epoch == 0
    if opened:
        job.epoch, job.world_size, job.keep = 1, world_size, keep
    check_size(job, world_size)
    check_free(job.writers, writer, job.name)
    others = [other for other in job.writers.values() if other.rank != writer.rank]
    if keep != job.keep and others:
        raise VersionConflict(f"{job.name}: rank {others[0].rank} keeps {job.keep} versions, not {keep}")
    if others and others[0].mode != writer.mode:
        raise VersionConflict(
            f'{job.name}: rank {others[0].rank} has mode="{others[0].mode}", not "{writer.mode}"; all ranks have one'
        )
    job.keep = keep
    if epoch == "continue" and not already_in(job, writer):
        # A version is of one incarnation of the trainer: what earlier processes sealed must not meet this one's bytes.
        for step in list(job.attempts):
            abort(job, step, f"rank {writer.rank} was started anew (process {writer.pid})")
    _replace(job, writer)
    return opened


def ready(job: Job, writer: Writer) -> Wait | str:
    """The digest of all ranks' manifests, once the epoch is open and every rank has registered."""
    if writer.refused is not None:
        raise writer.refused
    if job.pending and job.pending.writers.get(writer.rank) is writer:
        return Wait(job.name, lambda: _awaited(job))
    check_current(job, writer)
    digests = present(job)
    absent = [rank for rank in range(job.world_size) if rank not in digests]
    if absent:
        absent = list(job.joined.absent) if job.joined is not None and job.joined.absent else absent
        return Wait(
            job.name,
            lambda: (
                f"{describe_ranks(absent)} of {job.world_size} to register in epoch {job.epoch}{_hint(job)}{away(job)}"
            ),
        )
    return set_digest_of(tuple(digests[rank] for rank in range(job.world_size)))


def _awaited(job: Job) -> str:
    if job.pending is None:
        return "its new epoch"
    if job.joined is not None:
        return _awaited_elsewhere(job)
    if job.mirror is not None:
        absent, size = describe_ranks(job.pending.absent), job.pending.world_size
        return f"{absent} of {size} to register, here or on other nodes; {job.mirror.doing()}"
    return f"{describe_ranks(job.pending.absent)} of the new epoch's {job.pending.world_size} to register{_hint(job)}"


def away(job: Job) -> str:
    return f" ({job.joined.problem})" if job.joined is not None and job.joined.problem else ""


def _awaited_elsewhere(job: Job) -> str:
    joined = job.joined
    if joined is None or joined.problem:
        return f"the MetaServer to register this node's ranks: {joined.problem if joined else ''}"
    where = f"{describe_ranks(joined.absent)} to register on other nodes" if joined.absent else "the MetaServer's word"
    return f"{where}{_hint(job)}"


def check_size(job: Job, world_size: int) -> None:
    """Raises VersionConflict for a world of another size than the open epoch's."""
    if job.epoch and world_size != job.world_size:
        raise VersionConflict(
            f"{job.name}: epoch {job.epoch} has {job.world_size} writer ranks, not {world_size}; "
            'a trainer of another size opens a new epoch: all of its ranks pass epoch="new"'
        )


def _hint(job: Job) -> str:
    """Where some ranks ask for a new epoch and others do not, both sides would wait for ever without knowing why."""
    if not job.pending or not job.writers:
        return ""
    new, old = describe_ranks(job.pending.writers), describe_ranks(job.writers)
    return f' ({new} asked for a new epoch, {old} did not: all ranks or none pass epoch="new")'


def present(job: Job) -> dict[int, str]:
    """The registered manifests by rank. A rank that has sealed an open attempt counts, even if it has left since."""
    sealed = {rank: a.digests[rank] for a in job.attempts.values() for rank in a.sealed}
    elsewhere = job.joined.ranks if job.joined is not None else {}
    return elsewhere | sealed | {rank: writer.digest for rank, writer in job.writers.items()}


def reserve(job: Job, writer: Writer, set_digest: str, segment_digest: str, nbytes: int) -> Shortfall:
    """Declares this rank's segment layout, made for ``set_digest``; says how many slots are to be made."""
    check_current(job, writer)
    give_up_slots(job, writer)
    writer.reserved, writer.segment_digest, writer.nbytes = set_digest, segment_digest, nbytes
    return shortfall_of(job, writer.rank)


def leave(job: Job, writer: Writer, why: str) -> None:
    """A writer's session has ended: what it had not sealed is discarded, what it had sealed stays."""
    leave_rendezvous(job, writer)
    if job.writers.get(writer.rank) is writer:
        del job.writers[writer.rank]
        abort_unsealed(job, writer, why)
    else:
        give_up_slots(job, writer)


def check_current(job: Job, writer: Writer) -> None:
    if job.writers.get(writer.rank) is not writer:
        raise epoch_changed(job, job.epoch - 1)


def epoch_changed(job: Job, seen: int) -> EpochChanged:
    """The error for a caller who last saw epoch ``seen``."""
    newest = job.held()[0] if job.held() else None
    step = newest.key[1] if newest and newest.key[0] == job.epoch else None
    return EpochChanged(
        f"{job.name} is in epoch {job.epoch} now, not in epoch {seen}; {job.describe_held()}",
        {"epoch": job.epoch, "step": step},
    )


def already_in(job: Job, writer: Writer) -> bool:
    """The same process registers again (other tensors, say): that is no new run of the trainer."""
    current = job.writers.get(writer.rank)
    return current is not None and current.session == writer.session


def leave_rendezvous(job: Job, writer: Writer) -> None:
    pending = job.pending
    if pending is None:
        return
    for rank in [rank for rank, other in pending.writers.items() if other.session == writer.session]:
        del pending.writers[rank]
    if not pending.writers:
        job.pending = None


def _arrive(job: Job, writer: Writer, world_size: int, keep: int) -> bool:
    pending = job.pending or Rendezvous(world_size, keep, writer.mode)
    if (pending.world_size, pending.keep, pending.mode) != (world_size, keep, writer.mode):
        raise VersionConflict(
            f"{job.name}: the new epoch's ranks disagree: world_size {pending.world_size} keep {pending.keep} "
            f"mode {pending.mode}, and world_size {world_size} keep {keep} mode {writer.mode}"
        )
    check_free(pending.writers, writer, job.name)
    job.pending = pending
    pending.writers[writer.rank] = writer
    if pending.absent:
        return False
    open_epoch(job, pending)
    return True


def open_epoch(job: Job, pending: Rendezvous) -> None:
    """All ranks of a rendezvous have come, and are the writers of a new epoch."""
    for step in list(job.attempts):
        abort(job, step, f"epoch {job.epoch + 1} was opened")
    job.choice = job.returned = None
    for segment in job.segments.values():
        if segment.writable:
            segment.unsafe = True  # a process of the old epoch may hang in the middle of it
    job.writers, job.pending = pending.writers, None
    job.epoch, job.world_size, job.keep, job.high = job.epoch + 1, pending.world_size, pending.keep, -1


def check_free(writers: dict[int, Writer], writer: Writer, name: str) -> None:
    holder = writers.get(writer.rank)
    if holder is not None and holder.session != writer.session:
        raise VersionConflict(f"{name}: rank {writer.rank} is registered by process {holder.pid}, which lives")


def _replace(job: Job, writer: Writer) -> None:
    previous = job.writers.get(writer.rank)
    job.writers[writer.rank] = writer
    if previous is not None:
        abort_unsealed(job, writer, f"rank {writer.rank} registered anew")
