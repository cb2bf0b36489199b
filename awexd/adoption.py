"""After a restart: which of the segments found are committed versions. All others are unlinked."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from awexd.manifests import is_body
from awexd.memory import Found, Memory
from awexd.store import Segment, Store, Version, parking
from awexd.store.model import Job, ParcelState, Part, SegmentState, VersionKey
from awexd_transports.layout import digest_of
from awexd_transports.segment import HEADER_BYTES

NAMED_READERS = 24
"""Manifests that a header has room for."""
_log = logging.getLogger(__name__)


def adopt(store: Store, memory: Memory, jobs: Iterable[Job], manifests: Mapping[str, bytes], now: float) -> None:
    """Fills ``store`` with recorded jobs and with each version whose every rank had sealed the same attempt."""
    for job in jobs:
        job.idle_since = now
        job.alone = job.epoch > 0 and job.mirror is None
        store.jobs[job.name] = job
    groups: defaultdict[tuple[str, int, int, int], list[Found]] = defaultdict(list)
    for found in memory.adopt():
        header = found.header
        if header["state"] == ParcelState.PINNED:
            _adopt_parcel(store, found, now)
            continue
        groups[header["job"], header["epoch"], header["step"], header["attempt"]].append(found)
    good = {digest for digest, body in manifests.items() if is_body(body, digest)}
    for (name, epoch, step, attempt), segments in sorted(groups.items()):
        known = store.jobs.get(name)
        own = [found for found in segments if not found.header.get("mirrored")]
        # Of a trainer on several nodes, or of one that may be: whether it was committed, the MetaServer knows.
        whole = len(own) == segments[0].header["world_size"]
        spread = known is not None and (known.joined is not None or (known.mirror is not None and not whole))
        part = spread and bool(own) and not _brought(segments)
        if part:
            for found in [found for found in segments if found not in own]:
                memory.unlink(found.id)
            segments = own
        withdrawn = known is not None and attempt in known.withdrawn
        problem = "withdrawn" if withdrawn else _problem(segments, good, part)
        if problem:
            _log.info("job %s: epoch %d step %d is not whole (%s); unlinked", name, epoch, step, problem)
            for found in segments:
                memory.unlink(found.id)
            continue
        _adopt_version(store, name, (epoch, step), attempt, segments, now, part)
    for job in store.jobs.values():
        job.pins = {key: ranks for key, ranks in job.pins.items() if key in job.versions}
    for segment in store.to_unlink:
        memory.unlink(segment.id)
    for segment in store.to_clear:
        if segment not in store.to_unlink:
            memory.clear(segment.id)
    store.to_unlink.clear()
    store.to_clear.clear()
    store.touched.clear()


def header_of(
    job: Job,
    segment: Segment,
    key: VersionKey,
    attempt: int,
    *,
    world_size: int,
    checksums: bool,
    part: Part | None = None,
) -> dict[str, Any]:
    """What the header of a complete segment says, so that it is found again."""
    covers = sorted(part.covers) if part is not None and len(part.covers) <= NAMED_READERS else []
    return {
        "job": job.name,
        "owner_uid": job.owner_uid,
        "epoch": key[0],
        "step": key[1],
        "attempt": attempt,
        "rank": segment.rank,
        "world_size": world_size,
        "keep": job.keep,
        "digest": segment.digest,
        "checksums": checksums,
        "mirrored": segment.mirrored,
        "size": HEADER_BYTES + segment.nbytes,
        "state": str(SegmentState.SEALED),
        "part": [part.digest, part.nbytes, covers] if part is not None else None,
    }


def _adopt_parcel(store: Store, found: Found, now: float) -> None:
    header = found.header
    job = store.job_for(header["job"], header["owner_uid"], now)
    parking.adopt(store, job, header["rank"], header["name"], Segment(found.id, header["rank"], found.nbytes))
    _log.info("job %s: what rank %d parked as %s adopted", job.name, header["rank"], header["name"])


def _brought(segments: list[Found]) -> bool:
    """Whether all of a version is here, some of it from other nodes, which give only what is committed."""
    ranks = sorted(found.header["rank"] for found in segments)
    mirrored = any(found.header.get("mirrored") for found in segments)
    return mirrored and ranks == list(range(segments[0].header["world_size"]))


def _problem(segments: list[Found], manifests: set[str], part: bool) -> str:
    size = segments[0].header["world_size"]
    ranks = sorted(found.header["rank"] for found in segments)
    if ranks != list(range(size)) and not part:
        return f"of {size} ranks it has {ranks}"
    found = _part(segments)
    if found is not None and not found.covers:
        return f"a part of it, for more readers than {NAMED_READERS}"
    unknown = [found.header["digest"] for found in segments if found.header["digest"] not in manifests]
    return f"manifest {unknown[0][:12]} is lost" if unknown else ""


def _adopt_version(
    store: Store, name: str, key: tuple[int, int], attempt: int, found: list[Found], now: float, part: bool
) -> None:
    found.sort(key=lambda item: int(item.header["rank"]))
    header = found[0].header
    job = store.job_for(name, header["owner_uid"], now)
    if key[0] > job.epoch:
        job.epoch, job.world_size, job.keep, job.high = key[0], header["world_size"], header["keep"], -1
        if header.get("mirrored"):
            store.follow(job)
    segments = [
        Segment(
            item.id,
            item.header["rank"],
            item.nbytes,
            digest=item.header["digest"],
            checksums=item.header["checksums"],
            locked=item.locked,
            mirrored=bool(item.header.get("mirrored")),
        )
        for item in found
    ]
    digests = tuple(segment.digest for segment in segments)
    version = Version(
        key=key,
        attempt=attempt,
        segments=tuple(segment.id for segment in segments),
        digests=digests,
        set_digest=digest_of(digests),
        nbytes=sum(segment.nbytes for segment in segments),
        partial=part,
        unsure=part,
        part=_part(found),
    )
    store.adopt(job, version, segments)
    if part:
        store.spread(job)
    _log.info("job %s: %s adopted", name, version)


def _part(segments: Iterable[Found]) -> Part | None:
    """The largest of those that a version's fetched segments tell of: it was all here when the first was told."""
    told: list[Any] = [found.header.get("part") for found in segments if found.header.get("mirrored")]
    if None in told or not told:
        return None
    digest, nbytes, covers = max(told, key=lambda part: int(part[1]))
    return Part(digest, frozenset(covers), nbytes)
