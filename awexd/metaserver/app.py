"""The MetaServer's routes: from a request to the state, and from the state to an answer."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Coroutine
from importlib import resources
from typing import Any, NamedTuple

import msgspec
import orjson

from awexd import __version__
from awexd.metaserver import metrics, schema, views
from awexd.metaserver.bodies import Body
from awexd.metaserver.http import Connection, Head, Refused, Server, not_found, unauthorized
from awexd.metaserver.manifests import Manifests, check_body, unpacked_bytes
from awexd.metaserver.model import Held, Piece, Report
from awexd.metaserver.publishing import Publisher
from awexd.metaserver.rounds import told_of
from awexd.metaserver.schema import Operation, Router
from awexd.metaserver.state import TICKET_SECONDS, State
from awexd.metaserver.tokens import ROLES, Tokens
from awexd.metaserver.watching import MAX_STREAMS, Waiters
from awexd_transports.errors import AccessDenied, BudgetExceeded, InvalidArgument, VersionUnavailable

DEFAULT_WAIT_MS = 30_000
EXPIRY_SECONDS = 0.25
"""How late a node that is gone may be noticed."""
SLOW_BYTES = 256 << 10
"""Of a manifest, unpacked, from which on it is checked in a thread."""
MAX_UNCHECKED_BYTES = 256 << 20
"""Of manifests that wait for that."""
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d+)?")

Outcome = bytes | Coroutine[Any, Any, bytes] | None


class Routed(NamedTuple):
    """A request whose head was accepted. ``job``: the one that its path names, or ""."""

    operation: Operation
    places: dict[str, str]
    query: dict[str, Any]
    job: str

    @property
    def max_bytes(self) -> int:
        return self.operation.max_bytes


class App:
    """The routes of ``openapi.json``, by their operationId.

    Args:
        tokens: None: whoever reaches the listener may do everything, and must call it by a name of this machine's
            loopback, so that no web page can reach it under a name of its own.
    """

    def __init__(self, state: State, tokens: Tokens | None) -> None:
        self._state = state
        self._tokens = tokens
        self._document = schema.document()
        operations = schema.operations(self._document)
        self._router = Router(operations)
        self._routes: dict[str, Callable[[Connection, Routed, Any], Outcome]] = {
            operation.name: getattr(self, f"_{operation.name}") for operation in operations
        }
        self._page_body = resources.files("awexd.metaserver").joinpath("page.html").read_bytes()
        self._started = time.monotonic()
        self.manifests = Manifests(lambda: {d for job in state.jobs.values() for d in job.digests()})
        self._unchecked = 0
        self._checking = asyncio.Semaphore(1)
        self._engine_waiters: dict[tuple[str, str], Waiters] = {}
        self.publisher: Publisher
        self.server: Server

    # of the connections

    def route(self, head: Head) -> Routed:
        """Where a request goes, if its caller may call that.

        Raises:
            Refused, AwexdError: it goes nowhere.
        """
        operation, places = self._router.find(head.method, head.path)
        self._check_caller(head, operation)
        if operation.read is not None:
            kind = head.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # a web page cannot send that elsewhere without being asked
                raise Refused(415, "Content-Type: application/json is wanted", "invalid_argument")
        job = f"{places['owner']}/{places['name']}" if "owner" in places else ""
        return Routed(operation, places, operation.query(head.query), job)

    def _check_caller(self, head: Head, operation: Operation) -> None:
        if self._tokens is None:
            if not _is_loopback(head.headers["host"]):
                raise Refused(421, "without a token file only loopback names are served", AccessDenied.code)
            return
        if operation.role is None:
            return
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        level = self._tokens.level(token.strip()) if scheme.lower() == "bearer" else -1
        if level < 0:
            raise unauthorized("a bearer token is wanted: Authorization: Bearer TOKEN")
        if level < ROLES.index(operation.role):
            raise AccessDenied(f"the role {operation.role} is wanted; this token has {ROLES[level]}")

    def handle(self, connection: Connection, head: Head, routed: Routed, body: bytes) -> Outcome:
        """Answers a request as far as it goes now."""
        operation = routed.operation
        value: Any = body if operation.read is None else operation.read(body)
        try:
            return self._routes[operation.name](connection, routed, value)
        finally:
            self._settle()

    def _settle(self) -> None:
        self._state.advance(time.monotonic())
        self.publisher.settle()
        changed, self._state.engines = self._state.engines, set()
        for engine in changed:
            waiters = self._engine_waiters.pop(engine, None)
            if waiters is not None:
                waiters.tell(self.answer({}))

    def answer(self, value: Any) -> bytes:
        return self.server.answer(200, orjson.dumps(value))

    def _told(self, value: Any, job: str) -> Outcome:
        """The answer to what has changed a job: once that is on disk, if it has to be."""
        answer = self.answer(value)
        return self._after_disk(answer, job) if self.publisher.held(job) else answer

    async def _after_disk(self, answer: bytes, job: str) -> bytes:
        await self.publisher.durable(job)
        return answer

    async def expire(self) -> None:
        """Lets nodes go that have not renewed, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            self._state.expire(time.monotonic())
            self._settle()

    # what anyone may ask

    def _page(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.server.answer(200, self._page_body, "text/html; charset=utf-8")

    def _healthz(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.answer({"status": "ok", "version": __version__})

    def _openapi(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.server.answer(200, self._document)

    # readers

    def _metrics(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        text = metrics.text(self._state, self.manifests, self.publisher, self.server)
        return self.server.answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _status(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.answer(
            {
                "version": __version__,
                "run": self._state.run,
                "up_ms": int((time.monotonic() - self._started) * 1000),
                "seq": self.publisher.events.last,
                "nodes": self._node_rows(),
                "jobs": self._briefs(),
                "manifests": {"bodies": len(self.manifests), "bytes": self.manifests.nbytes},
            }
        )

    def _nodes(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.answer({"nodes": self._node_rows()})

    def _node_rows(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [views.node(node, self._state.ttl, now) for _, node in sorted(self._state.nodes.items())]

    def _jobs(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        return self.answer({"jobs": self._briefs()})

    def _briefs(self) -> list[orjson.Fragment]:
        return [orjson.Fragment(brief) for brief in self.publisher.all_shown()]

    def _job(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        job = self._state.find(routed.job)
        if self.publisher.held(job.name):
            return self._job_later(job.name)
        return self.publisher.view(job).answer

    async def _job_later(self, job: str) -> bytes:
        await self.publisher.durable(job)
        return self.publisher.view(self._state.find(job)).answer

    def _watch(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        found = self.publisher.shown(routed.job)
        after = routed.query.get("after", 0)
        if found is None:
            if not after:
                raise not_found(f"no job {routed.job} here")
            return self.answer(views.closed(routed.job, self.publisher.events.last))
        if after != found.seq:  # one that is of no change here, too: whoever has it missed something
            return found.answer if not found.stale else self._watch_later(routed.job)
        self.publisher.waiters(routed.job).add(connection, routed.query.get("timeout_ms", DEFAULT_WAIT_MS) / 1000)
        return None

    async def _watch_later(self, job: str) -> bytes:
        await self.publisher.durable(job)
        found = self.publisher.shown(job)
        return found.answer if found else self.answer(views.closed(job, self.publisher.events.last))

    def _watch_jobs(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        """Of jobs that have changed since the seq that comes with each, all there is to say."""
        seqs = dict(body["jobs"])
        if len(seqs) < len(body["jobs"]):
            raise InvalidArgument("body: a job twice")
        shown = {name: self.publisher.shown(name) for name in seqs}
        changed = [name for name, found in shown.items() if (found.seq if found else 0) != seqs[name]]
        absent = [name for name, found in shown.items() if found is None and not seqs[name]]
        if absent:
            raise VersionUnavailable(f"no job {absent[0]} here", {"absent": absent})
        if not changed:
            self.publisher.watches.add(connection, tuple(seqs), body["timeout_ms"] / 1000)
            return None
        told = {name: self.publisher.told(name) for name in changed}
        if None in told.values():
            return self._watch_jobs_later(told)
        return self.server.answer(200, views.several(filter(None, told.values())))

    async def _watch_jobs_later(self, told: dict[str, bytes | None]) -> bytes:
        for name in told:
            while told[name] is None:
                await self.publisher.durable(name)
                told[name] = self.publisher.told(name)
        return self.server.answer(200, views.several(filter(None, told.values())))

    def _events(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        events, after = self.publisher.events, routed.query.get("after", 0)
        if after != events.last:
            return self.answer(events.page(after, routed.query.get("limit", 500)))
        events.waiters.add(connection, routed.query.get("timeout_ms", DEFAULT_WAIT_MS) / 1000)
        return None

    def _stream(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        events = self.publisher.events
        if len(events.streams) >= MAX_STREAMS:
            raise BudgetExceeded(f"{MAX_STREAMS} streams are open already")
        head = self.server.head(200, "text/event-stream") + "Connection: close\r\n\r\n"
        events.follow(connection, head.encode(), routed.query.get("after", events.last))
        return None

    def _manifest(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        found = self.manifests.get(routed.places["digest"])
        if found is None:
            raise not_found(f"no manifest {routed.places['digest']} here")
        return self.server.answer(200, found, "application/octet-stream")

    # nodes

    def _announce(self, connection: Connection, routed: Routed, body: Body) -> bytes:
        now = time.monotonic()
        node = self._state.announce(routed.places["node"], body["run"], body["address"], body["version"], now)
        return self.answer(self._renewed(now) | {"key": node.key.hex()})

    def _renew(self, connection: Connection, routed: Routed, body: Body) -> bytes:
        now = time.monotonic()
        self._state.renew(routed.places["node"], body["run"], now)
        return self.answer(self._renewed(now))

    def _renewed(self, now: float) -> dict[str, Any]:
        return {"run": self._state.run, "ttl_ms": int(self._state.ttl * 1000), "clock_ms": int(now * 1000)}

    def _leave(self, connection: Connection, routed: Routed, body: bytes) -> bytes:
        self._state.leave(routed.places["node"], routed.query["run"])
        return self.answer({})

    def _report(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        report = _report_of(body)
        refused = self._state.report(routed.places["node"], body["run"], routed.job, report)
        job = self._state.jobs.get(routed.job)
        return self._told({"refused": refused, "home": job.home if job else None}, routed.job)

    def _forget(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        self._state.forget(routed.places["node"], routed.query["run"], routed.job)
        return self._told({}, routed.job)

    def _join(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        ranks = _by_rank(body["ranks"])
        job = self._state.join(
            body["node"],
            body["run"],
            routed.job,
            {rank: (incarnation, digest) for rank, (incarnation, digest) in ranks.items()},
            world_size=body["world_size"],
            keep=body["keep"],
            epoch=body["epoch"],
            after=body["after"],
        )
        waits = job.pending is not None and bool(job.pending.members.keys() & ranks.keys())
        complete = not waits and not job.absent
        known = [[rank, member.digest] for rank, member in sorted(job.members.items())] if complete else []
        value = {"job": job.name, "epoch": job.epoch, "pending": waits, "complete": complete, "ranks": known}
        return self._told(value, routed.job)

    def _part(self, connection: Connection, routed: Routed, body: Body) -> bytes:
        self._state.part(body["node"], body["run"], routed.job, body["ranks"])
        return self.answer({})

    def _begin(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        where = (body["node"], body["run"], routed.job, body["epoch"], body["step"])
        attempt = self._state.begin(*where, body["ranks"])
        return self._told({"attempt": attempt.number, "sealed": sorted(attempt.sealed)}, routed.job)

    def _seal(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        where = (body["node"], body["run"], routed.job, body["epoch"], body["step"])
        pieces = {rank: Piece(*piece) for rank, piece in _by_rank(body["pieces"]).items()}
        committed = self._state.seal(*where, body["attempt"], pieces)
        job = self._state.find(routed.job)
        attempt = job.attempts.get(body["step"])
        missing = sorted(set(range(job.world_size)) - attempt.sealed.keys()) if attempt and not committed else []
        return self._told({"committed": committed, "missing": missing}, routed.job)

    def _foretell(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        where = (body["node"], body["run"], routed.job, body["epoch"], body["step"])
        self._state.foretell(*where, body["attempt"], {rank: Piece(*p) for rank, p in _by_rank(body["pieces"]).items()})
        return self._told({}, routed.job)

    def _abort(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        where = (body["node"], body["run"], routed.job, body["epoch"], body["step"])
        aborted = self._state.abort(*where, body["attempt"], body["reason"])
        return self._told({"aborted": aborted}, routed.job)

    def _tell(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        name = routed.places["engine"]
        told, now = told_of(msgspec.to_builtins(body)), time.monotonic()
        engine = self._state.tell(body["node"], body["run"], routed.job, name, told, now)
        return self._told({"seq": engine.seq, **engine.shown}, routed.job)

    def _look(self, connection: Connection, routed: Routed, body: Body) -> bytes:
        asked = body["node"], body["run"], routed.job, routed.places["engine"]
        engine = self._state.look(*asked, time.monotonic())
        return self.answer({"look": engine.look})

    def _watch_engine(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        job, name = self._state.jobs.get(routed.job), routed.places["engine"]
        engine = job.engines.get(name) if job is not None else None
        if engine is None or engine.seq != routed.query.get("after", 0):
            return self.answer({})
        waiters = self._engine_waiters.setdefault((routed.job, name), Waiters(self.server.answer(204, b"")))
        waiters.add(connection, routed.query.get("timeout_ms", DEFAULT_WAIT_MS) / 1000)
        return None

    def _ticket(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        if self.publisher.held(routed.job):
            return self._ticket_later(routed, body)
        return self._ticket_now(routed, body)

    async def _ticket_later(self, routed: Routed, body: Body) -> bytes:
        await self.publisher.durable(routed.job)
        return self._ticket_now(routed, body)

    def _ticket_now(self, routed: Routed, body: Body) -> bytes:
        version = (body["epoch"], body["step"])
        now = time.monotonic()
        wanted = body["source"], frozenset(body["avoid"])
        more = {"ranks": body["ranks"], "parts": body["parts"]}
        found = self._state.tickets(body["node"], body["run"], routed.job, version, *wanted, **more, now=now)
        rows = [
            {
                "source": grant.source.name,
                "address": grant.source.address,
                "key": grant.key.hex(),
                "ticket": grant.ticket.encode().decode(),
                "ranks": sorted(grant.ranks),
            }
            for grant in found
        ]
        return self.answer({"sources": rows, "ttl_ms": int(TICKET_SECONDS * 1000)})

    def _home(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        node, grant = self._state.home(body["node"], body["run"], routed.job, time.monotonic())
        value = {
            "node": node,
            "address": grant.source.address if grant else None,
            "key": grant.key.hex() if grant else None,
            "ticket": grant.ticket.encode().decode() if grant else None,
            "ttl_ms": int(TICKET_SECONDS * 1000),
        }
        return self._told(value, routed.job)

    def _missing(self, connection: Connection, routed: Routed, body: Body) -> bytes:
        return self.answer({"missing": [digest for digest in body["digests"] if digest not in self.manifests]})

    def _keep_manifest(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        digest = routed.places["digest"]
        if digest in self.manifests:
            return self.answer({})
        if unpacked_bytes(body) > SLOW_BYTES:
            if self._unchecked + len(body) > MAX_UNCHECKED_BYTES:
                raise BudgetExceeded("too many large manifests at once; send it again")
            return self._keep_large(digest, body)
        check_body(body, digest)
        self.manifests.add(digest, body)
        return self.answer({})

    async def _keep_large(self, digest: str, body: bytes) -> bytes:
        """One at a time: unpacked, a body may be larger than it came by far."""
        self._unchecked += len(body)
        try:
            async with self._checking:
                if digest not in self.manifests:
                    await asyncio.to_thread(check_body, body, digest)
                    self.manifests.add(digest, body)
        finally:
            self._unchecked -= len(body)
        return self.answer({})

    # administrators

    def _close(self, connection: Connection, routed: Routed, body: bytes) -> Outcome:
        self._state.close_job(routed.job)
        return self._told({}, routed.job)

    def _rollback(self, connection: Connection, routed: Routed, body: Body) -> Outcome:
        return self._told({"withdrawn": self._state.roll_back(routed.job, body["step"])}, routed.job)


def _by_rank(rows: list[tuple[Any, ...]]) -> dict[int, list[Any]]:
    """
    Raises:
        InvalidArgument: a rank twice.
    """
    found = {rank: rest for rank, *rest in rows}
    if len(found) < len(rows):
        raise InvalidArgument("body: a rank twice")
    return found


def _report_of(body: Body) -> Report:
    local, epoch, size, keep, versions = (
        body["local"],
        body["epoch"],
        body["world_size"],
        body["keep"],
        body["versions"],
    )
    ranks = {rank: digest for rank, (digest,) in _by_rank(body["ranks"]).items()} if body["ranks"] else {}
    if local and not (epoch and keep and size and all(rank < size for rank in ranks)):
        raise InvalidArgument("body: a local job has an epoch, world_size and keep, and ranks below that size")
    if ranks and not local:
        raise InvalidArgument("body: ranks of a job that spans nodes are joined, not reported")
    held = tuple(map(_held, versions)) if versions else ()
    if len(held) > 1 and len({one.key for one in held}) < len(held):
        raise InvalidArgument("body: a version twice")
    engines = msgspec.to_builtins(body["engines"])
    used = frozenset([worker["digest"] for engine in engines for worker in engine["workers"]])
    return Report(
        local,
        body["epoch"],
        size,
        body["keep"],
        ranks,
        held,
        tuple(engines),
        used,
        withdrawn=frozenset(body["withdrawn"]),
        joined=body["joined"],
        waiting=frozenset(body["waiting"]),
        fetching=frozenset(body["fetching"]),
        home=body["home"],
        sends=body["sends"],
        coming=tuple(map(_coming, body["coming"])),
    )


def _held(one: Body) -> Held:
    pieces = {rank: Piece(*piece) for rank, piece in _by_rank(one["pieces"]).items()}
    return Held((one["epoch"], one["step"]), one["attempt"], pieces, one["parts"], frozenset(one["whole"]))


def _coming(one: Body) -> Held:
    pieces = {rank: Piece(*piece) for rank, piece in _by_rank(one["pieces"]).items()}
    return Held((one["epoch"], one["step"]), one["attempt"], pieces)


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback interface."""
    match = _HOST.fullmatch(host)
    name = (match[1] or match[2]).lower() if match else ""
    try:
        return name in _LOOPBACK_NAMES or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
