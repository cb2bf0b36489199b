"""What the MetaServer knows: a state machine without I/O. The server carries out its effects.

Epochs and commits must survive: ``records`` holds what is to be written before anything of that job is told to anyone.
All the rest is what the daemons say, and say again when this process's ``run`` has changed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from awexd.metaserver import rounds, sources, writing
from awexd.metaserver.model import (
    MAX_JOBS,
    MAX_JOBS_OF_A_NODE,
    MAX_NODES,
    Attempt,
    Grant,
    Held,
    Job,
    Member,
    Node,
    Note,
    Piece,
    Record,
    Report,
    Version,
)
from awexd.store.model import VersionKey, describe_keys, describe_ranks
from awexd.tickets import KEY_BYTES, SESSION, Ticket, key_of
from awexd_transports.errors import (
    BudgetExceeded,
    DaemonUnavailable,
    VersionConflict,
    VersionUnavailable,
)

TICKET_SECONDS = 60.0


class State:
    """Nodes and jobs of one cluster.

    ``touched``: jobs that have changed; ``records``: what of them must be on disk before that is told; ``notes``: what
    happened, oldest first; ``engines``: (job, engine) whose rounds have changed. Whoever runs this empties all four.
    ``nodes_changed`` counts changes of the list of nodes.

    Args:
        run: names this process.
        first: a number that no attempt and no change of an earlier process has, nor any above it.
        ttl: seconds within which a node renews.
    """

    def __init__(self, run: str, first: int, ttl: float) -> None:
        self.run = run
        self.ttl = ttl
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {}
        self.touched: set[str] = set()
        self.records: dict[str, Record] = {}
        self.notes: list[Note] = []
        self.engines: set[tuple[str, str]] = set()
        self.nodes_changed = 0
        self._first = self._next_attempt = first
        self._restored: frozenset[str] = frozenset()
        self._since = math.inf
        """When the first node was heard of."""

    def restore(self, records: Iterable[Record]) -> None:
        """What an earlier process has written. Who holds those versions, the nodes will tell."""
        for record in records:
            job = Job(record.name, record.epoch, record.world_size, record.keep, record.high)
            for epoch, step, attempt, world_size in sorted(record.commits):
                writing.remember_commit(job, Version((epoch, step), attempt, world_size))
            self.jobs[job.name] = job
        self._restored = frozenset(self.jobs)

    # nodes

    def announce(self, name: str, run: str, address: str | None, version: str, now: float) -> Node:
        """A daemon is there, or is still there.

        Raises:
            VersionConflict: a daemon at another address has that name, and lives.
            BudgetExceeded: too many nodes.
        """
        node, self._since = self.nodes.get(name), min(self._since, now)
        if node is not None and node.run != run:
            if node.address != address and node.expires > now:
                raise VersionConflict(
                    f"node {name} is the daemon at {node.address or 'no address'}, which lives: choose another --node"
                )
            self._lose(node, "its daemon was started anew")
            node = None
        if node is None:
            if len(self.nodes) >= MAX_NODES:
                raise BudgetExceeded(f"{MAX_NODES} nodes are known already")
            node = Node(name, run, address, version, secrets.token_bytes(KEY_BYTES), now + self.ttl, now)
            self.nodes[name] = node
            self.note("joined", "", name, f"node {name} ({address or 'serves no others'}) joined")
            self.nodes_changed += 1
        elif node.address != address:
            node.address = address
            self.nodes_changed += 1
        node.expires = now + self.ttl
        return node

    def renew(self, name: str, run: str, now: float) -> Node:
        """
        Raises:
            VersionUnavailable: this process does not know that daemon: announce it, and all that it has.
        """
        node = self.node(name, run)
        node.expires = now + self.ttl
        return node

    def node(self, name: str, run: str) -> Node:
        """The live node of that name and process."""
        node = self.nodes.get(name)
        if node is None:
            raise VersionUnavailable(f"node {name} is not announced here (any more)", {"announce": True})
        if node.run != run:
            raise VersionConflict(f"node {name} was started anew: this is the word of a daemon that has ended")
        return node

    def leave(self, name: str, run: str) -> None:
        self._lose(self.node(name, run), "its daemon was stopped")

    def expire(self, now: float) -> None:
        """Nodes that have not renewed are gone."""
        for node in [node for node in self.nodes.values() if node.expires <= now]:
            self._lose(node, f"not heard of for {self.ttl:g} s")

    def next_expiry(self) -> float | None:
        return min((node.expires for node in self.nodes.values()), default=None)

    def _lose(self, node: Node, why: str) -> None:
        del self.nodes[node.name]
        self.nodes_changed += 1
        self.note("left", "", node.name, f"node {node.name} is gone: {why}")
        for name in node.jobs:
            job = self.jobs.get(name)
            if job is not None:
                writing.lose(job, node.name, f"node {node.name} is gone")
                for engine in job.engines.values():
                    rounds.lose(engine, node.name, f"node {node.name} is gone: {why}")
                self._drop_report(job, node.name)

    def _drop_report(self, job: Job, node: str) -> None:
        job.reports.pop(node, None)
        if job.home == node:
            job.home = None
        for version in job.versions.values():
            version.leave(node)
            version.holders.pop(node, None)
            version.whole.pop(node, None)
        for coming in job.coming():
            coming.leave(node)
        writing.trim(job)
        self.touched.add(job.name)

    # jobs as their nodes see them

    def report(self, name: str, run: str, job_name: str, report: Report) -> list[VersionKey]:
        """All that a node has of a job. Returns the versions that it should not have: they are not what was committed.

        Raises:
            EpochChanged: its writers are of an epoch that is over.
            VersionConflict: another node has these ranks.
        """
        node = self.node(name, run)
        if job_name not in self.jobs and not _says_something(report):
            return []
        job = self._job(job_name, node)
        before = job.reports.get(name)
        if report.home and job.home is None:
            self._settle_at(job, name)
        if job.home not in (None, name) and (report.home or (report.local and not (report.ranks or report.versions))):
            return []  # it was the home: it is told which node is now
        if report.local and report.epoch:
            self._adopt(job, name, report)
        else:
            # Ranks that it had reported, not joined, are none of its own any more.
            job.members = {rank: one for rank, one in job.members.items() if one.node != name or one.incarnation}
            if job.attempts and writing.foretell_local(job, name, ()):
                self.touched.add(job.name)
            if report.joined:
                self._withdraw(job, name, report)
        refused = self._take_versions(job, name, report)
        # Both may have changed above though the report is as it was.
        if before != report or job.name in self.records:
            job.reports[name] = report
            self.touched.add(job.name)
        return refused

    def _adopt(self, job: Job, node: str, report: Report) -> None:
        """What a node that has all of a job's writers has decided on its own."""
        if report.epoch < job.epoch:
            raise writing.epoch_changed(job, report.epoch)
        elsewhere = {member.node for member in job.members.values()} - {node}
        if elsewhere:
            raise VersionConflict(f"{job.name}: it has writers on node {min(elsewhere)}; here it is only of {node}")
        if report.epoch > job.epoch:
            writing.open_epoch(job, report.epoch, report.world_size, report.keep)
            self._record(job)
            self.note("epoch", job.name, node, f"epoch {job.epoch} opened with {job.world_size} ranks on {node}")
        elif (report.world_size, report.keep) != (job.world_size, job.keep):
            job.world_size, job.keep = report.world_size, report.keep
            self._record(job)
        job.members = {rank: Member(node, "", digest) for rank, digest in report.ranks.items()}
        self._withdraw(job, node, report)
        for held in sorted(report.versions):
            self._adopt_version(job, node, held)
        if (report.coming or job.attempts) and writing.foretell_local(job, node, report.coming):
            self.touched.add(job.name)

    def _withdraw(self, job: Job, node: str, report: Report) -> None:
        """What a node of the trainer has rolled back or dropped."""
        gone = writing.withdraw(job, report.withdrawn, f"withdrawn on node {node}")
        if gone:
            self._record(job)
            self.note("withdrawn", job.name, node, f"{describe_keys(sorted(gone))[6:]} withdrawn on {node}")

    def _adopt_version(self, job: Job, node: str, held: Held) -> None:
        epoch, step = held.key
        if epoch != job.epoch or step <= job.high or len(held.pieces) != job.world_size:
            return
        ranks = frozenset(held.pieces)
        version = Version(held.key, held.attempt, job.world_size, dict(held.pieces), {node: ranks})
        attempt = job.attempts.get(step)
        if attempt is not None and attempt.local:
            writing.take_over(version, job.attempts.pop(step))
        writing.remember_commit(job, version)
        self._record(job)
        self.note("committed", job.name, node, f"epoch {epoch} step {step} committed on {node}")

    def _take_versions(self, job: Job, node: str, report: Report) -> list[VersionKey]:
        """Which pieces of which committed versions the node has now."""
        refused: list[VersionKey] = []
        holds: dict[VersionKey, Held] = {}
        for coming in job.coming() if job.attempts else ():
            if coming.key not in report.fetching:
                coming.leave(node)
        if not report.versions and not job.versions:
            return refused
        for held in report.versions:
            if job.attempt_of(held.key) == held.attempt:
                holds[held.key] = held
            else:
                refused.append(held.key)
        for key, held in holds.items():
            version = job.versions.get(key)
            if version is None:
                version = job.versions[key] = Version(key, *job.committed[key])
            for rank, piece in held.pieces.items():
                version.pieces.setdefault(rank, piece)
            ranks = frozenset(rank for rank, piece in held.pieces.items() if version.pieces[rank] == piece)
            if version.holders.get(node) != ranks:
                version.holders[node] = ranks
                self.touched.add(job.name)
            version.whole[node] = ranks if held.parts is None else ranks & held.whole
            if held.parts is not None and version.parts.get(node) != held.parts:
                version.parts[node] = held.parts
                self.touched.add(job.name)
        for key, version in job.versions.items():
            if key not in holds and version.holders.pop(node, None) is not None:
                self.touched.add(job.name)
            if len(version.holders.get(node, ())) == version.world_size or key not in report.fetching:
                version.fetching.pop(node, None)
            if key not in holds:
                version.whole.pop(node, None)
            if node not in version.fetching and (key not in holds or holds[key].parts is None):
                version.parts.pop(node, None)
        writing.trim(job)
        return refused

    def forget(self, name: str, run: str, job_name: str) -> None:
        """That node has nothing of that job any more. If it was one of its trainer's, the job is over on all."""
        node = self.node(name, run)
        node.jobs.discard(job_name)
        job = self.jobs.get(job_name)
        if job is None:
            return
        told = job.reports.get(name)
        writing.lose(job, name, f"node {name} closed the job")
        for engine in job.engines.values():
            rounds.lose(engine, name, f"node {name} has nothing of the job any more")
        self._drop_report(job, name)
        decided = told is not None and told.local and not any(report.local for report in job.reports.values())
        if (decided and not job.members) or (told is not None and told.joined):
            self.close_job(job_name, f"closed on node {name}")

    def close_job(self, job_name: str, why: str = "closed by an administrator") -> None:
        """Ends a job for good: its epochs begin anew."""
        job = self.find(job_name)
        del self.jobs[job_name]
        for node in self.nodes.values():
            node.jobs.discard(job_name)
        self.touched.add(job_name)
        self.engines |= {(job_name, engine) for engine in job.engines}
        self.records[job_name] = Record(job_name, job.epoch, 0, 0, -1, (), closed=True)
        self.note("closed", job_name, "", why)

    def find(self, job_name: str) -> Job:
        """
        Raises:
            VersionUnavailable: no such job.
        """
        job = self.jobs.get(job_name)
        if job is None:
            raise VersionUnavailable(f"no job {job_name} here")
        return job

    # writers of a job that spans nodes

    def join(
        self,
        name: str,
        run: str,
        job_name: str,
        ranks: Mapping[int, tuple[str, str]],
        *,
        world_size: int,
        keep: int,
        epoch: int | str,
        after: int | None,
    ) -> Job:
        """Registers that node's writer ranks: (incarnation, manifest's digest) each; see ``writing.join``."""
        node = self.node(name, run)
        job = self._job(job_name, node)
        before = job.epoch, job.keep
        if job.local not in (None, name) and epoch != "new" and job.members:
            raise VersionConflict(
                f"{job_name}: its trainer is on node {job.local}, with all its ranks; they move to several nodes with "
                'a new epoch: all ranks pass epoch="new"'
            )
        members = {rank: Member(name, *who) for rank, who in ranks.items()}
        writing.join(job, members, world_size, keep, epoch, after)
        if (job.epoch, job.keep) != before:
            self._record(job)
        if job.epoch != before[0]:
            self.note("epoch", job_name, name, f"epoch {job.epoch} opened with {job.world_size} ranks")
        self.note("joined", job_name, name, f"writer {describe_ranks(ranks)} of {world_size} registered on {name}")
        self.touched.add(job_name)
        return job

    def part(self, name: str, run: str, job_name: str, ranks: Iterable[int]) -> None:
        """Writers on that node have left."""
        self.node(name, run)
        writing.part(self.find(job_name), name, ranks)
        self.touched.add(job_name)

    def begin(self, name: str, run: str, job_name: str, epoch: int, step: int, ranks: Iterable[int]) -> Attempt:
        self.node(name, run)
        job = self.find(job_name)
        attempt = writing.begin(job, name, epoch, step, ranks, self._next_attempt)
        if attempt.number == self._next_attempt:
            self._next_attempt += 1
        self.touched.add(job_name)
        return attempt

    def seal(
        self, name: str, run: str, job_name: str, epoch: int, step: int, attempt: int, pieces: Mapping[int, Piece]
    ) -> bool:
        """Whether the version is committed now; see ``writing.seal``."""
        self.node(name, run)
        job = self.find(job_name)
        version = writing.seal(job, name, epoch, step, attempt, pieces, self._first)
        if version is not None:
            self._record(job)
            text = f"epoch {epoch} step {step} committed, {version.nbytes} bytes on {len(version.holders)} nodes"
            self.note("committed", job_name, "", text)
        self.touched.add(job_name)
        return job.attempt_of((epoch, step)) == attempt

    def foretell(
        self, name: str, run: str, job_name: str, epoch: int, step: int, attempt: int, pieces: Mapping[int, Piece]
    ) -> None:
        """What ranks of that node will seal; see ``writing.foretell``."""
        self.node(name, run)
        if writing.foretell(self.find(job_name), name, epoch, step, attempt, pieces):
            self.touched.add(job_name)

    def abort(self, name: str, run: str, job_name: str, epoch: int, step: int, attempt: int | None, why: str) -> bool:
        """Whether there was an attempt to discard; see ``writing.abort``."""
        self.node(name, run)
        aborted = writing.abort(self.find(job_name), name, epoch, step, attempt, why)
        if aborted:
            self.note("failed", job_name, name, f"step {step} of epoch {epoch} aborted on {name}: {why}")
            self.touched.add(job_name)
        return aborted

    def roll_back(self, job_name: str, step: int) -> list[VersionKey]:
        """Withdraws newer versions; which they were."""
        job = self.find(job_name)
        gone = [version.key for version in writing.roll_back(job, step)]
        self._record(job)
        self.note("withdrawn", job_name, "", f"rolled back to epoch {job.epoch} step {step}")
        self.touched.add(job_name)
        return gone

    # engines whose workers are on several nodes

    def tell(
        self, name: str, run: str, job_name: str, engine_name: str, told: rounds.Told, now: float
    ) -> rounds.Engine:
        """All that a node says of an engine; see ``rounds.tell``.

        Raises:
            VersionUnavailable: the job is not known: its nodes report it first.
            BudgetExceeded: too many engines.
        """
        node = self.node(name, run)
        job = self.find(job_name)
        node.jobs.add(job_name)
        engine = job.engines.get(engine_name)
        if engine is None:
            if len(job.engines) >= rounds.MAX_ENGINES:
                raise BudgetExceeded(f"{job_name}: {rounds.MAX_ENGINES} engines span nodes already")
            engine = job.engines[engine_name] = rounds.Engine(engine_name, told.world_size)
        try:
            rounds.tell(job_name, engine, name, told)
        finally:
            self._advance(job, now)
        return engine

    def look(self, name: str, run: str, job_name: str, engine_name: str, now: float) -> rounds.Engine:
        """Has every node of that engine say anew how its workers are.

        Raises:
            VersionUnavailable: it is not known here.
        """
        self.node(name, run)
        engine = self.find(job_name).engines.get(engine_name)
        if engine is None:
            raise VersionUnavailable(f"{job_name}: no node has told of engine {engine_name}")
        engine.look += 1
        self._advance(self.find(job_name), now)
        return engine

    def advance(self, now: float) -> None:
        """What follows for engines from what has changed since."""
        for name in self.touched:
            job = self.jobs.get(name)
            if job is not None and job.engines:
                self._advance(job, now)

    def _advance(self, job: Job, now: float) -> None:
        commits = rounds.Commits(job.name, now, job.attempt_of, job.aborted)
        for engine in list(job.engines.values()):
            for failed in rounds.advance(engine, commits):
                self.note("failed", job.name, "", failed.message)
            if not engine.parties:
                del job.engines[engine.name]
            shown: dict[str, Any] = rounds.view(engine)
            if shown != engine.shown:
                engine.shown = shown
                engine.seq += 1
                self.engines.add((job.name, engine.name))

    # exchanges

    def home(self, name: str, run: str, job_name: str, now: float) -> tuple[str, Grant | None]:
        """The node whose daemon decides a job's exchanges, and leave to forward sessions to it.

        Whoever asks first becomes it; None for that one.

        Raises:
            DaemonUnavailable: it may be one that has not told of itself since this process was started.
            VersionUnavailable: it serves no other nodes.
        """
        node, job = self.node(name, run), self.jobs.get(job_name)
        if job is None or job.home in (None, name):  # another node may never have anything of it to forget
            job = self._job(job_name, node)
        if job.home is None and job_name in self._restored and now < self._since + self.ttl:
            raise DaemonUnavailable(
                f"{job_name}: the MetaServer was just started, and the node where exchanges are decided may not have "
                "told yet"
            )
        if job.home is None:
            self._settle_at(job, name)
        if job.home in (None, name):
            return name, None
        home = self.nodes[job.home]
        if home.address is None:
            raise VersionUnavailable(
                f"{job_name}: node {home.name}, where its exchanges are decided, serves no other nodes: start its "
                "daemon with --listen"
            )
        return home.name, self._grant(job_name, SESSION, home, name, frozenset(), self._expires(now))

    def _settle_at(self, job: Job, name: str) -> None:
        job.home = name
        self.note("home", job.name, name, f"its exchanges are decided on node {name}")
        self.touched.add(job.name)

    # transfers

    def tickets(
        self,
        name: str,
        run: str,
        job_name: str,
        key: VersionKey,
        source: str | None = None,
        avoid: frozenset[str] = frozenset(),
        *,
        ranks: Iterable[int] | None = None,
        parts: str | None = None,
        now: float,
    ) -> list[Grant]:
        """Leave to fetch a version, or these ranks of it, from one node or from several that together have them.

        One that is still written is fetched as it comes.

        Whoever asks counts as fetching from then on, and may be asked itself by those that begin later: so a trainer's
        nodes send about what one that fetches takes in, however many do at once. ``parts``: of what it brings, where
        that is not all.

        Raises:
            VersionUnavailable: no other nodes have that and serve it.
        """
        target = self.node(name, run)
        job = self.find(job_name)
        version = job.versions.get(key) or next((coming for coming in job.coming() if coming.key == key), None)
        wanted = frozenset(ranks if ranks is not None else range(version.world_size if version else 0))
        found = None
        if version is not None:
            has = self._serving(version, name, sources.before(version, name, parts), parts)
            has = {node: held for node, held in has.items() if source in (None, node) and node not in avoid}
            writers = {rank: member.node for rank, member in job.members.items()}
            found = sources.choose(version, has, wanted, lambda node: self.nodes[node].tickets, writers)
        if version is None or not found:
            who = f"node {source} does not serve" if source else "no other nodes serve"
            what = "" if ranks is None else f"{describe_ranks(wanted)} of "
            raise VersionUnavailable(f"{job_name}: {who} {what}epoch {key[0]} step {key[1]}")
        target.jobs.add(job_name)
        subject, expires = (*key, version.attempt), self._expires(now)
        return [self._grant(job_name, subject, self.nodes[node], name, taken, expires) for node, taken in found.items()]

    def _serving(
        self, version: Version, name: str, earlier: list[str], parts: str | None
    ) -> dict[str, Collection[int]]:
        """Other nodes that may be asked for a version, and for which ranks."""
        has: dict[str, Collection[int]] = {**version.holders, **dict.fromkeys(earlier, range(version.world_size))}
        alike = {node for node in has if version.parts.get(node, parts) == parts}
        return {
            node: ranks if node in alike else version.whole.get(node, ())
            for node, ranks in has.items()
            if node != name and self.nodes[node].address
        }

    @staticmethod
    def _expires(now: float) -> int:
        return int((now + TICKET_SECONDS) * 1000)

    def _grant(
        self,
        job: str,
        subject: tuple[int, int, int],
        source: Node,
        target: str,
        ranks: frozenset[int],
        expires: int,
    ) -> Grant:
        source.tickets += 1
        ticket = Ticket(job, *subject, source.name, target, self.run, expires, secrets.token_hex(16))
        return Grant(source, ticket, key_of(source.key, ticket.encode()), ranks)

    # internals

    def note(self, kind: str, job: str, node: str, text: str) -> None:
        self.notes.append(Note(kind, job, node, text))

    def _job(self, job_name: str, node: Node) -> Job:
        job = self.jobs.get(job_name)
        if job_name not in node.jobs and len(node.jobs) >= MAX_JOBS_OF_A_NODE:
            raise BudgetExceeded(f"node {node.name} has {MAX_JOBS_OF_A_NODE} jobs already")
        if job is None:
            if len(self.jobs) >= MAX_JOBS:
                raise BudgetExceeded(f"{MAX_JOBS} jobs are known already; close some")
            job = self.jobs[job_name] = Job(job_name)
        node.jobs.add(job_name)
        return job

    def _record(self, job: Job) -> None:
        commits = ((*key, *known) for key, known in job.committed.items())
        self.records[job.name] = Record(job.name, job.epoch, job.world_size, job.keep, job.high, tuple(commits))
        self.touched.add(job.name)


def _says_something(report: Report) -> bool:
    return bool(report.ranks or report.versions or report.engines or report.waiting or report.home)
