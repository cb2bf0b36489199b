"""Stores of several nodes and one MetaServer's state, whose messages are sent and taken when a test says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import orjson

from awexd.metaserver.model import Held, Piece, Report
from awexd.metaserver.rounds import told_of
from awexd.metaserver.state import State
from awexd.store import Segment, Store, Wait
from awexd.store.elsewhere import Listing
from awexd.store.ledger import Session
from awexd.store.model import Engine, Job, SegmentState, VersionKey
from awexd.store.store import Resolved
from awexd_transports.errors import AwexdError

JOB, ENGINE, NBYTES, TTL, UPDATE = "me/j", "e", 100, 10.0, 100.0


@dataclass
class Worker:
    """One process: what it has got in each of its updates, by round, and the request that it has open."""

    rank: int
    node: Node
    session: Session | None = None
    updates: int | None = None
    version: VersionKey | None = None
    history: dict[int, VersionKey] = field(default_factory=dict)
    asked: tuple[int | None, float, float] | None = None
    staged: Resolved | None = None
    error: AwexdError | None = None

    def ask(self, step: int | None = None) -> None:
        now = self.node.cluster.now
        self.asked, self.error = (step, float(next(self.node.cluster.ids)), now + UPDATE), None
        self.look()

    def look(self) -> None:
        """Asks again, as the daemon does at every change."""
        if self.asked is None:
            return
        step, asked, until = self.asked
        store, now = self.node.store, self.node.cluster.now
        if until <= now:
            self.asked = None
            return
        try:
            found = store.resolve(self.registered(), step, UPDATE, False, now, asked=asked, until=until)
        except AwexdError as error:
            self.asked, self.error = None, error
            return
        if isinstance(found, Resolved):
            self.asked, self.staged = None, found

    def waits_for(self) -> str:
        step, asked, until = self.asked or (None, 0.0, 0.0)
        now = self.node.cluster.now
        found = self.node.store.resolve(self.registered(), step, UPDATE, False, now, asked=asked, until=until)
        assert isinstance(found, Wait)
        return found.reason

    def apply(self) -> None:
        """Gets what was staged, as far as its lease is still good."""
        staged, self.staged = self.staged, None
        if staged is None:
            return
        store, session = self.node.store, self.registered()
        number = store.worker_of(session)[1].round
        try:
            key = store.confirm(session, staged.lease.id, self.node.cluster.now)
        except AwexdError:
            store.release(session, None, True)
            self.version = None
            return
        assert key == staged.version.key
        self.version, self.updates = staged.version.key, number + 1
        self.history[number] = staged.version.key

    def give_up(self, *, dirty: bool = False) -> None:
        staged, self.staged = self.staged, None
        if staged is not None:
            self.node.store.release(self.registered(), staged.lease.id, dirty)
            self.version = None if dirty else self.version

    def registered(self) -> Session:
        if self.session is None or self.session.id not in self.node.store.sessions:
            self.staged = None
            self.session = Session(f"s{next(self.node.cluster.ids)}", next(self.node.cluster.ids), 1)
            self.node.store.open_session(self.session)
            known: dict[str, Any] = {"version": self.version, "updates": self.updates}
            size = self.node.cluster.size
            self.node.store.register_worker(
                self.session, self.node.job, ENGINE, self.rank, world_size=size, digest="d", **known
            )
        return self.session

    def die(self) -> None:
        if self.session is not None and self.session.id in self.node.store.sessions:
            self.node.store.end_session(self.session.id, unmapped=True, why="killed", now=self.node.cluster.now)
        self.session = None


class Node:
    """A daemon's store, and the exchange with the MetaServer that it is in: facts on their way, or an answer."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.runs = itertools.count()
        self.made = itertools.count()
        self.start()

    def start(self) -> None:
        """A new daemon, which holds nothing."""
        self.run = f"run-{next(self.runs)}"
        self.store = Store()
        self.store.clustered = True
        self.job: Job = self.store.job_for(JOB, 1, 0.0)
        self.store.follow(self.job)
        self.facts: dict[str, Any] | None = None
        self.answer: dict[str, Any] | None = None
        self.engine: Engine | None = None
        self.told_of = False
        self.learn()

    def learn(self) -> None:
        """What the MetaServer lists."""
        commits = self.cluster.commits
        listed = {(1, step): Listing(attempt, {0: ("d0", NBYTES, True)}, ("t",)) for step, attempt in commits.items()}
        high = max([*commits, *self.cluster.withdrawn.values()], default=-1)
        known: dict[str, Any] = {
            "epoch": 1,
            "world_size": 1,
            "keep": 2,
            "high": high,
            "nodes": ("t",),
            "listed": listed,
        }
        self.store.mirror(self.job, **known)
        self.store.withdraw_attempts(self.job, set(self.cluster.withdrawn))

    def bring(self, step: int) -> None:
        key, attempt = (1, step), self.cluster.commits.get(step)
        if attempt is None or key in self.job.versions or attempt in self.job.withdrawn:
            return
        slot = self.store.mirror_slot(self.job, 0, NBYTES)
        if isinstance(slot, Wait):
            return
        if slot is None:
            slot = Segment(f"m{next(self.made)}", 0, NBYTES, state=SegmentState.WRITING, mirrored=True)
            self.store.add_segment(self.job, slot)
        slot.digest = "d0"
        self.store.commit_mirrored(self.job, key, attempt, [slot])

    def send(self) -> None:
        """Computes what is told next; the exchange before it must be over."""
        engine = self.job.engines.get(ENGINE)
        if self.engine is not engine and self.engine is not None:
            self.store.leave_spanning(self.job, self.engine)
        self.engine = engine or self.engine
        if self.facts is not None or self.answer is not None or self.engine is None:
            return
        known = self.store.spanned(engine) if engine is not None else None
        if engine is not None and known is not None:
            known.problem = str
            self.store.take_up(self.job, engine, self.cluster.now)
        self.facts = orjson.loads(orjson.dumps(self.store.facts(self.job, self.engine, self.cluster.now)))
        self.facts["turn"] = next(self.cluster.ids)

    def deliver(self) -> None:
        """The MetaServer takes it, and answers."""
        facts, state = self.facts, self.cluster.state
        if facts is None or self.answer is not None:
            return
        try:
            engine = state.tell(self.name, self.run, JOB, ENGINE, told_of(facts), self.cluster.now)
        except AwexdError as error:
            self.facts = None
            if error.details.get("announce"):
                state.announce(self.name, self.run, f"{self.name}:1", "0", self.cluster.now)
            elif "started anew" not in str(error) and "registered on node" not in str(error):
                raise
            return
        answer: dict[str, Any] = orjson.loads(orjson.dumps(engine.shown))
        for row in answer["failed"]:
            row["at"] = row["at_ms"] / 1000
        self.answer = answer

    def hear(self) -> None:
        answer, facts, self.answer, self.facts = self.answer, self.facts, None, None
        if answer is not None and facts is not None and self.engine is not None:
            self.store.hear(self.job, self.engine, self.name, answer, facts, self.cluster.now)
            if not self.engine.elsewhere:
                self.store.leave_spanning(self.job, self.engine)
        self._look()

    def _look(self) -> None:
        for worker in self.cluster.workers.values():
            if worker.node is self:
                worker.look()

    def exchange(self) -> None:
        self.send()
        self.deliver()
        self.hear()


