"""Which transport brings bytes from which node: the fastest that both can do and that works, or the one that is set."""

from __future__ import annotations

import logging
import math
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from awexd.config import Settings
from awexd.peers.server import TcpServer
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd.rdma.agent import Agent
from awexd.rdma.available import why_not
from awexd.rdma.child import TransferFailed
from awexd.rdma.transport import TARGET, Rdma
from awexd_transports.base import Admission, Lane, Memory, Piece, Source, Subject, Transport
from awexd_transports.errors import AwexdError, DaemonUnavailable, DeadlineExceeded, InvalidArgument, ProtocolError

SAMPLE_BYTES = 16 << 20
SAMPLES = 8
"""The best of the last so many is a link's rate: the others may have waited for bytes that the source had not yet."""
FASTER = 1.25
"""How much faster a transport must have been, than one that is preferred, to be used instead."""
TRY_LANES = 32
"""Connections after which another transport is used for one, where that costs little."""
CHEAP = 0.5
"""It does where the other one had at least this share of the rate, or"""
SLOW = 2e9
"""nothing is known of it and this one brings fewer bytes a second."""
AGAIN_SECONDS = (30.0, 600.0)
"""Before one that failed is used again: at first, and at most, twice as long each time."""
ABSENT_SECONDS = 300.0
"""Before a node that did not serve by a transport is asked again."""
MAX_LINKS = 1024
FAULTS = (DaemonUnavailable, DeadlineExceeded, ProtocolError)
"""What may be the transport's fault. A version that is gone, or wrong bytes, are not."""

Note = Callable[[str, int], None]
"""Tells of something that happened: text and log level."""


@dataclass(slots=True)
class Fault:
    """Why a transport is not used with a node, and until when on the clock. ``count``: in a row."""

    text: str
    until: float
    count: int = 1
    told: bool = False


@dataclass(slots=True)
class Link:
    """What is known of the way from one node."""

    node: str
    transport: str = ""
    since: float = 0.0
    why: str = ""
    lanes: int = 0
    rates: dict[str, deque[float]] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)

    def rate(self, name: str) -> float | None:
        """Bytes per second."""
        return max(self.rates[name]) if self.rates.get(name) else None


class Routes:
    """Makes lanes (``base.Connects``) by one of several transports.

    Args:
        transports: the preferred one first. The last is used where all others fail.
        why: why there are no others, for people.
        clock: monotonic seconds.
    """

    def __init__(
        self, transports: Sequence[Transport], why: str, note: Note, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transports, self._why, self._note, self._clock = list(transports), why, note, clock
        self._links: dict[str, Link] = {}

    @property
    def name(self) -> str:
        """Of the transports in use, for people."""
        used = {link.transport for link in self._links.values() if link.transport}
        return ", ".join(sorted(used)) or self._transports[0].name

    @contextmanager
    def open(self) -> Iterator[None]:
        """What the transports keep between lanes is kept so long."""
        with ExitStack() as stack:
            if any(transport.name == Rdma.name for transport in self._transports):
                stack.enter_context(TARGET.held())
                self._begin(TARGET)
            yield

    def _begin(self, agent: Agent) -> None:
        """Its sidecar is there when the first bytes are to come."""
        try:
            agent.child()
        except (TransferFailed, OSError) as error:
            self._note(f"rdma: no sidecar can be started: {error}", logging.WARNING)

    def status(self) -> list[dict[str, Any]]:
        """Of every link, for people."""
        rows = []
        for link in self._links.values():
            rate = link.rate(link.transport)
            rows.append(
                {
                    "node": link.node,
                    "transport": link.transport,
                    "bytes_per_second": None if rate is None else int(rate),
                    "since": link.since,
                    "why": link.why,
                }
            )
        return [row for row in rows if row["transport"]]

    async def connect(self, source: Source, subject: Subject) -> Lane:
        """As ``Transport.connect``."""
        link = self._links.pop(source.node, None) or Link(source.node)
        self._links[source.node] = link  # the last used at the end
        if len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]
        while True:
            transport, why = self._choice(link)
            try:
                lane = await transport.connect(source, subject)
            except AwexdError as error:
                if "serves" not in error.details or len(self._transports) == 1:
                    raise
                text = f"node {source.node} does not serve by {transport.name}"
                link.faults[transport.name] = Fault(text, self._clock() + ABSENT_SECONDS, told=True)
                continue
            link.lanes += 1
            self._use(link, transport.name, why)
            return RoutedLane(lane, self, link, transport.name)

    def _choice(self, link: Link) -> tuple[Transport, str]:
        """What to use for the next lane, and why."""
        if len(self._transports) == 1:
            return self._transports[0], self._why
        now = self._clock()
        able = [one for one in self._transports if one.name not in link.faults or now >= link.faults[one.name].until]
        if not able:
            able = self._transports[-1:]
        best = able[0]
        for other in able[1:]:
            mine, theirs = link.rate(best.name), link.rate(other.name)
            if mine is not None and theirs is not None and theirs > FASTER * mine:
                best = other
        if link.lanes % TRY_LANES == TRY_LANES - 1:
            for other in able:
                if other is not best and self._is_cheap(link.rate(other.name), link.rate(best.name)):
                    return other, f"to see whether it is faster than {best.name}"
        kept = [fault.text for name, fault in link.faults.items() if now < fault.until and name != best.name]
        if best is not able[0]:
            return best, f"was faster than {able[0].name}"
        return best, "; ".join(kept) or "the fastest that both nodes can do"

    @staticmethod
    def _is_cheap(theirs: float | None, mine: float | None) -> bool:
        if mine is None:
            return False
        return mine < SLOW if theirs is None else theirs >= CHEAP * mine

    def _use(self, link: Link, name: str, why: str) -> None:
        untold = [fault for left, fault in link.faults.items() if not fault.told and left != name]
        if link.transport != name:
            link.transport, link.since = name, time.time()
        link.why = why
        for fault in untold:
            fault.told = True
            self._note(f"node {link.node} by {name} from now on: {fault.text}", logging.WARNING)

    def failed(self, link: Link, name: str, error: AwexdError) -> None:
        """A lane by that transport has ended with that; another is used for the next one, if there is one."""
        if name == self._transports[-1].name:
            return
        before = link.faults.get(name)
        count = before.count + 1 if before is not None else 1
        seconds = min(AGAIN_SECONDS[0] * 2 ** (count - 1), AGAIN_SECONDS[1])
        link.faults[name] = Fault(f"{name} failed: {error}", self._clock() + seconds, count)

    def moved(self, link: Link, name: str, rate: float) -> None:
        """It works; a sample of its rate in bytes per second."""
        link.rates.setdefault(name, deque(maxlen=SAMPLES)).append(rate)
        if link.faults.pop(name, None) is not None and name == link.transport:
            self._note(f"node {link.node} by {name} again", logging.INFO)


