"""The records of the store. Time is a monotonic number of seconds that the caller passes in."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from awexd.store.agreed import Spanning, Wish
from awexd.store.elsewhere import Joined, Mirror
from awexd.store.exchanging import Exchanges
from awexd_transports.errors import AwexdError
from awexd_transports.layout import digest_of

K = TypeVar("K")
T = TypeVar("T")

VersionKey = tuple[int, int]
"""(epoch, step)"""

MAX_OPEN_ROUNDS = 64
"""Rounds that an engine may have open, besides those that a worker is in; one further behind joins the newest."""
REMEMBERED_ATTEMPTS = 256
"""Ended attempts of which a job remembers how they ended, for a client that asks again after a lost reply."""
REMEMBERED_SLOTS = 4096


class Wait(NamedTuple):
    """Not yet: ``what`` says who or what is waited for now; ask again when that job has changed."""

    job: str
    what: Callable[[], str]

    @property
    def reason(self) -> str:
        return f"{self.job}: {self.what()}"


class SegmentState(StrEnum):
    FREE = "free"
    GRANTED = "granted"
    WRITING = "writing"
    SEALED = "sealed"
    HELD = "held"


@dataclass(slots=True)
class Segment:
    """One rank's slot of shared memory; its bytes follow the manifest ``digest`` unless it is free.

    A granted slot is its writer's to fill, for a step that it will name when it has.

    Attributes:
        nbytes: room for data and checksums, header not counted.
        session: of the writer that writes into it, while it does.
        users: sessions that were given a mapping and have not given it back.
        unsafe: a process that cannot be asked may still touch the memory: never reused, replaced once it is free.
        locked: its pages are locked in memory.
        borrowed: it is the memory of the writer's own process, in which its live parameters lie. The daemon has handles
            of it only; there is one a rank, for one version at a time, and ``session`` is its writer's for good.
        devices: of a borrowed one: the UUIDs of the GPUs it is on.
        exchanged: a borrowed one that nobody opens: its writer sends what is there.
        mirrored: the daemon itself fills it, from another node.
        offered: of an attempt that other nodes fetch as it is written: it is nobody's to fill until they are done.
    """

    id: str
    rank: int
    nbytes: int
    state: SegmentState = SegmentState.FREE
    digest: str = ""
    checksums: bool = False
    session: str = ""
    users: set[str] = field(default_factory=set)
    unsafe: bool = False
    locked: bool = False
    borrowed: bool = False
    devices: frozenset[str] = frozenset()
    exchanged: bool = False
    mirrored: bool = False
    offered: bool = False

    @property
    def sealed(self) -> bool:
        """Its header says so; a version's always does."""
        return self.state is SegmentState.SEALED or self.state is SegmentState.HELD

    @property
    def writable(self) -> bool:
        """Its writer may be writing into it."""
        return self.state is SegmentState.WRITING or self.state is SegmentState.GRANTED


class ParcelState(StrEnum):
    OPEN = "open"
    PINNED = "pinned"
    SPARE = "spare"


@dataclass(slots=True)
class Parcel:
    """What one rank has parked under a name. Pinned, it belongs to the job; else to the session that fills or keeps it.

    Attributes:
        session, pid: who has filled it; "" and 0 for one of a former daemon.
    """

    name: str
    rank: int
    segment: Segment
    session: str
    pid: int
    state: ParcelState = ParcelState.OPEN


@dataclass(slots=True)
class Writer:
    """One registered training process.

    Attributes:
        mode: ``"auto"``, ``"direct"``, ``"host"``, or ``"nccl"`` (it exchanges its versions); the same for all ranks.
        lends: in ``"auto"``: it will declare its memory before its first step, for all that it knows.
        reserved: the set of manifests that its segment layout was made for.
        node: the NUMA node that its memory should be on, if it minds.
        asked: the epoch that it has asked for, where that is not decided yet: ``"new"``, ``"continue"`` or a number.
        after: as of :func:`registering.register`.
        refused: why it cannot take part; told with its next request.
    """

    session: str
    pid: int
    rank: int
    digest: str
    mode: str = "auto"
    lends: bool = False
    reserved: str = ""
    segment_digest: str = ""
    nbytes: int = 0
    node: int | None = None
    asked: int | str = "continue"
    after: int | None = None
    refused: AwexdError | None = None


