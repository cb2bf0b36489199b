"""Memory that a trainer holds through us because it has let go of its own: parcels, and versions that are pinned.

Neither expires. They belong to the job: they outlive their session and this daemon, and end by ``drop`` and ``unpin``,
or with the job. Functions over the ledger, without I/O.
"""

from __future__ import annotations

from awexd.store.ledger import Ledger, Session
from awexd.store.model import Job, Parcel, ParcelState, Segment, Version, VersionKey, Writer, describe_ranks
from awexd_transports.errors import VersionConflict, VersionUnavailable


def begin(ledger: Ledger, job: Job, session: Session, rank: int, name: str, nbytes: int) -> Parcel | None:
    """The parcel to be filled, where that session has memory for it; None: it is to be made, then ``add`` it.

    Raises:
        VersionConflict: there is one of that name, or another process fills it.
    """
    known = job.parcels.get((rank, name))
    if known is None:
        return None
    if known.state is ParcelState.PINNED:
        raise VersionConflict(
            f"{job.name}: rank {rank} has parked {name!r} already (process {known.pid}): "
            "restore it, or discard it, first"
        )
    if known.session != session.id and known.session in ledger.sessions:
        raise VersionConflict(f"{job.name}: process {known.pid} is parking {name!r} of rank {rank}")
    if known.session == session.id and known.segment.nbytes == nbytes:
        known.state = ParcelState.OPEN
        return known
    _end(ledger, job, known)
    return None


def add(ledger: Ledger, job: Job, session: Session, rank: int, name: str, segment: Segment) -> Parcel:
    """Takes memory that was made for a parcel.

    Raises:
        VersionConflict: its client or its job has gone meanwhile, or somebody else was faster: the memory is not taken.
    """
    if ledger.jobs.get(job.name) is not job or ledger.sessions.get(session.id) is not session:
        raise VersionConflict(f"{job.name}: whoever parked {name!r} went away while memory was reserved for it")
    begin(ledger, job, session, rank, name, -1)
    parcel = job.parcels[rank, name] = Parcel(name, rank, segment, session.id, session.pid)
    ledger.touched.add(job.name)
    return parcel


def find(job: Job | None, session: Session, rank: int, name: str) -> Parcel:
    """A parcel that may be read: one that is pinned; or filled: one of this session.

    Raises:
        VersionUnavailable: there is none; says which there are.
    """
    parcel = job.parcels.get((rank, name)) if job else None
    if parcel is not None and (parcel.state is ParcelState.PINNED or parcel.session == session.id):
        return parcel
    known = [p.name for p in job.parcels.values() if p.rank == rank and p.state is ParcelState.PINNED] if job else []
    where, listed = job.name if job else "this job", ", ".join(map(repr, sorted(known)))
    raise VersionUnavailable(f"{where}: rank {rank} has parked nothing as {name!r}; parked: {listed or 'nothing'}")


def to_seal(job: Job | None, session: Session, rank: int, name: str, segment: str) -> Parcel:
    """The parcel whose bytes are all there now.

    Raises:
        VersionConflict: it went with the daemon before, or was given up.
    """
    parcel = job.parcels.get((rank, name)) if job else None
    if parcel is not None and parcel.segment.id == segment:
        own = parcel.session == session.id and parcel.state is ParcelState.OPEN
        if own or parcel.state is ParcelState.PINNED:
            return parcel
    raise VersionConflict(f"what was being parked as {name!r} was given up, or went with the daemon", {"retry": True})


def drop(ledger: Ledger, job: Job, session: Session, rank: int, name: str, segment: str | None, keep: bool) -> bool:
    """Ends a parcel, whatever its state; True if its memory stays as this session's, for the next one of that name.

    Args:
        segment: only if it still is that one; None: whichever it is.
    """
    parcel = job.parcels.get((rank, name))
    if parcel is None or segment not in (None, parcel.segment.id):
        return False
    ledger.to_clear.append(parcel.segment)
    ledger.touched.add(job.name)
    if keep and session.id in parcel.segment.users:
        parcel.state, parcel.session, parcel.pid = ParcelState.SPARE, session.id, session.pid
        return True
    _end(ledger, job, parcel)
    return False


