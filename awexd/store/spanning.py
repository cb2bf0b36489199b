"""Engines whose workers are on several nodes: their rounds are agreed on at the MetaServer before anything is leased.

A round opens here only for the version that is settled there, and ends here once every worker, wherever it is, is
through with it. Engines whose workers all are on this node have nothing of this.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

from awexd.store import reading
from awexd.store.agreed import Agreed, Other, Spanning, Wish
from awexd.store.lending import Lending
from awexd.store.mirroring import brought, rest
from awexd.store.model import Engine, Job, Version, VersionKey, Wait, Worker, describe_keys, describe_ranks
from awexd_transports.errors import AwexdError, VersionConflict, VersionUnavailable, from_wire

MAX_MESSAGE = 1000
HOLD_SECONDS = 60.0
"""Of a settled round's version, before any worker here has leased it; as long as an update lasts that is not told."""


class Wanted(NamedTuple):
    """A version that a worker's round is to be for; the other nodes have yet to agree."""

    version: Version


def spans(engine: Engine) -> bool:
    """Whether its rounds are agreed on with other nodes, or may have to be: some workers never were here."""
    known = engine.spanning
    across = known is not None and bool(known.others or known.rounds or not engine.whole)
    return across and bool(engine.absent)


def choose(job: Job, engine: Engine, known: Spanning, worker: Worker, step: int | None) -> Wait | Version | Wanted:
    """The version of this worker's round, once it is settled; what is to be agreed on for a new one.

    Raises:
        VersionConflict: the round was fixed to another step.
        VersionUnavailable: its version is not held any more, or cannot be had here; the next update is of the next one.
        AwexdError: as ``reading.pick``.
    """
    if not worker.placed:
        return Wait(job.name, lambda: _awaited(engine, known, worker))
    if worker.round not in known.rounds and _furthest(engine, known) > worker.round:
        worker.round = _round_to_join(
            engine, known
        )  # others are through with it, and what it was is not known any more
    agreed = known.rounds.get(worker.round)
    if agreed is not None and agreed.settled and not _given_up(engine, agreed):
        if step not in (None, agreed.key[1]):
            if not _may_skip(engine, agreed, worker.rank, step):
                raise VersionConflict(
                    f"{job.name}: this update of engine {engine.name} was fixed to step {agreed.key[1]}; "
                    f"rank {worker.rank} asks for step {step}"
                )
            worker.round += 1
            return choose(job, engine, known, worker, step)
        if agreed.ours or agreed.cannot is not None:
            version = _version(job, agreed)
            if version is not None and agreed.cannot is None and not worker.finds(version):
                return rest(job, worker, version)
            return _handed_out(job, engine, agreed, worker)
        return Wait(job.name, lambda: _awaited(engine, known, worker))
    found = reading.pick(job, worker, step)
    if isinstance(found, Version) and found.borrowed:
        raise VersionUnavailable(
            f"{job.name}: {found} is lent by its trainer on this node, and engine {engine.name} has workers on others; "
            'pass mode="host" (or "auto") to its WeightWriter'
        )
    return Wanted(found) if isinstance(found, Version) else found


def _handed_out(job: Job, engine: Engine, agreed: Agreed, worker: Worker) -> Version:
    version = _version(job, agreed)
    if version is not None and agreed.cannot is None:
        return version
    worker.round += 1
    why = agreed.cannot.message if agreed.cannot is not None else f"which is not held any more; {job.describe_held()}"
    raise VersionUnavailable(
        f"{job.name}: update {agreed.number} of engine {engine.name} was fixed to {_named(agreed.key)}, {why}"
    )


def _version(job: Job, agreed: Agreed) -> Version | None:
    """What is here of it, if a reader may have it."""
    version = job.versions.get(agreed.key)
    good = version is not None and version.attempt == agreed.attempt and not (version.withdrawn or version.partial)
    return version if good else None


def _lacks(job: Job, engine: Engine, version: Version) -> AwexdError | None:
    """Why not all that workers here read of it will be here; None where it is, or may come: then it is asked for."""
    try:
        for worker in engine.workers.values():
            if not worker.finds(version):
                rest(job, worker, version)
    except AwexdError as error:
        return error
    return None


def _used(engine: Engine, number: int) -> bool:
    """A worker here has got the round's version, or is getting it."""
    through = any(worker.placed and worker.round > number for worker in engine.workers.values())
    return through or (number in engine.rounds and bool(engine.rounds[number].active))


def _given_up(engine: Engine, agreed: Agreed) -> bool:
    """Workers here have tried, and none has got or is getting anything: this node hands it out no more."""
    return bool(agreed.failed) and not _used(engine, agreed.number)


