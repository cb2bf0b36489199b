"""Jobs whose writers are on another node: each is watched at the MetaServer, and its versions brought here.

A job is followed while an engine of it is here, or something of it is held that came from elsewhere. One whose own
trainer is here is only watched for engines on other nodes, where its trainer may lend GPU memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Collection
from typing import Any

from awexd import access
from awexd.nodes.announcing import Announcer
from awexd.nodes.early import Early, newest_coming
from awexd.nodes.extending import Extending
from awexd.nodes.joining import Joining
from awexd.nodes.looking import arrives, look
from awexd.nodes.mapped import Mapped
from awexd.nodes.metaclient import MetaClient
from awexd.nodes.mirroring import Bringing, Means
from awexd.nodes.needs import Planner, Readers
from awexd.nodes.routes import Routes
from awexd.nodes.serving import Serving
from awexd.nodes.watching import Watching
from awexd.service import Across, Service
from awexd.store.elsewhere import Listing, Mirror
from awexd.store.mirroring import NOTHING
from awexd.store.model import Job, VersionKey, describe_ranks
from awexd_transports.errors import (
    AwexdError,
    BudgetExceeded,
    DaemonUnavailable,
    IntegrityError,
    InvalidArgument,
    ProtocolError,
    VersionConflict,
    VersionUnavailable,
)

BACKOFF_SECONDS = (0.1, 5.0)
GRACE_SECONDS = 10.0
"""Without an engine here, before versions are brought no more: an engine may only be restarting."""
LASTING = (BudgetExceeded, IntegrityError, InvalidArgument, ProtocolError)
"""What another look at the MetaServer does not mend by itself: whoever waits for the version is told."""
_log = logging.getLogger(__name__)


class Following:
    """Follows until cancelled. When ``run`` has ended, nothing is written into any slot any more."""

    def __init__(
        self, service: Service, announcer: Announcer, serving: Serving | None, mapped: Mapped, routes: Routes
    ) -> None:
        self._service = service
        self._announcer = announcer
        self._serving = serving
        self._mapped = mapped
        self._routes = routes
        self._follows: dict[str, Follow] = {}
        self._dirty: set[str] = set(service.store.jobs)
        self._wake = asyncio.Event()
        service.followers.append(self._changed)
        service.look_elsewhere = self._look
        self._client: MetaClient | None = None
        announcer.refused = self._refused
        service.across = self._across

    def status(self, job: Job) -> dict[str, Any] | None:
        """Of a job that is decided elsewhere, for people."""
        follow = self._follows.get(job.name)
        if job.mirror is None:
            return None
        bringing = follow.bringing if follow is not None else None
        return {
            "trainer_on": list(job.mirror.nodes),
            "joined": job.joined is not None,
            "route": self._routes.name,
            "waits_for": job.mirror.doing() if follow is not None else "an engine here",
            "problem": (follow.problem or (job.joined.problem if job.joined else None) or None) if follow else None,
            "fetching": bringing.status() if bringing is not None else None,
            "parts": [
                {"version": list(version.key), "bytes": version.part.nbytes, "version_bytes": version.nbytes}
                for version in job.held()
                if version.part is not None
            ],
        }

    async def run(self) -> None:
        with self._routes.open():
            await self._follow()

    async def _follow(self) -> None:
        async with (
            self._announcer.client() as client,
            self._announcer.client(connections=1) as watcher,
            asyncio.TaskGroup() as group,
        ):
            planner = Planner(self._service.shelf)
            means = Means(
                self._service, self._announcer, client, self._routes, self._mapped, self._serving, {}, planner
            )
            watching, self._client = Watching(watcher), client
            group.create_task(watching.run())
            self._wake.set()
            while True:
                await self._wake.wait()
                self._wake.clear()
                dirty, self._dirty = self._dirty, set()
                for name in dirty:
                    job, follow = self._service.store.jobs.get(name), self._follows.get(name)
                    if follow is not None and follow.job is not job:
                        follow.stop()
                        follow = None
                    if follow is not None:
                        follow.look()
                    elif job is not None and concerns(job):
                        self._start(group, Follow(means, watching, job))

    def _across(self, job: Job) -> Across:
        """The MetaServer, for the ranks of a joined job."""
        follow = self._follows.get(job.name)
        if follow is None or follow.job is not job:
            raise DaemonUnavailable(f"{job.name}: the MetaServer is just being asked for this job; try again")
        return follow.joining

    async def _look(self, name: str, uid: int) -> None:
        known = name in self._follows or not arrives(self._service.store.jobs.get(name))
        if not known and self._client is not None and not self._announcer.problem():
            await look(self._service, self._client, self._announcer.node, name, uid)

    def _start(self, group: asyncio.TaskGroup, follow: Follow) -> None:
        name = follow.job.name
        self._follows[name] = follow
        task = follow.task = group.create_task(follow.run())

        def ended(_: object) -> None:
            if self._follows.get(name) is follow:
                del self._follows[name]
                self._changed([name])  # something may have come up meanwhile

        task.add_done_callback(ended)

    def _changed(self, jobs: Collection[str]) -> None:
        self._dirty.update(jobs)
        self._wake.set()

    def _refused(self, name: str, keys: list[VersionKey]) -> None:
        """What this node has of those steps was rolled back while it could not be told."""
        follow = self._follows.get(name)
        if follow is not None:
            follow.refused(keys)


def concerns(job: Job) -> bool:
    """Whether what is known of it elsewhere matters here."""
    lent = any(writer.lends or writer.mode == "direct" for writer in job.writers.values())
    across = job.joined is not None or job.pending is not None
    return bool(job.engines) or lent or across or (job.mirror is not None and bool(job.versions))


class Follow:
    """One job, as it is elsewhere. ``run`` ends by itself once nobody is concerned.

    Attributes:
        bringing: the version on its way here.
        joining: tells of this node's ranks, where others are on other nodes.
        problem: why the MetaServer does not tell; None while it does.
    """

    def __init__(self, means: Means, watching: Watching, job: Job) -> None:
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.bringing: Bringing | None = None
        self.problem: str | None = None
        self._means = means
        self._service = means.service
        self._store = means.service.store
        self._watching = watching
        self._url = f"/v1/jobs/{job.name}"
        self._wake = asyncio.Event()
        self._fetch: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._rested = self._pause = False
        self._readers = Readers(job)
        self._seen: tuple[str, dict[str, Any]] | None = None
        self.joining = Joining(means.service, means.announcer, means.client, job)

    def look(self) -> None:
        """The job has changed here."""
        self._readers.look()
        if self._fetch is not None and self.bringing is not None and not self._still(self.bringing):
            self._fetch.cancel()
        self._wake.set()
        self.joining.look()
        if self.job.engines:
            self._rested = False
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
        elif self._leaving is None:
            self._leaving = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._rest)

    def _still(self, bringing: Bringing) -> bool:
        """Whether to go on with it. What may never be committed makes way for what is."""
        mirror = self.job.mirror
        first = self._committed() if isinstance(bringing, Early) and not bringing.committed else None
        return bringing.good and (first is None or (mirror is not None and first == mirror.fetching))

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _rest(self) -> None:
        """No engine has come back."""
        self._leaving = None
        if self.job.engines:
            return
        self._rested = True
        if self._fetch is not None:
            self._fetch.cancel()
        if self.job.mirror is not None:
            self.job.mirror.coming = {}
            self._store.rest(self.job)
            self._service.settle()
        if not concerns(self.job):
            self.stop()

    async def run(self) -> None:
        if not self.job.epoch and not self.job.writers:
            self._adopt(self._store.follow(self.job))
        elif self.job.mirror is not None:
            self._adopt(self.job.mirror)
        self._service.settle()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self.joining.run())
                group.create_task(self._bring(group))
                self.look()
        except Exception:  # noqa: BLE001 - a fault of ours ends no daemon
            _log.exception("following job %s failed", self.job.name)
            await asyncio.sleep(BACKOFF_SECONDS[1])
        finally:
            if self._leaving is not None:
                self._leaving.cancel()

    def _adopt(self, mirror: Mirror) -> None:
        mirror.ask = self._asked
        mirror.doing = self._doing
        uid = access.owner_uid(self.job.name)
        if uid is not None:
            self.job.owner_uid = uid

    def _asked(self) -> None:
        """Somebody waits for one more step."""
        self._wake.set()
        if self._fetch is not None and self.bringing is not None and not self._still(self.bringing):
            self._fetch.cancel()

    def _doing(self) -> str:
        mirror = self.job.mirror
        if self.bringing is not None:
            text = self.bringing.doing()
        elif mirror is None or self._seen is None:
            text = f"the MetaServer at {self._means.client.url} has not told of it yet"
        elif not mirror.nodes:
            text = "no trainer of it is registered on any node; another user's job is OWNER/NAME"
        elif absent := self._seen[1]["absent"]:
            size = self._seen[1]["world_size"]
            text = f"{describe_ranks(absent)} of {size} on node {', '.join(mirror.nodes)} to register"
        else:
            text = f"node {', '.join(mirror.nodes)}, where its trainer is, to commit"
        problem = self.problem or self._means.announcer.problem()
        return f"{text}; {problem}" if problem else text

    # what is so elsewhere

    async def _watch(self) -> None:
        pause = BACKOFF_SECONDS[0]
        seq = 0
        while True:
            try:
                await self._means.announcer.reported(self.job.name)  # so that it knows the job
                view = await self._watching.next(self.job.name, seq)
                try:
                    closed, attempts = view["brief"]["closed"], frozenset[int]()
                    if not closed and self.job.joined is not None:  # what was open here when it was asked must be known
                        attempts = self.joining.open_attempts()
                        view = await self._means.client.call("GET", self._url)
                    seq = int(view["brief"]["seq"])
                    if not closed:
                        self._take(view, attempts)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise DaemonUnavailable("the MetaServer answers otherwise than this version expects") from error
                self.problem = None
                pause = BACKOFF_SECONDS[0]
                if closed:
                    seq = 0
                    if self.job.mirror is not None:
                        self._close("closed on the node of its trainer")
                continue
            except AwexdError as error:
                seq = 0
                gone = isinstance(error, VersionUnavailable) and not error.details.get("announce")
                if gone and self._known():
                    self._close("closed on the node of its trainer")
                    return
                self._away(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, BACKOFF_SECONDS[1])

    def _known(self) -> bool:
        """Whether the MetaServer's present process had told of the trainer's epoch: it forgets a job when that ends."""
        if self.job.mirror is None or self._seen is None:
            return False
        return self._seen[0] == self._watching.process and self._seen[1]["epoch"] > 0

    def _away(self, error: AwexdError) -> None:
        if self.problem is None:
            text = f"not told what becomes of it elsewhere: {error}; what is held here stays"
            self._service.note("metaserver", self.job.name, text, logging.WARNING)
            self._service.settle()
        self.problem = str(error)

    def _close(self, why: str) -> None:
        if self._store.jobs.get(self.job.name) is self.job:
            self._service.close_job(self.job, why)
            self._service.settle()

    def refused(self, keys: list[VersionKey]) -> None:
        """Versions here that are not committed; of an old one that may only mean that it is forgotten."""
        mirror = self.job.mirror
        if mirror is None or self._seen is None or self._seen[1]["epoch"] != self.job.epoch:
            return
        oldest = min((key for key in mirror.listed if key[0] == self.job.epoch), default=None)
        gone = {
            self.job.versions[key].attempt
            for key in keys
            if oldest is not None and key > oldest and key[0] == self.job.epoch and key in self.job.versions
        }
        self._withdraw(gone)

    def _take(self, view: dict[str, Any], attempts: frozenset[int]) -> None:
        """What the MetaServer says of the job now; ``attempts`` were open here when it was asked."""
        job, here, brief = self.job, self._means.announcer.node, view["brief"]
        if self._store.jobs.get(job.name) is not job:
            return
        epoch, high = int(brief["epoch"]), brief["last_step"]
        nodes = {str(row["node"]) for row in view["ranks"]} - {here}
        abroad = any(engine["node"] != here for engine in view["engines"])
        if abroad != job.abroad:
            job.abroad = abroad
            self._store.touched.add(job.name)
        if self._known() and self._seen is not None and epoch < self._seen[1]["epoch"]:
            self._close("closed on the node of its trainer")
            return
        self._withdraw({int(number) for number in view["aborted"]})
        current = self.joining.take(view, attempts)
        if not current or (job.joined is None and (job.writers or job.pending)):
            self._service.settle()
            return
        if job.mirror is None and job.epoch and not nodes and epoch <= job.epoch:
            return  # its trainer was here last, and has not appeared elsewhere
        if job.mirror is not None and 0 < epoch < job.epoch:
            self._close(f"it has begun anew elsewhere, with epoch {epoch}")
            return
        self._seen = self._watching.process, brief
        self._adopt(self._store.follow(job))
        opened = self._store.mirror(
            job,
            epoch=epoch,
            world_size=int(brief["world_size"]),
            keep=int(view["keep"]),
            high=-1 if high is None else int(high),
            nodes=nodes,
            local=view["local"],
            listed={(row["epoch"], row["step"]): _listing(row, here) for row in view["pieces"]},
        )
        mirror = self._store.follow(job)
        if mirror.sends != view["sends"]:
            mirror.sends = bool(view["sends"])
            self._store.touched.add(job.name)
        mirror.coming = {(row["epoch"], row["step"]): _listing(row, here) for row in view["coming"]}
        if opened:
            self._service.note("epoch", job.name, f"epoch {epoch} opened on node {', '.join(nodes) or 'elsewhere'}")
            self._service.records.save_soon(job)
        self._service.settle()
        self._service.watch_idle()
        self.look()

    def _withdraw(self, attempts: set[int]) -> None:
        versions = self._store.withdraw_attempts(self.job, attempts)
        if not versions:
            return
        for version in versions:  # readers in the midst of it see so without asking
            for segment_id in version.segments:
                if segment_id in self.job.segments:
                    self._service.wipe(self.job.segments[segment_id], version.key[1])
        gone = ", ".join(map(str, versions))
        self._service.note("withdrawn", self.job.name, f"{gone} withdrawn elsewhere")
        self._service.records.save_soon(self.job)
        self._service.settle()

    # bringing versions here

    async def _bring(self, group: asyncio.TaskGroup) -> None:
        pause = BACKOFF_SECONDS[0]
        while True:
            self._wake.clear()
            key = self._next()
            mirror = self.job.mirror
            if key is None or mirror is None:
                await self._wake.wait()
                continue
            readers = self._readers.look()
            if settles := self._readers.settles():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settles):
                        await self._wake.wait()
                continue
            mirror.failed.pop(key, None)
            self._pause = False
            mirror.fetching = key
            self._store.touched.add(self.job.name)  # the MetaServer is told
            self._service.settle()
            self.bringing = self._bringing(mirror, key, readers)
            self._fetch = group.create_task(self._one(mirror, key, self.bringing))
            try:
                await asyncio.wait([self._fetch])
            finally:
                self.bringing, self._fetch, mirror.fetching = None, None, None
            self._store.touched.add(self.job.name)
            self._service.settle()
            if not self._pause:
                pause = BACKOFF_SECONDS[0]
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def _one(self, mirror: Mirror, key: VersionKey, bringing: Bringing) -> None:
        try:
            await bringing.run()
        except VersionConflict as error:
            self._service.note("failed", self.job.name, f"given up: {error}")
        except AwexdError as error:
            if isinstance(error, LASTING) and not bringing.early:
                mirror.failed[key] = error
            self._pause = True
            text = f"epoch {key[0]} step {key[1]} cannot be brought here: {error}"
            self._service.note("failed", self.job.name, text, logging.WARNING)
        except Exception:  # noqa: BLE001 - a fault of ours ends no daemon
            _log.exception("bringing %s of job %s failed", key, self.job.name)
            self._pause = True
            if bringing.early:
                return
            mirror.failed[key] = AwexdError(f"{self.job.name}: bringing {key} here failed; the daemon's log has more")

    def _bringing(self, mirror: Mirror, key: VersionKey, readers: frozenset[str]) -> Bringing:
        listing, version = mirror.listed.get(key), self.job.versions.get(key)
        if listing is None:
            return Early(self._means, self.job, mirror, key, mirror.coming[key], readers)
        more = self._means, self.job, mirror, key, listing, readers
        part = version.part if version is not None else None
        return Extending(*more, version, part) if version and part else Bringing(*more)

    def _next(self) -> VersionKey | None:
        """What to bring here now: a step that somebody waits for, else the newest, else what may become that."""
        job, mirror = self.job, self.job.mirror
        if mirror is None or self._rested or not job.engines:
            return None
        return self._committed() or newest_coming(job, mirror)

    def _committed(self) -> VersionKey | None:
        """Of what is committed."""
        job, mirror = self.job, self.job.mirror
        if mirror is None or not job.engines:
            return None

        def missing(key: VersionKey) -> bool:
            listing = mirror.listed[key]
            here = job.versions.get(key)
            wanted = here is None or (here.partial and not here.leaving and not here.unsure)
            return bool(listing.pieces) and wanted and listing.attempt not in job.withdrawn

        for step in mirror.asked:
            if (job.epoch, step) in mirror.listed and missing((job.epoch, step)):
                return job.epoch, step
        for key in mirror.lacking:
            if self._lacks(job, key):
                return key
        newest = max((key for key in mirror.listed if missing(key)), default=NOTHING)
        held = max((version.key for version in job.held()), default=NOTHING)
        return newest if newest > held else held if self._lacks(job, held) else None

    @staticmethod
    def _lacks(job: Job, key: VersionKey) -> bool:
        """Whether a part of that version is here, more is to be had, and somebody here reads more."""
        version, listing = job.versions.get(key), job.mirror.listed.get(key) if job.mirror is not None else None
        if version is None or version.withdrawn or listing is None or listing.attempt != version.attempt:
            return False
        workers = (worker for engine in job.engines.values() for worker in engine.workers.values())
        return bool(listing.pieces) and any(not worker.finds(version) for worker in workers)


def _listing(row: dict[str, Any], here: str) -> Listing:
    pieces = {
        int(rank): (str(digest), int(nbytes), checksums is True) for rank, digest, nbytes, checksums in row["pieces"]
    }
    whole = set(range(int(row["world_size"])))
    if pieces.keys() != whole:  # after its restart, the MetaServer has yet to be told
        pieces = {}
    some = {here, *row["parts"]}
    holders = tuple(node for node, ranks in row["holders"].items() if set(ranks) == whole and node not in some)
    return Listing(int(row["attempt"]), pieces, holders)
