"""What owners and administrators do to a job: grant, drop, roll back, close; and tidying up."""

from __future__ import annotations

import time
from typing import Any

from awexd import access
from awexd.service import Call, Reply, Service
from awexd.store import Version
from awexd.store.model import Job
from awexd_transports.errors import AccessDenied, VersionUnavailable


class Control:
    """The operations that take away or give rights. Only a job's owner, root and the daemon's user may."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._memory = service.memory
        service.add(
            {
                "job.close": self._job_close,
                "job.grant": self._job_grant,
                "drop": self._drop,
                "rollback": self._rollback,
                "gc": self._gc,
            }
        )

    async def _job_close(self, call: Call) -> Reply:
        job = self._controlled(call, missing_ok=True)
        if job is not None:
            self._service.close_job(job, f"by uid {call.peer.uid}")
            self._service.settle()
            await self._service.background.threads_done()  # answered when the memory is gone
        return Reply({"closed": job is not None})

    async def _job_grant(self, call: Call) -> Reply:
        name = access.qualify(call.arguments["job"], call.peer)
        access.check_write(name, call.peer)
        job = self._store.job_for(name, call.peer.uid, time.monotonic())
        job.uids.update(call.arguments["uids"])
        job.gids.update(call.arguments["gids"])
        await self._service.records.save(job)
        return Reply({"uids": sorted(job.uids), "gids": sorted(job.gids)})

    async def _drop(self, call: Call) -> Reply:
        job: Job = self._controlled(call)
        step = call.arguments["step"]
        if step is None and job.idle_since is not None:
            job.pins.clear()  # nobody is left to whom those were the only copy
        reply = await self._withdraw(job, self._store.drop(job, step), call.peer.uid)
        deserted = job.unused_since is not None and self._store.jobs.get(job.name) is job
        if step is None and deserted:
            self._service.close_job(job, "nothing is left of it")
        return reply

    async def _rollback(self, call: Call) -> Reply:
        job = self._controlled(call)
        versions = self._store.rollback(job, call.arguments["step"])
        return await self._withdraw(job, versions, call.peer.uid)

    async def _gc(self, call: Call) -> Reply:
        if not call.peer.admin:
            raise AccessDenied("only root and the daemon's own user may collect garbage")
        before = self._memory.total_nbytes
        self._store.collect()
        self._service.settle()
        await self._service.background.threads_done()
        await self._service.shelf.prune()
        return Reply({"freed_bytes": before - self._memory.total_nbytes})

    def _controlled(self, call: Call, *, missing_ok: bool = False) -> Any:
        name = access.qualify(call.arguments["job"], call.peer)
        access.check_control(name, call.peer)
        job = self._store.jobs.get(name)
        if job is None and not missing_ok:
            jobs = self._store.jobs
            known = [other for other in sorted(jobs) if access.may_read(other, jobs[other], call.peer)]
            raise VersionUnavailable(f"no job {name} here; jobs: {', '.join(known) or 'none'}")
        return job

    async def _withdraw(self, job: Job, versions: list[Version], uid: int) -> Reply:
        # Headers first, then the record: a daemon killed in between must find neither versions nor free steps.
        for version in versions:
            for segment_id in version.segments:
                if segment_id in job.segments:
                    self._service.wipe(job.segments[segment_id], version.key[1])
        self._service.settle()
        await self._service.records.save(job)
        await self._service.background.threads_done()
        gone = ", ".join(map(str, versions)) or "nothing"
        self._service.note("withdrawn", job.name, f"{gone} withdrawn by uid {uid}")
        return Reply({"withdrawn": [list(v.key) for v in versions], "held": [list(v.key) for v in job.held()]})