def _may_skip(engine: Engine, agreed: Agreed, rank: int, step: int | None) -> bool:
    """As on one node: a worker whose try failed goes on to a later step, or back to the last that every worker had."""
    back = engine.completed is not None and engine.completed[1] == step
    return step is not None and rank in agreed.tried and (step > agreed.key[1] or back)


def _round_to_join(engine: Engine, known: Spanning) -> int:
    return max(known.rounds) if known.rounds else _furthest(engine, known)


def _furthest(engine: Engine, known: Spanning) -> int:
    local = [worker.round for worker in engine.workers.values() if worker.placed]
    return max([*local, *(row["round"] or 0 for row in known.elsewhere.values())], default=0)


def _awaited(engine: Engine, known: Spanning, worker: Worker) -> str:
    """Whom a worker's round waits for."""
    what = f"update {worker.round} of engine {engine.name}"
    if problem := known.problem():
        return f"the MetaServer, for {what}, whose workers are not all on this node: {problem}"
    if absent := sorted(set(engine.absent) - known.elsewhere.keys()):
        return f"{describe_ranks(absent)} of engine {engine.name} to register, on this node or another"
    agreed = known.rounds.get(worker.round)
    if agreed is None or not worker.placed:
        return f"the MetaServer to fix the version of {what}"
    lacking = [
        f"node {other.node} ({describe_ranks(other.workers)})"
        for other in known.others.values()
        if other.node not in agreed.have
    ]
    if not agreed.ours:
        lacking.append("this node")
    return f"{', '.join(lacking) or 'the MetaServer'} to have {_named(agreed.key)} for {what}"


def row_of(worker: Worker, staged: VersionKey | None) -> dict[str, Any]:
    """A worker as the other nodes are told of it."""
    return {
        "rank": worker.rank,
        "round": worker.round if worker.placed else None,
        "pid": worker.pid,
        "state": worker.state,
        "version": list(worker.version) if worker.version else None,
        "digest": worker.digest,
        "staged": list(staged) if staged else None,
        "result": worker.result._asdict() if worker.result else None,
        "failure": worker.failure._asdict() if worker.failure else None,
        "verified": worker.verified,
        "aside": worker.aside,
    }


