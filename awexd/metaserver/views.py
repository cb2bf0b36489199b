"""The MetaServer's state as plain JSON values. Looks only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from awexd.metaserver.model import Job, Node, Version

SHOWN_ABORTS = 8


def brief(job: Job) -> dict[str, Any]:
    """What waiters are told: small, since there may be a thousand of them."""
    pending = job.pending
    return {
        "job": job.name,
        "seq": job.seq,
        "epoch": job.epoch,
        "last_step": job.high if job.high >= 0 else None,
        "world_size": job.world_size,
        "absent": job.absent,
        "pending": {"world_size": pending.world_size, "absent": pending.absent} if pending else None,
        "versions": [[*version.key, version.attempt, version.held()] for version in job.listed()],
        "open": [[a.step, a.number, len(a.sealed)] for _, a in sorted(job.attempts.items())] if job.attempts else [],
        "aborted": list(job.aborted)[-SHOWN_ABORTS:],
        "engines": sum([len(report.engines) for report in job.reports.values()]),
        "nodes": len({*job.reports, *[member.node for member in job.members.values()]}),
        "closed": False,
    }


def closed(name: str, seq: int) -> dict[str, Any]:
    """The last that waiters are told of a job."""
    return brief(Job(name, seq=seq)) | {"closed": True}


def closed_view(name: str, seq: int) -> dict[str, Any]:
    """The same of all there is to say."""
    return view(Job(name)) | {"brief": closed(name, seq)}


def gist(view: dict[str, Any]) -> dict[str, Any]:
    """A view less its number and what of it changes with every rank of every step."""
    return view | {"brief": view["brief"] | {"seq": 0, "open": []}}


def several(bodies: Iterable[bytes]) -> bytes:
    """Views of several jobs, as one."""
    return b'{"jobs":[%s]}' % b",".join(bodies)


def view(job: Job) -> dict[str, Any]:
    """All there is to say of a job."""
    return {
        "brief": brief(job),
        "keep": job.keep,
        "local": job.local,
        "home": job.home,
        "sends": any(report.sends for report in job.reports.values()),
        "waiting": [{"node": node, "ranks": sorted(ranks)} for node, ranks in sorted(_waiting(job).items())],
        "ranks": [{"rank": rank, "node": m.node, "digest": m.digest} for rank, m in sorted(job.members.items())],
        "pieces": [_version(version) for version in job.listed()],
        "coming": [_version(version) for version in job.coming()],
        "aborted": {str(number): why for number, why in job.aborted.items()},
        "engines": [
            {"node": node, **engine} for node, report in sorted(job.reports.items()) for engine in report.engines
        ],
    }


def _version(version: Version) -> dict[str, Any]:
    return {
        "epoch": version.key[0],
        "step": version.key[1],
        "attempt": version.attempt,
        "world_size": version.world_size,
        "bytes": version.nbytes,
        "pieces": [[rank, *piece] for rank, piece in sorted(version.pieces.items())],
        "fetching": list(version.fetching),
        "parts": dict(sorted(version.parts.items())),
        "holders": {node: sorted(ranks) for node, ranks in sorted(version.holders.items())},
    }


def _waiting(job: Job) -> dict[str, set[int]]:
    """Ranks by node whose fellows have still to come, wherever that may be."""
    found = {node: set(report.waiting) for node, report in job.reports.items() if report.waiting}
    for rank, member in job.pending.members.items() if job.pending else ():
        found.setdefault(member.node, set()).add(rank)
    return found


def node(found: Node, ttl: float, now: float) -> dict[str, Any]:
    return {
        "node": found.name,
        "run": found.run,
        "address": found.address,
        "version": found.version,
        "seen_ms": max(0, int((now + ttl - found.expires) * 1000)),
        "up_ms": int((now - found.since) * 1000),
        "jobs": sorted(found.jobs),
    }