class RoutedLane:
    """A lane whose rate and faults are remembered (``base.Lane``)."""

    def __init__(self, lane: Lane, routes: Routes, link: Link, name: str) -> None:
        self._lane, self._routes, self._link, self._name = lane, routes, link, name
        self._closed = False
        self._under_way = 0
        self._since = math.inf
        self._bytes, self._seconds = 0, 0.0

    @property
    def depth(self) -> int:
        return self._lane.depth

    @property
    def received(self) -> int:
        return self._lane.received

    async def fetch(self, piece: Piece, memory: Memory, *, summed: bool) -> None:
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way += 1
        try:
            await self._lane.fetch(piece, memory, summed=summed)
        except FAULTS as error:
            if not self._closed:
                self._closed = True  # one fault of one lane
                self._routes.failed(self._link, self._name, error)
            raise
        finally:
            self._under_way -= 1
        now = time.monotonic()
        self._bytes += piece.nbytes
        self._seconds += now - self._since
        self._since = now
        if self._bytes >= SAMPLE_BYTES:
            self._routes.moved(self._link, self._name, self._bytes / max(1e-6, self._seconds))
            self._bytes, self._seconds = 0, 0.0

    async def close(self) -> None:
        self._closed = True
        await self._lane.close()


def peer_settings(settings: Settings, peers: PeerSettings) -> PeerSettings:
    """With mutual TLS, where the daemon's settings say so.

    Raises:
        InvalidArgument: its files cannot be used, or one is missing.
    """
    files = {name: getattr(settings, name) for name in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca")}
    if not any(files.values()):
        return peers
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise InvalidArgument(f"TLS between daemons is mutual, and needs {' and '.join(missing)} too")
    contexts = [_context(purpose, files) for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH)]
    return replace(peers, server_tls=contexts[0], client_tls=contexts[1])


def _context(purpose: ssl.Purpose, files: Mapping[str, Any]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(purpose, cafile=files["peer_tls_ca"])
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files["peer_tls_cert"], files["peer_tls_key"])
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"TLS files for other nodes' daemons: {error}") from error
    return context


def transports(settings: Settings, peers: PeerSettings) -> tuple[list[Transport], str]:
    """By which this node fetches, the preferred one first; and why by no others.

    Raises:
        InvalidArgument: the one that is set cannot be used.
    """
    choice = settings.peer_transport
    if choice == Rdma.name:
        return [Rdma(peers)], "as peer_transport says"
    if choice == Tcp.name:
        return [Tcp(peers)], "as peer_transport says"
    reason = "rdma: its bytes would not go by TLS" if peers.client_tls else why_not(os.environ, forced=False)
    if reason is not None:
        return [Tcp(peers)], reason
    return [Rdma(peers), Tcp(peers)], ""


def serving(settings: Settings, peers: PeerSettings, admission: Admission, host: str, port: int) -> TcpServer:
    """Serves by what this node can do.

    Raises:
        InvalidArgument: it cannot, or not there.
    """
    preferred = transports(settings, peers)[0][0]
    server = preferred.serve(host, port, admission)
    if not isinstance(server, TcpServer):
        raise InvalidArgument(f"{preferred.name} serves by nothing that others can use")
    return server
