"""Engines whose workers are on several nodes: which version all of them get in their n-th update. Pure.

A round is proposed for the first worker that asks, settled once every node of the engine has its version, and over
once every worker has had it. Only a settled one may be applied; it is never given another version while any node may
hand it out. All of it is what nodes say, and say again: a round that any of them knows as settled is.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from awexd.store.model import MAX_OPEN_ROUNDS, VersionKey, describe_ranks
from awexd_transports.errors import InvalidArgument, VersionConflict, VersionUnavailable

MAX_ENGINES = 1024
"""Of a job, that span nodes."""
REMEMBERED_FAILURES = 16


class Wish(NamedTuple):
    """A worker waits for its update ``number``; its node has this version. ``any``: one that all have will do too.

    ``id`` is one of its node's, never used again.
    """

    id: int
    rank: int
    number: int
    key: VersionKey
    attempt: int
    any: bool


class Fact(NamedTuple):
    """A round as a node knows it. ``have``: that node holds its version and may hand it out."""

    id: str
    number: int
    key: VersionKey
    attempt: int
    settled: bool
    have: bool


class Told(NamedTuple):
    """All that a node says of an engine; it replaces what that node said before.

    Attributes:
        turn: grows with each; one that was outrun on its way is refused.
        workers: rows as they are shown, by rank; ``round``: of its next update, None where it has yet to join one.
        cannot: why a version cannot be brought there, by the round's id: an error's code and message.
        held: versions there, as (epoch, step, attempt).
        look: the last look that it has answered; see ``Engine.look``.
    """

    turn: int
    world_size: int
    workers: Mapping[int, Mapping[str, Any]]
    wishes: tuple[Wish, ...] = ()
    rounds: tuple[Fact, ...] = ()
    cannot: Mapping[str, tuple[str, str]] = {}
    held: frozenset[tuple[int, int, int]] = frozenset()
    look: int = 0


@dataclass(slots=True)
class Party:
    """One node's part of an engine. ``refused``: its wishes that have been answered with an error."""

    told: Told
    refused: set[int] = field(default_factory=set)

    @property
    def wishes(self) -> list[Wish]:
        return [wish for wish in self.told.wishes if wish.id not in self.refused]

    def has(self, round_id: str) -> bool:
        return any(fact.id == round_id and fact.have for fact in self.told.rounds)


@dataclass(slots=True)
class Round:
    """The n-th update of every worker.

    Attributes:
        proposed_by: the node whose wish it was, which has the version.
        gone: why that is none any more; whoever has not got it will not.
    """

    id: str
    number: int
    key: VersionKey
    attempt: int
    settled: bool = False
    proposed_by: str = ""
    gone: str | None = None


class Failed(NamedTuple):
    """A round that came to nothing before anybody was handed its version: an error's code and message, and when."""

    id: str
    number: int
    code: str
    message: str
    at_ms: int


