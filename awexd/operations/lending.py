"""What training processes ask for that lend their own GPU memory: borrowed versions, and the end of them.

The daemon has no context of any GPU. What it keeps of a rank's memory is a memfd that the rank made: handles, where its
pieces lie, and their checksums. It is handed to readers as a segment's descriptor would be, and never read here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import time

from awexd.manifests import LENT_SEALS, seals_of
from awexd.service import Call, Reply, Service
from awexd.store import Segment, Wait
from awexd.store.model import Version
from awexd_transports.errors import ProtocolError

MAX_LENT_BYTES = 1 << 30
"""Of a memfd that describes a rank's memory: a checksum takes 8 bytes for up to 2 MiB."""


class Lenders:
    """The operations on borrowed versions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        service.add(
            {
                "write.lend": self._lend,
                "write.choose": self._choose,
                "write.borrow": self._borrow,
                "write.affirm": self._affirm,
                "write.captured": self._captured,
                "write.revoke": self._revoke,
                "segment.dropped": self._dropped,
            }
        )

    def _lend(self, call: Call) -> Reply:
        job, writer = self._store.writer_of(call.session)
        fd = _checked(call)
        segment = Segment(
            f"g{secrets.token_hex(8)}",
            writer.rank,
            call.arguments["nbytes"],
            borrowed=True,
            devices=frozenset(call.arguments["devices"]),
        )
        self._store.lend(call.session, segment)
        self._service.lent[segment.id] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        text = f"rank {writer.rank} lends its memory on {', '.join(sorted(segment.devices))}"
        self._service.note("lent", job.name, text, logging.DEBUG)
        return Reply({"segment": segment.id})

    def _choose(self, call: Call) -> Reply | Wait:
        step, set_digest, why_not = (call.arguments[k] for k in ("step", "set", "why_not"))
        chosen = self._store.choose(call.session, step, set_digest, time.monotonic(), why_not)
        return chosen if isinstance(chosen, Wait) else Reply({"borrowed": chosen.borrowed, "reason": chosen.reason})

    def _borrow(self, call: Call) -> Reply | Wait:
        job, _ = self._store.writer_of(call.session)
        step, set_digest, segment, checksums = (call.arguments[k] for k in ("step", "set", "segment", "checksums"))
        outcome = self._store.borrow(call.session, step, set_digest, segment, checksums)
        if isinstance(outcome, Wait):
            return outcome
        self._service.settle()  # readers first
        committed = isinstance(outcome, Version)
        if isinstance(outcome, Version):
            self._service.note("committed", job.name, f"{outcome} committed, borrowed", logging.DEBUG)
        attempt = outcome.attempt if isinstance(outcome, Version) else outcome
        return Reply({"epoch": job.epoch, "attempt": attempt, "committed": committed})

    def _affirm(self, call: Call) -> Reply:
        self._store.affirm(call.session, *(call.arguments[k] for k in ("step", "attempt", "good")))
        return Reply({})

    def _captured(self, call: Call) -> Reply | Wait:
        job, _ = self._store.writer_of(call.session)
        epoch, step, attempt, at_once = (call.arguments[k] for k in ("epoch", "step", "attempt", "at_once"))
        waiting = self._store.captured(call.session, epoch, step, attempt, at_once)
        if waiting is None:
            self._service.records.save_soon(job)
        return waiting or Reply({})

    def _revoke(self, call: Call) -> Reply | Wait:
        return self._store.revoke(call.session) or Reply({})

    def _dropped(self, call: Call) -> Reply | Wait:
        """Once there is something to unmap; the answer names it, as any would."""
        if call.session.to_drop:
            return Reply({})
        job, _ = self._store.worker_of(call.session)
        return Wait(job.name, lambda: "a segment to be given up")


def _checked(call: Call) -> int:
    """The memfd that describes a rank's memory: of the size that is said, which nobody can change.

    Raises:
        ProtocolError: it is none.
    """
    if len(call.fds) != 1:
        raise ProtocolError(f"a rank's memory is described by one descriptor, not {len(call.fds)}")
    fd, nbytes = call.fds[0], call.arguments["nbytes"]
    if seals_of(fd) & LENT_SEALS != LENT_SEALS:
        raise ProtocolError("what describes a rank's memory must be a memfd sealed against growing and shrinking")
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes or nbytes > MAX_LENT_BYTES:
        raise ProtocolError(f"a memfd of {found.st_size} bytes, {nbytes} are named, at most {MAX_LENT_BYTES}")
    return fd
