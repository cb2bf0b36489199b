"""What ``awexctl`` shows: the daemon's state as plain JSON values. Looks only."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import orjson

from awexd import __version__, access
from awexd.service import EVENTS, Call, Reply, Service
from awexd.store import Wait, phases
from awexd.store.model import Engine, Job, SegmentState, Version, Worker, Writer
from awexd.store.spanning import spans
from awexd_transports.errors import VersionUnavailable

PAGE_BYTES = 1 << 18
"""Of events in one answer, about: a frame has its limit."""


class Report:
    """The operations that look. A caller sees the jobs that it may read."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = time.time()
        self.cluster: Callable[[], dict[str, Any]] | None = None
        """What there is to say of the MetaServer, where there is one."""
        self.following: Callable[[Job], dict[str, Any] | None] = lambda job: None
        """What there is to say of a job that is decided on another node."""
        self.seen: Callable[[Job, Engine, float], Awaitable[None]] | None = None
        """Returns once the other nodes of an engine have told how its workers are."""
        service.add({"status": self._status, "versions": self._versions, "sessions": self._sessions})
        service.add({"events": self._events, "read.engine": self._one_engine, "manifests": self._manifests})

    def _status(self, call: Call) -> Reply:
        memory, store = self._service.memory, self._service.store
        return Reply(
            {
                "version": __version__,
                "pid": os.getpid(),
                "socket": self._service.settings.socket,
                "started": self._started,
                "memory": {
                    "used_bytes": memory.total_nbytes,
                    "available_bytes": memory.budget.available(memory.total_nbytes),
                    "budget_bytes": memory.budget.limit,
                    "locked": not memory.lock_problem,
                    "lock_problem": memory.lock_problem,
                },
                "metaserver": self.cluster() if self.cluster else None,
                "sessions": len(store.sessions),
                "jobs": [self._job(job) for job in self._visible(call)],
                "phases": [
                    {
                        "gpu": gpu,
                        "phase": inside[0].phase if inside else None,
                        "holders": [phases.row(claim) for claim in inside],
                        "waiting": [phases.row(claim) for claim in waiting],
                    }
                    for gpu, inside, waiting in store.phases.by_gpu()
                ],
            }
        )

    def _versions(self, call: Call) -> Reply:
        wanted = call.arguments["job"]
        name = access.qualify(wanted, call.peer) if wanted else None
        if name:
            access.check_read(name, self._service.store.jobs.get(name), call.peer)
            if name not in self._service.store.jobs:
                raise VersionUnavailable(f"no job {name} here")
        jobs = [job for job in self._visible(call) if name in (None, job.name)]
        rows = [
            {
                "job": job.name,
                "epoch": version.key[0],
                "step": version.key[1],
                "kind": "borrowed" if version.borrowed else "partial" if version.partial else "held",
                "reason": version.reason,
                "bytes": version.nbytes,
                "ranks": len(version.segments),
                "leases": len(version.leases),
                "state": _state(version),
                "manifests": version.set_digest,
            }
            for job in jobs
            for version in sorted(job.versions.values(), key=lambda v: v.key, reverse=True)
        ]
        return Reply({"versions": rows})

    def _sessions(self, call: Call) -> Reply:
        rows = []
        for session in self._service.store.sessions.values():
            role = session.writer or session.worker
            visible = call.peer.admin or call.peer.uid == session.uid
            if not visible:
                continue
            forward = self._service.forwards.get(session.id)
            row: dict[str, Any] = {
                "session": session.id,
                "node": session.node or None,
                "pid": session.pid,
                "uid": session.uid,
                "home": forward.node if forward else None,
                "job": role[0] if role else forward.job if forward else None,
                "role": "writer" if session.writer else "reader" if session.worker else "control",
                "leases": len(session.leases),
            }
            if session.writer:
                row["rank"] = session.writer[1].rank
            if session.worker:
                worker = session.worker[1]
                row |= {"engine": worker.engine, "rank": worker.rank, "state": worker.state}
            rows.append(row)
        return Reply({"sessions": rows})

    def _manifests(self, call: Call) -> Reply:
        """What a job's ranks and engines have registered; without a trainer, the newest version's segments."""
        name = access.qualify(call.arguments["job"], call.peer)
        job = self._service.store.jobs.get(name)
        access.check_read(name, job, call.peer)
        if job is None:
            raise VersionUnavailable(f"no job {name} here")
        writers = _registered(job.writers.values())
        segments = list(job.held()[0].digests) if not writers and job.held() else []
        engines = [
            {"engine": engine.name, "world_size": engine.world_size, "workers": _registered(engine.workers.values())}
            for engine in job.engines.values()
            if engine.workers
        ]
        workers = [worker for engine in job.engines.values() for worker in engine.workers.values()]
        ranks = [*writers, *_registered(workers)]
        index, fd = self._service.shelf.bundle([*(digest for _, digest in ranks), *segments])
        body = {"job": name, "world_size": job.world_size, "writers": writers, "segments": segments}
        return Reply(body | {"engines": engines, "bodies": index}, [fd])

    def _events(self, call: Call) -> Reply | Wait:
        """Those after a number, once there are any; without one, from the first that is remembered. In pages."""
        events, after = self._service.events, call.arguments["after"]
        wanted = call.arguments["job"]
        name = access.qualify(wanted, call.peer) if wanted else None
        jobs = self._service.store.jobs
        found = [
            event
            for event in events.after(min(after or 0, events.last))
            if name in (None, event["job"])
            and (not event["job"] or access.may_read(event["job"], jobs.get(event["job"]), call.peer))
        ]
        if after is not None and not found:
            return Wait(EVENTS, lambda: "something to happen")
        page = _page(found)
        more = len(page) < len(found)
        return Reply({"events": page, "last": page[-1]["number"] if more else events.last, "more": more})

    def _job(self, job: Job) -> dict[str, Any]:
        engines = [self._engine(engine) for engine in job.engines.values()]
        return _job(job) | {"engines": engines, "elsewhere": self.following(job)}

    def _one_engine(self, call: Call) -> Reply | Coroutine[Any, Any, Reply]:
        """For whoever drives an engine's workers: what each of them has come to, on other nodes, too."""
        name = access.qualify(call.arguments["job"], call.peer)
        job = self._service.store.jobs.get(name)
        access.check_read(name, job, call.peer)
        engine = job.engines.get(call.arguments["engine"]) if job else None
        if engine is None:
            raise VersionUnavailable(f"{name}: no worker of engine {call.arguments['engine']} has registered")
        return self._seen(job, engine, call) if job and spans(engine) else Reply(self._engine(engine))

    async def _seen(self, job: Job, engine: Engine, call: Call) -> Reply:
        if self.seen is not None:
            await self.seen(job, engine, call.deadline)
        return Reply(self._engine(engine))

    def _engine(self, engine: Engine) -> dict[str, Any]:
        workers = [
            _worker(worker)
            | {"waiting": engine.waits(worker, time.monotonic()), "staged": self._service.store.staged(worker)}
            for worker in engine.workers.values()
        ]
        for other in engine.spanning.others.values() if engine.spanning is not None else ():
            more: dict[str, Any] = {"waiting": False, "node": other.node}
            workers += [dict(row) | more for row in other.workers.values()]
        workers.sort(key=lambda row: row["rank"])
        rounds = [
            {"update": number, "version": list(agreed.key), "settled": agreed.settled, "have": list(agreed.have)}
            for number, agreed in (sorted(engine.spanning.rounds.items()) if engine.spanning is not None else ())
        ]
        return {"engine": engine.name, "world_size": engine.world_size, "workers": workers, "rounds": rounds}

    def _visible(self, call: Call) -> list[Job]:
        jobs = self._service.store.jobs
        return [jobs[name] for name in sorted(jobs) if access.may_read(name, jobs[name], call.peer)]


