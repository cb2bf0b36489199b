"""What ``awexctl`` shows: the daemon's state as plain JSON values. Looks only."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from awexd import __version__, access
from awexd.service import Call, Reply, Service
from awexd.store.model import Engine, Job, SegmentState
from awexd_transports.errors import VersionUnavailable


class Report:
    """The operations that look. A caller sees the jobs that it may read."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = time.time()
        service.add({"status": self._status, "versions": self._versions, "sessions": self._sessions})

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
                "sessions": len(store.sessions),
                "jobs": [_job(job) for job in self._visible(call)],
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
                "kind": "held",
                "bytes": version.nbytes,
                "ranks": len(version.segments),
                "leases": len(version.leases),
                "state": "withdrawn" if version.withdrawn else "retiring" if version.retired else "held",
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
            row: dict[str, Any] = {
                "session": session.id,
                "pid": session.pid,
                "uid": session.uid,
                "job": role[0] if role else None,
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

    def _visible(self, call: Call) -> list[Job]:
        jobs = self._service.store.jobs
        return [jobs[name] for name in sorted(jobs) if access.may_read(name, jobs[name], call.peer)]


def _job(job: Job) -> dict[str, Any]:
    return {
        "job": job.name,
        "epoch": job.epoch,
        "world_size": job.world_size,
        "keep": job.keep,
        "last_step": job.high if job.high >= 0 else None,
        "writers": sorted(job.writers),
        "held": [list(version.key) for version in job.held()],
        "borrowed": [],
        "open": [
            {"step": step, "sealed": sorted(attempt.sealed), "ranks": sorted(attempt.segments)}
            for step, attempt in sorted(job.attempts.items())
        ],
        "segments": _segments(job),
        "bytes": sum(segment.nbytes for segment in job.segments.values()),
        "locked": all(segment.locked for segment in job.segments.values()),
        "engines": [_engine(engine) for engine in job.engines.values()],
    }


def _segments(job: Job) -> dict[str, int]:
    """How many of each state. One that is granted has nothing of a version yet: it counts as free."""
    states = Counter(segment.state for segment in job.segments.values())
    states[SegmentState.FREE] += states.pop(SegmentState.GRANTED, 0)
    return {state.value: states[state] for state in SegmentState if state is not SegmentState.GRANTED}


def _engine(engine: Engine) -> dict[str, Any]:
    return {
        "engine": engine.name,
        "world_size": engine.world_size,
        "workers": [
            {
                "rank": rank,
                "pid": worker.pid,
                "state": worker.state,
                "version": list(worker.version) if worker.version else None,
            }
            for rank, worker in sorted(engine.workers.items())
        ],
    }
