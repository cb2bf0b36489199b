"""What training processes ask for: registration, memory, slots, and steps that become versions."""

from __future__ import annotations

import contextlib
import logging

from awexd import access
from awexd.adoption import header_of
from awexd.service import Across, Call, Operation, Outcome, Reply, Service
from awexd.store import Segment, Wait
from awexd.store.ledger import Session
from awexd.store.model import Attempt, Job
from awexd.store.slots import Shortfall, mappable
from awexd.store.writing import Begun
from awexd_transports.errors import DaemonUnavailable, EpochChanged, VersionConflict


class Trainers:
    """The operations ``write.*``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._memory = service.memory
        self._allocator = service.allocator
        service.add(
            {
                "write.register": self._register,
                "write.ready": self._ready,
                "write.reserve": self._reserve,
                "write.slot": self._slot,
                "write.publish": self._publish,
                "write.begin": self._begin,
                "write.progress": self._progress,
                "write.seal": self._seal,
                "write.abort": self._abort,
                "write.committed": self._committed,
            }
        )

    async def _register(self, call: Call) -> Reply:
        arguments = call.arguments
        name = access.qualify(arguments["job"], call.peer)
        access.check_write(name, call.peer)
        async with self._service.manifest(call):
            if self._service.look_elsewhere is not None:
                await self._service.look_elsewhere(name, call.peer.uid)
            job = await self._service.place(call, name, arguments["rank"])
            opened = self._store.register_writer(
                call.session,
                job,
                arguments["rank"],
                arguments["digest"],
                world_size=arguments["world_size"],
                epoch=arguments["epoch"],
                after=arguments["after"],
                keep=arguments["keep"],
                mode=arguments["mode"],
                lends=arguments["lends"],
            )
        job.owner_uid = call.peer.uid
        if opened:
            self._service.settle()
            self._service.note("epoch", name, f"epoch {job.epoch} opened with {job.world_size} ranks")
        await self._service.records.save_epoch(job)
        peer, rank, size = call.peer, arguments["rank"], arguments["world_size"]
        who = f"writer rank {rank} of {size} (process {peer.pid}, uid {peer.uid})"
        self._service.note("joined", name, f"{who} registered")
        complete = not isinstance(self._store.ready(call.session), Wait)
        pending = self._store.is_pending(call.session)
        return Reply({"job": name, "epoch": job.epoch, "pending": pending, "complete": complete})

    def _ready(self, call: Call) -> Reply | Wait:
        job, _ = self._store.writer_of(call.session)
        ready = self._store.ready(call.session)
        if isinstance(ready, Wait):
            return ready
        set_digest, digests = ready
        own = [w for e in job.engines.values() for w in e.workers.values() if w.uid == call.peer.uid]
        engines = [[worker.engine, worker.rank, worker.digest] for worker in own]
        index, fd = self._service.shelf.bundle([*digests, *(worker.digest for worker in own)])
        body = {"epoch": job.epoch, "set": set_digest, "ranks": digests, "engines": engines, "bodies": index}
        return Reply(body, [fd])

    async def _reserve(self, call: Call) -> Reply:
        arguments = call.arguments
        job, writer = self._store.writer_of(call.session)
        async with self._service.manifest(call):
            self._store.reserve(call.session, arguments["set"], arguments["digest"], arguments["nbytes"])
            writer.node = arguments["node"]
        self._service.settle()
        await self._allocator.fill(job, writer.rank, call.deadline)
        segments = [segment.id for segment in mappable(job, writer)]
        return Reply({"segments": segments, "lock_problem": self._memory.lock_problem})

    def _slot(self, call: Call) -> Outcome:
        job, _ = self._store.writer_of(call.session)
        granted = self._store.grant(call.session)
        if isinstance(granted, Wait):
            return granted
        if isinstance(granted, Shortfall):
            return self._filled(call, job, granted.rank, self._slot)
        self._memory.clear(granted.id)
        return Reply({"segment": granted.id})

    def _next_slot(self, session: Session) -> str | None:
        granted = self._store.grant(session)
        if not isinstance(granted, Segment):
            return None
        self._memory.clear(granted.id)
        return granted.id

    def _begin(self, call: Call) -> Outcome:
        job, _ = self._store.writer_of(call.session)
        if job.joined is not None:
            return self._begin_joined(call, job)
        begun = self._store.begin(call.session, call.arguments["step"], call.arguments["set"])
        if isinstance(begun, Wait):
            return begun
        if isinstance(begun, Shortfall):
            return self._filled(call, job, begun.rank, self._begin)
        return self._begun(job, begun)

    def _begin_joined(self, call: Call, job: Job) -> Outcome:
        """As ``_begin``; the attempt is the MetaServer's, which is asked once there is a slot."""
        waiting = self._store.check_step(call.session, call.arguments["step"], call.arguments["set"])
        if waiting is not None:
            return waiting
        self._store.begin_anew(call.session, call.arguments["step"])
        granted = self._store.grant(call.session)
        if isinstance(granted, Wait):
            return granted
        if isinstance(granted, Shortfall):
            return self._filled(call, job, granted.rank, self._begin)
        return self._begin_across(call, job, granted)

    async def _begin_across(self, call: Call, job: Job, slot: Segment) -> Outcome:
        step, set_digest = call.arguments["step"], call.arguments["set"]
        number = await self._across(job).begin(step, slot.rank, call.deadline)
        begun = self._store.begin_filled(call.session, step, set_digest, slot.id, number)
        if isinstance(begun, Wait):
            return begun
        return self._begun(job, begun)

    def _begun(self, job: Job, begun: Begun) -> Reply:
        self._memory.clear(begun.segment.id)
        where = {"attempt": begun.attempt.number, "epoch": job.epoch, "segment": begun.segment.id}
        return Reply(where | {"early": self._service.early(job)})

    def _progress(self, call: Call) -> Reply:
        epoch, step, attempt, nbytes, checksums = (
            call.arguments[k] for k in ("epoch", "step", "attempt", "nbytes", "checksums")
        )
        job, current = self._store.progress(call.session, epoch, step, attempt, nbytes, checksums)
        if self._service.progressed is not None:
            self._service.progressed(job, current)
        return Reply({})

    def _across(self, job: Job) -> Across:
        if self._service.across is None:
            raise DaemonUnavailable(f"{job.name}: its ranks are on several nodes, and this daemon has no MetaServer")
        return self._service.across(job)

    async def _filled(self, call: Call, job: Job, rank: int, again: Operation) -> Outcome:
        await self._allocator.fill(job, rank, call.deadline)
        return again(call)

    def _seal(self, call: Call) -> Reply:
        job, _ = self._store.writer_of(call.session)
        epoch, step, attempt, checksums = (call.arguments[k] for k in ("epoch", "step", "attempt", "checksums"))
        segment = self._store.check_seal(call.session, epoch, step, attempt)
        following = None
        if segment is not None:
            self._seal_slot(call, job, segment, epoch, step, attempt, checksums)
            self._service.settle()  # readers first
            following = self._next_slot(call.session)
        committed = self._store.committed(call.session, epoch, step, attempt) is None
        return Reply({"committed": committed, "next": following, "early": self._service.early(job)})

    def _publish(self, call: Call) -> Outcome:
        """Begins and seals at once a slot that was granted and has been filled. Grants the next, if one is free."""
        job, _ = self._store.writer_of(call.session)
        step, set_digest, slot = (call.arguments[k] for k in ("step", "set", "segment"))
        if job.joined is None or self._store.sealed_in(call.session, step, slot) is not None:
            return self._publish_filled(call, job, None)
        waiting = self._store.check_step(call.session, step, set_digest)
        if waiting is not None:
            return waiting
        self._store.begin_anew(call.session, step)
        return self._publish_across(call, job)

    async def _publish_across(self, call: Call, job: Job) -> Outcome:
        _, writer = self._store.writer_of(call.session)
        number = await self._across(job).begin(call.arguments["step"], writer.rank, call.deadline)
        return self._publish_filled(call, job, number)

    def _publish_filled(self, call: Call, job: Job, number: int | None) -> Reply | Wait:
        step, set_digest, slot, checksums = (call.arguments[k] for k in ("step", "set", "segment", "checksums"))
        attempt = self._store.sealed_in(call.session, step, slot)
        if attempt is None:
            begun = self._store.begin_filled(call.session, step, set_digest, slot, number)
            if isinstance(begun, Wait):
                return begun
            attempt = begun.attempt.number
            try:
                self._seal_slot(call, job, begun.segment, job.epoch, step, attempt, checksums)
            except Exception as error:
                self._store.abort(call.session, step, attempt, str(error))
                raise
            self._service.settle()  # readers first
        committed = self._store.committed(call.session, job.epoch, step, attempt) is None
        following = self._next_slot(call.session)
        told = {"committed": committed, "next": following, "early": self._service.early(job)}
        return Reply({"epoch": job.epoch, "attempt": attempt} | told)

    def _seal_slot(
        self, call: Call, job: Job, segment: Segment, epoch: int, step: int, attempt: int, checksums: bool
    ) -> None:
        size = job.world_size
        header = header_of(job, segment, (epoch, step), attempt, world_size=size, checksums=checksums)
        self._memory.seal(segment.id, header)
        version = self._store.seal(call.session, step, checksums)
        if version:
            self._service.records.save_soon(job)
            self._service.note("committed", job.name, f"{version} committed, {version.nbytes} bytes", logging.DEBUG)

    def _abort(self, call: Call) -> Outcome:
        arguments = call.arguments
        job, writer = self._store.writer_of(call.session)
        attempt = job.attempts.get(arguments["step"])
        if job.joined is not None and attempt is not None and writer.rank in attempt.sealed:
            return self._abort_across(job, writer.rank, attempt, call)
        self._store.abort(call.session, arguments["step"], arguments["attempt"], arguments["reason"])
        return Reply({})

    async def _abort_across(self, job: Job, rank: int, attempt: Attempt, call: Call) -> Reply:
        """Of an attempt that other nodes may have sealed, and so committed, meanwhile."""
        why = f"rank {rank} aborted it: {call.arguments['reason']}"
        if call.arguments["attempt"] in (None, attempt.number):
            with contextlib.suppress(EpochChanged, VersionConflict):  # it is over
                await self._across(job).abort(attempt.epoch, attempt.step, attempt.number, why, call.deadline)
                self._store.abort_joined(job, attempt, why)
        return Reply({})

    def _committed(self, call: Call) -> Reply | Wait:
        epoch, step, attempt = (call.arguments[k] for k in ("epoch", "step", "attempt"))
        return self._store.committed(call.session, epoch, step, attempt) or Reply({})
