"""A trainer's versions that are exchanged: its live parameters, sent to engines while they may not change.

One thread a version serves the exchanges of it, until every engine has it or it is withdrawn.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awexd.manifests import unbundle
from awexd.protocol import MAX_DEADLINE_MS
from awexd_client.endpoint import Deadline
from awexd_client.exchanges import ABORT_SECONDS, Exchanges, Joined, device_name, device_of
from awexd_client.holding import Holding
from awexd_client.lending import CLOSE_SECONDS, Lender
from awexd_client.outgoing import SegmentLayout
from awexd_client.publication import Publication
from awexd_client.session import Connection
from awexd_client.shares import Boxes, Sending, sent
from awexd_transports.collective.base import Guard, Lost
from awexd_transports.collective.rings import Ring
from awexd_transports.collective.rounds import readers_of
from awexd_transports.cuda import driver as cuda
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    VersionConflict,
    VersionUnavailable,
)
from awexd_transports.layout import Manifest
from awexd_transports.plan import Plan, plan
from awexd_transports.view import View

if TYPE_CHECKING:
    from awexd_client.writer import WeightWriter

EXCHANGE_SECONDS = 600.0
"""The most that a writer gives one exchange; the engines' own deadlines are what ends it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offered:
    """What is sent: where each piece of the segment's manifest lies, and what it was registered as."""

    holding: Holding
    layout: SegmentLayout
    views: tuple[View, ...]


