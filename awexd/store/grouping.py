"""What processes ask for that exchange a version among themselves; see :mod:`awexd.store.exchanging`."""

from __future__ import annotations

from awexd.store import exchanging, writing
from awexd.store.exchanging import Exchange, Member, Terms
from awexd.store.ledger import Session
from awexd.store.lending import Lending
from awexd.store.model import Job, Version, Wait
from awexd_transports.errors import AwexdError, InvalidArgument, VersionUnavailable


class Grouping(Lending):
    """The operations on exchanges."""

    def join(self, session: Session, member: Member) -> Wait | Exchange | None:
        """The exchange in which the session takes part next; None: its version is over, or has been for a writer.

        Raises:
            EpochChanged, VersionConflict: a writer's attempt never became a version.
            VersionUnavailable: a worker's lease has ended.
        """
        job, version = self._exchanged(session, member)
        if isinstance(version, Wait):
            return version
        if version is None:
            job.exchanges.joining.pop(session.id, None)
            return None
        found = self._untold(job, session)
        if found is None:
            job.exchanges.joining[session.id] = member
            if job.exchanges.running is None and job.exchanges.form(job, version, self.leases) is not None:
                self.touched.add(job.name)
            found = self._untold(job, session)
        if found is None:
            return Wait(job.name, lambda: job.exchanges.awaited(job, version, self.leases))
        found.told.add(session.id)
        return found

    def exchange_of(self, session: Session, number: int) -> tuple[Job, Exchange, Member]:
        """Raises InvalidArgument: none of that number in which this session takes part."""
        job = self._job(session)
        exchange = job.exchanges.recent.get(number)
        member = exchange.member(session.id) if exchange is not None else None
        if exchange is None or member is None:
            raise InvalidArgument(f"{job.name}: this session takes part in no exchange {number}")
        return job, exchange, member

    def publish_address(self, session: Session, number: int, address: str) -> None:
        """Where this member listens, by now."""
        job, exchange, _ = self.exchange_of(session, number)
        exchange.group.addresses[session.id] = address
        self.touched.add(job.name)

    def addresses(self, session: Session, number: int) -> Wait | list[str]:
        """Those of all members, by number, once all listen."""
        job, exchange, _ = self.exchange_of(session, number)
        _check(exchange)
        known = exchange.group.addresses
        if len(known) < len(exchange.members):
            return Wait(job.name, lambda: f"{exchange.others(known)} to be ready to be connected to")
        return [known[member.session] for member in exchange.members]

    def agree(self, session: Session, number: int, terms: Terms) -> Wait | None:
        """None once every member is about to do the same.

        Raises:
            InvalidArgument, ManifestMismatch: they are not; all are told.
            VersionUnavailable: somebody has left.
        """
        job, exchange, _ = self.exchange_of(session, number)
        _check(exchange)
        known = len(exchange.terms)
        exchange.terms[session.id] = terms
        if len(exchange.terms) < len(exchange.members):
            return Wait(job.name, lambda: f"{exchange.others(exchange.terms)} to begin the exchange")
        if known < len(exchange.terms):
            wrong = exchanging.disagreement(job, exchange)
            if wrong is not None:
                job.exchanges.fail(exchange, wrong)
            self.touched.add(job.name)
        _check(exchange)
        return None

    def watch(self, session: Session, number: int) -> Wait | None:
        """None once this session's part is done.

        Raises:
            AwexdError: why the exchange came to nothing.
        """
        job, exchange, member = self.exchange_of(session, number)
        if member.session in exchange.done:
            return None
        _check(exchange)
        return Wait(job.name, lambda: f"the exchange with {exchange.others({*exchange.done, session.id})}")

    def end_part(self, session: Session, number: int, why: str | None) -> None:
        """The session's part is done, or (``why``) came to nothing, and the exchange with it."""
        job, exchange, member = self.exchange_of(session, number)
        if why is None:
            exchange.done.add(session.id)
        else:
            job.exchanges.fail(exchange, exchanging.broken(job, exchange, f"{member}: {why}"))
        self.touched.add(job.name)

    def _job(self, session: Session) -> Job:
        return (self.writer_of(session) if session.writer else self.worker_of(session))[0]

    def _untold(self, job: Job, session: Session) -> Exchange | None:
        running = job.exchanges.running
        fits = running is not None and running.member(session.id) is not None and session.id not in running.told
        return running if fits else None

    def _exchanged(self, session: Session, member: Member) -> tuple[Job, Version | Wait | None]:
        job = self._job(session)
        if not member.lease:
            version = next((one for one in job.versions.values() if one.attempt == member.attempt), None)
            if version is None and any(one.number == member.attempt for one in job.attempts.values()):
                (step,) = (step for step, one in job.attempts.items() if one.number == member.attempt)
                return job, writing.committed(job, job.epoch, step, member.attempt)
            offered = version is not None and version.exchanged and not version.withdrawn
            return job, version if offered else None
        lease = self.leases.get(member.lease)
        version = job.versions.get(lease.key) if lease is not None and lease.session == session.id else None
        if version is None or version.withdrawn:
            raise VersionUnavailable(f"{job.name}: the version of this update was taken back", {"exchange": 0})
        if not version.exchanged:
            raise InvalidArgument(f"{job.name}: {version} is read, not exchanged")
        return job, version


def _check(exchange: Exchange) -> None:
    error: AwexdError | None = exchange.error
    if error is not None:
        raise error
