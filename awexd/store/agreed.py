"""What is known of an engine whose workers may be on several nodes. Times are seconds of a monotonic clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from awexd_transports.errors import AwexdError

Key = tuple[int, int]
REMEMBERED_FAILURES = 64


@dataclass(slots=True)
class Wish:
    """A worker waits for its update ``number``, and, once it is held for it here, for all to agree on that version.

    Attributes:
        id: never used again.
        asked: when its request came, by which that is known again; ``made``: when the store was first asked.
        until: the wish lasts.
        any: a newer one than the engine's last that all nodes have will do as well.
        lease: of the version; "" before it is here, and once another was chosen.
        refused: why its round came to nothing.
    """

    id: int
    number: int
    asked: float
    made: float
    until: float
    key: Key | None = None
    attempt: int = 0
    any: bool = False
    lease: str = ""
    refused: AwexdError | None = None


@dataclass(slots=True)
class Agreed:
    """A round of all nodes, as the MetaServer told of it.

    Attributes:
        settled: every node has said that it has the version: only then it may be handed out.
        have: nodes that hold the version.
        ours: this node is one of them, by the answer to what it has told last.
        holds: leases here; those of a settled round are given until ``until``, when that is known.
        gone: why the version is none any more. ``cannot``: why this node cannot have it.
        tried: workers here whose update to it failed; ``failed``: those since this node took the round up (again).
    """

    id: str
    number: int
    key: Key
    attempt: int
    settled: bool = False
    have: tuple[str, ...] = ()
    ours: bool = False
    holds: list[str] = field(default_factory=list)
    until: float | None = None
    gone: str | None = None
    cannot: AwexdError | None = None
    tried: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Other:
    """Another node's part of the engine: rows of its workers by rank, as they are shown there."""

    node: str
    look: int
    workers: Mapping[int, Mapping[str, Any]]


@dataclass(slots=True)
class Spanning:
    """Of one engine.

    Attributes:
        others: by node.
        rounds: by number, those that not every worker is through with.
        failures: ids of rounds that came to nothing, as far as their waiters here were told.
        looks: how often the MetaServer was asked how the workers are right now.
        said: what the MetaServer answered last.
        problem: why the MetaServer does not tell; "" while it does.
    """

    others: dict[str, Other] = field(default_factory=dict)
    rounds: dict[int, Agreed] = field(default_factory=dict)
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_FAILURES))
    looks: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)
    problem: Callable[[], str] = lambda: "the MetaServer has not been asked yet"

    @property
    def elsewhere(self) -> dict[int, Mapping[str, Any]]:
        """Rows of workers on other nodes, by rank."""
        return {rank: row for other in self.others.values() for rank, row in other.workers.items()}

    @property
    def digests(self) -> dict[int, str]:
        """Manifests of workers on other nodes, by rank."""
        return {rank: str(row["digest"]) for rank, row in self.elsewhere.items()}

    def gave_up(self, number: int, rank: int) -> None:
        """That worker's try at the round came to nothing."""
        agreed = self.rounds.get(number)
        if agreed is not None:
            agreed.tried.add(rank)
            agreed.failed.add(rank)

    def leases(self) -> list[str]:
        return [lease for agreed in self.rounds.values() for lease in agreed.holds]
