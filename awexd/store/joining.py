"""Trainers whose ranks may be on several nodes: they gather here, and what the MetaServer decides is carried out.

A rank whose fellows are not all here waits in the job's rendezvous. If the others come here too, this node decides by
itself, as for any job of one node. If they turn up on other nodes, the job is *joined*: from then on its ranks, epochs,
attempts and commits are the MetaServer's, which tells every node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from awexd.store import registering, slots, writing
from awexd.store.elsewhere import Joined, Mirror
from awexd.store.ledger import Ledger
from awexd.store.model import (
    Attempt,
    Job,
    Rendezvous,
    Segment,
    SegmentState,
    Version,
    VersionKey,
    Writer,
    set_digest_of,
)
from awexd_transports.errors import AwexdError, InvalidArgument, VersionConflict


def arrive(job: Job, writer: Writer, world_size: int, epoch: int | str, keep: int, after: int | None) -> bool:
    """As :func:`registering.register`, of a job that this node does not decide alone (yet).

    Raises:
        InvalidArgument, VersionConflict, EpochChanged: as there.
    """
    if writer.rank >= world_size:
        raise InvalidArgument(f"rank {writer.rank} in a world of {world_size}")
    if isinstance(epoch, int) and epoch != job.epoch:
        raise registering.epoch_changed(job, epoch)
    if job.joined is not None and (error := _unfit(job, writer)) is not None:
        raise error
    again = registering.already_in(job, writer) or (epoch == "new" and after is not None and job.epoch > after)
    writer.asked, writer.after = (job.epoch, None) if again and job.epoch else (epoch, after)
    registering.leave_rendezvous(job, writer)
    if writer.asked != "new":
        registering.check_size(job, world_size)
        registering.check_free(job.writers, writer, job.name)
    pending = job.pending or Rendezvous(world_size, keep, writer.mode)
    _check_alike(job, pending, writer, world_size, keep)
    registering.check_free(pending.writers, writer, job.name)
    job.pending = pending
    pending.writers[writer.rank] = writer
    elsewhere = job.mirror is not None and job.mirror.nodes
    if pending.absent or job.joined is not None or elsewhere:
        return False
    return _decide(job, pending)


def _check_alike(job: Job, pending: Rendezvous, writer: Writer, world_size: int, keep: int) -> None:
    if (pending.world_size, pending.keep, pending.mode) != (world_size, keep, writer.mode):
        raise VersionConflict(
            f"{job.name}: its ranks disagree: world_size {pending.world_size} keep {pending.keep} mode {pending.mode}, "
            f"and world_size {world_size} keep {keep} mode {writer.mode}"
        )
    others = [other for other in pending.writers.values() if (other.asked == "new") != (writer.asked == "new")]
    if job.epoch and others:
        new = writer.rank if writer.asked == "new" else others[0].rank
        old = others[0].rank if writer.asked == "new" else writer.rank
        raise VersionConflict(
            f'{job.name}: rank {new} asked for a new epoch, rank {old} did not: all ranks or none pass epoch="new"'
        )


def _decide(job: Job, pending: Rendezvous) -> bool:
    """All ranks are here."""
    job.alone = True
    if not job.epoch or any(writer.asked == "new" for writer in pending.writers.values()):
        registering.open_epoch(job, pending)
        return True
    job.keep, job.writers, job.pending = pending.keep, pending.writers, None
    return False


def _unfit(job: Job, writer: Writer) -> InvalidArgument | None:
    """Why a rank's mode is none for a job that spans nodes."""
    if writer.mode not in ("direct", "nccl"):
        return None
    what = 'transport="nccl"' if writer.mode == "nccl" else 'mode="direct"'
    return InvalidArgument(
        f"{job.name}: its ranks are on several nodes, where {what} does not work: versions go through host memory; "
        'pass mode="auto" or mode="host", and no transport, to all ranks'
    )


