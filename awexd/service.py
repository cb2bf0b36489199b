"""How requests are carried out over one store, and what follows from a change of it.

The operations are those of :mod:`awexd.operations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, NamedTuple, Protocol, Union

from awexd.access import Peer
from awexd.allocator import Allocator
from awexd.background import Background, Signals
from awexd.config import Settings
from awexd.events import Events
from awexd.journal import Journal
from awexd.memory import Memory
from awexd.protocol import Message
from awexd.records import Records
from awexd.shelf import Shelf
from awexd.store import Segment, Store, Wait, parking
from awexd.store.ledger import Session
from awexd.store.model import Attempt, Job
from awexd.store.slots import mappable
from awexd_transports.errors import (
    AccessDenied,
    DeadlineExceeded,
    ProtocolError,
    VersionUnavailable,
)
from awexd_transports.segment import WITHDRAWN_AT, WORDS_AT

Arguments = dict[str, Any]
LAST_LOOK_SECONDS = 0.01
"""Between a lease's time and its end: at least one pass of the loop over all sockets."""
EVENTS = "events"
"""In the place of a job's name, which has a slash: what changes when something has happened to any."""
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
    say: Callable[[Message, list[int]], None]
    """To the client, beside the answer."""


Outcome = Union[Reply, Wait, Coroutine[Any, Any, "Outcome"]]  # noqa: UP007 - it names itself
"""An answer; or not yet: ask again when that job has changed; or what has to wait for a disk or a thread first."""
Operation = Callable[[Call], Outcome]


class Forward(Protocol):
    """A session of this node whose job has its home on another."""

    job: str
    node: str

    def takes(self, message: Message) -> bool:
        """Whether that request is carried out there."""

    def send(self, message: Message, fds: list[int]) -> None:
        """Has it carried out. Owns ``fds``."""