@dataclass(slots=True)
class Engine:
    """An engine as the nodes of its workers tell of it.

    Attributes:
        turns: of what each node has told last.
        left: why ranks that were there are not.
        completed: the last version that every worker was through with.
        look: counts who wanted to know how its workers are right now.
        seq: of its last change.
        shown: as of that.
    """

    name: str
    world_size: int
    parties: dict[str, Party] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    failed: deque[Failed] = field(default_factory=lambda: deque(maxlen=REMEMBERED_FAILURES))
    turns: dict[str, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    completed: VersionKey | None = None
    look: int = 0
    seq: int = 0
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def present(self) -> dict[int, str]:
        """Nodes by rank."""
        return {rank: node for node, party in self.parties.items() for rank in party.told.workers}

    @property
    def absent(self) -> list[int]:
        present = self.present
        return [rank for rank in range(self.world_size) if rank not in present]


class Commits(NamedTuple):
    """What of a job's versions is known at ``now``: a commit's attempt, and why attempts were aborted."""

    job: str
    now: float
    attempt_of: Callable[[VersionKey], int | None]
    aborted: Mapping[int, str]

    def why_gone(self, key: VersionKey, attempt: int) -> str | None:
        """Why that is no version any more; None where it is one, or may be: its node has yet to tell."""
        committed = self.attempt_of(key)
        if attempt in self.aborted or committed not in (None, attempt):
            return f"{_named(key)} was withdrawn: {self.aborted.get(attempt, 'another took its place')}"
        return None


def told_of(body: Mapping[str, Any]) -> Told:
    """What a node says of an engine, from ``TellBody`` of the document.

    Raises:
        InvalidArgument: a rank twice, or one that is not in its world.
    """
    workers = {row["rank"]: row for row in body["workers"]}
    if len(workers) < len(body["workers"]) or any(rank >= body["world_size"] for rank in workers):
        raise InvalidArgument("body: workers are ranks below the world's size, each once")

    def version(one: Mapping[str, Any]) -> tuple[VersionKey, int]:
        return (one["epoch"], one["step"]), one["attempt"]

    return Told(
        turn=body["turn"],
        world_size=body["world_size"],
        workers=workers,
        wishes=tuple(Wish(one["id"], one["rank"], one["number"], *version(one), one["any"]) for one in body["wishes"]),
        rounds=tuple(
            Fact(one["id"], one["number"], *version(one), one["settled"], one["have"]) for one in body["rounds"]
        ),
        cannot={one["id"]: (one["code"], one["message"]) for one in body["cannot"]},
        held=frozenset((epoch, step, attempt) for epoch, step, attempt in body["held"]),
        look=body["look"],
    )


def tell(job: str, engine: Engine, node: str, told: Told) -> None:
    """What that node says of the engine now.

    Raises:
        VersionConflict: another node has one of its ranks, the engine is of another size, or this was outrun.
    """
    if told.turn <= engine.turns.get(node, -1):
        raise VersionConflict(f"{job}: node {node} has told of engine {engine.name} since")
    others = {rank: other for rank, other in engine.present.items() if other != node}
    taken = sorted(told.workers.keys() & others.keys())
    if taken:
        on = others[taken[0]]
        _let_go(engine, node, told.workers.keys())  # two nodes may have changed ranks: each waits for the other
        raise VersionConflict(f"{job}: {describe_ranks(taken)} of engine {engine.name} is registered on node {on}")
    if others and told.world_size != engine.world_size:
        raise VersionConflict(f"{job}: engine {engine.name} has {engine.world_size} workers, not {told.world_size}")
    engine.world_size = told.world_size
    engine.turns[node] = told.turn
    before = engine.parties.get(node)
    if before is not None:
        _leave(engine, before.told.workers.keys() - told.workers.keys(), f"it left node {node}")
    if told.workers:
        refused = before.refused & {wish.id for wish in told.wishes} if before is not None else set()
        engine.parties[node] = Party(told, refused)
    else:
        engine.parties.pop(node, None)
    for rank in told.workers:
        engine.left.pop(rank, None)
    for fact in told.rounds:
        known = engine.rounds.get(fact.number)
        # Where this process knows of none, also one that the node hands out no more: others may, who have yet to tell.
        stands = fact.settled and (known is None or (fact.have and not known.settled))
        if stands and not _over(engine, fact.number):
            engine.rounds[fact.number] = Round(fact.id, fact.number, fact.key, fact.attempt, settled=True)


def lose(engine: Engine, node: str, why: str) -> None:
    """That node is gone; what was settled stays so."""
    engine.turns.pop(node, None)  # its next daemon counts anew
    party = engine.parties.pop(node, None)
    if party is not None:
        _leave(engine, party.told.workers, why)


def advance(engine: Engine, commits: Commits) -> list[Failed]:
    """Settles, ends and proposes what is due; the rounds that came to nothing by that."""
    failures: list[Failed] = []
    while True:
        found = [*_checked(engine, commits), *_proposed(engine, commits)]
        if not found:
            break
        failures += [one for one in found if isinstance(one, Failed)]
    for number in sorted(engine.rounds)[: max(0, len(engine.rounds) - MAX_OPEN_ROUNDS)]:
        del engine.rounds[number]
    return failures


def view(engine: Engine) -> dict[str, Any]:
    """What the nodes of the engine are told."""
    return {
        "engine": engine.name,
        "world_size": engine.world_size,
        "absent": engine.absent,
        "look": engine.look,
        "completed": list(engine.completed) if engine.completed else None,
        "parties": [
            {
                "node": node,
                "look": party.told.look,
                "held": [list(one) for one in sorted(party.told.held)],
                "workers": [party.told.workers[rank] for rank in sorted(party.told.workers)],
            }
            for node, party in sorted(engine.parties.items())
        ],
        "rounds": [
            {
                "id": one.id,
                "number": number,
                "epoch": one.key[0],
                "step": one.key[1],
                "attempt": one.attempt,
                "settled": one.settled,
                "have": [node for node, party in sorted(engine.parties.items()) if _has(node, party, one)],
                "gone": one.gone,
            }
            for number, one in sorted(engine.rounds.items())
        ],
        "failed": [one._asdict() for one in engine.failed],
    }


def _checked(engine: Engine, commits: Commits) -> Iterable[Round | Failed]:
    """Rounds that are over, or settled, by now."""
    for number, one in sorted(engine.rounds.items()):
        one.gone = commits.why_gone(one.key, one.attempt)
        if _over(engine, number):
            engine.completed = one.key
            del engine.rounds[number]
            yield one
        elif one.settled:
            # Nobody has got it, and nobody may hand it out any more: the same update may be to another version.
            unused = not (engine.absent or _through(engine, number))
            if unused and not any(party.has(one.id) for party in engine.parties.values()):
                del engine.rounds[number]
                yield one
        elif error := _why_not(engine, one, commits):
            del engine.rounds[number]
            yield _fail(engine, one, *error, commits)
        elif not any(wish.number == number for party in engine.parties.values() for wish in party.wishes):
            del engine.rounds[number]  # their time is over, which is what they are told
            yield one
        elif all(_has(node, party, one) for node, party in engine.parties.items()):
            one.settled = True
            yield one


def _through(engine: Engine, number: int) -> int:
    """How many workers are through with that round."""
    rows = [row for party in engine.parties.values() for row in party.told.workers.values()]
    return sum(row["round"] is not None and row["round"] > number for row in rows)


def _over(engine: Engine, number: int) -> bool:
    return _through(engine, number) == engine.world_size


def _why_not(engine: Engine, one: Round, commits: Commits) -> tuple[str, str] | None:
    """Why a proposed round comes to nothing: an error's code and message."""
    for node, party in engine.parties.items():
        cannot = party.told.cannot.get(one.id)
        if cannot is not None:
            return cannot[0], f"node {node} ({describe_ranks(party.told.workers)}) cannot have it: {cannot[1]}"
    code = VersionUnavailable.code
    if absent := engine.absent:
        return code, "; ".join(f"rank {rank}: {engine.left.get(rank, 'not registered')}" for rank in absent[:16])
    if gone := commits.why_gone(one.key, one.attempt):
        return code, gone
    return None


def _proposed(engine: Engine, commits: Commits) -> Iterable[Round | Failed]:
    """New rounds for those who wait."""
    if engine.absent:
        return
    for node, party in engine.parties.items():
        for wish in party.wishes:
            # One that somebody was through with is not to be another's; whoever comes late joins a later one.
            if wish.number in engine.rounds or wish.id in party.refused or _through(engine, wish.number):
                continue
            made = Round(secrets.token_hex(8), wish.number, wish.key, wish.attempt, proposed_by=node)
            gone = commits.why_gone(wish.key, wish.attempt)
            shared = _newest_of_all(engine, commits) if wish.any else None
            if shared is not None:
                made.key, made.attempt = shared
            elif gone is not None:
                yield _fail(engine, made, VersionUnavailable.code, gone, commits)
                continue
            elif commits.attempt_of(wish.key) is None:
                continue  # its node has yet to report that it is committed
            engine.rounds[wish.number] = made
            yield made


def _newest_of_all(engine: Engine, commits: Commits) -> tuple[VersionKey, int] | None:
    """The newest version that every node has, where it is newer than what the engine was through with last."""
    held = frozenset.intersection(*(party.told.held for party in engine.parties.values()))
    last = engine.completed or (0, -1)
    newer = [((epoch, step), attempt) for epoch, step, attempt in held if (epoch, step) > last]
    return max((one for one in newer if commits.attempt_of(one[0]) == one[1]), default=None)


def _has(node: str, party: Party, one: Round) -> bool:
    """As the node says; one that has wished for it, and has yet to hear of the round, has it."""
    if any(fact.id == one.id for fact in party.told.rounds):
        return party.has(one.id)
    return node == one.proposed_by and any((w.key, w.attempt) == (one.key, one.attempt) for w in party.wishes)


def _fail(engine: Engine, one: Round, code: str, why: str, commits: Commits) -> Failed:
    message = f"{commits.job}: update {one.number} of engine {engine.name} to {_named(one.key)} came to nothing: {why}"
    failed = Failed(one.id, one.number, code, message[:1024], math.ceil(commits.now * 1000))
    engine.failed.append(failed)
    for party in engine.parties.values():
        party.refused |= {wish.id for wish in party.wishes if wish.number == one.number}
    return failed


def _let_go(engine: Engine, node: str, ranks: Collection[int]) -> None:
    """Of its workers the node has none but of these any more."""
    party = engine.parties.get(node)
    if party is None:
        return
    _leave(engine, party.told.workers.keys() - ranks, f"it left node {node}")
    party.told = party.told._replace(workers={r: row for r, row in party.told.workers.items() if r in ranks})
    if not party.told.workers:
        del engine.parties[node]


def _leave(engine: Engine, ranks: Iterable[int], why: str) -> None:
    for rank in ranks:
        engine.left[rank] = why


def _named(key: VersionKey) -> str:
    return f"epoch {key[0]} step {key[1]}"
