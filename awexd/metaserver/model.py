"""The MetaServer's records. Times are seconds of a monotonic clock that the caller passes in."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from awexd.metaserver.rounds import Engine
from awexd.store.model import VersionKey
from awexd.tickets import Ticket

MAX_NODES = 4096
MAX_JOBS = 4096
MAX_JOBS_OF_A_NODE = 256
MAX_VERSIONS = 64
"""Of a job, listed and remembered as committed."""
MAX_ATTEMPTS = 64
"""Of a job, open at once."""
REMEMBERED_ABORTS = 256


class Piece(NamedTuple):
    """One rank's segment of one version: the manifest that its bytes follow, how many, whether with checksums."""

    digest: str
    nbytes: int
    checksums: bool = False


class Member(NamedTuple):
    """Who is a writer rank. ``incarnation``: its process, as its node names it; ``digest``: its manifest."""

    node: str
    incarnation: str
    digest: str


@dataclass(slots=True)
class Node:
    """A daemon that has announced itself.

    Attributes:
        run: names the daemon's process; another one on the same node takes its place.
        address: ``host:port`` where it serves other daemons; None where it does not.
        key: of the tickets that let others fetch from it.
        expires: it is gone then, unless it renews.
        tickets: that named it as a source.
    """

    name: str
    run: str
    address: str | None
    version: str
    key: bytes
    expires: float
    since: float
    jobs: set[str] = field(default_factory=set)
    tickets: int = 0


@dataclass(slots=True)
class Version:
    """A committed version.

    Attributes:
        holders: which ranks' pieces each node has.
        fetching: nodes that bring it to themselves, in the order in which they began: one may serve those after it.
        parts: what each node has or brings of its ranks, where that is not all; such a node serves only its like.
        whole: ranks of which each node has all, whatever its ``parts``.
        asked: bytes that tickets were given for, by the node to fetch from.
    """

    key: VersionKey
    attempt: int
    world_size: int
    pieces: dict[int, Piece] = field(default_factory=dict)
    holders: dict[str, frozenset[int]] = field(default_factory=dict)
    fetching: dict[str, int] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    whole: dict[str, frozenset[int]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())

    def held(self) -> bool:
        """Whether every piece is on some node."""
        return len(frozenset().union(*self.holders.values())) == self.world_size

    def leave(self, node: str) -> None:
        """That node brings it to itself no more."""
        self.fetching.pop(node, None)
        self.parts.pop(node, None)


@dataclass(slots=True)
class Attempt:
    """One try at a version by all writer ranks of all nodes.

    Attributes:
        begun: ranks that write, and on which node.
        sealed: those that are done.
        pieces: what ranks will seal, of those whose nodes have said so and let others fetch it as it is written.
        coming: once that is known of all: the version that it will be, if it is committed.
        local: the node that has all writers decides what becomes of it, whatever is thought of it here.
    """

    number: int
    epoch: int
    step: int
    begun: dict[int, str] = field(default_factory=dict)
    sealed: dict[int, Piece] = field(default_factory=dict)
    pieces: dict[int, Piece] = field(default_factory=dict)
    coming: Version | None = None
    local: bool = False


class Grant(NamedTuple):
    """Leave to fetch some ranks' segments from one node."""

    source: Node
    ticket: Ticket
    key: bytes
    ranks: frozenset[int]


class Held(NamedTuple):
    """What a node says it holds of a version: all, or of the ranks that are not ``whole`` only ``parts``."""

    key: VersionKey
    attempt: int
    pieces: Mapping[int, Piece]
    parts: str | None = None
    whole: frozenset[int] = frozenset()


class Report(NamedTuple):
    """All that a node says of a job; it replaces what the node said before.

    Attributes:
        local: the job's writers are all on this node, which alone decides what is committed.
        ranks: the manifests of its writers, where ``local``.
        engines: as they are shown.
        used: manifests that its engines' workers have registered.
        withdrawn: attempts whose versions were rolled back or dropped, where ``local`` or ``joined``.
        joined: writers of the job are on several nodes, of which this is one.
        waiting: ranks on this node whose fellows are not all there.
        fetching: versions that the node brings to itself.
        home: processes exchange the job's weights, which this node decides. ``sends``: its trainer does.
        coming: where ``local``: what is still written and may be fetched already.
    """

    local: bool
    epoch: int
    world_size: int
    keep: int
    ranks: Mapping[int, str]
    versions: tuple[Held, ...]
    engines: tuple[Mapping[str, Any], ...]
    used: frozenset[str]
    withdrawn: frozenset[int] = frozenset()
    joined: bool = False
    waiting: frozenset[int] = frozenset()
    fetching: frozenset[VersionKey] = frozenset()
    home: bool = False
    sends: bool = False
    coming: tuple[Held, ...] = ()


@dataclass(slots=True)
class Rendezvous:
    """Ranks that have asked for a new epoch, which opens when all have."""

    world_size: int
    keep: int
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.members]


@dataclass(slots=True)
class Job:
    """One job on all nodes.

    Attributes:
        high: the last step that was committed in this epoch; -1 for none. It never goes back.
        committed: recent commits, each with its attempt and its number of ranks, for whoever asks again.
        aborted: recent attempts that were aborted, and why.
        engines: those whose workers are on several nodes, or may be.
        home: the node whose daemon decides its exchanges. Not on disk: that node tells it.
        seq: of its last change; see ``State.seq``.
    """

    name: str
    epoch: int = 0
    world_size: int = 0
    keep: int = 0
    high: int = -1
    members: dict[int, Member] = field(default_factory=dict)
    pending: Rendezvous | None = None
    attempts: dict[int, Attempt] = field(default_factory=dict)
    committed: dict[VersionKey, tuple[int, int]] = field(default_factory=dict)
    aborted: OrderedDict[int, str] = field(default_factory=OrderedDict)
    versions: dict[VersionKey, Version] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    home: str | None = None
    seq: int = 0

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.members]

    @property
    def local(self) -> str | None:
        """The node that has all writers, and decides by itself."""
        for node, report in self.reports.items():
            if report.local and report.epoch == self.epoch:
                return node
        return None

    def attempt_of(self, key: VersionKey) -> int | None:
        """Of a commit that is remembered."""
        known = self.committed.get(key)
        return known[0] if known else None

    def listed(self) -> list[Version]:
        """Newest first."""
        return [self.versions[key] for key in sorted(self.versions, reverse=True)]

    def coming(self) -> list[Version]:
        """What may be fetched though it is not committed, and may never be; in order of steps."""
        return [attempt.coming for _, attempt in sorted(self.attempts.items()) if attempt.coming is not None]

    def digests(self) -> Iterable[str]:
        """Every manifest that is in use."""
        for member in (*self.members.values(), *(self.pending.members.values() if self.pending else ())):
            yield member.digest
        for attempt in self.attempts.values():
            yield from (piece.digest for piece in attempt.sealed.values())
            yield from (piece.digest for piece in attempt.pieces.values())
        for version in self.versions.values():
            yield from (piece.digest for piece in version.pieces.values())
        for report in self.reports.values():
            yield from report.used
            yield from (piece.digest for held in report.coming for piece in held.pieces.values())


class Record(NamedTuple):
    """What of a job must survive. ``commits``: all that it remembers, as (epoch, step, attempt, world size)."""

    name: str
    epoch: int
    world_size: int
    keep: int
    high: int
    commits: tuple[tuple[int, int, int, int], ...]
    closed: bool = False


class Note(NamedTuple):
    """Something that happened; ``job`` is "" where it is of no job."""

    kind: str
    job: str
    node: str
    text: str
