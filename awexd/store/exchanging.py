"""Who moves a version's bytes to whom, process to process: exchanges, and the groups of processes that they run in.

A version that is exchanged is a borrowed one that nobody opens: its writers send it. An exchange is one such sending:
by every writer rank, to all workers of the engines that are updating to that version. Engines that come later get one
of their own. There is one at a time in a job.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from awexd_transports.errors import AwexdError, InvalidArgument, ManifestMismatch, VersionUnavailable

if TYPE_CHECKING:
    from awexd.store.model import Engine, Job, Lease, Version, VersionKey

GROUPS_KEPT = 4
"""Groups of a job whose processes stay connected: engines that update by turns have one each."""
REMEMBERED_EXCHANGES = 16
Terms = dict[str, Any]
"""What a member is about to do: ``format``, ``ring`` (bytes), ``plans`` (digests, by number of the worker)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process that takes part.

    Attributes:
        session: its own. ``engine``: "" for a writer.
        digest: of its manifest.
        node: another one than this daemon's.
        device: UUID of the GPU that has all of its tensors; None: some are in host memory, or on several.
        sums: it wants checksums.
        attempt: that it takes part in. ``lease``: a worker's, on the version.
    """

    session: str
    pid: int
    engine: str
    rank: int
    digest: str
    device: str | None
    sums: bool
    attempt: int
    lease: str = ""
    node: str = ""

    def __str__(self) -> str:
        role = f"rank {self.rank} of engine {self.engine}" if self.engine else f"writer rank {self.rank}"
        return f"{role} (process {self.pid}{f' on node {self.node}' if self.node else ''})"


@dataclass(slots=True)
class Group:
    """Processes that are connected to each other, in the order of their numbers; ``id`` is secret to them.

    ``backend``: ``"nccl"``, ``"sockets"`` of one node, or ``"tcp"``. ``addresses``: where they listen, by session; each
    is to be listening before any other connects.
    """

    id: str
    sessions: tuple[str, ...]
    backend: str
    addresses: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Exchange:
    """One sending of a version.

    Attributes:
        members: writers by rank, then workers; ``writers`` says how many are the former.
        fresh: its group is not connected yet.
        told: members that have been told of it. ``terms``: of those that are about to begin. ``done``: that are.
        error: why it came to nothing.
    """

    number: int
    key: VersionKey
    group: Group
    fresh: bool
    members: list[Member]
    writers: int
    told: set[str] = field(default_factory=set)
    terms: dict[str, Terms] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    error: AwexdError | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.done) == len(self.members)

    def member(self, session: str) -> Member | None:
        return next((one for one in self.members if one.session == session), None)

    def others(self, but: Collection[str]) -> str:
        """In words, those that are not yet so far."""
        late = [str(member) for member in self.members if member.session not in but]
        return ", ".join(late[:4]) + (", ..." if len(late) > 4 else "")


@dataclass(slots=True)
class Exchanges:
    """Of one job. ``joining``: by session, who waits to take part in the next."""

    joining: dict[str, Member] = field(default_factory=dict)
    recent: OrderedDict[int, Exchange] = field(default_factory=OrderedDict)
    groups: OrderedDict[str, Group] = field(default_factory=OrderedDict)
    count: int = 0

    @property
    def running(self) -> Exchange | None:
        last = next(reversed(self.recent.values()), None)
        return last if last is not None and not last.over else None

    def fail(self, exchange: Exchange, error: AwexdError) -> None:
        """Ends it for all; its group is not used again."""
        if not exchange.over:
            exchange.error = error
            self.groups.pop(exchange.group.id, None)

    def form(self, job: Job, version: Version, leases: Mapping[str, Lease]) -> Exchange | None:
        """The next exchange of that version, if everybody who is to take part has come."""
        writers = [self.joining.get(job.writers[rank].session) for rank in sorted(job.writers)]
        offering = [one for one in writers if one is not None and one.attempt == version.attempt]
        if len(offering) != job.world_size:
            return None
        workers: list[Member] = []
        for engine in job.engines.values():
            come = self._come(engine, version)
            late = _late(engine, version, come, leases)
            if late and all(late.values()):
                return None
            workers += [] if late else come
        if not workers:
            return None
        members = [*offering, *sorted(workers, key=lambda one: (one.engine, one.rank))]
        for member in members:
            del self.joining[member.session]
        self.count += 1
        group, fresh = self._group(members)
        made = Exchange(self.count, version.key, group, fresh, members, len(offering))
        self.recent[made.number] = made
        while len(self.recent) > REMEMBERED_EXCHANGES:
            self.recent.popitem(last=False)
        return made

    def awaited(self, job: Job, version: Version, leases: Mapping[str, Lease]) -> str:
        """Who is missing for the next exchange, in words."""
        if self.running is not None:
            return f"the exchange with {self.running.others(self.running.done)} to end"
        waiting = self.joining.values()
        ranks = {one.rank for one in waiting if not one.engine and one.attempt == version.attempt}
        missing = [f"writer rank {rank}" for rank in range(job.world_size) if rank not in ranks]
        for engine in job.engines.values():
            missing += _late(engine, version, self._come(engine, version), leases)
        return f"{', '.join(missing[:4]) or 'an engine'} to take part in the exchange of {version}"

    def _come(self, engine: Engine, version: Version) -> list[Member]:
        sessions = [worker.session for worker in engine.workers.values()]
        joined = [self.joining[session] for session in sessions if session in self.joining]
        return [one for one in joined if one.attempt == version.attempt]

    def _group(self, members: list[Member]) -> tuple[Group, bool]:
        """The group of exactly these processes, and whether it has to be made."""
        sessions, backend = tuple(member.session for member in members), _backend(members)
        for group in self.groups.values():
            if (group.sessions, group.backend) == (sessions, backend):
                self.groups.move_to_end(group.id)
                return group, False
        group = Group(secrets.token_hex(16), sessions, backend)
        self.groups[group.id] = group
        while len(self.groups) > GROUPS_KEPT:
            self.groups.popitem(last=False)
        return group, True


def _late(engine: Engine, version: Version, come: list[Member], leases: Mapping[str, Lease]) -> dict[str, bool]:
    """The workers that an engine still lacks for an exchange, in words, and whether each is on its way to it.

    None where the engine is not updating to that version. Whoever is on its way is waited for by other engines too.
    """
    ranks = {one.rank for one in come}
    leased = {lease.session for lease in leases.values() if lease.key == version.key and not lease.stage}
    if not come and leased.isdisjoint(worker.session for worker in engine.workers.values()):
        return {}
    late = {
        f"rank {worker.rank} of engine {engine.name}"
        + (f" ({worker.failure.message})" if worker.failure else ""): worker.session in leased
        for worker in engine.workers.values()
        if worker.rank not in ranks and (worker.version != version.key or worker.session in leased)
    }
    return late | {f"rank {rank} of engine {engine.name} (not registered)": False for rank in engine.absent}


def _backend(members: Collection[Member]) -> str:
    """NCCL takes a GPU once."""
    devices = [member.device for member in members]
    if None not in devices and len({*devices}) == len(devices):
        return "nccl"
    return "sockets" if len({member.node for member in members}) == 1 else "tcp"


def review(job: Job, sessions: Collection[str], leases: Mapping[str, Lease]) -> None:
    """After a change: whoever has left, or has given its update up, ends the exchange for all."""
    exchanges = job.exchanges
    for session in [one for one in exchanges.joining if one not in sessions]:
        del exchanges.joining[session]
    for session, member in list(exchanges.joining.items()):
        if member.lease and member.lease not in leases:
            del exchanges.joining[session]
    for group in [one for one in exchanges.groups.values() if not {*one.sessions} <= {*sessions}]:
        del exchanges.groups[group.id]
    running = exchanges.running
    why = _why_over(job, running, sessions, leases) if running is not None else None
    if running is not None and why is not None:
        exchanges.fail(running, broken(job, running, why))


def _why_over(job: Job, exchange: Exchange, sessions: Collection[str], leases: Mapping[str, Lease]) -> str | None:
    for member in exchange.members:
        if member.session in exchange.done:
            continue
        if member.session not in sessions:
            return f"{member} has left"
        if member.lease and member.lease not in leases:
            return f"{member} gave its update up"
    if all(member.session in exchange.done for member in exchange.members[exchange.writers :]):
        return None  # everybody has it: its writers take it back before the last of them has said that it is done
    version = job.versions.get(exchange.key)
    return "its trainer took it back" if version is None or version.withdrawn else None


def broken(job: Job, exchange: Exchange, why: str) -> VersionUnavailable:
    """What the members of an exchange are told that came to nothing; the others may take part in the next."""
    epoch, step = exchange.key
    text = f"{job.name}: the exchange of epoch {epoch} step {step} came to nothing: {why}"
    return VersionUnavailable(text, {"exchange": exchange.number})


def disagreement(job: Job, exchange: Exchange) -> AwexdError | None:
    """How the members would do different things, if they would."""
    first = exchange.members[0]
    for name, what in (("format", "their ways of cutting"), ("ring", "their rings (ring_bytes=, in bytes)")):
        for member in exchange.members:
            one, other = (exchange.terms[each.session][name] for each in (first, member))
            if one != other:
                return InvalidArgument(
                    f"{job.name}: the members of an exchange differ in {what}: {one} of {first}, {other} of {member}; "
                    "nothing was moved"
                )
    for number, worker in enumerate(exchange.members[exchange.writers :], exchange.writers):
        own = exchange.terms[worker.session]["plans"].get(str(number))
        for writer in exchange.members[: exchange.writers]:
            if exchange.terms[writer.session]["plans"].get(str(number)) != own:
                return ManifestMismatch(
                    f"{job.name}: {writer} and {worker} have different plans of what moves between them; nothing was "
                    "moved. Run the same awexd version on both, and register again"
                )
    return None