def end_session(ledger: Ledger, session: Session) -> None:
    """What that session had not finished, or had kept for later, goes."""
    for job in (ledger.jobs[name] for name in session.parks if name in ledger.jobs):
        for parcel in list(job.parcels.values()):
            if parcel.session == session.id and parcel.state is not ParcelState.PINNED:
                _end(ledger, job, parcel)


def end_all(ledger: Ledger, job: Job) -> None:
    """With its job."""
    job.pins.clear()
    for parcel in list(job.parcels.values()):
        _end(ledger, job, parcel)


def give_up_spares(ledger: Ledger) -> bool:
    """Gives memory back that is only kept for later; True if there was any."""
    spares = [(job, p) for job in ledger.jobs.values() for p in job.parcels.values() if p.state is ParcelState.SPARE]
    for job, parcel in spares:
        _end(ledger, job, parcel)
    return bool(spares)


def parked_nbytes(ledger: Ledger) -> int:
    return sum(parcel.segment.nbytes for job in ledger.jobs.values() for parcel in job.parcels.values())


def pin(job: Job, writer: Writer, key: VersionKey) -> Version:
    """Keeps a version, whatever is published later, until ``unpin``. Repeating it is harmless.

    Raises:
        VersionUnavailable: it is not held, or not all of it.
        VersionConflict: the rank has pinned another one.
    """
    other = pinned_by(job, writer.rank)
    if other is not None:
        if other.key == key:
            return other
        raise VersionConflict(
            f"{job.name}: rank {writer.rank} has offloaded into {other} already: restore() or discard() first"
        )
    version = job.held_of(*key)
    if version is None or version.part is not None:
        how = "not held" if version is None else "held in part"
        raise VersionUnavailable(f"{job.name}: epoch {key[0]} step {key[1]} is {how}; {job.describe_held()}")
    job.pins.setdefault(key, set()).add(writer.rank)
    return version


def pinned_by(job: Job, rank: int) -> Version | None:
    """The version that this rank has pinned."""
    return next((job.versions[key] for key, ranks in job.pins.items() if rank in ranks and key in job.versions), None)


def unpin(ledger: Ledger, job: Job, rank: int) -> bool:
    """Ends what this rank has pinned; True if it had."""
    mine = [key for key, ranks in job.pins.items() if rank in ranks]
    for key in mine:
        job.pins[key].discard(rank)
        if not job.pins[key]:
            del job.pins[key]
    if mine:
        ledger._settle(job)
    return bool(mine)


def check_unpinned(job: Job, keys: list[VersionKey]) -> None:
    """Versions that are somebody's only copy are not withdrawn.

    Raises:
        VersionConflict: names who has pinned one.
    """
    for key in keys:
        if key in job.pins:
            raise VersionConflict(
                f"{job.name}: {job.versions[key]} is the only copy of the weights of {describe_ranks(job.pins[key])}, "
                "which offloaded them: restore() or discard() them first"
            )


def adopt(ledger: Ledger, job: Job, rank: int, name: str, segment: Segment) -> None:
    """Takes over a parcel that was pinned by way of a former daemon."""
    job.parcels[rank, name] = Parcel(name, rank, segment, "", 0, ParcelState.PINNED)
    ledger.touched.add(job.name)


def _end(ledger: Ledger, job: Job, parcel: Parcel) -> None:
    del job.parcels[parcel.rank, parcel.name]
    for session_id in parcel.segment.users:
        if session_id in ledger.sessions:
            ledger.sessions[session_id].to_drop.add(parcel.segment.id)
    ledger.to_unlink.append(parcel.segment)
    ledger.touched.add(job.name)