@dataclass(slots=True)
class Rendezvous:
    """Ranks of a trainer that have arrived, before it is decided which epoch they are in."""

    world_size: int
    keep: int
    mode: str
    writers: dict[int, Writer] = field(default_factory=dict)

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.writers]


class Choice(NamedTuple):
    """How a step is published by all ranks: the first one's asking decides. ``reason``: why so, for people."""

    step: int
    borrowed: bool
    reason: str


@dataclass(slots=True)
class Attempt:
    """One try at a version: a segment a rank, sealed one by one. ``digests``: what its ranks had registered.

    ``doubted``: ranks that lend their memory and still look whether it is what they declared.
    ``missing``: of a joined job: ranks, of any node, that had not sealed when the MetaServer was last told of it.
    ``written``: of ranks that tell how far they are: bytes from the start of their segments that are complete.
    """

    number: int
    epoch: int
    step: int
    borrowed: bool = False
    doubted: set[int] = field(default_factory=set)
    missing: tuple[int, ...] = ()
    segments: dict[int, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    written: dict[int, int] = field(default_factory=dict)


class Part(NamedTuple):
    """What is here of a version of which not all is.

    Attributes:
        digest: of those bytes; see ``awexd_transports.needs``.
        covers: manifests of workers that read nothing else.
        nbytes: how many.
    """

    digest: str
    covers: frozenset[str]
    nbytes: int


@dataclass(slots=True)
class Version:
    """A committed version; immutable.

    Attributes:
        retired: beyond ``keep``; here only until its leases end, and still good for a round that it was fixed to.
        withdrawn: rolled back or dropped; here only until its leases end, and good for nobody.
        borrowed: its bytes are the writers' live parameters; withdrawn before those change.
        exchanged: it is borrowed, and its writers send it to whoever reads it.
        reason: why it is borrowed, or is not.
        doubted: as of its attempt: until it is empty, no update to it is a success.
        high: the job's before this version.
        served: other nodes may be fetching it from here: its memory stays until they are done.
        part: what of it is here, where that is not all.
        extending: more of it is being brought here: its memory stays meanwhile.
        partial: only the segments of ranks of this node are here, in order of their ranks: nobody here reads it yet.
        unsure: it was found after a restart, and the MetaServer has not said yet whether it was committed.
        arrival: the number of the one that has brought it here; 0 where none did that readers could follow.
    """

    key: VersionKey
    attempt: int
    segments: tuple[str, ...]
    digests: tuple[str, ...]
    set_digest: str
    nbytes: int
    leases: set[str] = field(default_factory=set)
    retired: bool = False
    withdrawn: bool = False
    borrowed: bool = False
    exchanged: bool = False
    reason: str = ""
    doubted: set[int] = field(default_factory=set)
    high: int = -1
    served: bool = False
    part: Part | None = None
    extending: bool = False
    partial: bool = False
    unsure: bool = False
    arrival: int = 0

    @property
    def leaving(self) -> bool:
        return self.retired or self.withdrawn

    def __str__(self) -> str:
        return f"epoch {self.key[0]} step {self.key[1]}"


@dataclass(slots=True)
class Lease:
    """A hold on a version until ``expires``. ``session`` is empty for the hold of a whole round.

    ``spans``: of one of several nodes, that others may still fetch it for: it does not retire.
    """

    id: str
    job: str
    key: VersionKey
    session: str
    expires: float
    stage: bool = False
    spans: bool = False


class Result(NamedTuple):
    """What a worker said of its last update."""

    nbytes: int
    stage_us: int
    pause_us: int
    borrowed: bool = False
    reason: str = ""


class Failure(NamedTuple):
    """Why a worker's last try came to nothing: an error's code and message."""

    code: str
    message: str


@dataclass(slots=True)
class Worker:
    """One registered inference process. ``round`` is the round that its next update belongs to.

    Attributes:
        aside: why its engine loads tensors itself: (reason, how many, the first) each.
        devices: UUIDs of the GPUs whose memory it can open; none where it takes no borrowed version.
        exchanges: it takes versions that are exchanged, and no others.
        waiting_until: it has asked for a version to update to that is still to come, until then.
        failure: since it was last given a version.
        verified: what came of the last comparison of its version with a checkpoint, as ``read.verified`` told it.
        wish: of an engine that spans nodes: what it waits for the other nodes to agree on.
        placed: of such an engine: it is known which of its rounds this worker is in.
        seen: the newest version that it was told of by ``read.wait``.
    """

    session: str
    pid: int
    uid: int
    engine: str
    rank: int
    digest: str
    round: int
    epoch: int
    state: str = "empty"
    version: VersionKey | None = None
    aside: list[list[str | int]] = field(default_factory=list)
    devices: frozenset[str] = frozenset()
    exchanges: bool = False
    waiting_until: float = 0.0
    result: Result | None = None
    failure: Failure | None = None
    verified: dict[str, Any] | None = None
    wish: Wish | None = None
    placed: bool = False
    seen: VersionKey | None = None

    def takes(self, version: Version) -> bool:
        """Whether it can read that version."""
        if version.exchanged or self.exchanges:
            return version.exchanged and self.exchanges
        return self.finds(version) and (not version.borrowed or bool(self.devices))

    def finds(self, version: Version) -> bool:
        """Whether all that it reads of that version is here."""
        return version.part is None or self.digest in version.part.covers


@dataclass(slots=True)
class Round:
    """The n-th update of every worker of an engine: one version for all of them.

    ``active``: ranks in the middle of it. ``failed``: ranks that have tried and given up.
    """

    key: VersionKey
    holds: list[str] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)
    active: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Engine:
    """An inference instance: its workers by rank, and the rounds that not every worker has confirmed.

    Attributes:
        awaiting: sessions that drive its workers and wait for a version for them: their user, and until when.
        whole: all its workers have been on this node at once; unless others turn up elsewhere, it is this node's alone.
        spanning: what is known of its workers on other nodes, while not all are here.
        exchanges: it takes versions that are exchanged: all its workers register here, wherever they are.
    """

    name: str
    world_size: int
    workers: dict[int, Worker] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    completed: VersionKey | None = None
    awaiting: dict[str, tuple[int, float]] = field(default_factory=dict)
    whole: bool = False
    spanning: Spanning | None = None
    exchanges: bool = False

    @property
    def absent(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.workers]

    @property
    def elsewhere(self) -> bool:
        """Workers of it may be on other nodes, where they register."""
        return bool(self.absent) and not self.exchanges

    def waits(self, worker: Worker, now: float) -> bool:
        """Whether the worker is in an update whose version is still to come: itself, or in whoever drives it."""
        driven = any(uid == worker.uid and until > now for uid, until in self.awaiting.values())
        return driven or worker.waiting_until > now


