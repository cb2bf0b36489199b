"""Writer ranks on several nodes: who is in which epoch, and how a step becomes a version. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from awexd.metaserver.model import (
    MAX_ATTEMPTS,
    MAX_VERSIONS,
    REMEMBERED_ABORTS,
    Attempt,
    Held,
    Job,
    Member,
    Piece,
    Rendezvous,
    Version,
)
from awexd.store.model import VersionKey, describe_keys, describe_ranks
from awexd_transports.errors import BudgetExceeded, EpochChanged, InvalidArgument, VersionConflict, VersionUnavailable


def join(
    job: Job, members: Mapping[int, Member], world_size: int, keep: int, epoch: int | str, after: int | None
) -> bool:
    """Registers ranks of one node; True if that opened an epoch.

    ``epoch`` and ``after`` as for :func:`awexd.store.registering.register`: ``"continue"``, ``"new"`` or a number.

    Raises:
        InvalidArgument: a rank that is not in the world.
        VersionConflict: another node has that rank, or the world's size or keep differs.
        EpochChanged: the epoch to be resumed is over.
    """
    beyond = [rank for rank in members if rank >= world_size]
    if beyond:
        raise InvalidArgument(f"{describe_ranks(beyond)} in a world of {world_size}")
    if isinstance(epoch, int) and epoch != job.epoch:
        raise epoch_changed(job, epoch)
    opened_since = after is not None and job.epoch > after
    already_in = all(_same(job.members.get(rank), member) for rank, member in members.items())
    if epoch == "new" and not opened_since and not already_in:
        return _arrive(job, members, world_size, keep)
    leave_rendezvous(job, members)
    opened = job.epoch == 0
    if opened:
        job.epoch, job.world_size, job.keep = 1, world_size, keep
    elif world_size != job.world_size:
        raise VersionConflict(
            f"{job.name}: epoch {job.epoch} has {job.world_size} writer ranks, not {world_size}; "
            'a trainer of another size opens a new epoch: all of its ranks pass epoch="new"'
        )
    _check_free(job, job.members, members)
    if keep != job.keep and job.members.keys() - members.keys():
        raise VersionConflict(f"{job.name}: its other ranks keep {job.keep} versions, not {keep}")
    job.keep = keep
    anew = [rank for rank, member in members.items() if not _same(job.members.get(rank), member)]
    if anew and not isinstance(epoch, int):
        # A version is of one incarnation of the trainer: what earlier processes sealed must not meet this one's bytes.
        abort_all(job, f"{describe_ranks(anew)} started anew")
    job.members.update(members)
    return opened


def _arrive(job: Job, members: Mapping[int, Member], world_size: int, keep: int) -> bool:
    pending = job.pending or Rendezvous(world_size, keep)
    if (pending.world_size, pending.keep) != (world_size, keep):
        raise VersionConflict(
            f"{job.name}: the new epoch's ranks disagree: world_size {pending.world_size} keep {pending.keep}, "
            f"and world_size {world_size} keep {keep}"
        )
    _check_free(job, pending.members, members)
    job.pending = pending
    pending.members.update(members)
    if pending.absent:
        return False
    open_epoch(job, job.epoch + 1, world_size, keep)
    job.members, job.pending = pending.members, None
    return True


def open_epoch(job: Job, epoch: int, world_size: int, keep: int) -> None:
    """Begins an epoch without ranks."""
    abort_all(job, f"epoch {epoch} was opened")
    job.epoch, job.world_size, job.keep, job.high = epoch, world_size, keep, -1
    job.members = {}


def part(job: Job, node: str, ranks: Iterable[int]) -> None:
    """Writers of that node have left: what they had sealed stays, what they had not cannot commit any more."""
    gone = {rank for rank in ranks if rank in job.members and job.members[rank].node == node}
    for rank in gone:
        del job.members[rank]
    leave_rendezvous(job, {rank: Member(node, "", "") for rank in ranks})
    for attempt in list(job.attempts.values()):
        if attempt.begun.keys() & gone - attempt.sealed.keys():
            abort_attempt(job, attempt, f"{describe_ranks(gone)} left before sealing it")


def lose(job: Job, node: str, why: str) -> None:
    """That node is gone with all it held: no attempt that counts on it can commit."""
    ranks = {rank for rank, member in job.members.items() if member.node == node}
    for rank in ranks:
        del job.members[rank]
    if job.pending:
        leave_rendezvous(job, {rank: member for rank, member in job.pending.members.items() if member.node == node})
    for attempt in list(job.attempts.values()):
        if node in attempt.begun.values():
            abort_attempt(job, attempt, why)


def leave_rendezvous(job: Job, members: Mapping[int, Member]) -> None:
    pending = job.pending
    if pending is None:
        return
    for rank, member in members.items():
        if rank in pending.members and pending.members[rank].node == member.node:
            del pending.members[rank]
    if not pending.members:
        job.pending = None


def begin(job: Job, node: str, epoch: int, step: int, ranks: Iterable[int], number: int) -> Attempt:
    """The attempt at ``step`` that these ranks write for; ``number`` is its, if it is a new one.

    Raises:
        EpochChanged: a newer epoch is open.
        VersionConflict: a step that is not after the last, or that another rank has passed; a rank that is another
            node's or has sealed, or absent ones.
    """
    ranks = set(ranks)
    _check_current(job, node, epoch, ranks)
    if job.absent:
        text = f"{job.name}: {describe_ranks(job.absent)} of {job.world_size} has not registered in epoch {epoch}"
        raise VersionConflict(text, {"absent": job.absent})
    if step <= job.high:
        held = describe_keys(version.key for version in job.listed())
        raise VersionConflict(f"{job.name}: step {step} is not after step {job.high} of epoch {epoch}; {held}")
    _leave_other_steps(job, step, ranks)
    attempt = job.attempts.get(step)
    if attempt is not None and (anew := ranks & attempt.pieces.keys() - attempt.sealed.keys()):
        abort_attempt(job, attempt, f"{describe_ranks(anew)} began it anew")  # others may have what was there before
        attempt = None
    if attempt is None:
        if len(job.attempts) >= MAX_ATTEMPTS:
            raise BudgetExceeded(f"{job.name}: {MAX_ATTEMPTS} steps are being written already; abort some")
        attempt = job.attempts[step] = Attempt(number, epoch, step)
    done = ranks & attempt.sealed.keys()
    if done:
        raise VersionConflict(f"{job.name}: {describe_ranks(done)} has sealed step {step}; abort it to write it again")
    attempt.begun |= dict.fromkeys(ranks, node)
    return attempt


def seal(
    job: Job, node: str, epoch: int, step: int, number: int, pieces: Mapping[int, Piece], first: int
) -> Version | None:
    """These ranks' bytes are complete; the version, if they were the last. Repeating it is harmless.

    ``first``: the lowest attempt that this MetaServer's process may have given out itself; one before it is taken up
    again as its nodes tell of it.

    Raises:
        EpochChanged: a newer epoch is open.
        VersionConflict: the attempt was aborted, or a rank is not this node's.
    """
    if job.attempt_of((epoch, step)) == number:
        return None
    ranks = set(pieces)
    _check_current(job, node, epoch, ranks)
    attempt = job.attempts.get(step)
    if attempt is None or attempt.number != number:
        attempt = _taken_up(job, step, number, attempt, first)
    for rank, piece in pieces.items():
        if attempt.sealed.get(rank, piece) != piece:
            raise VersionConflict(f"{job.name}: rank {rank} has sealed attempt {number} with other bytes")
    attempt.begun |= dict.fromkeys(ranks, node)
    attempt.sealed.update(pieces)
    if len(attempt.sealed) < job.world_size:
        return None
    return _commit(job, attempt)


def foretell(job: Job, node: str, epoch: int, step: int, number: int, pieces: Mapping[int, Piece]) -> bool:
    """What these ranks will seal, which others may fetch as it is written; True once that is known of all ranks.

    Of an attempt that is over, or was taken up again, it is of no use, and harmless.

    Raises:
        EpochChanged: a newer epoch is open.
        VersionConflict: a rank is not this node's, or has said otherwise.
    """
    _check_current(job, node, epoch, pieces)
    attempt = job.attempts.get(step)
    if attempt is None or attempt.number != number or any(attempt.begun.get(rank) != node for rank in pieces):
        return False
    for rank, piece in pieces.items():
        if attempt.pieces.get(rank, piece) != piece:
            raise VersionConflict(f"{job.name}: rank {rank} writes other bytes in attempt {number} than it has told")
    attempt.pieces.update(pieces)
    if attempt.coming is not None or len(attempt.pieces) < job.world_size:
        return False
    attempt.coming = _coming(job, attempt)
    return True


def foretell_local(job: Job, node: str, told: Iterable[Held]) -> bool:
    """All that the node that has all writers lets others fetch while it is written; whether that has changed.

    What it does not tell any more is over: committed, as its versions say, or aborted.
    """
    wanted = {
        held.key[1]: held
        for held in told
        if held.key[0] == job.epoch and held.key[1] > job.high and len(held.pieces) == job.world_size
    }
    before = _local(job, node)
    for attempt in before:
        held = wanted.get(attempt.step)
        if held is None or (held.attempt, dict(held.pieces)) != (attempt.number, attempt.pieces):
            abort_attempt(job, attempt, f"it is over on node {node}")
    for step, held in wanted.items():
        if step not in job.attempts:
            begun, pieces = dict.fromkeys(held.pieces, node), dict(held.pieces)
            attempt = Attempt(held.attempt, job.epoch, step, begun, pieces=pieces, local=True)
            attempt.coming = _coming(job, attempt)
            job.attempts[step] = attempt
    return before != _local(job, node)


def abort(job: Job, node: str, epoch: int, step: int, number: int | None, reason: str) -> bool:
    """Discards the attempt on every rank; whether there was one. One that is committed stays.

    Raises:
        EpochChanged: a newer epoch is open.
        VersionConflict: it is committed.
    """
    if number is not None and job.attempt_of((epoch, step)) == number:
        raise VersionConflict(f"{job.name}: epoch {epoch} step {step} is committed; roll it back instead")
    _check_current(job, node, epoch, ())
    attempt = job.attempts.get(step)
    if attempt is None or number not in (None, attempt.number):
        return False
    abort_attempt(job, attempt, reason)
    return True


def roll_back(job: Job, step: int) -> list[Version]:
    """Withdraws what is newer than that step of the current epoch; its steps are not used again.

    Raises:
        VersionUnavailable: there is no such version.
    """
    if (job.epoch, step) not in job.versions:
        held = describe_keys(version.key for version in job.listed())
        raise VersionUnavailable(f"{job.name}: no version of epoch {job.epoch} step {step}; {held}")
    gone = [version for key, version in job.versions.items() if key > (job.epoch, step)]
    for version in gone:
        del job.versions[version.key]
        job.committed.pop(version.key, None)
        remember_abort(job, version.attempt, f"rolled back to step {step}")
    abort_all(job, f"rolled back to step {step}")
    return gone


def withdraw(job: Job, attempts: Collection[int], why: str) -> list[VersionKey]:
    """The node that decides has taken back what it had committed in these attempts; the steps stay used."""
    gone = [key for key, (attempt, _) in job.committed.items() if attempt in attempts]
    for key in gone:
        job.versions.pop(key, None)
        remember_abort(job, job.committed.pop(key)[0], why)
    for attempt in attempts:
        if attempt not in job.aborted:  # before this process was started; somebody may ask for it yet
            remember_abort(job, attempt, why)
    return gone


def take_over(version: Version, attempt: Attempt) -> None:
    """If it was committed in that attempt, who fetches it goes on."""
    coming = attempt.coming
    if coming is not None and (coming.attempt, coming.pieces) == (version.attempt, version.pieces):
        version.fetching, version.parts = coming.fetching, coming.parts
        version.whole, version.asked = coming.whole, coming.asked


def abort_all(job: Job, why: str) -> None:
    for attempt in list(job.attempts.values()):
        abort_attempt(job, attempt, why)


def abort_attempt(job: Job, attempt: Attempt, why: str) -> None:
    del job.attempts[attempt.step]
    if not attempt.local:
        remember_abort(job, attempt.number, why)


def remember_abort(job: Job, number: int, why: str) -> None:
    job.aborted[number] = why
    while len(job.aborted) > REMEMBERED_ABORTS:
        job.aborted.popitem(last=False)


def remember_commit(job: Job, version: Version) -> None:
    """Lists a version as committed; the oldest are forgotten."""
    job.versions[version.key] = version
    job.committed[version.key] = version.attempt, version.world_size
    while len(job.committed) > MAX_VERSIONS:
        del job.committed[min(job.committed)]
    if version.key[0] == job.epoch:
        job.high = max(job.high, version.key[1])
    trim(job)


def trim(job: Job) -> None:
    """Versions that nobody has go, but for the newest: a node may come back with it."""
    for version in job.listed()[1:]:
        if not version.holders:
            del job.versions[version.key]
    for version in job.listed()[MAX_VERSIONS:]:
        del job.versions[version.key]


def epoch_changed(job: Job, seen: int) -> EpochChanged:
    """The error for a caller who last saw epoch ``seen``."""
    step = job.high if job.high >= 0 else None
    return EpochChanged(
        f"{job.name} is in epoch {job.epoch} now, not in epoch {seen}", {"epoch": job.epoch, "step": step}
    )


def _commit(job: Job, attempt: Attempt) -> Version:
    key, pieces = (attempt.epoch, attempt.step), dict(sorted(attempt.sealed.items()))
    version = Version(key, attempt.number, job.world_size, pieces, _holders(attempt, pieces))
    take_over(version, attempt)
    del job.attempts[attempt.step]
    remember_commit(job, version)
    for older in [other for other in job.attempts.values() if other.step < attempt.step]:
        abort_attempt(job, older, f"step {attempt.step} was committed first")
    return version


def _local(job: Job, node: str) -> list[Attempt]:
    """What that node alone decides."""
    return [attempt for attempt in job.attempts.values() if attempt.local and node in attempt.begun.values()]


def _coming(job: Job, attempt: Attempt) -> Version:
    key, pieces = (attempt.epoch, attempt.step), dict(sorted(attempt.pieces.items()))
    holders = _holders(attempt, pieces)
    return Version(key, attempt.number, job.world_size, pieces, holders, whole=dict(holders))


def _holders(attempt: Attempt, ranks: Iterable[int]) -> dict[str, frozenset[int]]:
    """Of these ranks, which each node has."""
    holders: dict[str, set[int]] = {}
    for rank in ranks:
        holders.setdefault(attempt.begun[rank], set()).add(rank)
    return {node: frozenset(found) for node, found in holders.items()}


def _taken_up(job: Job, step: int, number: int, current: Attempt | None, first: int) -> Attempt:
    """An attempt of the MetaServer before this one, as a node tells of it; the later of two is the one that counts."""
    why = job.aborted.get(number)
    if why is None and step <= job.high:
        why = f"step {job.high} of epoch {job.epoch} is committed"
    if why is None and current is not None and current.number > number:
        why = f"attempt {current.number} at step {step} came after it"
    if why is not None or number >= first:
        text = why or "it is not known here"
        raise VersionConflict(f"{job.name}: attempt {number} at step {step} is over: {text}; publish it again")
    if current is not None:
        abort_attempt(job, current, f"attempt {number} at step {step} came after it")
    if len(job.attempts) >= MAX_ATTEMPTS:
        raise BudgetExceeded(f"{job.name}: {MAX_ATTEMPTS} steps are being written already; abort some")
    attempt = job.attempts[step] = Attempt(number, job.epoch, step)
    return attempt


def _leave_other_steps(job: Job, step: int, ranks: set[int]) -> None:
    """A rank writes one step at a time, and goes forward: what it leaves unsealed behind it can no longer commit."""
    this = job.attempts.get(step)
    for attempt in job.attempts.values():
        ahead = attempt.begun.keys() - ranks - (this.sealed.keys() if this else set())
        if attempt.step > step and ahead:
            raise VersionConflict(
                f"{job.name}: {describe_ranks(ahead)} went on to step {attempt.step} without sealing step {step}: "
                "it can no longer commit"
            )
    for attempt in list(job.attempts.values()):
        unsealed, sealed = ranks - attempt.sealed.keys(), ranks & attempt.sealed.keys()
        if attempt.step < step and unsealed:
            abort_attempt(job, attempt, f"{describe_ranks(unsealed)} went on to step {step} without sealing it")
        elif attempt.step > step and (sealed or ranks & attempt.begun.keys()):
            abort_attempt(job, attempt, f"{describe_ranks(sealed or ranks)} went back to step {step}")


def _check_current(job: Job, node: str, epoch: int, ranks: Iterable[int]) -> None:
    if epoch != job.epoch:
        raise epoch_changed(job, epoch)
    foreign = [rank for rank in ranks if rank not in job.members or job.members[rank].node != node]
    if foreign:
        raise VersionConflict(f"{job.name}: {describe_ranks(foreign)} is not registered on node {node}")


def _check_free(job: Job, holders: Mapping[int, Member], members: Mapping[int, Member]) -> None:
    """A node itself replaces its processes; it cannot take another node's rank."""
    for rank, member in members.items():
        if rank in holders and holders[rank].node != member.node:
            raise VersionConflict(f"{job.name}: rank {rank} is registered on node {holders[rank].node}, which lives")


def _same(one: Member | None, other: Member) -> bool:
    return one is not None and one[:2] == other[:2]
