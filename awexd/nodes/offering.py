"""What ranks of this node are writing is fetched by other nodes as far as it has come, before it is a version.

Nobody there reads it before the MetaServer has committed that attempt. One that is over is withdrawn at once, and its
slots are filled anew only when nothing of them is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from awexd.nodes.mapped import Mapped
from awexd.peers.offers import Offered
from awexd.peers.server import TcpServer
from awexd.service import Service
from awexd.store import Segment
from awexd.store.model import Attempt, Job
from awexd_transports.base import Memory, Subject
from awexd_transports.errors import AwexdError


@dataclass(slots=True)
class Written:
    """An attempt that is offered. ``segments``: of this node's ranks; ``ending`` while pieces of it are under way."""

    job: Job
    offer: Offered
    segments: dict[int, Segment] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    ending: bool = False


class Offering:
    """Offers open attempts whose ranks tell how far they are. ``changed`` whenever a job has changed."""

    def __init__(self, service: Service, server: TcpServer, mapped: Mapped) -> None:
        self._service, self._store = service, service.store
        self._server, self._mapped = server, mapped
        self._written: dict[Subject, Written] = {}
        self._failed: set[Subject] = set()
        service.progressed = self.progressed

    def find(self, subject: Subject) -> Written | None:
        """Unless it is ending."""
        found = self._written.get(subject)
        return found if found is not None and not found.ending else None

    def changed(self, name: str, job: Job | None) -> None:
        """Its attempts may be others now, or further."""
        attempts = {_subject(job, a): a for a in job.attempts.values() if a.written} if job is not None else {}
        self._failed -= {subject for subject in self._failed if subject.job == name and subject not in attempts}
        for subject, one in [item for item in self._written.items() if item[0].job == name]:
            if (subject not in attempts or one.job is not job) and not one.ending:
                self._end(subject, one)
        for attempt in attempts.values():
            if job is not None:
                self.progressed(job, attempt)

    def progressed(self, job: Job, attempt: Attempt) -> None:
        """More of that attempt is there."""
        subject = _subject(job, attempt)
        if (job.joined is None and job.mirror is not None) or subject in self._failed:
            return
        one = self._written.get(subject)
        if one is None or attempt.written.keys() - one.segments.keys():
            one = self._include(job, subject, one, attempt)
        if one is None or one.ending:
            return
        for rank, segment in one.segments.items():
            end = segment.nbytes if rank in attempt.sealed else attempt.written[rank]
            if end > one.told.get(rank, 0):
                one.told[rank] = end
                one.offer.extend(rank, 0, end)

    def take(self, subject: Subject) -> Written | None:
        """It is committed: whoever takes it has the offer now, and drops its segments' memory in the end."""
        one = self.find(subject)
        if one is not None:
            del self._written[subject]
            self._store.offer_no_more(one.job, one.segments.values())
        return one

    def ended(self, subject: Subject, one: Written) -> None:
        """Nothing of it is in flight any more."""
        if self._written.get(subject) is one:
            del self._written[subject]
        for segment in one.segments.values():
            self._mapped.drop(segment.id)
        self._store.offer_no_more(one.job, one.segments.values())

    def _include(self, job: Job, subject: Subject, one: Written | None, attempt: Attempt) -> Written | None:
        if one is not None and one.ending:
            return None
        known = one.segments if one is not None else {}
        new = {rank: job.segments[attempt.segments[rank]] for rank in attempt.written.keys() - known.keys()}
        memories: dict[int, Memory] = {}
        try:
            for rank, segment in new.items():
                memories[rank] = self._mapped.use(segment)
            if one is None:
                one = self._written[subject] = Written(job, self._server.offer(subject, memories, {}))
            else:
                one.offer.include(memories)
        except (OSError, AwexdError) as error:
            for rank in memories:
                self._mapped.drop(new[rank].id)
            self._failed.add(subject)
            self._service.note("failed", job.name, f"step {attempt.step} is not served before its commit: {error}")
            return None
        for rank, segment in new.items():
            one.segments[rank] = segment
            self._store.offer(segment)
        return one

    def _end(self, subject: Subject, one: Written) -> None:
        one.ending = True
        if one.offer.withdraw_unused():
            self.ended(subject, one)
        else:
            self._service.background.task(self._withdraw(subject, one))

    async def _withdraw(self, subject: Subject, one: Written) -> None:
        try:
            await one.offer.withdraw()
        finally:
            self.ended(subject, one)
            self._service.settle()


def _subject(job: Job, attempt: Attempt) -> Subject:
    return Subject(job.name, attempt.epoch, attempt.step, attempt.number)