class Endings:
    """How recent attempts ended, and what became of their slots. Many aborts do not make it forget a commit."""

    def __init__(self) -> None:
        self._commits: OrderedDict[int, VersionKey] = OrderedDict()
        self._aborts: OrderedDict[int, str] = OrderedDict()
        self._discarded: OrderedDict[str, str] = OrderedDict()
        self._lost: OrderedDict[int, str] = OrderedDict()

    def commit(self, attempt: int, key: VersionKey) -> None:
        _remember(self._commits, attempt, key)

    def abort(self, attempt: int, why: str, slots: Iterable[str]) -> None:
        _remember(self._aborts, attempt, why)
        for slot in slots:
            _remember(self._discarded, slot, why, REMEMBERED_SLOTS)

    def lose(self, attempt: int, why: str) -> None:
        """It was committed and lent, and taken back before every engine had it."""
        _remember(self._lost, attempt, why)

    def why_lost(self, attempt: int) -> str | None:
        return self._lost.get(attempt)

    def undo(self, attempt: int) -> None:
        """It never was, for nobody's fault: whoever asks publishes the same bytes again."""
        self._commits.pop(attempt, None)
        self._aborts.pop(attempt, None)

    def taken(self, slot: str) -> None:
        """It has a new life: what became of its bytes before is no answer any more."""
        self._discarded.pop(slot, None)

    def committed(self, attempt: int, key: VersionKey) -> bool:
        return self._commits.get(attempt) == key

    def why_aborted(self, attempt: int) -> str | None:
        return self._aborts.get(attempt)

    def why_discarded(self, slot: str) -> str | None:
        """Why the attempt ended that this slot was last written for, if that was an abort."""
        return self._discarded.get(slot)


