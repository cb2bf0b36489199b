"""What processes ask for that exchange a version among themselves: when, with whom, where, and how it ended.

The daemon moves none of the bytes. It says who takes part, that all are about to do the same, and that one has gone.
"""

from __future__ import annotations

import logging
import secrets

from awexd.service import Call, Reply, Service
from awexd.store import Segment, Wait
from awexd.store.exchanging import Member
from awexd.store.model import Job, Version
from awexd_transports.errors import AccessDenied, InvalidArgument


class Groups:
    """The operations ``group.*``, ``write.offer`` and ``read.exchanges``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        service.add(
            {
                "write.offer": self._offer,
                "read.exchanges": self._exchanges,
                "group.join": self._join,
                "group.manifests": self._manifests,
                "group.publish": self._publish,
                "group.address": self._address,
                "group.agree": self._agree,
                "group.watch": self._watch,
                "group.done": self._done,
            }
        )

    def _offer(self, call: Call) -> Reply | Wait:
        """A step whose bytes are the writers' live parameters, which they will send."""
        job, writer = self._store.writer_of(call.session)
        if writer.mode != "nccl":
            raise InvalidArgument(f'{job.name}: rank {writer.rank} is registered with mode="{writer.mode}"')
        segment = job.lent(writer.rank)
        if segment is None or segment.session != call.session.id or segment.digest != writer.segment_digest:
            number = f"x{secrets.token_hex(8)}"
            segment = Segment(number, writer.rank, writer.nbytes, borrowed=True, exchanged=True)
            self._store.lend(call.session, segment)
        step, set_digest = call.arguments["step"], call.arguments["set"]
        outcome = self._store.borrow(call.session, step, set_digest, segment.id, checksums=False)
        if isinstance(outcome, Wait):
            return outcome
        committed = isinstance(outcome, Version)
        attempt = outcome.attempt if isinstance(outcome, Version) else outcome
        self._store.affirm(call.session, step, attempt, good=True)
        if committed:
            self._service.note("committed", job.name, f"{outcome} committed, to be exchanged", logging.DEBUG)
        return Reply({"epoch": job.epoch, "attempt": attempt, "committed": committed})

    def _exchanges(self, call: Call) -> Reply:
        job, worker = self._store.worker_of(call.session)
        if call.peer.uid != job.owner_uid:
            raise AccessDenied(f"{job.name}: only its owner's processes exchange weights with its trainer")
        worker.exchanges = job.engines[worker.engine].exchanges = True
        self._store.touched.add(job.name)
        return Reply({})

    def _join(self, call: Call) -> Reply | Wait:
        exchange = self._store.join(call.session, self._member(call))
        if isinstance(exchange, Wait):
            return exchange
        if exchange is None:
            return Reply({"over": True})
        job = self._job(call)
        workers = exchange.members[exchange.writers :]
        body = {
            "over": False,
            "exchange": exchange.number,
            "group": exchange.group.id,
            "fresh": exchange.fresh,
            "kept": list(job.exchanges.groups),
            "backend": exchange.group.backend,
            "host": call.session.host or self._service.host,
            "index": [member.session for member in exchange.members].index(call.session.id),
            "writers": exchange.writers,
            "workers": [[worker.engine, worker.rank, worker.digest] for worker in workers],
            "sums": [member.sums for member in exchange.members],
        }
        names = f"{exchange.writers} and {len(workers)} processes by {exchange.group.backend}"
        if len(exchange.told) == 1:
            text = f"epoch {exchange.key[0]} step {exchange.key[1]} is exchanged between {names}"
            self._service.note("exchange", job.name, text, logging.DEBUG)
        return Reply(body)

    def _member(self, call: Call) -> Member:
        session, arguments = call.session, call.arguments
        device, sums = arguments["device"], arguments["sums"]
        if session.writer:
            _, writer = self._store.writer_of(session)
            if arguments["attempt"] is None:
                raise InvalidArgument("a writer names the attempt that it offers")
            place = "", writer.rank, writer.segment_digest
            return Member(session.id, session.pid, *place, device, sums, arguments["attempt"], node=session.node)
        job, worker = self._store.worker_of(session)
        lease = self._store.leases.get(arguments["lease"] or "")
        version = job.versions.get(lease.key) if lease is not None else None
        place = worker.engine, worker.rank, worker.digest
        attempt = version.attempt if version is not None else 0
        lease_id = arguments["lease"] or "none"
        return Member(session.id, session.pid, *place, device, sums, attempt, lease_id, session.node)

    def _manifests(self, call: Call) -> Reply:
        """Of the workers that take part."""
        _, exchange, _ = self._store.exchange_of(call.session, call.arguments["exchange"])
        index, fd = self._service.shelf.bundle([member.digest for member in exchange.members[exchange.writers :]])
        return Reply({"bodies": index}, [fd])

    def _publish(self, call: Call) -> Reply:
        self._store.publish_address(call.session, call.arguments["exchange"], call.arguments["address"])
        return Reply({})

    def _address(self, call: Call) -> Reply | Wait:
        found = self._store.addresses(call.session, call.arguments["exchange"])
        return found if isinstance(found, Wait) else Reply({"addresses": found})

    def _agree(self, call: Call) -> Reply | Wait:
        terms = {name: call.arguments[name] for name in ("format", "ring", "plans")}
        return self._store.agree(call.session, call.arguments["exchange"], terms) or Reply({})

    def _watch(self, call: Call) -> Reply | Wait:
        return self._store.watch(call.session, call.arguments["exchange"]) or Reply({})

    def _done(self, call: Call) -> Reply:
        job, exchange, _ = self._store.exchange_of(call.session, call.arguments["exchange"])
        over = exchange.over
        self._store.end_part(call.session, call.arguments["exchange"], call.arguments["error"])
        if exchange.error is not None and not over:
            self._service.note("failed", job.name, exchange.error.message, logging.WARNING)
        return Reply({})

    def _job(self, call: Call) -> Job:
        return (self._store.writer_of(call.session) if call.session.writer else self._store.worker_of(call.session))[0]
