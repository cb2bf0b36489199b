"""Engines whose workers are on several nodes: what this node has of each is told the MetaServer, whose answer is done.

One exchange does both: a node tells all that it has of an engine and is answered with all that concerns it. That is
repeated when either changes, so that a lost answer, and a restart of either side, is mended by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Collection
from typing import Any

from awexd.nodes.announcing import Announcer
from awexd.nodes.metaclient import MetaClient
from awexd.service import LAST_LOOK_SECONDS, Service
from awexd.store.model import Engine, Job, describe_ranks
from awexd_transports.errors import AwexdError, DaemonUnavailable, DeadlineExceeded

WAIT_MS = 30_000
ANSWER_SECONDS = WAIT_MS / 1000 + 15.0
BACKOFF_SECONDS = (0.05, 2.0)
_log = logging.getLogger(__name__)


class Rounds:
    """All engines that have workers here, but not all of them. ``run`` until cancelled."""

    def __init__(self, service: Service, announcer: Announcer) -> None:
        self._service = service
        self._announcer = announcer
        self._agreeing: dict[tuple[str, str], Agreeing] = {}
        self._dirty: set[str] = set(service.store.jobs)
        self._wake = asyncio.Event()
        service.store.clustered = True
        service.followers.append(self._changed)

    async def run(self) -> None:
        async with (
            self._announcer.client() as client,
            self._announcer.client(connections=0) as watcher,
            asyncio.TaskGroup() as group,
        ):
            self._wake.set()
            while True:
                await self._wake.wait()
                self._wake.clear()
                dirty, self._dirty = self._dirty, set()
                for agreeing in self._agreeing.values():
                    if agreeing.job.name in dirty:
                        agreeing.look()
                for name in dirty:
                    job = self._service.store.jobs.get(name)
                    for engine in list(job.engines.values()) if job is not None else ():
                        if job is not None and engine.elsewhere and (name, engine.name) not in self._agreeing:
                            agreeing = Agreeing(self._service, self._announcer, client, watcher, job, engine)
                            self._start(group, agreeing)

    async def seen(self, job: Job, engine: Engine, deadline: float) -> None:
        """Returns once every other node of the engine has told how its workers are, after this was called.

        Raises:
            DeadlineExceeded: names who has not.
            AwexdError: the MetaServer does not take the question.
        """
        agreeing = self._agreeing.get((job.name, engine.name))
        if agreeing is not None:
            await agreeing.seen(deadline)

    def _start(self, group: asyncio.TaskGroup, agreeing: Agreeing) -> None:
        name = agreeing.job.name, agreeing.engine.name
        self._agreeing[name] = agreeing

        def ended(_: object) -> None:
            del self._agreeing[name]
            self._changed([name[0]])  # another of that name may have come meanwhile

        group.create_task(agreeing.run()).add_done_callback(ended)

    def _changed(self, jobs: Collection[str]) -> None:
        self._dirty.update(jobs)
        self._wake.set()


class Agreeing:
    """One engine. ``run`` ends once all its workers are here, or none is."""

    def __init__(
        self,
        service: Service,
        announcer: Announcer,
        client: MetaClient,
        watcher: MetaClient,
        job: Job,
        engine: Engine,
    ) -> None:
        self.job, self.engine = job, engine
        self._service, self._store = service, service.store
        self._announcer, self._client, self._watcher = announcer, client, watcher
        self._url = f"/v1/jobs/{job.name}/engines/{engine.name}"
        self._wake = asyncio.Event()
        self._told: dict[str, Any] | None = None
        self._seq = 0
        self._heard = asyncio.Event()
        self._looked = self._turn = 0
        self._problem = ""

    def look(self) -> None:
        """The job has changed here."""
        self._wake.set()

    @property
    def _over(self) -> bool:
        gone = self._store.jobs.get(self.job.name) is not self.job
        return gone or self.job.engines.get(self.engine.name) is not self.engine or not self.engine.elsewhere

    async def run(self) -> None:
        known = self._store.spanned(self.engine)
        if known is not None:
            known.problem = self._doing
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                await self._keep()
                watch.cancel()
        except Exception:  # noqa: BLE001 - a fault of ours ends no daemon
            _log.exception("agreeing on engine %s of job %s failed", self.engine.name, self.job.name)
            await asyncio.sleep(BACKOFF_SECONDS[1])
        finally:
            self._store.leave_spanning(self.job, self.engine)
            self._service.settle()

    async def seen(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        body = {"node": self._announcer.node, "run": self._announcer.run}
        answer = await self._client.call("POST", f"{self._url}/looks", body, timeout=max(0.1, deadline - loop.time()))
        while (known := self.engine.spanning) is not None:
            late = [other for other in known.others.values() if other.look < answer["look"]]
            if not late:
                return
            try:
                async with asyncio.timeout_at(deadline):
                    await self._service.changes.next(self.job.name)
            except TimeoutError:
                who = ", ".join(f"node {other.node} ({describe_ranks(other.workers)})" for other in late)
                raise DeadlineExceeded(f"{self.job.name}: {who} did not tell how its workers are") from None

    # internals

    async def _keep(self) -> None:
        """Tells until all workers are here, or none is; again and again where the MetaServer is away."""
        pause = BACKOFF_SECONDS[0]
        while True:
            over = self._over
            try:
                told = await self._tell(over)
                self._problem, pause = "", BACKOFF_SECONDS[0]
                if over:
                    return
                if not told:
                    await self._change()
            except AwexdError as error:
                if over:
                    return  # the MetaServer hears of it when it knows this node again
                self._problem, self._told = str(error), None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                        await self._wake.wait()
                await asyncio.sleep(BACKOFF_SECONDS[0])
                pause = min(2 * pause, BACKOFF_SECONDS[1])

    def _doing(self) -> str:
        return self._announcer.problem() or self._problem

    async def _tell(self, over: bool) -> bool:
        """Tells what has changed; False: nothing has."""
        if not over:
            await self._announcer.reported(self.job.name)  # its manifests, too
        self._wake.clear()
        if not over:
            self._store.take_up(self.job, self.engine, time.monotonic())
        facts = self._store.facts(self.job, self.engine, time.monotonic())
        if facts == self._told:
            return False
        if facts["look"] > self._looked:
            self._looked = facts["look"]
            await asyncio.sleep(LAST_LOOK_SECONDS)  # what workers had said before they answered their driver is read
            facts = self._store.facts(self.job, self.engine, time.monotonic())
        self._turn = max(self._turn + 1, time.time_ns() // 1000)  # also after what a daemon before this one has told
        body = facts | {"node": self._announcer.node, "run": self._announcer.run, "turn": self._turn}
        answer = await self._client.call("POST", self._url, body)
        try:
            for row in answer["failed"]:
                row["at"] = self._announcer.here_at(row["at_ms"])
            self._store.hear(self.job, self.engine, self._announcer.node, answer, facts, time.monotonic())
            self._seq = answer["seq"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DaemonUnavailable("the MetaServer answers otherwise than this version expects") from error
        self._told = facts
        self._heard.set()
        self._service.settle()
        await self._get_manifests()
        return True

    async def _get_manifests(self) -> None:
        """Of the engine's workers elsewhere: a worker may have to know what its siblings declare."""
        shelf, known = self._service.shelf, self.engine.spanning
        wanted = [digest for digest in known.digests.values() if shelf.body(digest) is None] if known else []
        for digest in dict.fromkeys(wanted):
            body = await self._client.call("GET", f"/v1/manifests/{digest}")
            if not isinstance(body, bytes):
                raise DaemonUnavailable(f"the MetaServer gives no manifest {digest[:12]}")
            await shelf.add(digest, body)
        if wanted:
            self._store.touched.add(self.job.name)
            self._service.settle()

    async def _change(self) -> None:
        """Returns when something may have changed, or a wish has had its time."""
        now = time.monotonic()
        ends = [one.wish.until for one in self.engine.workers.values() if one.wish is not None and one.wish.until > now]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(ends) - now if ends else None):
                await self._wake.wait()

    async def _watch(self) -> None:
        """Has all told again whenever the MetaServer has something new, or is another."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            query = {"after": self._seq, "timeout_ms": WAIT_MS}
            changed: Any = {}
            with contextlib.suppress(AwexdError):
                changed = await self._watcher.call("GET", f"{self._url}/watch", query=query, timeout=ANSWER_SECONDS)
            if changed is None:
                self._heard.set()
                continue
            self._told = None
            self._wake.set()