class Across(Protocol):
    """What the ranks of a joined job need of the MetaServer."""

    async def begin(self, step: int, rank: int, deadline: float) -> int:
        """Its attempt at that step."""

    async def abort(self, epoch: int, step: int, number: int, reason: str, deadline: float) -> None:
        """Discards that attempt, in which a rank of this node has sealed."""


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
        self.allocator = Allocator(store, memory, background, self.settle)
        self.changes = Signals()
        self.events = Events()
        self.followers: list[Callable[[Collection[str]], None]] = []
        """Called with the names of jobs that have changed; they must not take long."""
        self.look_elsewhere: Callable[[str, int], Awaitable[None]] | None = None
        """Awaited, with a job's name and its owner's uid, before a trainer's first writer registers here."""
        self.unlinked: list[Callable[[str], None]] = []
        """Called with the id of a segment of shared memory that goes."""
        self.across: Callable[[Job], Across] | None = None
        """The MetaServer, for the ranks of a joined job."""
        self.progressed: Callable[[Job, Attempt], None] | None = None
        """Called with an attempt of which more is written; None where other nodes fetch nothing from here."""
        self.early: Callable[[Job], bool] = lambda job: False
        """Whether other nodes will fetch what is written of that job next, and may begin meanwhile."""
        self.forwards: dict[str, Forward] = {}
        """By session."""
        self.ended: list[Callable[[str], None]] = []
        """Called with the id of a session that has ended."""
        self.host = ""
        """Where processes of this node can be reached from others; "" where it is by itself."""
        self.lent: dict[str, int] = {}
        """What describes borrowed segments: a memfd each."""
        self.taken_back: Callable[[str], None] | None = None
        """Called with a borrowed segment's id once that is over."""
        self._settling = self._expiring = self._noted = False
        self._operations: dict[str, Operation] = {
            "segment.open": self._segment_open,
            "segment.closed": self._segment_closed,
            "session.home": lambda call: Reply({"node": None}),
        }

    def add(self, operations: dict[str, Operation]) -> None:
        """Adds operations that others carry out ; see the modules named above."""
        self._operations.update(operations)

    def note(self, kind: str, job: str, text: str, level: int = logging.INFO) -> None:
        """Something happened that those who follow a job's events are to hear of."""
        self.events.add(kind, job, text, level)
        self._noted = True

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
            while store.to_clear or store.to_unlink or store.touched or self._noted:
                self._carry_out()
        finally:
            self._settling = False
        if not self._expiring:
            self.background.by("leases", store.next_expiry(), self._leases_due)

    def _carry_out(self) -> None:
        store = self.store
        touched, store.touched = store.touched, set()
        for name in touched:
            self.changes.fire(name)  # first, since somebody waits for it
        for follow in self.followers:
            follow(touched)
        if self._noted:
            self._noted = False
            self.changes.fire(EVENTS)
        for segment in store.to_clear:
            if not segment.sealed:
                self.memory.clear(segment.id)
        store.to_clear.clear()
        for segment in store.to_unlink:
            if segment.exchanged:
                continue
            if segment.borrowed:
                os.pwrite(self.lent[segment.id], bytes(WITHDRAWN_AT - WORDS_AT), WORDS_AT)  # whatever is lent there
                os.close(self.lent.pop(segment.id))
                if self.taken_back is not None:
                    self.taken_back(segment.id)
            else:
                self.background.thread(self.memory.unlink, segment.id)
                for gone in self.unlinked:
                    gone(segment.id)
        store.to_unlink.clear()

    def wipe(self, segment: Segment, step: int) -> None:
        """A version is withdrawn: readers in the midst of it see so without asking, or are told."""
        if segment.id in self.lent:
            os.pwrite(self.lent[segment.id], struct.pack("<Q", step + 1), WITHDRAWN_AT)
        elif not segment.exchanged:
            self.memory.clear(segment.id)

    def end_session(self, session: Session, *, unmapped: bool, why: str) -> None:
        if session.writer:
            self.note("left", session.writer[0], f"writer rank {session.writer[1].rank} left: {why}")
        elif session.worker:
            name, worker = session.worker
            self.note("left", name, f"engine {worker.engine} rank {worker.rank} left: {why}")
        self.store.end_session(session.id, unmapped=unmapped, why=why, now=time.monotonic())
        for ended in self.ended:
            ended(session.id)
        self.settle()
        self.watch_idle()
        if self.shelf.heavy:
            self.background.task(self.shelf.prune())

    def watch_idle(self) -> None:
        """Sets the timer for jobs that have become idle."""
        idle = [since for job in self.store.jobs.values() if (since := job.unused_since) is not None]
        self.background.by("idle jobs", min(idle) + self.settings.job_ttl if idle else None, self._drop_idle_jobs)

    def _drop_idle_jobs(self) -> None:
        """Ends jobs that nobody has used for the time that the settings give them."""
        for job in self.store.idle_jobs(time.monotonic(), self.settings.job_ttl):
            self.close_job(job, f"idle for {self.settings.job_ttl:g} s")
        self.settle()
        self.watch_idle()

    # segments

    def _segment_open(self, call: Call) -> Reply:
        opened: list[int] = []
        try:
            for segment_id in call.arguments["ids"]:
                segment, writable = self._permitted(call.session, segment_id)
                if segment.exchanged:
                    raise AccessDenied(f"segment {segment_id} is sent to those that take it; nobody opens it")
                if segment.borrowed:
                    opened.append(os.dup(self.lent[segment_id]))
                else:
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
        """What a writer writes or may come to write; read-only, what it has pinned, or a worker has leased."""
        if session.writer:
            job, writer = self.store.writer_of(session)
            for segment in mappable(job, writer):
                if segment.id == segment_id:
                    return segment, True
            pinned = parking.pinned_by(job, writer.rank)
            if pinned is not None and segment_id in pinned.segments:
                return job.segments[segment_id], False
        if session.worker and segment_id in self.store.leased_segments(session):
            return self.leased(session, segment_id), False
        for segment in self.store.arriving_segments(session):
            if segment.id == segment_id:
                return segment, False
        raise AccessDenied(f"segment {segment_id}: neither written nor leased by this session")

    def leased(self, session: Session, segment_id: str) -> Segment:
        """A segment of a version that this worker has leased.

        Raises:
            VersionUnavailable: it is not leased, or was borrowed and is taken back.
        """
        job, _ = self.store.worker_of(session)
        if segment_id in self.store.leased_segments(session) and segment_id in job.segments:
            return job.segments[segment_id]
        text = f"{job.name}: its writer has taken back the memory that this version was in"
        raise VersionUnavailable(text, {"taken_back": True})

    # internals

    async def place(self, call: Call, name: str, rank: int, engine: str | None = None) -> Job:
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

    def close_job(self, job: Job, why: str) -> None:
        self.store.close_job(job)
        self.note("closed", job.name, f"closed: {why}")
        self.background.task(self.records.forget(job))

    @contextlib.asynccontextmanager
    async def manifest(self, call: Call) -> AsyncIterator[None]:
        """Takes the manifest that a request brings, and keeps it at least until the store has been told of it."""
        if len(call.fds) != 1:
            raise ProtocolError(f"a manifest travels as one descriptor, not {len(call.fds)}")
        digest = call.arguments["digest"]
        with self.shelf.arriving(digest):
            await self.shelf.take(call.fds[0], digest)
            if self.shelf.heavy:
                await self.shelf.prune()
            yield

    def _leases_due(self) -> None:
        """Ends leases after one more look at the sockets: what was sent before they ran out counts as in time.

        A worker may go by its own clock for that. Timers come before sockets where this process was held up.
        """
        self._expiring = True
        self.background.later(LAST_LOOK_SECONDS, self._expire)

    def _expire(self) -> None:
        self._expiring = False
        for lease in self.store.leases.values():
            session = self.store.sessions.get(lease.session)
            if lease.expires <= time.monotonic() and session and session.worker:
                worker = session.worker[1]
                who = f"engine {worker.engine} rank {worker.rank} (process {session.pid})"
                text = f"the lease of {who} on epoch {lease.key[0]} step {lease.key[1]} has run out"
                self.note("expired", lease.job, text, logging.WARNING)
        self.store.expire(time.monotonic())
        self.settle()


def late(call: Call, wait: Wait) -> DeadlineExceeded:
    """The error for a request whose deadline has come."""
    waited = asyncio.get_running_loop().time() - call.began
    return DeadlineExceeded(f"waited {waited:.2f} s for {wait.reason}", {"waited": waited})
