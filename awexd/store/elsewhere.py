"""What is known of jobs that are decided elsewhere: by another node, or by the MetaServer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from awexd_transports.errors import AwexdError

if TYPE_CHECKING:
    from awexd.store.model import VersionKey


class Listing(NamedTuple):
    """A committed version as the MetaServer lists it.

    ``pieces``: by rank, the digest of its segment's manifest, its bytes, and whether its writer stored checksums; empty
    where the MetaServer does not know.
    ``holders``: other nodes that have all of it.
    """

    attempt: int
    pieces: dict[int, tuple[str, int, bool]]
    holders: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.pieces.values())


@dataclass(slots=True)
class Mirror:
    """What is known of a job whose writers are on another node.

    Attributes:
        nodes: those that have writers now.
        local: the one of them, if any, that has all and decides by itself.
        informed: the MetaServer has told of the job since this daemon began.
        listed: versions that are committed, as far as the MetaServer remembers them.
        coming: those that are still written, and may be fetched already; none may ever be committed.
        fetching: the one that is being brought here.
        arrival: its number, where readers may copy what has come of it.
        failed: why one could not be brought here, until that is tried again.
        asked: steps of the current epoch that somebody here waits for.
        lacking: versions of which only a part is here, and somebody waits for more.
        ask: called when there is one more.
        sends: its trainer exchanges (``transport="nccl"``): nothing of it is ever committed.
        doing: who is waited for, and in which phase; for people.
    """

    nodes: tuple[str, ...] = ()
    local: str | None = None
    informed: bool = False
    listed: dict[VersionKey, Listing] = field(default_factory=dict)
    coming: dict[VersionKey, Listing] = field(default_factory=dict)
    fetching: VersionKey | None = None
    arrival: int | None = None
    failed: dict[VersionKey, AwexdError] = field(default_factory=dict)
    asked: dict[int, None] = field(default_factory=dict)
    lacking: dict[VersionKey, None] = field(default_factory=dict)
    sends: bool = False
    ask: Callable[[], None] = lambda: None
    doing: Callable[[], str] = lambda: "the MetaServer has not been asked yet"


@dataclass(slots=True)
class Joined:
    """A job whose writers are on several nodes, this one among them: the MetaServer decides.

    Attributes:
        ranks: the manifests of all ranks of the epoch, by rank, once they are here; empty while ranks are absent.
        absent: ranks of the epoch that have registered on no node.
        aborts: what this node has discarded and the MetaServer is still to be told: epoch, step, attempt, reason.
        problem: why the MetaServer cannot be told or asked now; "" where it can.
    """

    ranks: dict[int, str] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    aborts: deque[tuple[int, int, int, str]] = field(default_factory=deque)
    problem: str = ""