class Offerer(Lender):
    """Publishes a writer's versions by exchanging them."""

    def __init__(self, writer: WeightWriter, ring_bytes: int) -> None:
        super().__init__(writer)
        self._exchanges = Exchanges(ring_bytes, writer.world_size)
        self._offered: _Offered | None = None
        self._serving: _Serving | None = None
        self._manifests: dict[str, Manifest] = {}
        self._plans: dict[tuple[str, str], Plan] = {}
        self._shares: dict[str, tuple[_Offered, Sending]] = {}

    @property
    def groups_made(self) -> int:
        return self._exchanges.made

    def publish(self, step: int, deadline: Deadline) -> tuple[Publication | None, str]:
        writer = self._writer
        writer._check_newest()
        if writer._segment_ is None:
            writer._prepare(deadline)
        self.take_back(deadline)
        self._stop(deadline)
        offered = self._look()
        devices = {view.device for view in offered.views if view.device is not None}
        if devices:
            cuda.driver.synchronize(sorted(devices))
        asked = {"step": step, "set": offered.layout.registered_set}
        answer = writer._ask("write.offer", deadline.left(), **asked)
        publication = Publication(writer, step, lent=True)
        publication.epoch, publication._attempt = answer["epoch"], answer["attempt"]
        publication._committed = answer["committed"]
        publication.nbytes = sum(view.nbytes for view in offered.views)
        self._open = publication
        self._serving = _Serving(self, publication, offered, writer._connection)
        return publication, ""

    def intends(self, holding: Holding) -> bool:
        return False

    def end(self, publication: Publication, timeout: float, *, at_once: bool) -> None:
        deadline = Deadline(timeout)
        try:
            super().end(publication, deadline.left(), at_once=at_once)
        except VersionConflict:
            serving = self._serving
            if serving is None or serving.publication._attempt != publication._attempt:
                raise
            # Another rank may have found the same wrong a moment earlier, and taken the version back.
            if not serving.ended(min(ABORT_SECONDS, deadline.left())) or serving.error is None:
                raise
            raise serving.error from None
        self._stop(deadline)

    def revoke(self, deadline: Deadline) -> None:
        self._writer._surviving(self._revoke, deadline)

    def forget(self) -> None:
        self._open = None
        self._shares.clear()

    def close(self) -> None:
        deadline = Deadline(CLOSE_SECONDS)
        try:
            self._revoke(deadline)
        except AwexdError as error:
            _log.debug("%s: what was offered goes with its connection: %s", self._writer.job, error)
        self.forget()

    def let_go(self) -> None:
        """The connection is over: so is the thread that served."""
        serving, self._serving = self._serving, None
        if serving is None or serving.ended(ABORT_SECONDS + CLOSE_SECONDS):
            self._exchanges.close()
        self._offered = None
        self._shares.clear()

    def _revoke(self, deadline: Deadline) -> None:
        if self._serving is not None:
            self._writer._ask("write.revoke", deadline.left())
            self._stop(deadline)
        self.forget()

    def _stop(self, deadline: Deadline) -> None:
        """Once the version is over: nobody reads the parameters any more."""
        serving, self._serving = self._serving, None
        if serving is not None and not serving.ended(deadline.left()):
            self._serving = serving
            raise DeadlineExceeded(f"{self._writer.job}: step {serving.publication.step} is still being sent")

    def _look(self) -> _Offered:
        writer = self._writer
        writer._refresh()
        layout, holding = writer._segment, writer._holding
        known = self._offered
        if known is None or known.holding is not holding or known.layout is not layout:
            self._offered = known = _Offered(holding, layout, layout.sources(holding))
            for kept in (self._shares, self._plans, self._manifests):
                kept.clear()
        return known

    def share(self, ring: Ring, joined: Joined, offered: _Offered, used: Connection) -> Sending:
        """What this rank sends; made once for each group."""
        known = self._shares.get(joined.group)
        if known is not None and known[0] is offered and not joined.fresh:
            return known[1]
        manifests = self._segments(offered, used)
        workers = self._workers(joined, used)
        plans: dict[str, str] = {}
        brought, checked = list[tuple[int, Boxes]](), list[tuple[int, Boxes]]()
        for reader in readers_of(joined.index, joined.writers, len(workers)):
            planned = self._plan(offered, manifests, workers[reader])
            peer = joined.writers + reader
            both = (
                sent(manifests[joined.index].entries, joined.index, offered.views, workers[reader].entries, moves)
                for moves in (planned.moves, planned.further)
            )
            for boxes, kind in zip(both, (brought, checked), strict=True):
                kind.append((peer, boxes))
            plans[str(peer)] = planned.digest
        summed = frozenset(peer for peer, wanted in enumerate(joined.sums) if wanted and joined.sums[joined.index])
        share = Sending(ring, plans, brought, checked, summed)
        self._shares = {key: kept for key, kept in self._shares.items() if key in joined.kept}
        self._shares[joined.group] = offered, share
        return share

    def _plan(self, offered: _Offered, manifests: tuple[Manifest, ...], worker: Manifest) -> Plan:
        key = offered.layout.registered_set, worker.digest
        if key not in self._plans:
            self._plans[key] = plan(manifests, [worker], partial=True)
        return self._plans[key]

    def _segments(self, offered: _Offered, used: Connection) -> tuple[Manifest, ...]:
        """The segment manifests of all ranks, as engines get them."""
        answer = self._fetched(used, "read.sources", {"job": self._writer.job, "set": None})
        manifests = tuple(self._manifests[digest] for digest in answer["ranks"])
        if manifests[self._writer.rank] != offered.layout.manifest:
            raise VersionConflict(f"{self._writer.job}: the ranks' manifests have changed; publish the next step")
        return manifests

    def _workers(self, joined: Joined, used: Connection) -> list[Manifest]:
        digests = [digest for _, _, digest in joined.workers]
        if not {*digests} <= self._manifests.keys():
            self._fetched(used, "group.manifests", {"exchange": joined.exchange})
        return [self._manifests[digest] for digest in digests]

    def _fetched(self, used: Connection, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A call of the serving thread whose answer brings manifests."""
        answer, fds = used.call(operation, arguments, timeout=CLOSE_SECONDS)
        try:
            for digest, body in unbundle(answer["bodies"], fds[0]).items():
                if digest not in self._manifests:
                    self._manifests[digest] = Manifest.decode(body, digest)
        finally:
            for fd in fds:
                os.close(fd)
        return answer


class _Serving(threading.Thread):
    """Takes part in every exchange of one version. ``error``: what was wrong with this rank's part, for its caller."""

    def __init__(self, owner: Offerer, publication: Publication, offered: _Offered, used: Connection) -> None:
        super().__init__(name="awexd-offer", daemon=True)
        self.publication = publication
        self.error: BaseException | None = None
        self._owner, self._offered, self._used = owner, offered, used
        self.start()

    def ended(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()

    def run(self) -> None:
        try:
            while (joined := self._join()) is not None:
                self._take_part(joined)
        except AwexdError as error:
            if not isinstance(error, DaemonUnavailable):
                self._give_up(error)
        except BaseException as error:  # noqa: BLE001 - raised by ``captured``
            self._give_up(error)

    def _join(self) -> Joined | None:
        device, writer = device_of(self._offered.holding), self._owner._writer
        arguments = {
            "attempt": self.publication._attempt,
            "lease": None,
            "device": device_name(device),
            "sums": writer.verify_mode == "checksum",
        }
        while True:
            try:
                answer, _ = self._used.call("group.join", arguments, timeout=MAX_DEADLINE_MS / 1000, patient=True)
                return Joined.of(answer)
            except DeadlineExceeded:
                continue

    def _take_part(self, joined: Joined) -> None:
        owner, offered = self._owner, self._offered
        if offered.holding.watch.changed():
            raise VersionConflict(
                f"{owner._writer.job}: tensors were rebound or moved while step {self.publication.step} is exchanged"
            )
        try:
            owner._exchanges.run(
                self._used,
                joined,
                device_of(offered.holding),
                lambda ring, joined: owner.share(ring, joined, offered, self._used),
                Guard(),
                Deadline(EXCHANGE_SECONDS),
            )
        except Lost:
            return
        except VersionUnavailable as error:
            if "exchange" not in error.details:
                raise

    def _give_up(self, error: BaseException) -> None:
        """Nobody gets this version any more: what is wrong here would be wrong again."""
        self.error = error
        publication = self.publication
        attempted = {"epoch": publication.epoch, "step": publication.step, "attempt": publication._attempt}
        try:
            self._used.call("write.captured", {**attempted, "at_once": True}, timeout=CLOSE_SECONDS)
        except AwexdError as gone:
            _log.debug("%s: %s", self._owner._writer.job, gone)
