"""A daemon tells the MetaServer what it has: itself, and of each job its ranks, engines and held versions.

Nothing on the socket's path waits for this: a change only leaves a job's name here. What is told of a job is always
all of it, so that a lost answer, and a restart of either side, is mended by telling it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from awexd import __version__
from awexd.background import Signals
from awexd.config import Settings
from awexd.nodes.metaclient import MetaClient, tls_context, token_for
from awexd.service import Service
from awexd.store.model import Attempt, Engine, Job, Version, VersionKey
from awexd.tickets import KEY_BYTES
from awexd_transports.base import Admission
from awexd_transports.errors import AwexdError, BudgetExceeded, DaemonUnavailable, DeadlineExceeded

RENEWALS = 3
"""In the time after which a daemon that says nothing is gone."""
BACKOFF_SECONDS = (0.1, 5.0)
LEAVE_SECONDS = 2.0
UNSERVED = "0"
_TRANSIENT = (DaemonUnavailable, DeadlineExceeded)
_log = logging.getLogger(__name__)


class _Anew(Exception):
    """The MetaServer does not know this daemon (any more)."""


class Announcer:
    """Announces one daemon until cancelled.

    Attributes:
        node: its name. ``run``: of this process.
        generation: counts how often the MetaServer has been told of this daemon from the beginning.
        address: where other nodes reach this one; None: it serves none.
        admission: whom it lets in that fetches from it; its key is the MetaServer's present process's.
        elsewhere: called with a job whose exchanges are decided here though its home is another node, and that node.
        refused: called with a job and the versions of it that were not committed as this node has them.

    Raises:
        InvalidArgument, AccessDenied: its token or TLS files cannot be used.
    """

    def __init__(self, service: Service, settings: Settings) -> None:
        if settings.metaserver is None:
            raise ValueError("no MetaServer")
        self.node = settings.node or host_name()
        self.run = secrets.token_hex(8)
        self.generation = 0
        self.admission = Admission(self.node, secrets.token_bytes(KEY_BYTES), self._now_ms)
        self.refused: Callable[[str, list[VersionKey]], None] = lambda job, keys: None
        self.elsewhere: Callable[[str, str], None] = lambda job, home: None
        self._url = settings.metaserver
        self._service = service
        self.address = settings.advertise
        self._token = token_for(settings.token_file, "node")
        self._context = tls_context(self._url, settings.tls_ca, settings.tls_cert, settings.tls_key)
        self._clock = 0.0
        self._run = ""
        self._reported = Signals()
        self._dirty: set[str] = set()
        self._told: set[str] = set()
        self._refused: dict[str, str] = {}
        self._later: set[str] = set()
        self._bodies: set[str] = set()
        self._changed = asyncio.Event()
        self._problem: str | None = "not announced yet"
        service.followers.append(self.changed)

    def changed(self, jobs: Collection[str]) -> None:
        """Something of these jobs has changed."""
        self._dirty.update(jobs)
        self._changed.set()

    def client(self, connections: int = 8) -> MetaClient:
        """One more for the same MetaServer, with this daemon's token."""
        return MetaClient(self._url, self._token, self._context, connections=connections)

    async def reported(self, name: str) -> None:
        """Returns once the MetaServer has been told of that job."""
        while name not in self._told:
            await self._reported.next(name)

    def problem(self) -> str:
        """Why the MetaServer does not know this node now; "" where it does."""
        return self._problem or ""

    def _now_ms(self, run: str) -> int | None:
        """The clock of the MetaServer's process of that name, as far as known: behind by at most an answer's way."""
        return int((time.monotonic() + self._clock) * 1000) if run == self._run else None

    def here_at(self, clock_ms: int) -> float:
        """A moment of the MetaServer's clock by this process's (monotonic); late by at most an answer's way."""
        return clock_ms / 1000 - self._clock

    def status(self) -> dict[str, Any]:
        """For people."""
        return {"url": self._url, "node": self.node, "connected": self._problem is None, "problem": self._problem}

    async def keep(self) -> None:
        """Announces, tells of changes, renews; again and again where the MetaServer is away. Leaves when cancelled."""
        async with MetaClient(self._url, self._token, self._context) as client:
            pause = BACKOFF_SECONDS[0]
            try:
                while True:
                    try:
                        await self._announce(client)
                        pause = BACKOFF_SECONDS[0]
                        await self._tell(client)
                    except _Anew:
                        continue
                    except AwexdError as error:
                        self._away(error)
                    except Exception:  # noqa: BLE001 - a fault of ours ends no daemon
                        _log.exception("announcing failed")
                        self._away(AwexdError("announcing to the MetaServer failed; the log has more"))
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, BACKOFF_SECONDS[1])
            finally:
                if self._problem is None:
                    with contextlib.suppress(AwexdError):
                        path = f"/v1/nodes/{self.node}"
                        await client.call("DELETE", path, query={"run": self.run}, timeout=LEAVE_SECONDS)

    async def _announce(self, client: MetaClient) -> None:
        body = {"run": self.run, "address": self.address, "version": __version__}
        answer = await client.call("PUT", f"/v1/nodes/{self.node}", body)
        try:
            self.admission.key = bytes.fromhex(answer["key"])
            self._run, self._ttl = str(answer["run"]), answer["ttl_ms"] / 1000
            self._clock = answer["clock_ms"] / 1000 - time.monotonic()
        except (KeyError, TypeError, ValueError) as error:
            raise DaemonUnavailable(
                f"the MetaServer at {self._url} answers otherwise than this version expects"
            ) from error
        self._bodies.clear()
        self._refused.clear()
        self._told.clear()
        self.generation += 1
        self.changed(self._service.store.jobs)
        if self._problem is not None:
            self._problem = None
            self._service.note("metaserver", "", f"announced to the MetaServer at {self._url} as {self.node}")
            self._service.settle()

    def _away(self, error: AwexdError) -> None:
        if self._problem != str(error):
            self._problem = str(error)
            text = f"{error}; this node's own jobs go on without it"
            self._service.note("metaserver", "", text, logging.WARNING)
            self._service.settle()

    async def _tell(self, client: MetaClient) -> None:
        """Tells of changes, and that it is still there, until something fails."""
        renewal = time.monotonic() + self._ttl / RENEWALS
        while True:
            while self._dirty and time.monotonic() < renewal:
                await self._report(client, self._dirty.pop())
            if time.monotonic() >= renewal:
                answer = await self._ask(client, "POST", f"/v1/nodes/{self.node}/renew", {"run": self.run})
                self._clock = answer["clock_ms"] / 1000 - time.monotonic()
                renewal = time.monotonic() + self._ttl / RENEWALS
                self._dirty |= self._later
                self._later.clear()
            self._changed.clear()
            if not self._dirty:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, renewal - time.monotonic())):
                        await self._changed.wait()

    async def _report(self, client: MetaClient, name: str) -> None:
        """All of one job, if it still is there; manifests first, so that whoever hears of them can have them."""
        job = self._service.store.jobs.get(name)
        path = f"/v1/nodes/{self.node}/jobs/{name}"
        try:
            if job is None:
                if name in self._told:
                    await self._ask(client, "DELETE", path, query={"run": self.run})
                    self._told.discard(name)
                return
            await self._send_manifests(client, job)
            if self._service.store.jobs.get(name) is not job:  # closed meanwhile
                self._dirty.add(name)
                return
            report = report_of(job)
            answer = await self._ask(client, "PUT", path, report | {"run": self.run})
            self._told.add(name)
            self._reported.fire(name)
            if answer["refused"]:
                self.refused(name, [(epoch, step) for epoch, step in answer["refused"]])
            if report["home"] and answer["home"] not in (None, self.node):
                self.elsewhere(name, answer["home"])
            self._refused.pop(name, None)
        except (_Anew, *_TRANSIENT):
            self._dirty.add(name)
            raise
        except AwexdError as error:
            # Its next change is told again; until then nothing would come of it, unless there only was no room.
            if isinstance(error, BudgetExceeded):
                self._later.add(name)
            if self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                self._service.note("metaserver", name, f"the MetaServer refuses it: {error}", logging.WARNING)
                self._service.settle()

    async def _send_manifests(self, client: MetaClient, job: Job) -> None:
        """Those that are not there yet."""
        wanted = list(dict.fromkeys(digest for digest in _digests(job) if digest not in self._bodies))
        if not wanted:
            return
        answer = await self._ask(client, "POST", "/v1/manifests/missing", {"digests": wanted})
        for digest in answer["missing"]:
            body = self._service.shelf.body(digest)
            if body is not None:
                await self._ask(client, "PUT", f"/v1/manifests/{digest}", body)
        self._bodies.update(wanted)

    async def _ask(self, client: MetaClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
        try:
            answer = await client.call(method, path, body, **more)
        except AwexdError as error:
            if error.details.get("announce"):
                raise _Anew from error
            raise
        if client.run != self._run:
            raise _Anew
        return answer


def report_of(job: Job) -> dict[str, Any]:
    """What the MetaServer is told of a job; as ``ReportBody`` of its document. Ranks of a joined one are told apart."""
    versions = [version for version in job.kept() if not version.borrowed]
    segments = [[job.segments[segment_id] for segment_id in version.segments] for version in versions]
    return {
        "local": job.epoch > 0 and job.mirror is None,
        "joined": job.joined is not None,
        "epoch": job.epoch,
        "world_size": job.world_size,
        "keep": job.keep,
        "ranks": [[rank, writer.digest] for rank, writer in sorted(job.writers.items())] if job.joined is None else [],
        "waiting": _waiting(job),
        "versions": [
            {
                "epoch": version.key[0],
                "step": version.key[1],
                "attempt": version.attempt,
                "pieces": [[one.rank, one.digest, one.nbytes, one.checksums] for one in held],
                "parts": _parts(version),
                "whole": [one.rank for one in held if not one.mirrored] if version.part is not None else [],
            }
            for version, held in zip(versions, segments, strict=True)
        ],
        "engines": [_engine(engine) for engine in job.engines.values() if engine.workers],
        "withdrawn": list(job.withdrawn),
        "fetching": [job.mirror.fetching] if job.mirror is not None and job.mirror.fetching else [],
        "home": exchanged(job),
        "sends": any(writer.mode == "nccl" for writer in job.writers.values()),
        "coming": [_coming(job, attempt) for attempt in _foretold(job)],
    }


def _foretold(job: Job) -> list[Attempt]:
    """What other nodes may fetch before its commit; that of a joined job is told apart."""
    alone = job.joined is None and job.mirror is None
    return [one for one in job.attempts.values() if alone and len(one.written) == job.world_size]


def _coming(job: Job, attempt: Attempt) -> dict[str, Any]:
    segments = [job.segments[attempt.segments[rank]] for rank in sorted(attempt.written)]
    pieces = [[one.rank, one.digest, one.nbytes, one.checksums] for one in segments]
    return {"epoch": attempt.epoch, "step": attempt.step, "attempt": attempt.number, "pieces": pieces}


def exchanged(job: Job) -> bool:
    """Whether processes exchange that job's weights, as this daemon says."""
    writers = [*job.writers.values(), *(job.pending.writers.values() if job.pending else ())]
    workers = [worker for engine in job.engines.values() for worker in engine.workers.values()]
    return any(writer.mode == "nccl" for writer in writers) or any(worker.exchanges for worker in workers)


def _parts(version: Version) -> str | None:
    """What is served of it; of a part that an earlier daemon has left, nothing, which nobody else has too."""
    if version.part is None:
        return None
    return version.part.digest if version.served else UNSERVED


def _waiting(job: Job) -> list[int]:
    """Ranks of which the MetaServer knows by nothing else."""
    writers = job.pending.writers if job.pending is not None else {}
    return sorted(rank for rank, writer in writers.items() if job.joined is None or writer.refused is not None)


def _engine(engine: Engine) -> dict[str, Any]:
    workers = [
        {
            "rank": worker.rank,
            "state": worker.state,
            "version": list(worker.version) if worker.version else None,
            "digest": worker.digest,
        }
        for _, worker in sorted(engine.workers.items())
    ]
    return {"engine": engine.name, "world_size": engine.world_size, "workers": workers}


def _digests(job: Job) -> Iterable[str]:
    yield from (writer.digest for writer in job.writers.values())
    for version in job.kept():
        yield from () if version.borrowed else version.digests
    for attempt in _foretold(job):
        yield from (job.segments[segment_id].digest for segment_id in attempt.segments.values())
    for engine in job.engines.values():
        yield from (worker.digest for worker in engine.workers.values())


def host_name() -> str:
    """This host's name, as a node may be named."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:100].lstrip(".-")
    return name or "node"
