"""The transport ``rdma``: greeted and asked over the same connection as ``tcp``, the bytes written by NIXL."""

from __future__ import annotations

import os
from typing import ClassVar

from awexd.peers.link import Link
from awexd.peers.offers import Offered
from awexd.peers.server import TcpServer
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import greeted, named
from awexd.peers.wire import Kind
from awexd.rdma.agent import Agent
from awexd.rdma.available import why_not
from awexd.rdma.child import TransferFailed
from awexd.rdma.lane import RdmaLane
from awexd.rdma.writing import Known, Writes
from awexd_transports.base import Admission, Capabilities, Source, Subject
from awexd_transports.errors import DaemonUnavailable, InvalidArgument

TARGET = Agent("target")
"""This process's: all that is fetched here is written by way of one sidecar."""


class Rdma:
    """Makes servers and lanes (``base.Transport``). Lanes' sidecar lives while there is one, or ``TARGET`` is held.

    Raises:
        InvalidArgument: this node cannot do it; says why.
    """

    name: ClassVar[str] = "rdma"
    capabilities: ClassVar[Capabilities] = Capabilities(one_sided=True)

    def __init__(self, settings: PeerSettings | None = None) -> None:
        self._settings = settings or PeerSettings()
        reason = why_not(os.environ)
        if reason is not None:
            raise InvalidArgument(reason)
        if self._settings.server_tls is not None or self._settings.client_tls is not None:
            raise InvalidArgument("rdma: its bytes do not go by TLS; use tcp where they must")

    def serve(self, host: str, port: int, admission: Admission) -> RdmaServer:
        return RdmaServer(host, port, admission, self._settings)

    async def connect(self, source: Source, subject: Subject) -> RdmaLane:
        link, serves = await greeted(source, subject, self._settings)
        if self.name not in serves:
            link.abort()
            raise named(
                DaemonUnavailable("it does not serve by rdma", {"serves": list(serves)}), source, subject, "handshake"
            )
        return RdmaLane(link, source, subject, self._settings, TARGET)


class RdmaServer(TcpServer):
    """Serves by ``tcp`` too, at the same address: each target asks by the one or the other."""

    serves = ("tcp", "rdma")

    def __init__(self, host: str, port: int, admission: Admission, settings: PeerSettings) -> None:
        super().__init__(host, port, admission, settings)
        self._agent = Agent("source")
        self._known: Known = Known()
        try:
            self._agent.child()
        except (TransferFailed, OSError) as error:
            self.close()
            raise InvalidArgument(f"rdma: no sidecar can be started: {error}") from error

    def close(self) -> None:
        super().close()
        self._agent.close()

    async def _answer(self, link: Link, offer: Offered) -> None:
        writes = Writes(self._agent, self._known, link, offer, self._settings)
        try:
            while True:
                if offer.withdrawn:
                    raise offer.gone()
                frame = await writes.frame()
                if frame.kind is Kind.WANT:
                    await self._piece(link, offer, frame)
                else:
                    self.sent += await writes.take(frame)
        finally:
            writes.close()