class Spanned(Lending):
    """The operations on engines that span nodes.

    Attributes:
        clustered: this daemon has a MetaServer: an engine may have workers elsewhere.
    """

    clustered = False
    _wish_ids = itertools.count(1)

    def spanned(self, engine: Engine) -> Spanning | None:
        """What is known of its workers on other nodes; None where all that it ever had are here."""
        if not (self.clustered and engine.elsewhere):
            return None
        if engine.spanning is None:
            engine.spanning = Spanning()
        return engine.spanning

    def staged(self, worker: Worker) -> VersionKey | None:
        """The version under lease for the worker's update."""
        session = self.sessions.get(worker.session)
        leases = [self.leases[lease] for lease in session.leases] if session else []
        return next((lease.key for lease in leases if not lease.stage), None)

    def agree_on(
        self, job: Job, engine: Engine, worker: Worker, step: int | None, asked: float, now: float, until: float
    ) -> Wait | Version:
        """As ``reading.choose``, for an engine whose workers are not all here.

        Args:
            asked: when the request came, which is made again at each change. ``until``: it waits.

        Raises:
            AwexdError: also why the round came to nothing: then nobody got anything, on any node.
        """
        known = self.spanned(engine)
        if known is None or not spans(engine):
            return reading.choose(job, worker, step, stage=False)
        wish = worker.wish
        if wish is not None and wish.asked == asked and wish.refused is not None:
            self._unwish(worker)
            raise wish.refused
        try:
            found = choose(job, engine, known, worker, step)
        except AwexdError:
            self._unwish(worker)
            self.touched.add(job.name)
            raise
        if isinstance(found, Version):
            self._unwish(worker)
            return found
        if worker.placed and (wish is None or wish.asked != asked or wish.number != worker.round):
            self._unwish(worker)
            wish = worker.wish = Wish(next(self._wish_ids), worker.round, asked, now, until)
        if isinstance(found, Wait):
            return found
        if wish is not None and wish.key is None:
            self._fix(job, worker, wish, found.version, step)
        return Wait(job.name, lambda: _awaited(engine, known, worker))

    def facts(self, job: Job, engine: Engine, now: float) -> dict[str, Any]:
        """All that the other nodes are told of the engine; as ``TellBody`` of the MetaServer's document."""
        known = engine.spanning
        if known is None or not engine.absent or job.engines.get(engine.name) is not engine:
            rounds, workers = list[Agreed](), list[Worker]()
        else:
            _adopt(job, engine, known)
            rounds, workers = list(known.rounds.values()), list(engine.workers.values())
        wishes = [(worker.rank, worker.wish) for worker in workers if worker.wish is not None]
        return {
            "world_size": engine.world_size,
            "workers": [row_of(worker, self.staged(worker)) for worker in sorted(workers, key=lambda one: one.rank)],
            "wishes": [
                {
                    "id": wish.id,
                    "rank": rank,
                    "number": wish.number,
                    "epoch": wish.key[0],
                    "step": wish.key[1],
                    "attempt": wish.attempt,
                    "any": wish.any,
                }
                for rank, wish in wishes
                if wish.key is not None and wish.refused is None and wish.until > now
            ],
            "rounds": [
                {
                    "id": agreed.id,
                    "number": agreed.number,
                    "epoch": agreed.key[0],
                    "step": agreed.key[1],
                    "attempt": agreed.attempt,
                    "settled": agreed.settled,
                    "have": self._has(job, engine, agreed),
                }
                for agreed in rounds
            ],
            "cannot": [
                {"id": agreed.id, "code": agreed.cannot.code, "message": agreed.cannot.message[:MAX_MESSAGE]}
                for agreed in rounds
                if agreed.cannot is not None
            ],
            "held": [[*version.key, version.attempt] for version in job.held() if not version.borrowed],
            "look": known.looks if known is not None else 0,
        }

    def hear(
        self, job: Job, engine: Engine, here: str, told: dict[str, Any], facts: dict[str, Any], now: float
    ) -> None:
        """What the MetaServer answered to these facts; ``at`` of what failed is by the store's clock."""
        known = engine.spanning
        if known is None or not engine.absent or job.engines.get(engine.name) is not engine:
            return
        said = {name: told[name] for name in told if name != "seq"}
        changed = said != known.said
        known.said, known.looks = said, told["look"]
        known.others = {
            party["node"]: Other(party["node"], party["look"], {row["rank"]: row for row in party["workers"]})
            for party in told["parties"]
            if party["node"] != here
        }
        engine.whole = engine.whole and not known.others  # also where a MetaServer started anew has yet to hear of them
        if told["completed"]:
            engine.completed = (told["completed"][0], told["completed"][1])
        self._hear_rounds(job, engine, known, here, told["rounds"])
        self._hear_failures(engine, known, told["failed"])
        told_of = {row["rank"]: row["pid"] for row in facts["workers"]}
        for worker in engine.workers.values():
            if not worker.placed and told_of.get(worker.rank) == worker.pid:
                worker.round, worker.placed = _round_to_join(engine, known), True
        self._end_leases(_through(engine, known))
        self.take_up(job, engine, now)
        if changed:
            self._settle(job)  # a version may have been kept for a round that is none any more

    def take_up(self, job: Job, engine: Engine, now: float) -> None:
        """Holds the versions of the rounds that are agreed on, or has them brought here.

        A settled round's for so long only, and again once a worker asks for it: one that never comes must not keep its
        trainer waiting for ever.
        """
        known = engine.spanning
        asking = [one for one in engine.workers.values() if one.wish is not None and one.wish.until > now]
        for agreed in known.rounds.values() if known is not None else ():
            before: list[str] = []
            late = [one for one in asking if one.round == agreed.number and one.rank not in agreed.tried]
            if agreed.settled and (agreed.until is None or (late and agreed.until <= now)):
                agreed.until = now + HOLD_SECONDS
                before, agreed.holds = agreed.holds, before
            version, until = _version(job, agreed), agreed.until or now + HOLD_SECONDS
            if version is None:
                agreed.cannot = self._why_not(job, agreed)
                continue
            agreed.cannot = _lacks(job, engine, version)
            if not self._holds(agreed) and until > now:
                agreed.holds = [self._span(job, version, until)]
                previous = job.versions.get(engine.completed) if engine.completed else None
                if previous is not None and previous is not version:
                    agreed.holds.append(self._lease(job, previous, "", until).id)
            self._end_leases(before)  # those after them are there

    def leave_spanning(self, job: Job, engine: Engine) -> None:
        """All its workers are here now, or none is."""
        if engine.spanning is not None:
            self._end_leases(engine.spanning.leases())
            engine.spanning, engine.whole = None, not engine.absent
        for worker in engine.workers.values():
            self._unwish(worker)
        if self.jobs.get(job.name) is job:
            self._settle(job)

    # internals

    def _span(self, job: Job, version: Version, until: float) -> str:
        """A lease under which the version does not retire either: other nodes can still fetch it."""
        lease = self._lease(job, version, "", until)
        lease.spans = True
        return lease.id

    def _holds(self, agreed: Agreed) -> bool:
        return bool(agreed.holds) and agreed.holds[0] in self.leases

    def _has(self, job: Job, engine: Engine, agreed: Agreed) -> bool:
        version = _version(job, agreed)
        here = version is not None and all(worker.finds(version) for worker in engine.workers.values())
        return (self._holds(agreed) and here and not _given_up(engine, agreed)) or _used(engine, agreed.number)

    @staticmethod
    def _why_not(job: Job, agreed: Agreed) -> AwexdError | None:
        """Why that version will not be here; None where it may come: then it is asked for."""
        if agreed.gone is not None:
            return VersionUnavailable(agreed.gone)
        if agreed.attempt in job.withdrawn:
            return VersionUnavailable(f"{_named(agreed.key)} was withdrawn")
        if agreed.key[0] < job.epoch:
            return VersionUnavailable(f"{_named(agreed.key)} is not held; {job.describe_held()}")
        try:
            coming = brought(job, agreed.key[1]) if agreed.key[0] == job.epoch else None
        except AwexdError as error:
            return error
        # Where a node has it, it is only not listed yet.
        if coming is None and not agreed.have and job.epoch and agreed.key <= (job.epoch, job.high):
            return VersionUnavailable(f"{_named(agreed.key)} is not held any more; {job.describe_held()}")
        return None

    def _hear_rounds(
        self, job: Job, engine: Engine, known: Spanning, here: str, told: Iterable[dict[str, Any]]
    ) -> None:
        rows = {row["number"]: row for row in told}
        _adopt(job, engine, known)
        for number, agreed in list(known.rounds.items()):
            row = rows.get(number)
            opened = row is not None and not row["settled"] and agreed.settled and _used(engine, number)
            if row is None or (row["id"] != agreed.id and not opened):
                del known.rounds[number]
                self._end_leases(agreed.holds)
        for number, row in rows.items():
            if number in known.rounds and known.rounds[number].id != row["id"]:
                continue  # opened before others were known of: they are told
            key = (row["epoch"], row["step"])
            agreed = known.rounds.setdefault(number, Agreed(row["id"], number, key, row["attempt"]))
            agreed.settled, agreed.have, agreed.ours = row["settled"], tuple(row["have"]), here in row["have"]
            agreed.gone = row["gone"]
            waiting = [w for w in engine.workers.values() if w.wish and w.wish.key and w.wish.number == number]
            if waiting and not agreed.ours and _given_up(engine, agreed):
                agreed.failed.clear()  # it goes on elsewhere, and somebody here wants it after all
            for worker in waiting:
                if worker.wish is not None and worker.wish.key != key:  # that one makes room, if need be
                    self._end_leases([worker.wish.lease])

    def _hear_failures(self, engine: Engine, known: Spanning, told: Iterable[dict[str, Any]]) -> None:
        for row in told:
            if row["id"] in known.failures:
                continue
            known.failures.append(row["id"])
            for worker in engine.workers.values():
                wish = worker.wish
                if wish is not None and wish.number == row["number"] and wish.made <= row["at"]:
                    wish.refused = from_wire(row["code"], row["message"], {})

    def _fix(self, job: Job, worker: Worker, wish: Wish, version: Version, step: int | None) -> None:
        """That version is here: the other nodes are asked for it."""
        fresh = worker.seen is None or (worker.version is not None and worker.version >= worker.seen)
        wish.key, wish.attempt, wish.any = version.key, version.attempt, step is None and fresh
        wish.lease = self._span(job, version, wish.until)
        self.touched.add(job.name)

    def _unwish(self, worker: Worker) -> None:
        wish, worker.wish = worker.wish, None
        if wish is not None and wish.lease:
            self._end_leases([wish.lease])


def _adopt(job: Job, engine: Engine, known: Spanning) -> None:
    """Rounds that were opened while the engine had all its workers here, or by a daemon before this one."""
    for number, current in engine.rounds.items():
        version = job.versions.get(current.key)
        if number not in known.rounds and version is not None and _used(engine, number):
            agreed = Agreed(secrets.token_hex(8), number, current.key, version.attempt, settled=True)
            known.rounds[number] = agreed


def _through(engine: Engine, known: Spanning) -> list[str]:
    """Counts who is through with the rounds that are open here; the leases that end with that."""
    rounds = {worker.rank: worker.round for worker in engine.workers.values() if worker.placed}
    rounds |= {rank: row["round"] or 0 for rank, row in known.elsewhere.items()}
    for number, current in engine.rounds.items():
        current.confirmed = {rank for rank, at in rounds.items() if at > number}
    return reading.close_completed(engine)


def _named(key: VersionKey) -> str:
    return describe_keys([key])[6:]
