"""Other nodes fetch what is held here: every held version is offered, and its memory kept until they are done.

What is still written, too (``offering``): its offer goes on as that of the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from awexd.nodes.mapped import Mapped
from awexd.nodes.offering import Offering
from awexd.peers.offers import Offered
from awexd.peers.server import TcpServer
from awexd.service import Service
from awexd.store import Segment, Version
from awexd.store.model import Job
from awexd_transports.base import Memory, Piece, Subject
from awexd_transports.errors import AwexdError
from awexd_transports.ranges import Ranges

WITHDRAWN_SECONDS = 1.0
"""For the pieces under way of a version that was rolled back or dropped, which nobody may finish."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """A version that is offered, until it is withdrawn: ``ending`` while others are still in the middle of it."""

    job: Job
    version: Version
    offer: Offered
    ending: bool = False


class Serving:
    """Offers what the store holds, as that changes."""

    def __init__(self, service: Service, server: TcpServer, mapped: Mapped) -> None:
        self._service = service
        self._store = service.store
        self._server = server
        self._mapped = mapped
        self._served: dict[str, dict[Subject, Served]] = {}
        self._failed: set[Subject] = set()
        self._offering = Offering(service, server, mapped)
        service.early = self.early
        service.followers.append(self.changed)
        self.changed(self._store.jobs)

    @property
    def sent(self) -> int:
        """Bytes of pieces, since the start."""
        return self._server.sent

    def changed(self, jobs: Collection[str]) -> None:
        """These jobs may hold something else now."""
        for name in list(jobs):
            job = self._store.jobs.get(name)
            held = [one for one in job.kept() if not one.borrowed] if job else []
            wanted = {_subject(name, version): version for version in held}
            served = self._served.get(name, {})
            self._failed -= {subject for subject in self._failed if subject.job == name and subject not in wanted}
            for subject, one in list(served.items()):
                if wanted.get(subject) is not one.version:
                    self._end(name, subject, one)
            if job is not None:
                for subject, version in wanted.items():
                    # What exactly is here of a part is known to who has brought it.
                    if version.part is None and subject not in self._served.get(name, {}):
                        self._offer(job, subject, version)
            self._offering.changed(name, job)

    def early(self, job: Job) -> bool:
        """Whether other nodes will fetch what is written next: one that decides alone goes by what it holds.

        Engines here want what the other nodes' ranks write, of which all is told or nothing.
        """
        if job.joined is not None:
            return job.abroad or bool(job.engines)
        return job.mirror is None and any(one.offer.used for one in self._served.get(job.name, {}).values())

    def begin(self, job: Job, subject: Subject, segments: Mapping[int, Segment]) -> Offered:
        """Offers a version that is still being fetched, as far as it has come; ``keep`` it or ``give_up``.

        Of one that is served in part already, or written here, these are the other ranks' segments.
        """
        memories = {rank: self._mapped.use(segment) for rank, segment in segments.items()}
        served, written = self._served.get(job.name, {}).get(subject), self._offering.find(subject)
        own = served.offer if served is not None and not served.ending else written.offer if written else None
        try:
            if own is not None:
                own.include(memories)
                return own
            return self._server.offer(subject, memories, {})
        except BaseException:
            for segment in segments.values():
                self._mapped.drop(segment.id)
            raise

    def keep(self, job: Job, version: Version, offer: Offered) -> None:
        """It is whole now, and committed here."""
        self._store.serve(version)
        self._served.setdefault(job.name, {})[offer.subject] = Served(job, version, offer)

    def extend(self, job: Job, version: Version, ranges: Mapping[int, Ranges], rows: Collection[Piece]) -> None:
        """Of a version of which a part is served, all of this is here now."""
        served = self._served.get(job.name, {}).get(_subject(job.name, version))
        if served is None:
            return
        for rank, there in ranges.items():
            for start, end in there:
                served.offer.extend(rank, start, end)
        for piece in rows:
            served.offer.extend_rows(piece)
        served.offer.promise(ranges, rows)

    async def give_up(self, offer: Offered, segments: Mapping[int, Segment]) -> None:
        """It will not be whole. What of it is this node's own is offered again."""
        name = offer.subject.job
        served = self._served.get(name, {}).get(offer.subject)
        own = served if served is not None and served.offer is offer and not served.ending else None
        found = self._offering.find(offer.subject)
        written = found if found is not None and found.offer is offer else None
        if own is not None:
            own.ending = True
        elif written is not None:
            written.ending = True
        try:
            await offer.withdraw()
        finally:
            for segment in segments.values():
                self._mapped.drop(segment.id)
            if own is not None:
                self._ended(name, offer.subject, own)
            elif written is not None:
                self._offering.ended(offer.subject, written)
            if own is not None or written is not None:
                self.changed([name])

    def _offer(self, job: Job, subject: Subject, version: Version) -> None:
        written = self._offering.find(subject)
        mapped = written.segments.keys() if written is not None else set()
        segments = [one for one in (job.segments[name] for name in version.segments) if one.rank not in mapped]
        memories: dict[int, Memory] = {}
        try:
            for segment in segments:
                memories[segment.rank] = self._mapped.use(segment)
            if written is None:
                offer = self._server.offer(subject, memories, None)
            else:
                offer = written.offer
                offer.include(memories)
        except (OSError, AwexdError) as error:
            for segment in segments[: len(memories)]:
                self._mapped.drop(segment.id)
            if subject not in self._failed:
                self._failed.add(subject)
                self._service.note("failed", job.name, f"{version} is not served to other nodes: {error}")
            return
        self.keep(job, version, offer)
        if written is not None:
            for one in [job.segments[segment_id] for segment_id in version.segments]:
                offer.extend(one.rank, 0, one.nbytes)
            self._offering.take(subject)

    def _end(self, name: str, subject: Subject, one: Served) -> None:
        if one.ending:
            return
        one.ending = True
        if one.offer.withdraw_unused():
            self._ended(name, subject, one)
        else:
            self._service.background.task(self._withdraw(name, subject, one))

    async def _withdraw(self, name: str, subject: Subject, one: Served) -> None:
        try:
            if one.version.retired and not one.version.withdrawn:
                with contextlib.suppress(TimeoutError):
                    # As for a reader's lease, a writer waits for this only where it has no other slot.
                    async with asyncio.timeout(self._service.settings.fetch_grace):
                        await one.offer.unused()
                await one.offer.withdraw()
            else:
                await one.offer.withdraw(WITHDRAWN_SECONDS)
        finally:
            self._ended(name, subject, one)
            self._service.settle()

    def _ended(self, name: str, subject: Subject, one: Served) -> None:
        served = self._served[name]
        del served[subject]
        if not served:
            del self._served[name]
        for segment_id in one.version.segments:
            self._mapped.drop(segment_id)
        self._store.serve_no_more(one.job, one.version)


def _subject(name: str, version: Version) -> Subject:
    return Subject(name, *version.key, version.attempt)