class Joining(Ledger):
    """What is done to joined jobs on the word of the MetaServer.

    ``clustered``: there is one; a job whose ranks are not all here may be a joined one.
    """

    clustered = False

    def spread(self, job: Job) -> Joined:
        """Other ranks of this job are on other nodes: it is joined from now on."""
        if job.joined is None:
            job.joined, job.alone = Joined(), False
            job.mirror = job.mirror or Mirror()
            for writer in job.pending.writers.values() if job.pending is not None else ():
                writer.refused = _unfit(job, writer)
            self._settle(job)
        return job.joined

    def leave_joined(self, job: Job) -> bool:
        """Whether nothing of its trainer is here any more: then it is decided elsewhere, like any mirrored job."""
        own = any(not segment.mirrored for segment in job.segments.values())
        if job.joined is None or job.writers or job.pending or own or job.attempts:
            return False
        job.joined = None
        self.touched.add(job.name)
        return True

    def open_joined(self, job: Job, epoch: int) -> None:
        """That epoch has been opened, of which no rank of this node is known to be yet."""
        for step in list(job.attempts):
            slots.abort(job, step, f"epoch {epoch} was opened", told=True)
        for segment in job.segments.values():
            if segment.writable:
                segment.unsafe = True  # a process of the old epoch may hang in the middle of it
        job.epoch, job.high, job.choice, job.returned = epoch, -1, None, None
        job.writers = {}
        if job.mirror is not None:
            job.mirror.asked.clear()
        if job.joined is not None:
            job.joined.ranks = {}
        self._settle(job)

    def admit(self, job: Job, epoch: int, world_size: int, keep: int, writers: Iterable[Writer]) -> None:
        """These ranks of the rendezvous are in that epoch now."""
        if epoch != job.epoch:
            self.open_joined(job, epoch)
        job.world_size, job.keep = world_size, keep
        for writer in writers:
            previous = job.writers.get(writer.rank)
            job.writers[writer.rank] = writer
            writer.asked = epoch
            if job.pending is not None and job.pending.writers.get(writer.rank) is writer:
                del job.pending.writers[writer.rank]
            if previous is not None and previous is not writer:
                slots.abort_unsealed(job, previous, f"rank {writer.rank} registered anew")
            for segment in job.slots(writer.rank):
                segment.mirrored = False
        if job.pending is not None and not job.pending.writers:
            job.pending = None
        for segment in list(job.segments.values()):
            if segment.rank >= world_size and segment.state is SegmentState.FREE:
                self._unlink(job, segment)
        self._settle(job)

    def refuse(self, job: Job, writers: Iterable[Writer], error: AwexdError) -> None:
        """These ranks cannot take part: each is told with its next request."""
        for writer in writers:
            writer.refused = error
        self._settle(job)

    def know_ranks(self, job: Job, ranks: dict[int, str], absent: tuple[int, ...]) -> None:
        """The manifests of all ranks of the epoch, which are here; or which ranks have not registered yet."""
        joined = job.joined
        if joined is not None and (joined.ranks, joined.absent) != (ranks, absent):
            joined.ranks, joined.absent = ranks, absent
            self._settle(job)

    def begin_joined(self, job: Job, step: int, number: int) -> None:
        """The MetaServer's attempt at that step is ``number``; another of that step is over."""
        attempt = job.attempts.get(step)
        if attempt is not None and attempt.number != number:
            slots.abort(job, step, f"attempt {number} came after it", told=True)
            self._settle(job)

    def commit_joined(self, job: Job, attempt: Attempt) -> Version | None:
        """Every rank on every node has sealed it; None where that is known already, or not all of it is here."""
        if job.attempts.get(attempt.step) is not attempt or attempt.segments.keys() - attempt.sealed:
            return None
        version = writing.commit(job, attempt)
        for other in [step for step in job.attempts if step < attempt.step]:
            slots.abort(job, other, f"step {attempt.step} was committed first", told=True)
        self._settle(job)
        return version

    def abort_joined(self, job: Job, attempt: Attempt, why: str) -> None:
        """It was discarded on another node, or never will be committed."""
        if job.attempts.get(attempt.step) is attempt:
            slots.abort(job, attempt.step, why, told=True)
            self._settle(job)

    def confirm_adopted(self, job: Job, listed: dict[VersionKey, int]) -> list[Version]:
        """Of versions that were found after a restart: those that were never committed go. Returns them."""
        gone = []
        for version in [version for version in job.kept() if version.unsure]:
            if listed.get(version.key) == version.attempt:
                version.unsure, version.partial = False, len(version.segments) < job.world_size
                job.high = max(job.high, version.key[1]) if version.key[0] == job.epoch else job.high
                job.endings.commit(version.attempt, version.key)
            else:
                version.withdrawn = True
                why = "its daemon was restarted before every rank had sealed it"
                job.endings.abort(version.attempt, why, version.segments)
                gone.append(version)
        if gone:
            self._withdrawn(job)
        self._settle(job)
        return gone

    def complete(self, job: Job, version: Version, segments: Collection[Segment]) -> None:
        """The other nodes' ranks' segments of a partial version are here too: ``segments`` are all, by rank."""
        digests = tuple(segment.digest for segment in segments)
        version.segments, version.digests = tuple(segment.id for segment in segments), digests
        version.set_digest, version.nbytes = set_digest_of(digests), sum(segment.nbytes for segment in segments)
        version.partial = False