def _registered(ranks: Iterable[Writer | Worker]) -> list[tuple[int, str]]:
    return sorted((one.rank, one.digest) for one in ranks)


def _page(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many of the first as one answer takes, but one at least."""
    ends = itertools.accumulate(len(orjson.dumps(event)) for event in events)
    return events[: max(1, sum(end <= PAGE_BYTES for end in ends))]


def _job(job: Job) -> dict[str, Any]:
    return {
        "job": job.name,
        "epoch": job.epoch,
        "world_size": job.world_size,
        "keep": job.keep,
        "last_step": job.high if job.high >= 0 else None,
        "writers": sorted(job.writers),
        "held": [list(version.key) for version in job.held() if not version.borrowed],
        "borrowed": [list(version.key) for version in job.held() if version.borrowed],
        "partial": [list(version.key) for version in job.kept() if version.partial],
        "choice": job.choice._asdict() if job.choice else None,
        "open": [
            {"step": step, "sealed": sorted(attempt.sealed), "ranks": sorted(attempt.segments)}
            for step, attempt in sorted(job.attempts.items())
        ],
        "segments": _segments(job),
        "parked": [
            {"rank": p.rank, "name": p.name, "bytes": p.segment.nbytes, "state": p.state.value, "pid": p.pid or None}
            for _, p in sorted(job.parcels.items())
        ],
        "pinned": [{"version": list(key), "ranks": sorted(ranks)} for key, ranks in sorted(job.pins.items())],
        "bytes": sum(segment.nbytes for segment in job.segments.values() if not segment.borrowed),
        "locked": all(segment.locked for segment in job.segments.values()),
    }


def _state(version: Version) -> str:
    if version.withdrawn:
        return "withdrawn"
    return "retiring" if version.retired else "borrowed" if version.borrowed else "held"


def _segments(job: Job) -> dict[str, int]:
    """How many of each state. One that is granted has nothing of a version yet: it counts as free."""
    states = Counter(segment.state for segment in job.segments.values() if not segment.borrowed)
    states[SegmentState.FREE] += states.pop(SegmentState.GRANTED, 0)
    return {state.value: states[state] for state in SegmentState if state is not SegmentState.GRANTED}


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "pid": worker.pid,
        "state": worker.state,
        "version": list(worker.version) if worker.version else None,
        "result": worker.result._asdict() if worker.result else None,
        "failure": worker.failure._asdict() if worker.failure else None,
        "aside": worker.aside,
        "verified": worker.verified,
    }
