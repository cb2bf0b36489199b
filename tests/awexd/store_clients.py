"""A store without a daemon: sessions, the slots that a daemon would make, and an injected clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from awexd.store import Segment, Store, Version, Wait
from awexd.store.ledger import Session
from awexd.store.model import Job, Lease, SegmentState
from awexd.store.slots import Shortfall
from awexd.store.writing import Begun

JOB = "root/j"
NBYTES = 4096


def digest(text: str) -> str:
    """A name in the form of a digest, readable in a failure."""
    return text.encode().hex().ljust(64, "0")[:64]


@dataclass
class World:
    """One store and its clock, and what a daemon would have done for it."""

    store: Store = field(default_factory=Store)
    now: float = 1000.0
    unlinked: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def job(self) -> Job:
        return self.store.jobs[JOB]

    def session(self) -> Session:
        number = next(self._numbers)
        session = Session(f"s{number}", 1000 + number, 0)
        self.store.open_session(session)
        return session

    def end(self, session: Session, *, unmapped: bool = True) -> None:
        self.store.end_session(session.id, unmapped=unmapped, why="it ended", now=self.now)
        self.drain()

    def drain(self) -> set[str]:
        """What the daemon does after each call; the jobs whose waiters it wakes."""
        self.cleared += [segment.id for segment in self.store.to_clear]
        self.unlinked += [segment.id for segment in self.store.to_unlink]
        touched = set(self.store.touched)
        for effects in (self.store.to_clear, self.store.to_unlink):
            effects.clear()
        self.store.touched.clear()
        return touched

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)
        self.drain()

    def make(self, shortfall: Shortfall) -> None:
        for _ in range(shortfall.slots):
            segment = Segment(f"m{next(self._numbers)}", shortfall.rank, shortfall.nbytes)
            self.store.add_segment(self.job, segment)

    def held(self) -> list[tuple[int, int]]:
        return [version.key for version in self.job.held()]


class Trainer:
    """One training process."""

    def __init__(self, world: World, rank: int = 0, size: int = 1, *, keep: int = 2, nbytes: int = NBYTES) -> None:
        self.world, self.rank, self.size, self.keep, self.nbytes = world, rank, size, keep, nbytes
        self.session = world.session()
        self.set = ""

    def register(self, epoch: int | str = "continue", *, manifest: str = "w") -> bool:
        store = self.world.store
        job = store.job_for(JOB, 0, 0.0)
        named = digest(f"{manifest}{self.rank}")
        return store.register_writer(
            self.session, job, self.rank, named, world_size=self.size, epoch=epoch, keep=self.keep
        )

    def reserve(self) -> None:
        outcome = self.world.store.ready(self.session)
        assert not isinstance(outcome, Wait), outcome
        self.set = outcome[0]
        segment_digest = digest(f"segment{self.rank}")
        self.world.make(self.world.store.reserve(self.session, self.set, segment_digest, self.nbytes))
        self.world.drain()

    def try_begin(self, step: int) -> Begun | Wait:
        while True:
            outcome = self.world.store.begin(self.session, step, self.set)
            self.world.drain()
            if not isinstance(outcome, Shortfall):
                if isinstance(outcome, Begun):
                    self.world.store.opened(self.session, outcome.segment)
                return outcome
            self.world.make(outcome)

    def begin(self, step: int) -> Begun:
        outcome = self.try_begin(step)
        assert isinstance(outcome, Begun), outcome
        return outcome

    def seal(self, begun: Begun) -> Version | None:
        attempt = begun.attempt
        segment = self.world.store.check_seal(self.session, attempt.epoch, attempt.step, attempt.number)
        version = self.world.store.seal(self.session, attempt.step, False) if segment else None
        self.world.drain()
        return version

    def try_grant(self) -> Segment | Wait:
        while True:
            outcome = self.world.store.grant(self.session)
            self.world.drain()
            if not isinstance(outcome, Shortfall):
                if isinstance(outcome, Segment):
                    self.world.store.opened(self.session, outcome)
                return outcome
            self.world.make(outcome)

    def grant(self) -> Segment:
        outcome = self.try_grant()
        assert isinstance(outcome, Segment), outcome.reason
        return outcome

    def try_publish_filled(self, step: int, slot: str) -> Begun | Wait | int:
        """What the daemon does for ``write.publish``; the attempt's number where it was done before."""
        store = self.world.store
        try:
            done = store.sealed_in(self.session, step, slot)
            if done is not None:
                return done
            outcome = store.begin_filled(self.session, step, self.set, slot)
            if isinstance(outcome, Begun):
                store.seal(self.session, step, False)
            return outcome
        finally:
            self.world.drain()

    def publish_filled(self, step: int) -> Begun:
        """Into a slot that is granted first."""
        outcome = self.try_publish_filled(step, self.grant().id)
        assert isinstance(outcome, Begun), outcome
        return outcome

    def abort(self, begun: Begun, reason: str = "no reason") -> None:
        self.world.store.abort(self.session, begun.attempt.step, begun.attempt.number, reason)
        self.world.drain()

    def committed(self, begun: Begun) -> Wait | None:
        attempt = begun.attempt
        return self.world.store.committed(self.session, attempt.epoch, attempt.step, attempt.number)

    def publish(self, step: int) -> Version | None:
        return self.seal(self.begin(step))

    def end(self, *, unmapped: bool = True) -> None:
        self.world.end(self.session, unmapped=unmapped)


