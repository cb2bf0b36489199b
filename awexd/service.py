"""What each request does: access, the store's verdict, the I/O that follows from it, and the reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, Union

from awexd import access
from awexd.access import Peer
from awexd.allocator import Allocator
from awexd.background import Background, Signals
from awexd.config import Settings
from awexd.journal import Journal
from awexd.memory import Memory
from awexd.records import Records
from awexd.shelf import Shelf
from awexd.store import Segment, Store, Wait
from awexd.store.ledger import Session
from awexd.store.model import Job, SegmentState
from awexd.store.slots import Shortfall
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DeadlineExceeded,
    ProtocolError,
)
from awexd_transports.layout import digest_of
from awexd_transports.segment import HEADER_BYTES

Arguments = dict[str, Any]
_log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """A result and the descriptors that go with it."""

    result: dict[str, Any]
    fds: list[int] = []  # noqa: RUF012 - never changed


class Call(NamedTuple):
    """One request: who asks, its arguments and descriptors, when it came and when it must be answered (loop time)."""

    session: Session
    peer: Peer
    arguments: Arguments
    fds: list[int]
    began: float
    deadline: float


Outcome = Union[Reply, Wait, Coroutine[Any, Any, "Outcome"]]  # noqa: UP007 - it names itself
"""An answer; or not yet: ask again when that job has changed; or what has to wait for a disk or a thread first."""
Operation = Callable[[Call], Outcome]


class Service:
    """All operations of the socket, over one store."""

    def __init__(
        self, settings: Settings, store: Store, memory: Memory, journal: Journal, background: Background
    ) -> None:
        self.settings = settings
        self.store = store
        self.memory = memory
        self.shelf = Shelf(journal, background, store.jobs)
        self.records = Records(journal, background, store.jobs)
        self.background = background
        self.changes = Signals()
        self._settling = False
        self._allocator = Allocator(store, memory, background, self.settle)
        self._operations: dict[str, Operation] = {
            "write.register": self._write_register,
            "write.ready": self._write_ready,
            "write.reserve": self._write_reserve,
            "write.slot": self._write_slot,
            "write.publish": self._write_publish,
            "write.begin": self._write_begin,
            "write.seal": self._write_seal,
            "write.abort": self._write_abort,
            "write.committed": self._write_committed,
            "read.sources": self._read_sources,
            "read.register": self._read_register,
            "read.siblings": self._read_siblings,
            "read.resolve": self._read_resolve,
            "read.confirm": self._read_confirm,
            "read.release": self._read_release,
            "read.wait": self._read_wait,
            "segment.open": self._segment_open,
            "segment.closed": self._segment_closed,
        }

    def add(self, operations: dict[str, Operation]) -> None:
        """Adds operations that others carry out (see :mod:`awexd.report` and :mod:`awexd.control`)."""
        self._operations.update(operations)

    def perform(self, operation: str, call: Call) -> Outcome:
        """Carries out one request as far as it goes now.

        Raises:
            AwexdError: what the client is told.
        """
        try:
            return self._operations[operation](call)
        finally:
            self.settle()

    async def finish(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """The rest of a request that had to wait."""
        try:
            return await work
        finally:
            self.settle()

    def settle(self) -> None:
        """Carries out what the store has decided, and asks again for whoever waits for it.

        That may change the store once more: whoever is called back from here leaves it to this loop.
        """
        store = self.store
        if self._settling:
            return
        self._settling = True
        try:
            while store.to_clear or store.to_unlink or store.touched:
                self._carry_out()
        finally:
            self._settling = False
        self.background.by("leases", store.next_expiry(), self._expire)

    def _carry_out(self) -> None:
        store = self.store
        touched, store.touched = store.touched, set()
        for name in touched:
            self.changes.fire(name)  # first, since somebody waits for it
        for segment in store.to_clear:
            if not segment.sealed:
                self.memory.clear(segment.id)
        store.to_clear.clear()
        for segment in store.to_unlink:
            self.background.thread(self.memory.unlink, segment.id)
        store.to_unlink.clear()

    def end_session(self, session: Session, *, unmapped: bool, why: str) -> None:
        if session.writer:
            _log.info("job %s: writer rank %d left: %s", session.writer[0], session.writer[1].rank, why)
        elif session.worker:
            name, worker = session.worker
            _log.info("job %s: engine %s rank %d left: %s", name, worker.engine, worker.rank, why)
        self.store.end_session(session.id, unmapped=unmapped, why=why, now=time.monotonic())
        self.settle()
        self.watch_idle()
        if self.shelf.heavy:
            self.background.task(self.shelf.prune())

    def watch_idle(self) -> None:
        """Sets the timer for jobs that have become idle."""
        idle = [job.idle_since for job in self.store.jobs.values() if job.idle_since is not None]
        self.background.by("idle jobs", min(idle) + self.settings.job_ttl if idle else None, self._drop_idle_jobs)

    def _drop_idle_jobs(self) -> None:
        """Ends jobs that nobody has used for the time that the settings give them."""
        for job in self.store.idle_jobs(time.monotonic(), self.settings.job_ttl):
            _log.info("job %s was idle for %g s; closed", job.name, self.settings.job_ttl)
            self.close_job(job)
        self.settle()
        self.watch_idle()

    # training processes

    async def _write_register(self, call: Call) -> Reply:
        arguments = call.arguments
        name = access.qualify(arguments["job"], call.peer)
        access.check_write(name, call.peer)
        async with self._manifest(call):
            job = await self._place(call, name, arguments["rank"])
            opened = self.store.register_writer(
                call.session,
                job,
                arguments["rank"],
                arguments["digest"],
                world_size=arguments["world_size"],
                epoch=arguments["epoch"],
                after=arguments["after"],
                keep=arguments["keep"],
            )
        job.owner_uid = call.peer.uid
        if opened:
            self.settle()
            _log.info("job %s: epoch %d opened with %d ranks", name, job.epoch, job.world_size)
        await self.records.save_epoch(job)
        peer, rank, size = call.peer, arguments["rank"], arguments["world_size"]
        _log.info("job %s: writer rank %d of %d registered (process %d, uid %d)", name, rank, size, peer.pid, peer.uid)
        complete = not isinstance(self.store.ready(call.session), Wait)
        pending = self.store.is_pending(call.session)
        return Reply({"job": name, "epoch": job.epoch, "pending": pending, "complete": complete})

    def _write_ready(self, call: Call) -> Reply | Wait:
        job, _ = self.store.writer_of(call.session)
        ready = self.store.ready(call.session)
        if isinstance(ready, Wait):
            return ready
        set_digest, digests = ready
        own = [w for e in job.engines.values() for w in e.workers.values() if w.uid == call.peer.uid]
        engines = [[worker.engine, worker.rank, worker.digest] for worker in own]
        index, fd = self.shelf.bundle([*digests, *(worker.digest for worker in own)])
        body = {"epoch": job.epoch, "set": set_digest, "ranks": digests, "engines": engines, "bodies": index}
        return Reply(body, [fd])

    async def _write_reserve(self, call: Call) -> Reply:
        arguments = call.arguments
        job, writer = self.store.writer_of(call.session)
        async with self._manifest(call):
            self.store.reserve(call.session, arguments["set"], arguments["digest"], arguments["nbytes"])
        self.settle()
        await self._allocator.fill(job, writer.rank, call.deadline)
        return Reply({"slots": len(job.slots(writer.rank)), "lock_problem": self.memory.lock_problem})

    def _write_slot(self, call: Call) -> Outcome:
        job, _ = self.store.writer_of(call.session)
        granted = self.store.grant(call.session)
        if isinstance(granted, Wait):
            return granted
        if isinstance(granted, Shortfall):
            return self._filled(call, job, granted.rank, self._write_slot)
        self.memory.clear(granted.id)
        return Reply({"segment": granted.id})

    def _next_slot(self, session: Session) -> str | None:
        granted = self.store.grant(session)
        if not isinstance(granted, Segment):
            return None
        self.memory.clear(granted.id)
        return granted.id

    def _write_begin(self, call: Call) -> Outcome:
        job, _ = self.store.writer_of(call.session)
        begun = self.store.begin(call.session, call.arguments["step"], call.arguments["set"])
        if isinstance(begun, Wait):
            return begun
        if isinstance(begun, Shortfall):
            return self._filled(call, job, begun.rank, self._write_begin)
        self.memory.clear(begun.segment.id)
        return Reply({"attempt": begun.attempt.number, "epoch": job.epoch, "segment": begun.segment.id})

    async def _filled(self, call: Call, job: Job, rank: int, again: Operation) -> Outcome:
        await self._allocator.fill(job, rank, call.deadline)
        return again(call)

    def _write_seal(self, call: Call) -> Reply:
        job, _ = self.store.writer_of(call.session)
        epoch, step, attempt, checksums = (call.arguments[k] for k in ("epoch", "step", "attempt", "checksums"))
        segment = self.store.check_seal(call.session, epoch, step, attempt)
        if segment is not None:
            self._seal(call, job, segment, epoch, step, attempt, checksums)
        return Reply({"committed": self.store.committed(call.session, epoch, step, attempt) is None})

    def _write_publish(self, call: Call) -> Reply | Wait:
        """Begins and seals at once a slot that was granted and has been filled. Grants the next, if one is free."""
        job, _ = self.store.writer_of(call.session)
        step, set_digest, slot, checksums = (call.arguments[k] for k in ("step", "set", "segment", "checksums"))
        attempt = self.store.sealed_in(call.session, step, slot)
        if attempt is None:
            begun = self.store.begin_filled(call.session, step, set_digest, slot)
            if isinstance(begun, Wait):
                return begun
            attempt = begun.attempt.number
            try:
                self._seal(call, job, begun.segment, job.epoch, step, attempt, checksums)
            except AwexdError as error:
                self.store.abort(call.session, step, attempt, error.message)
                raise
            self.settle()  # readers first
        committed = self.store.committed(call.session, job.epoch, step, attempt) is None
        following = self._next_slot(call.session)
        return Reply({"epoch": job.epoch, "attempt": attempt, "committed": committed, "next": following})

    def _seal(
        self, call: Call, job: Job, segment: Segment, epoch: int, step: int, attempt: int, checksums: bool
    ) -> None:
        self.memory.seal(segment.id, _header(job, segment, epoch, step, attempt, checksums))
        version = self.store.seal(call.session, step, checksums)
        if version:
            self.records.save_soon(job)
            _log.debug("job %s: %s committed", job.name, version)

    def _write_abort(self, call: Call) -> Reply:
        arguments = call.arguments
        self.store.abort(call.session, arguments["step"], arguments["attempt"], arguments["reason"])
        return Reply({})

    def _write_committed(self, call: Call) -> Reply | Wait:
        epoch, step, attempt = (call.arguments[k] for k in ("epoch", "step", "attempt"))
        return self.store.committed(call.session, epoch, step, attempt) or Reply({})

    # inference processes

    def _read_sources(self, call: Call) -> Reply:
        name = access.qualify(call.arguments["job"], call.peer)
        job = self.store.jobs.get(name)
        access.check_read(name, job, call.peer)
        digests = self.store.find_set(job, call.arguments["set"]) if job else None
        if digests is None:
            return Reply({"set": None, "ranks": [], "bodies": []})
        index, fd = self.shelf.bundle(digests)
        return Reply({"set": digest_of(digests), "ranks": digests, "bodies": index}, [fd])

    async def _read_register(self, call: Call) -> Reply:
        arguments = call.arguments
        name = access.qualify(arguments["job"], call.peer)
        engine = access.check_name("engine", arguments["engine"])
        access.check_read(name, self.store.jobs.get(name), call.peer)
        async with self._manifest(call):
            job = await self._place(call, name, arguments["rank"], engine)
            self.store.register_worker(
                call.session,
                job,
                engine,
                arguments["rank"],
                world_size=arguments["world_size"],
                digest=arguments["digest"],
                version=tuple(arguments["version"]) if arguments["version"] else None,
                updates=arguments["updates"],
            )
        peer, rank, size = call.peer, arguments["rank"], arguments["world_size"]
        _log.info("job %s: engine %s rank %d of %d registered (process %d)", name, engine, rank, size, peer.pid)
        return Reply({"job": name, "epoch": job.epoch, "updates": self.store.worker_of(call.session)[1].round})

    def _read_siblings(self, call: Call) -> Reply | Wait:
        digests = self.store.siblings(call.session)
        if isinstance(digests, Wait):
            return digests
        index, fd = self.shelf.bundle(digests)
        return Reply({"ranks": digests, "bodies": index}, [fd])

    def _read_resolve(self, call: Call) -> Reply | Wait:
        job, _ = self.store.worker_of(call.session)
        arguments = call.arguments
        seconds = min(arguments["lease_ms"] / 1000, self.settings.lease_ttl)
        resolved = self.store.resolve(call.session, arguments["step"], seconds, arguments["stage"], time.monotonic())
        if isinstance(resolved, Wait):
            return resolved
        version, lease = resolved
        segments = [job.segments[segment_id] for segment_id in version.segments]
        body = {
            "epoch": version.key[0],
            "step": version.key[1],
            "lease": lease.id,
            "set": version.set_digest,
            "segments": [[s.id, HEADER_BYTES + s.nbytes, s.checksums] for s in segments],
        }
        return Reply(body)

    def _read_confirm(self, call: Call) -> Reply:
        epoch, step = self.store.confirm(call.session, call.arguments["lease"], time.monotonic())
        return Reply({"epoch": epoch, "step": step, "updates": self.store.worker_of(call.session)[1].round})

    def _read_release(self, call: Call) -> Reply:
        self.store.release(call.session, call.arguments["lease"], call.arguments["dirty"])
        return Reply({})

    def _read_wait(self, call: Call) -> Reply | Wait:
        newest = self.store.newest_since(call.session, call.arguments["step"])
        return newest if isinstance(newest, Wait) else Reply({"epoch": newest[0], "step": newest[1]})

    # segments

    def _segment_open(self, call: Call) -> Reply:
        opened: list[int] = []
        try:
            for segment_id in call.arguments["ids"]:
                segment, writable = self._permitted(call.session, segment_id)
                opened.append(self.memory.descriptor(segment_id, writable=writable))
                self.store.opened(call.session, segment)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return Reply({}, opened)

    def _segment_closed(self, call: Call) -> Reply:
        self.store.closed(call.session, call.arguments["ids"])
        return Reply({})

    def _permitted(self, session: Session, segment_id: str) -> tuple[Segment, bool]:
        """A writer may map what it writes; a worker, read-only, what it has leased."""
        if session.writer:
            job, _ = self.store.writer_of(session)
            segment = job.segments.get(segment_id)
            if segment and segment.session == session.id and segment.writable:
                return segment, True
        if session.worker:
            job, _ = self.store.worker_of(session)
            leased = {key for lease in session.leases for key in job.versions[self.store.leases[lease].key].segments}
            if segment_id in leased:
                return job.segments[segment_id], False
        raise AccessDenied(f"segment {segment_id}: neither written nor leased by this session")

    # internals

    async def _place(self, call: Call, name: str, rank: int, engine: str | None = None) -> Job:
        """The job to register in, once a holder of the place who is just leaving has left."""
        while True:
            job = self.store.job_for(name, call.peer.uid, time.monotonic())
            leaving = self.store.leaving(job, rank, engine)
            if leaving is None:
                return job
            try:
                async with asyncio.timeout_at(call.deadline):
                    await self.changes.next(name)
            except TimeoutError:
                raise late(call, leaving) from None

    def close_job(self, job: Job) -> None:
        self.store.close_job(job)
        self.background.task(self.records.forget(job))

    @contextlib.asynccontextmanager
    async def _manifest(self, call: Call) -> AsyncIterator[None]:
        """Takes the manifest that a request brings, and keeps it at least until the store has been told of it."""
        if len(call.fds) != 1:
            raise ProtocolError(f"a manifest travels as one descriptor, not {len(call.fds)}")
        digest = call.arguments["digest"]
        with self.shelf.arriving(digest):
            await self.shelf.take(call.fds[0], digest)
            if self.shelf.heavy:
                await self.shelf.prune()
            yield

    def _expire(self) -> None:
        for lease in self.store.leases.values():
            session = self.store.sessions.get(lease.session)
            if lease.expires <= time.monotonic() and session and session.worker:
                worker = session.worker[1]
                _log.warning(
                    "job %s: the lease of engine %s rank %d (process %d) on epoch %d step %d has run out",
                    *(lease.job, worker.engine, worker.rank, session.pid, *lease.key),
                )
        self.store.expire(time.monotonic())
        self.settle()


def late(call: Call, wait: Wait) -> DeadlineExceeded:
    """The error for a request whose deadline has come."""
    waited = asyncio.get_running_loop().time() - call.began
    return DeadlineExceeded(f"waited {waited:.2f} s for {wait.reason}", {"waited": waited})


def _header(job: Job, segment: Segment, epoch: int, step: int, attempt: int, checksums: bool) -> dict[str, Any]:
    return {
        "job": job.name,
        "owner_uid": job.owner_uid,
        "epoch": epoch,
        "step": step,
        "attempt": attempt,
        "rank": segment.rank,
        "world_size": job.world_size,
        "keep": job.keep,
        "digest": segment.digest,
        "checksums": checksums,
        "size": HEADER_BYTES + segment.nbytes,
        "state": str(SegmentState.SEALED),
    }
