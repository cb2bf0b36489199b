"""What other nodes know of a job, before its first writer registers here.

A trainer may come to a node that has never heard of it, or that has missed what it did elsewhere: epochs and steps must
go on from there. Asked once per arrival, and only of a MetaServer that is there; without one the node decides alone.
"""

from __future__ import annotations

import time
from typing import Any

from awexd.nodes.metaclient import MetaClient
from awexd.service import Service
from awexd.store.model import Job
from awexd_transports.errors import AwexdError

LOOK_SECONDS = 1.0
"""How long a trainer that arrives may wait for the MetaServer."""


def arrives(job: Job | None) -> bool:
    """Whether a writer that registers now is the first of its trainer on this node."""
    return job is None or not (job.writers or job.pending)


async def look(service: Service, client: MetaClient, node: str, name: str, uid: int) -> None:
    """Takes over the epoch and the last step of a job whose trainer was on other nodes, and is on none now."""
    try:
        view = await client.call("GET", f"/v1/jobs/{name}", timeout=LOOK_SECONDS)
        brief = view["brief"]
        nodes = {str(row["node"]) for row in view["ranks"]} - {node}
        known = int(brief["epoch"]), -1 if brief["last_step"] is None else int(brief["last_step"])
        size, keep = int(brief["world_size"]), int(view["keep"])
    except (AwexdError, KeyError, TypeError, ValueError):  # it is away, or has never heard of it
        return
    job = service.store.jobs.get(name)
    if nodes or not arrives(job) or known <= ((job.epoch, job.high) if job is not None else (0, -1)):
        return
    job = service.store.job_for(name, uid, time.monotonic())
    _take(service, job, known, size, keep)


def _take(service: Service, job: Job, known: tuple[int, int], size: int, keep: int) -> None:
    listed: dict[Any, Any] = job.mirror.listed if job.mirror is not None else {}
    epoch, high = known
    service.store.mirror(job, epoch=epoch, world_size=size, keep=keep, high=high, nodes=(), listed=listed)
    service.note("epoch", job.name, f"epoch {epoch} is known from other nodes, up to step {high}")
    service.records.save_soon(job)
    service.settle()