class Engine:
    """One inference process."""

    def __init__(self, world: World, rank: int = 0, size: int = 1, name: str = "e") -> None:
        self.world, self.rank, self.size, self.name = world, rank, size, name
        self.session = world.session()

    def register(self, version: tuple[int, int] | None = None) -> None:
        job = self.world.store.job_for(JOB, 0, 0.0)
        self.world.store.register_worker(
            self.session,
            job,
            self.name,
            self.rank,
            world_size=self.size,
            digest=digest(f"r{self.rank}"),
            version=version,
        )
        self.world.drain()

    def try_resolve(self, step: int | None = None, seconds: float = 60.0, *, stage: bool = False) -> Wait | Lease:
        outcome = self.world.store.resolve(self.session, step, seconds, stage, self.world.now)
        self.world.drain()
        if isinstance(outcome, Wait):
            return outcome
        for segment_id in outcome.version.segments:
            self.world.store.opened(self.session, self.world.job.segments[segment_id])
        return outcome.lease

    def resolve(self, step: int | None = None, seconds: float = 60.0, *, stage: bool = False) -> Lease:
        outcome = self.try_resolve(step, seconds, stage=stage)
        assert isinstance(outcome, Lease), outcome
        return outcome

    def confirm(self, lease: Lease) -> tuple[int, int]:
        try:
            confirmed = self.world.store.confirm(self.session, lease.id, self.world.now)
            assert not isinstance(confirmed, Wait), confirmed
            return confirmed
        finally:
            self.world.drain()

    def release(self, lease: Lease, *, dirty: bool = False) -> None:
        self.world.store.release(self.session, lease.id, dirty)
        self.world.drain()

    def update(self, step: int | None = None) -> tuple[int, int]:
        return self.confirm(self.resolve(step))

    def end(self, *, unmapped: bool = True) -> None:
        self.world.end(self.session, unmapped=unmapped)


def trainers(world: World, size: int, *, epoch: int | str = "continue", keep: int = 2) -> list[Trainer]:
    """A registered trainer of that many ranks, with slots."""
    ranks = [Trainer(world, rank, size, keep=keep) for rank in range(size)]
    for trainer in ranks:
        trainer.register(epoch)
    for trainer in ranks:
        trainer.reserve()
    return ranks


def engines(world: World, size: int, name: str = "e") -> list[Engine]:
    """A registered engine of that many workers."""
    workers = [Engine(world, rank, size, name) for rank in range(size)]
    for worker in workers:
        worker.register()
    return workers


def check(world: World) -> None:
    """What must hold after every call, whatever came before."""
    store = world.store
    for job in store.jobs.values():
        _check_versions(job)
        _check_slots(job, store)
    for lease in store.leases.values():
        version = store.jobs[lease.job].versions[lease.key]
        assert lease.id in version.leases
        assert not lease.session or lease.id in store.sessions[lease.session].leases
    assert all(lease in store.leases for session in store.sessions.values() for lease in session.leases)


def _check_versions(job: Job) -> None:
    for version in job.versions.values():
        segments = [job.segments[segment_id] for segment_id in version.segments]
        assert [segment.rank for segment in segments] == list(range(len(segments)))
        assert all(segment.state is SegmentState.HELD for segment in segments), version
        assert tuple(segment.digest for segment in segments) == version.digests
        assert all(version.digests), f"{version} follows no manifest"
        assert version.key[0] < job.epoch or version.key[1] <= job.high
    used = [segment_id for version in job.versions.values() for segment_id in version.segments]
    assert len(used) == len(set(used)), "two versions share a segment"
    assert len(job.held()) <= max(job.keep, 1)


def _check_slots(job: Job, store: Store) -> None:
    in_versions = {segment_id for version in job.versions.values() for segment_id in version.segments}
    in_attempts = [segment_id for attempt in job.attempts.values() for segment_id in attempt.segments.values()]
    assert len(in_attempts) == len(set(in_attempts)), "two attempts share a segment"
    for attempt in job.attempts.values():
        for rank, segment_id in attempt.segments.items():
            segment = job.segments[segment_id]
            wanted = SegmentState.SEALED if rank in attempt.sealed else SegmentState.WRITING
            assert segment.state is wanted, f"rank {rank}'s slot of step {attempt.step} is {segment.state}"
            assert segment.digest
    for segment in job.segments.values():
        assert (segment.state is SegmentState.HELD) == (segment.id in in_versions), segment
        assert segment.state is not SegmentState.SEALED or segment.id in in_attempts
        assert segment.users <= store.sessions.keys(), "an ended session still maps it"
        if segment.state is SegmentState.FREE:
            assert not segment.unsafe, "a free slot that may never be reused"
        if segment.state is SegmentState.WRITING:
            assert segment.users & store.sessions.keys() or segment.rank in job.writers, "nobody writes it"
    for rank in {segment.rank for segment in job.segments.values()}:
        # A slot that may never be reused is about to be replaced.
        sizes = [segment.nbytes for segment in job.slots(rank) if not segment.unsafe]
        for nbytes in set(sizes):
            assert sizes.count(nbytes) <= job.keep + 1, f"rank {rank} has {sizes.count(nbytes)} slots of {nbytes}"