class Cluster:
    """``size`` workers of one engine on nodes of these names; versions of one writer rank on a node ``t``."""

    def __init__(self, *names: str, size: int = 2) -> None:
        self.size, self.now = size, 1000.0
        self.ids = itertools.count(1)
        self.commits: dict[int, int] = {}
        self.withdrawn: dict[int, int] = {}
        self.high = 0
        self.workers: dict[int, Worker] = {}
        self.begin()
        self.nodes = {name: Node(self, name) for name in names}

    def begin(self) -> None:
        """A new MetaServer."""
        self.state = State("run", next(self.ids) * 1000, TTL)
        self.state.announce("t", "run-t", "t:1", "0", self.now)
        self.report()

    def report(self) -> None:
        pieces = {0: Piece("d0", NBYTES, True)}
        held = tuple(Held((1, step), attempt, pieces) for step, attempt in self.commits.items())
        gone = frozenset(self.withdrawn)
        told = Report(True, 1, 1, 2, {0: "w"}, held, (), frozenset(), gone)
        self.state.report("t", "run-t", JOB, told)
        self.state.advance(self.now)
        self.state.touched.clear()

    def publish(self) -> int:
        self.high += 1
        self.commits[self.high] = 10_000 + self.high
        self.report()
        return self.high

    def roll_back(self) -> None:
        """The newest is withdrawn; its step is not used again."""
        if len(self.commits) > 1:
            step = max(self.commits)
            self.withdrawn[self.commits.pop(step)] = step
            self.report()

    def worker(self, rank: int, node: str) -> Worker:
        """A process starts, and registers."""
        made = self.workers[rank] = Worker(rank, self.nodes[node])
        made.registered()
        return made

    def lose(self, name: str) -> None:
        """Nobody has heard of that node for too long."""
        node = self.state.nodes.get(name)
        if node is not None:
            self.state.leave(name, node.run)
            self.state.advance(self.now)
            self.state.touched.clear()

    def settle(self) -> None:
        """Everything that is to be told is."""
        for _ in range(6):
            self.now += 0.001
            for node in self.nodes.values():
                node.learn()
                for step in sorted(self.commits)[-2:]:
                    node.bring(step)
                for asked in list(node.job.mirror.asked) if node.job.mirror else ():
                    node.bring(asked)
                node.exchange()

    def check(self) -> None:
        """No two processes that live got different versions in the same round."""
        got: dict[int, dict[VersionKey, int]] = {}
        for worker in self.workers.values():
            for number, key in worker.history.items():
                got.setdefault(number, {})[key] = worker.rank
        mixed = {number: keys for number, keys in got.items() if len(keys) > 1}
        assert not mixed, f"one round, several versions: {mixed}"
