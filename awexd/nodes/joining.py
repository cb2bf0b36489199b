"""A trainer on several nodes: this node's ranks are told to the MetaServer, and its word is carried out.

Of a job whose ranks are all here, nothing is told but that some wait, and nothing waits for the MetaServer. What is
told is told again when the MetaServer or the way to it was away; all of it may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from awexd.nodes.announcing import Announcer
from awexd.nodes.metaclient import MetaClient
from awexd.service import Service
from awexd.store.elsewhere import Joined
from awexd.store.model import Attempt, Job, VersionKey, Writer, describe_ranks
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    EpochChanged,
    InvalidArgument,
    ProtocolError,
    VersionConflict,
    VersionUnavailable,
)

BACKOFF_SECONDS = (0.05, 2.0)
MAX_REASON = 1024
T = TypeVar("T")
_AWAY = (DaemonUnavailable, DeadlineExceeded)
_log = logging.getLogger(__name__)


class Joining:
    """One job's ranks of this node. ``run`` until cancelled; ``take`` whatever the MetaServer says of the job."""

    def __init__(self, service: Service, announcer: Announcer, client: MetaClient, job: Job) -> None:
        self._service, self._store = service, service.store
        self._announcer, self._client = announcer, client
        self._job = job
        self._url = f"/v1/jobs/{job.name}"
        self._wake = asyncio.Event()
        self._generation = -1
        self._members: dict[int, str] = {}
        """Ranks that the MetaServer has from here, and as which incarnation."""
        self._sealed: dict[int, set[int]] = {}
        self._foretold: dict[int, set[int]] = {}
        self._runs: dict[int, str] = {}
        """By attempt: the MetaServer's process that has given it out."""
        self._bodies: set[str] = set()
        self._everyone: dict[int, str] = {}
        self._again = False

    @property
    def _joined(self) -> Joined:
        if self._job.joined is None:
            raise VersionConflict(f"{self._job.name}: its ranks are not on several nodes any more")
        return self._job.joined

    def look(self) -> None:
        """Something of the job has changed here."""
        self._wake.set()

    # what the MetaServer says

    def open_attempts(self) -> frozenset[int]:
        return frozenset(attempt.number for attempt in self._job.attempts.values())

    def take(self, view: dict[str, Any], before: frozenset[int]) -> bool:
        """What the MetaServer says of the job now; False where that was overtaken by what is known here.

        ``before``: ``open_attempts()`` when it was asked: only of those its answer says how they ended.
        """
        job, here = self._job, self._announcer.node
        members = {int(row["rank"]): (str(row["node"]), str(row["digest"])) for row in view["ranks"]}
        nodes = {node for node, _ in members.values()} | {str(row["node"]) for row in view["waiting"]}
        if job.joined is None:
            if job.pending is None or not nodes - {here}:
                return True
            self._join(nodes - {here})
        brief = view["brief"]
        epoch = int(brief["epoch"])
        if epoch < job.epoch:
            self._wake.set()
            return False
        if epoch > job.epoch:
            self._open(epoch, {node for node, _ in members.values()})
        if epoch:
            self._end_attempts(view, before)
        self._everyone = {} if brief["absent"] else {rank: digest for rank, (_, digest) in members.items()}
        pending = brief["pending"] if job.pending is not None else None
        absent = tuple(map(int, (pending or brief)["absent"]))
        self._store.know_ranks(job, self._joined.ranks if self._everyone else {}, absent)
        self._again = self._again or brief["pending"] is None
        self._wake.set()
        return True

    def _join(self, nodes: set[str]) -> None:
        self._store.spread(self._job)
        text = f"its ranks are on this node and on {', '.join(sorted(nodes))}: the MetaServer decides"
        self._service.note("joined", self._job.name, text)
        self._service.records.save_soon(self._job)
        self._service.settle()

    def _open(self, epoch: int, nodes: set[str]) -> None:
        self._store.open_joined(self._job, epoch)
        self._members.clear()
        self._service.note("epoch", self._job.name, f"epoch {epoch} opened on nodes {', '.join(sorted(nodes))}")
        self._service.records.save_soon(self._job)

    def _end_attempts(self, view: dict[str, Any], before: frozenset[int]) -> None:
        """Versions that were committed, and attempts that never will be."""
        job, brief = self._job, view["brief"]
        listed: dict[VersionKey, int] = {(row["epoch"], row["step"]): row["attempt"] for row in view["pieces"]}
        if any(version.unsure for version in job.versions.values()):
            for version in self._store.confirm_adopted(job, listed):
                self._service.note("failed", job.name, f"{version} was not committed before this daemon was restarted")
        running = {number for _, number, _ in brief["open"]}
        last = -1 if brief["last_step"] is None else int(brief["last_step"])
        for attempt in list(job.attempts.values()):
            number, why = attempt.number, view["aborted"].get(str(attempt.number))
            if number not in before:
                continue
            if listed.get((attempt.epoch, attempt.step)) == number:
                self._commit(attempt)
            elif why is not None:
                self._abort(attempt, why)
            elif number not in running and (attempt.step <= last or self._runs.get(number) == self._client.run):
                if attempt.sealed:
                    self._sealed.pop(number, None)  # asked again: the answer says how it ended
                else:
                    self._abort(attempt, "it is over on the other nodes")
        for number in [number for number in self._runs if number not in before]:
            if all(attempt.number != number for attempt in job.attempts.values()):
                del self._runs[number]

    def _commit(self, attempt: Attempt) -> None:
        version = self._store.commit_joined(self._job, attempt)
        if version is not None:
            self._service.records.save_soon(self._job)
            text = f"{version} committed on all nodes, {version.nbytes} bytes of it here"
            self._service.note("committed", self._job.name, text, logging.DEBUG)
            self._service.settle()

    def _abort(self, attempt: Attempt, why: str) -> None:
        self._store.abort_joined(self._job, attempt, why)
        self._service.note("failed", self._job.name, f"step {attempt.step} is discarded: {why}")
        self._service.settle()

    # what it is told

    async def run(self) -> None:
        """Tells it whatever it does not know; again and again where it is away."""
        pause = BACKOFF_SECONDS[0]
        while True:
            self._wake.clear()
            try:
                if self._job.joined is not None:
                    await self._tell()
                    self._problem("")
                pause = BACKOFF_SECONDS[0]
            except AwexdError as error:
                if not self._is_away(error):
                    _log.warning("%s: the MetaServer refuses what this node tells: %s", self._job.name, error)
                self._problem(str(error))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, BACKOFF_SECONDS[1])
                continue
            await self._wake.wait()

    def _problem(self, text: str) -> None:
        joined = self._job.joined
        if joined is not None and joined.problem != text:
            joined.problem = text

    def _is_away(self, error: AwexdError) -> bool:
        """It cannot be reached now, or does not know this node (any more): which it will."""
        if error.details.get("announce"):
            self._announcer.changed([self._job.name])  # finds out, and announces anew
        return isinstance(error, _AWAY) or bool(error.details.get("announce"))

    async def _tell(self) -> None:
        if self._generation != self._announcer.generation:
            self._members.clear()
            self._sealed.clear()
            self._foretold.clear()
            self._bodies.clear()
            self._generation = self._announcer.generation
        if problem := self._announcer.problem():
            raise DaemonUnavailable(problem)
        await self._tell_aborts()
        await self._tell_gone()
        await self._tell_ranks()
        await self._foretell()
        await self._tell_seals()
        await self._know_everyone()
        if self._store.leave_joined(self._job):
            self._service.settle()

    async def _ask(self, path: str, **body: Any) -> Any:
        where = {"node": self._announcer.node, "run": self._announcer.run}
        try:
            return await self._client.call("POST", f"{self._url}/{path}", where | body)
        except (EpochChanged, VersionConflict) as error:
            if self._generation != self._announcer.generation:  # one that does not know this node's ranks yet
                raise DaemonUnavailable(f"the MetaServer is being told of this node's ranks anew: {error}") from error
            raise

    async def _tell_aborts(self) -> None:
        aborts = self._joined.aborts
        while aborts:
            epoch, step, number, why = aborts[0]
            try:
                await self._ask("aborts", epoch=epoch, step=step, attempt=number, reason=why[:MAX_REASON])
            except (EpochChanged, VersionConflict):
                pass  # it is over already
            except VersionUnavailable as error:
                if error.details.get("announce"):
                    raise
            if aborts:
                aborts.popleft()

    async def _tell_gone(self) -> None:
        """Ranks whose processes have ended."""
        job = self._job
        present = {rank for rank, writer in job.writers.items() if self._members.get(rank) == self._name(writer)}
        gone = [
            rank
            for rank in self._members.keys() - present
            if job.pending is None or rank not in job.pending.writers  # that one takes its place
        ]
        if gone:
            await self._ask("ranks/part", ranks=gone)
            for rank in gone:
                self._members.pop(rank, None)

    async def _tell_ranks(self) -> None:
        """Ranks that wait for an epoch, and those that the MetaServer may not know any more."""
        job, again, self._again = self._job, self._again, False
        waiting = [one for one in job.pending.writers.values() if one.refused is None] if job.pending else []
        asked = {one.rank for one in waiting if self._members.get(one.rank) == self._name(one)}
        if not again and len(asked) == len(waiting):
            waiting = []
        current = [one for one in job.writers.values() if one.refused is None]
        known = [one for one in current if self._members.get(one.rank) != self._name(one)]
        groups: dict[tuple[int | str, int | None], list[Writer]] = {}
        for writer in waiting:
            groups.setdefault((writer.asked, writer.after), []).append(writer)
        for writer in known:
            groups.setdefault((job.epoch, None), []).append(writer)
        for (epoch, after), writers in groups.items():
            await self._register(writers, epoch, after)

    async def _register(self, writers: list[Writer], epoch: int | str, after: int | None) -> None:
        job = self._job
        await self._give_manifests(writer.digest for writer in writers)
        size, keep = job.world_size, job.keep
        if job.pending is not None and any(job.pending.writers.get(one.rank) is one for one in writers):
            size, keep = job.pending.world_size, job.pending.keep
        ranks = [[writer.rank, self._name(writer), writer.digest] for writer in writers]
        if epoch == "new" and after is None:
            view = await self._client.call("GET", self._url)
            after = int(view["brief"]["epoch"])
            for writer in writers:
                writer.after = after
        try:
            answer = await self._ask("ranks", ranks=ranks, world_size=size, keep=keep, epoch=epoch, after=after)
        except (EpochChanged, VersionConflict, InvalidArgument) as error:
            self._store.refuse(job, writers, error)
            self._service.note("failed", job.name, f"{describe_ranks(w.rank for w in writers)} cannot join: {error}")
            self._service.settle()
            return
        self._members |= {writer.rank: self._name(writer) for writer in writers}
        if answer["pending"]:
            return
        there = [one for one in writers if one.session in self._store.sessions]
        self._store.admit(job, int(answer["epoch"]), size, keep, there)
        if answer["complete"]:
            self._everyone = {int(rank): str(digest) for rank, digest in answer["ranks"]}
        self._service.settle()
        await self._service.records.save_epoch(job)
        self._wake.set()

    async def _foretell(self) -> None:
        """What ranks that tell how far they are will seal: other nodes fetch it meanwhile."""
        job = self._job
        for attempt in list(job.attempts.values()):
            told = self._foretold.setdefault(attempt.number, set())
            ranks = sorted(attempt.written.keys() - told)
            if not ranks or job.attempts.get(attempt.step) is not attempt:
                continue
            pieces = await self._pieces(attempt, ranks)
            try:
                await self._ask("attempts/pieces", **pieces)
            except AwexdError as error:
                if self._is_away(error):
                    raise
                # It is fetched once it is committed; sealing says why, where that matters.
                _log.debug("%s: step %d is not fetched before its commit: %s", job.name, attempt.step, error)
            told.update(ranks)
        for number in self._foretold.keys() - {attempt.number for attempt in job.attempts.values()}:
            del self._foretold[number]

    async def _tell_seals(self) -> None:
        job = self._job
        for attempt in list(job.attempts.values()):
            told = self._sealed.setdefault(attempt.number, set())
            ranks = sorted(attempt.sealed - told)
            if not ranks:
                continue
            pieces = await self._pieces(attempt, ranks)
            try:
                answer = await self._ask("seals", **pieces)
            except (EpochChanged, VersionConflict) as error:
                self._abort(attempt, str(error))
                continue
            told.update(ranks)
            self._runs[attempt.number] = self._client.run
            attempt.missing = tuple(answer["missing"])
            if answer["committed"]:
                self._commit(attempt)
        open_ = {attempt.number for attempt in job.attempts.values()}
        for number in self._sealed.keys() - open_:
            del self._sealed[number]

    async def _pieces(self, attempt: Attempt, ranks: Iterable[int]) -> dict[str, Any]:
        """What these ranks have sealed, or will, as the MetaServer is told; it has their manifests then."""
        segments = [self._job.segments[attempt.segments[rank]] for rank in ranks]
        pieces = [[one.rank, one.digest, one.nbytes, one.checksums] for one in segments]
        await self._give_manifests(one.digest for one in segments)
        return {"epoch": attempt.epoch, "step": attempt.step, "attempt": attempt.number, "pieces": pieces}

    async def _know_everyone(self) -> None:
        """Once all ranks have registered: their manifests, which planning takes."""
        everyone, shelf = self._everyone, self._service.shelf
        if not everyone or everyone == self._joined.ranks:
            return
        for digest in dict.fromkeys(everyone.values()):
            if shelf.body(digest) is None:
                with shelf.arriving(digest):
                    body = await self._client.call("GET", f"/v1/manifests/{digest}")
                    if not isinstance(body, bytes):
                        raise ProtocolError(f"the MetaServer gives no manifest {digest[:12]}")
                    await shelf.add(digest, body)
        self._store.know_ranks(self._job, everyone, ())
        self._service.settle()

    async def _give_manifests(self, digests: Iterable[str]) -> None:
        wanted = [digest for digest in dict.fromkeys(digests) if digest not in self._bodies]
        if not wanted:
            return
        answer = await self._client.call("POST", "/v1/manifests/missing", {"digests": wanted})
        for digest in answer["missing"]:
            body = self._service.shelf.body(digest)
            if body is not None:
                await self._client.call("PUT", f"/v1/manifests/{digest}", body)
        self._bodies.update(wanted)

    def _name(self, writer: Writer) -> str:
        """An incarnation: a process, as this daemon's process knows it."""
        return f"{self._announcer.run}.{writer.session}"

    # what ranks ask

    async def begin(self, step: int, rank: int, deadline: float) -> int:
        """The MetaServer's attempt at that step, for a rank of this node.

        Raises:
            DeadlineExceeded: it was not to be reached by then.
            EpochChanged, VersionConflict: as it says.
        """

        async def ask() -> int:
            await self._settled()
            answer = await self._ask("attempts", epoch=self._job.epoch, step=step, ranks=[rank])
            self._runs[int(answer["attempt"])] = self._client.run
            return int(answer["attempt"])

        return await self._patiently(ask, f"begin step {step}", deadline)

    async def abort(self, epoch: int, step: int, number: int, reason: str, deadline: float) -> None:
        """Discards an attempt in which a rank of this node has sealed.

        Raises:
            DeadlineExceeded: the MetaServer was not to be reached by then.
            EpochChanged, VersionConflict: it is over, or committed.
        """

        async def ask() -> None:
            await self._ask("aborts", epoch=epoch, step=step, attempt=number, reason=reason[:MAX_REASON])

        await self._patiently(ask, f"discard step {step}", deadline)

    async def _settled(self) -> None:
        """Raises where the MetaServer does not know all that this node's ranks have come to."""
        joined, current = self._joined, [one for one in self._job.writers.values() if one.refused is None]
        known = all(self._members.get(one.rank) == self._name(one) for one in current)
        if self._generation != self._announcer.generation or joined.aborts or not known:
            self._wake.set()
            raise DaemonUnavailable(self._announcer.problem() or "it is being told of this node's ranks")

    async def _patiently(self, ask: Callable[[], Awaitable[T]], what: str, deadline: float) -> T:
        pause, last = BACKOFF_SECONDS[0], ""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        return await ask()
                    except AwexdError as error:
                        absent = bool(error.details.get("absent"))
                        if not (absent or self._is_away(error)):
                            raise
                        last = str(error)
                    await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
                    pause = min(2 * pause, BACKOFF_SECONDS[1])
        except TimeoutError:
            text = f"{self._job.name}: the MetaServer at {self._client.url} to {what}: {last or 'no answer'}"
            raise DeadlineExceeded(f"waited for {text}") from None
