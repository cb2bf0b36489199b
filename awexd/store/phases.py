"""Who may use which GPU's memory now: trainers, or rollout engines. A state machine without I/O.

A claim names GPUs (opaque strings, compared exactly) and one of the two phases. Claims of the same phase share a GPU. A
claim waits while a GPU of its is in the other phase, and behind earlier claims that wait for the other phase there: a
stream of newcomers starves nobody. It gets all of its GPUs at once or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from awexd_transports.errors import InvalidArgument

CHANGED = "phases"
"""In the place of a job's name, which has a slash: what changes when a claim is granted, left or given up."""


@dataclass(slots=True)
class Claim:
    """One client's claim.

    Attributes:
        token: chosen by the client; by it a claim is known again after a restart.
        session: "" for one that a former daemon granted, until its client says that it is still inside.
        who: the client in words, as its job calls it.
        since: wall time, seconds: when it was granted, or asked for while it waits.
    """

    token: str
    session: str
    job: str
    who: str
    pid: int
    uid: int
    phase: str
    gpus: tuple[str, ...]
    since: float
    inside: bool = False

    @property
    def label(self) -> str:
        return f"{self.who} of {self.job} (process {self.pid}, uid {self.uid})"


class Phases:
    """Claims in the order in which they were made; ``advance`` grants what can be granted."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def claim(self, new: Claim) -> Claim:
        """Takes a place in the queue; the claim that is known by that token already, if there is one.

        Raises:
            InvalidArgument: the session has another claim.
        """
        known = self._claims.get(new.token)
        if known is not None and known.session in ("", new.session) and known.uid == new.uid:
            known.session = new.session
            return known
        if known is not None or self._of(new.session):
            raise InvalidArgument(f"this client has a phase already, or waits for one: {(known or new).who}")
        self._claims[new.token] = new
        return new

    def advance(self, now: float) -> bool:
        """Grants what can be granted, first come, first served; True if anything was."""
        before = len(self.inside)
        waiting: list[Claim] = []
        for claim in self._claims.values():
            if claim.inside:
                continue
            if any(_clash(claim, other) for other in (*self.inside, *waiting)):
                waiting.append(claim)
            else:
                claim.inside, claim.since = True, now
        return len(self.inside) > before

    def has(self, claim: Claim) -> bool:
        return self._claims.get(claim.token) is claim

    def leave(self, session: str, uid: int, token: str) -> bool:
        """Ends a claim of that session, or of none; True if there was one. ``advance`` then lets others in."""
        claim = self._claims.get(token)
        if claim is None or claim.session not in ("", session) or claim.uid != uid:
            return False
        del self._claims[token]
        return True

    def end_session(self, session: str) -> bool:
        """Ends whatever that session had; True if it had anything."""
        ended = self._of(session)
        for claim in ended:
            del self._claims[claim.token]
        return bool(ended)

    def remember(self, claim: Claim) -> None:
        """Takes over a claim that a former daemon granted: its process lives, and has not said anything yet."""
        claim.session, claim.inside = "", True
        self._claims[claim.token] = claim

    def blocking(self, claim: Claim) -> list[Claim]:
        """Whom that claim waits for."""
        earlier: list[Claim] = []
        for other in self._claims.values():
            if other is claim:
                break
            earlier.append(other)
        return [other for other in (*self.inside, *(o for o in earlier if not o.inside)) if _clash(claim, other)]

    @property
    def inside(self) -> list[Claim]:
        return [claim for claim in self._claims.values() if claim.inside]

    def by_gpu(self) -> Iterator[tuple[str, list[Claim], list[Claim]]]:
        """Each GPU that anybody has claimed: who is inside, and who waits."""
        for gpu in sorted({gpu for claim in self._claims.values() for gpu in claim.gpus}):
            claims = [claim for claim in self._claims.values() if gpu in claim.gpus]
            yield gpu, [c for c in claims if c.inside], [c for c in claims if not c.inside]

    def _of(self, session: str) -> list[Claim]:
        return [claim for claim in self._claims.values() if claim.session == session]


def _clash(one: Claim, other: Claim) -> bool:
    return one.phase != other.phase and not set(one.gpus).isdisjoint(other.gpus)


def describe(blocking: Iterable[Claim], now: float) -> str:
    """For an error's message: who is waited for, and since when."""
    parts = [
        f"{claim.label}, {'in' if claim.inside else 'before it in the queue for'} phase {claim.phase} "
        f"for {max(0.0, now - claim.since):.1f} s on {', '.join(claim.gpus)}"
        for claim in blocking
    ]
    return "; ".join(parts) or "nobody any more"


def row(claim: Claim) -> dict[str, Any]:
    """Plain values, for ``status``."""
    return {
        "job": claim.job,
        "who": claim.who,
        "pid": claim.pid,
        "uid": claim.uid,
        "phase": claim.phase,
        "since": claim.since,
        "connected": claim.session != "",
    }