@dataclass
class Job:
    """All of one job: the trainer's epoch, its slots and versions, and the engines that read it.

    Attributes:
        epoch: 0 until the first trainer has registered.
        high: highest step committed or withdrawn in this epoch; -1 for none. Steps are never used twice.
        withdrawn: attempts whose versions were rolled back or dropped, the last of them: they must not come back.
        choice: how the step that is being published is; of a step that is over it says nothing.
        returned: the last borrowed version that its writers took back once every engine had it, unless rolled back.
        closing: borrowed segments that are given up and that some reader has still mapped.
        parcels: what ranks have parked, by rank and name.
        pins: versions that ranks have offloaded their weights into, and which ranks.
        exchanges: of its versions among its processes.
        mirror: where its writers are on another node, or may be; None where they are, or were last, on this one alone.
        joined: where its writers are on several nodes and this one has some, or has segments of theirs.
        alone: all of its ranks have been on this node in this epoch: whatever comes is decided here.
        abroad: an engine of it is on another node.
        idle_since: when its last session ended; None while it has one.
    """

    name: str
    owner_uid: int
    epoch: int = 0
    world_size: int = 0
    keep: int = 0
    high: int = -1
    uids: set[int] = field(default_factory=set)
    gids: set[int] = field(default_factory=set)
    writers: dict[int, Writer] = field(default_factory=dict)
    pending: Rendezvous | None = None
    segments: dict[str, Segment] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    endings: Endings = field(default_factory=Endings)
    versions: dict[VersionKey, Version] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    withdrawn: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED_ATTEMPTS))
    choice: Choice | None = None
    returned: VersionKey | None = None
    closing: dict[str, Segment] = field(default_factory=dict)
    parcels: dict[tuple[int, str], Parcel] = field(default_factory=dict)
    pins: dict[VersionKey, set[int]] = field(default_factory=dict)
    exchanges: Exchanges = field(default_factory=Exchanges)
    mirror: Mirror | None = None
    joined: Joined | None = None
    alone: bool = False
    abroad: bool = False
    idle_since: float | None = None

    @property
    def unused_since(self) -> float | None:
        """As ``idle_since``; a joined job with ranks on other nodes is in use."""
        elsewhere = self.joined is not None and self.mirror is not None and self.mirror.nodes
        return None if elsewhere else self.idle_since

    def held(self) -> list[Version]:
        """Versions a reader may ask for, newest first."""
        return [version for version in self.kept() if not version.partial]

    def kept(self) -> list[Version]:
        """Those, and versions of which only this node's ranks' segments are here."""
        return [self.versions[key] for key in sorted(self.versions, reverse=True) if not self.versions[key].leaving]

    def held_of(self, epoch: int, step: int) -> Version | None:
        """That version, if a reader may ask for it."""
        version = self.versions.get((epoch, step))
        return version if version is not None and not (version.leaving or version.partial) else None

    def describe_held(self) -> str:
        borrowed = [version.key for version in self.held() if version.borrowed]
        kept = describe_keys(version.key for version in self.held() if not version.borrowed)
        return kept + (f"; borrowed{describe_keys(borrowed)[4:]}" if borrowed else "")

    def slots(self, rank: int) -> list[Segment]:
        """Shared memory that is this rank's."""
        return [segment for segment in self.segments.values() if segment.rank == rank and not segment.borrowed]

    def lent(self, rank: int) -> Segment | None:
        """The rank's own memory that readers may map, if it has been declared."""
        found = (segment for segment in self.segments.values() if segment.rank == rank and segment.borrowed)
        return next(found, None)


def _remember(ended: OrderedDict[K, T], what: K, how: T, limit: int = REMEMBERED_ATTEMPTS) -> None:
    ended[what] = how
    while len(ended) > limit:
        ended.popitem(last=False)


@lru_cache(maxsize=256)
def set_digest_of(digests: tuple[str, ...]) -> str:
    """The digest of a set of manifests; asked for with every step, and always the same."""
    return digest_of(digests)


def describe_keys(keys: Iterable[VersionKey]) -> str:
    listed = [f"epoch {epoch} step {step}" for epoch, step in keys]
    return "held: " + (", ".join(listed) if listed else "none")


def describe_ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16])) + (", ..." if len(listed) > 16 else "")
    return ("rank " if len(listed) == 1 else "ranks ") + shown
