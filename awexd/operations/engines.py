"""What inference processes ask for: registration, versions under lease, and the end of an update."""

from __future__ import annotations

import asyncio
import logging
import time

from awexd import access
from awexd.service import Call, Reply, Service
from awexd.store import Wait
from awexd.store.arriving import ArrivalState
from awexd.store.model import Failure, Result, VersionKey, set_digest_of
from awexd_transports.layout import digest_of
from awexd_transports.segment import HEADER_BYTES

MAX_LANDED = 8192
"""Of one answer: a frame has room for more than that."""


class Engines:
    """The operations ``read.*``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        service.add(
            {
                "read.sources": self._sources,
                "read.register": self._register,
                "read.siblings": self._siblings,
                "read.resolve": self._resolve,
                "read.arriving": self._arriving,
                "read.arrived": self._arrived,
                "read.confirm": self._confirm,
                "read.release": self._release,
                "read.wait": self._wait,
                "read.await": self._await,
                "read.verified": self._verified,
            }
        )

    def _sources(self, call: Call) -> Reply:
        name = access.qualify(call.arguments["job"], call.peer)
        job = self._store.jobs.get(name)
        access.check_read(name, job, call.peer)
        digests = self._store.find_set(job, call.arguments["set"]) if job else None
        if digests is None:
            return Reply({"set": None, "ranks": [], "bodies": []})
        index, fd = self._service.shelf.bundle(digests)
        return Reply({"set": digest_of(digests), "ranks": digests, "bodies": index}, [fd])

    async def _register(self, call: Call) -> Reply:
        arguments = call.arguments
        name = access.qualify(arguments["job"], call.peer)
        engine = access.check_name("engine", arguments["engine"])
        access.check_read(name, self._store.jobs.get(name), call.peer)
        async with self._service.manifest(call):
            job = await self._service.place(call, name, arguments["rank"], engine)
            self._store.register_worker(
                call.session,
                job,
                engine,
                arguments["rank"],
                world_size=arguments["world_size"],
                digest=arguments["digest"],
                version=tuple(arguments["version"]) if arguments["version"] else None,
                updates=arguments["updates"],
                alone=bool(arguments["alone"]),
            )
        worker = self._store.worker_of(call.session)[1]
        worker.aside = arguments["aside"] or []
        # Whoever opens GPU memory may write to all of its allocation: reading that was granted does not go so far.
        worker.devices = frozenset(arguments["devices"] or ()) if call.peer.uid == job.owner_uid else frozenset()
        who = f"engine {engine} rank {worker.rank} of {arguments['world_size']} (process {call.peer.pid})"
        self._service.note("joined", name, f"{who} registered")
        return Reply({"job": name, "epoch": job.epoch, "updates": worker.round})

    def _siblings(self, call: Call) -> Reply | Wait:
        digests = self._store.siblings(call.session)
        if isinstance(digests, Wait):
            return digests
        job, worker = self._store.worker_of(call.session)
        if any(self._service.shelf.body(digest) is None for digest in digests):
            return Wait(job.name, lambda: f"the MetaServer to give the manifests of engine {worker.engine}")
        index, fd = self._service.shelf.bundle(digests)
        return Reply({"ranks": digests, "bodies": index}, [fd])

    def _resolve(self, call: Call) -> Reply | Wait:
        job, worker = self._store.worker_of(call.session)
        step, stage = call.arguments["step"], call.arguments["stage"]
        seconds = min(call.arguments["lease_ms"] / 1000, self._service.settings.lease_ttl)
        before = worker.waiting_until
        try:
            when = {"asked": call.began, "until": self._until(call)}
            resolved = self._store.resolve(call.session, step, seconds, stage, time.monotonic(), **when)
        finally:
            worker.waiting_until = before if stage else 0.0
        if isinstance(resolved, Wait):
            worker.waiting_until = before if stage else self._until(call)
            return resolved
        version, lease = resolved
        worker.failure = worker.failure if stage else None
        segments = [job.segments[segment_id] for segment_id in version.segments]
        body = {
            "epoch": version.key[0],
            "step": version.key[1],
            "lease": lease.id,
            "lease_ms": int(seconds * 1000),
            "updates": None if stage else worker.round + 1,
            "alone": job.engines[worker.engine].whole,
            "set": version.set_digest,
            "segments": [[s.id, s.nbytes if s.borrowed else HEADER_BYTES + s.nbytes, s.checksums] for s in segments],
            "borrowed": version.borrowed,
            "exchanged": version.exchanged,
            "reason": version.reason,
            "arrival": version.arrival,
        }
        return Reply(body)

    def _arriving(self, call: Call) -> Reply | Wait:
        """What has landed of the version that an update waits for, beyond the first ``landed`` entries."""
        known, number = call.arguments["landed"], call.arguments["arrival"]
        if number is None:
            found = self._store.take_part(call.session, call.arguments["step"])
        else:
            found = self._store.taking_part(call.session, number, known)
        if found is not None and not isinstance(found, Wait):
            self._service.changes.fire(found.heard)
        if isinstance(found, Wait):
            return found
        if found is None:
            return Reply({"arrival": None})
        coming = found.state is ArrivalState.COMING
        if coming and found.beyond(known) < found.quantum and number is not None:
            job, what = self._store.worker_of(call.session)[0], f"epoch {found.key[0]} step {found.key[1]}"
            return Wait(found.signal, lambda: f"the rest of {what}: {job.mirror.doing() if job.mirror else 'its end'}")
        segments = [[one.id, HEADER_BYTES + one.nbytes, one.checksums] for one in found.segments]
        body = {
            "arrival": found.number,
            "epoch": found.key[0],
            "step": found.key[1],
            "set": set_digest_of(found.digests),
            "segments": segments if number is None else [],
            "pieces": found.pieces if number is None else [],
            "landed": [list(landed) for landed in found.landed[known : known + MAX_LANDED]],
            "over": not coming and known + MAX_LANDED >= len(found.landed),
        }
        return Reply(body)

    def _arrived(self, call: Call) -> Reply:
        """The session copies out of that arrival no more; whether all that it has is good and committed here."""
        found = self._store.taking_part(call.session, call.arguments["arrival"])
        self._store.leave_arrivals(call.session.id)
        return Reply({"good": found is not None and found.state is ArrivalState.HERE})

    def _confirm(self, call: Call) -> Reply | Wait:
        job, worker = self._store.worker_of(call.session)
        lease = self._store.leases.get(call.arguments["lease"])
        version = job.versions.get(lease.key) if lease else None
        confirmed: Wait | VersionKey | None = None
        try:
            confirmed = self._store.confirm(call.session, call.arguments["lease"], time.monotonic())
        finally:
            if not isinstance(confirmed, Wait):
                worker.verified = None
                if worker.version:
                    told = (call.arguments[field] for field in ("nbytes", "stage_us", "pause_us"))
                    worker.result = Result(*told, *((version.borrowed, version.reason) if version else ()))
        if isinstance(confirmed, Wait):
            return confirmed
        epoch, step = confirmed
        return Reply({"epoch": epoch, "step": step, "updates": worker.round})

    def _release(self, call: Call) -> Reply:
        self._store.release(call.session, call.arguments["lease"], call.arguments["dirty"])
        if call.arguments["error"]:
            job, worker = self._store.worker_of(call.session)
            worker.failure = Failure(*call.arguments["error"])
            worker.verified = None if call.arguments["dirty"] else worker.verified
            state = "which is dirty now" if call.arguments["dirty"] else "which was not touched"
            text = f"engine {worker.engine} rank {worker.rank}, {state}: {worker.failure.message}"
            self._service.note("failed", job.name, text, logging.WARNING)
        return Reply({})

    def _verified(self, call: Call) -> Reply:
        job, worker = self._store.worker_of(call.session)
        told = worker.verified = dict(call.arguments)
        equal = not told["differing"]
        count = f"all {told['tensors']}" if equal else f"{told['differing']} of {told['tensors']}"
        text = f"{count} tensors compared {'equal' if equal else 'differ from'} those of {told['checkpoint']}"
        level = logging.INFO if equal else logging.WARNING
        self._service.note("verified", job.name, f"engine {worker.engine} rank {worker.rank}: {text}", level)
        return Reply({})

    def _wait(self, call: Call) -> Reply | Wait:
        newest = self._store.newest_since(call.session, call.arguments["step"])
        return newest if isinstance(newest, Wait) else Reply({"epoch": newest[0], "step": newest[1]})

    def _await(self, call: Call) -> Reply | Wait:
        """For whoever drives an engine's workers: once an update of them need not wait for its version."""
        name = access.qualify(call.arguments["job"], call.peer)
        job = self._store.jobs.get(name)
        access.check_read(name, job, call.peer)
        if job is None:
            return Wait(name, lambda: "a trainer or an engine of it to register")
        engine, step = call.arguments["engine"], call.arguments["step"]
        return self._store.await_version(call.session, job, engine, step, self._until(call)) or Reply({})

    @staticmethod
    def _until(call: Call) -> float:
        """The end of a request that waits, on the store's clock: loops may count from another moment."""
        return time.monotonic() + call.deadline - asyncio.get_running_loop().time()
