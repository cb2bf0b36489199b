"""Versions on their way here that readers take in as they come: what of each has landed, and who copies out of it.

Whoever does runs on neither version meanwhile, and has got nothing until this one is committed here and leased to it as
any other is. It is told which arrival a version was: of the same one, it need not copy again what it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from awexd.store import reading
from awexd.store.ledger import Ledger, Session
from awexd.store.model import Job, Segment, Version, VersionKey, Wait, Worker, set_digest_of
from awexd_transports.errors import AwexdError

QUANTUM = 32 << 20
"""Bytes that land before readers are told of them: less is not worth a message, and a launch of copies."""
SHARE = 256
"""Of a large version, so many messages at most."""
WINDOW, WINDOW_SHARE = 8 * QUANTUM, 8
"""Bytes that may have landed and are not known to readers, at least; of a large version, its bytes over that."""


class ArrivalState(StrEnum):
    COMING = "coming"
    HERE = "here"
    LOST = "lost"


class Landed(NamedTuple):
    """Bytes of a rank's segment that are there and right: ``rows`` of them, their starts ``stride`` bytes apart."""

    rank: int
    offset: int
    nbytes: int
    rows: int
    stride: int


@dataclass(slots=True, eq=False)
class Arrival:
    """One try at bringing a version here.

    Attributes:
        number: its own among all of this daemon.
        segments: by rank; while anybody reads them, they hold nothing else.
        covers: the manifests of those for whom it is brought; None: it is all of the version.
        pieces: in which those ranks' bytes come, how many each; all ranks' in turn (``turns.turn``).
        nbytes: that will land.
        landed: in the order in which it did. ``totals``: bytes of it, up to each and with it.
        readers: sessions that copy out of it, and the lease that holds it for each once it is here.
        known: how many entries of ``landed`` each of them has been told of, and is done with.
        committed: it is, somewhere; else it may never be.
        paced: bytes come no faster than readers copy them. ``heard``: named by whoever is waited for.
    """

    number: int
    key: VersionKey
    attempt: int
    segments: tuple[Segment, ...]
    covers: frozenset[str] | None
    pieces: tuple[int, ...]
    nbytes: int
    signal: str
    state: ArrivalState = ArrivalState.COMING
    landed: list[Landed] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    committed: bool = True
    paced: bool = True
    _told: int = 0

    @property
    def heard(self) -> str:
        return f"{self.signal} heard"

    @property
    def ahead(self) -> bool:
        """Whether more has landed than its readers should be left behind by."""
        behind = min(self.known.values(), default=len(self.landed))
        return self.paced and self.beyond(behind) > max(WINDOW, self.nbytes // WINDOW_SHARE)

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(segment.digest for segment in self.segments)

    @property
    def quantum(self) -> int:
        return max(QUANTUM, self.nbytes // SHARE)

    def finds(self, worker: Worker) -> bool:
        """Whether all that it reads is on its way here."""
        return self.covers is None or worker.digest in self.covers

    def land(self, landed: Landed) -> bool:
        """That is there too; whether there is so much that readers are to be told."""
        total = (self.totals[-1] if self.totals else 0) + landed.nbytes
        self.landed.append(landed)
        self.totals.append(total)
        due = total - self._told >= self.quantum
        if due:
            self._told = total
        return due

    def beyond(self, number: int) -> int:
        """Bytes that have landed after the first so many entries."""
        if not self.totals or not number:
            return self.totals[-1] if self.totals else 0
        return self.totals[-1] - self.totals[min(number, len(self.totals)) - 1]


class Arriving(Ledger):
    """The operations on arrivals."""

    def __init__(self, first_attempt: int = 1) -> None:
        super().__init__(first_attempt)
        self._arrivals: dict[int, Arrival] = {}
        """Those that are coming, and those that somebody still copies out of."""
        self._arrival_numbers = itertools.count(1)

    def arrive(
        self,
        job: Job,
        key: VersionKey,
        attempt: int,
        segments: Iterable[Segment],
        covers: frozenset[str] | None,
        pieces: Iterable[int],
        nbytes: int,
    ) -> Arrival:
        """A version begins to come, into these slots, by rank; ``arrived`` must follow."""
        number = next(self._arrival_numbers)
        signal = f"{job.name} arrival {number}"
        arrival = Arrival(number, key, attempt, tuple(segments), covers, tuple(pieces), nbytes, signal)
        self._arrivals[number] = arrival
        if job.mirror is not None:
            job.mirror.arrival = number
        self.touched.add(job.name)
        return arrival

    def arrived(self, job: Job, arrival: Arrival, version: Version | None, until: float) -> None:
        """It is committed here, and held for those who copy out of it until then; None: nothing comes of it.

        Memory out of which somebody may be copying in the second case is not used again.
        """
        if job.mirror is not None and job.mirror.arrival == arrival.number:
            job.mirror.arrival = None
        if version is not None:
            arrival.state, version.arrival = ArrivalState.HERE, arrival.number
            for session_id in arrival.readers:
                lease = self._lease(job, version, session_id, until, stage=True)
                self.sessions[session_id].leases.add(lease.id)
                arrival.readers[session_id] = lease.id
        else:
            arrival.state = ArrivalState.LOST
            for segment in arrival.segments if arrival.readers else ():
                segment.unsafe = True
        self._forget_arrival(arrival)
        self.touched.update({job.name, arrival.signal} if self.jobs.get(job.name) is job else {arrival.signal})

    def take_part(self, session: Session, step: int | None) -> Arrival | Wait | None:
        """The arrival of what the next update of the session's worker would get; it copies out of it from now on.

        None: that update is to be asked for now, for nothing is on its way that it would wait for.
        """
        job, worker = self.worker_of(session)
        self.leave_arrivals(session.id)
        engine, mirror = job.engines[worker.engine], job.mirror
        here = mirror is None and (job.writers or job.pending)  # its trainer, which goes by who waits for an update
        if here or worker.exchanges or worker.round in engine.rounds:
            return None
        arrival = self._arrivals.get(mirror.arrival or 0) if mirror is not None else None
        if arrival is not None and arrival.finds(worker) and self._awaits(job, worker, step, arrival):
            arrival.readers[session.id] = ""
            arrival.known[session.id] = 0
            return arrival
        try:
            outcome = reading.pick(job, worker, step)
        except AwexdError:
            return None  # told to whoever asks for it
        return outcome if isinstance(outcome, Wait) else None

    def taking_part(self, session: Session, number: int, known: int | None = None) -> Arrival | None:
        """That arrival, if all that the session has copied out of it so far is good; None: it has copied nothing.

        ``known``: so many entries of ``landed`` it is done with.
        """
        arrival = self._arrivals.get(number)
        if arrival is None or session.id not in arrival.readers:
            return None
        lease = self.leases.get(arrival.readers[session.id])
        if arrival.state is ArrivalState.LOST or (arrival.state is ArrivalState.HERE and lease is None):
            self.leave_arrivals(session.id)
            return None
        if known is not None:
            arrival.known[session.id] = known
        return arrival

    def leave_arrivals(self, session_id: str) -> None:
        """That session copies out of none any more: it has said so, or is over and has nothing mapped."""
        for arrival in [one for one in self._arrivals.values() if session_id in one.readers]:
            self._end_leases([lease] if (lease := arrival.readers.pop(session_id)) else [])
            del arrival.known[session_id]
            self.touched.add(arrival.heard)
            self._forget_arrival(arrival)

    def arriving_segments(self, session: Session) -> Iterable[Segment]:
        """What the session may map besides what it has leased."""
        for arrival in self._arrivals.values():
            if session.id in arrival.readers and arrival.state is not ArrivalState.LOST:
                yield from arrival.segments

    def find_set(self, job: Job, set_digest: str | None) -> list[str] | None:
        found = super().find_set(job, set_digest)
        arrival = self._arrivals.get(job.mirror.arrival or 0) if job.mirror is not None else None
        if found is None and arrival is not None and set_digest == set_digest_of(arrival.digests):
            return list(arrival.digests)
        return found

    def _forget_arrival(self, arrival: Arrival) -> None:
        if not arrival.readers and arrival.state is not ArrivalState.COMING:
            self._arrivals.pop(arrival.number, None)

    @staticmethod
    def _awaits(job: Job, worker: Worker, step: int | None, arrival: Arrival) -> bool:
        """Whether an update of it to that step gets that version, once it is here, and nothing before."""
        if step is not None:
            return arrival.key == (job.epoch, step)
        held = reading.visible(job, worker)
        return not held or (arrival.committed and held[0].key < arrival.key)
