"""This daemon among those of other nodes: announced, serving, following. Its sockets' clients wait for none of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from awexd.config import Settings
from awexd.nodes.announcing import Announcer
from awexd.nodes.following import Following
from awexd.nodes.homes import Homes, Serve
from awexd.nodes.mapped import Mapped
from awexd.nodes.mirroring import PEERS
from awexd.nodes.rounds import Rounds
from awexd.nodes.routes import Routes, peer_settings, serving, transports
from awexd.nodes.serving import Serving
from awexd.service import Service
from awexd.store.model import Job
from awexd_transports.errors import AwexdError, InvalidArgument

REFUSAL_SECONDS = 10.0
"""Between two events of that kind."""
WILDCARDS = ("0.0.0.0", "::")


class Cluster:
    """Everything that this daemon does with a MetaServer and other nodes. Listens at once; ``run`` until cancelled.

    Args:
        serve, expel: of sessions, as for ``Homes``.

    Raises:
        AwexdError: its token or TLS files, or the address to listen on, cannot be used.
    """

    def __init__(
        self, service: Service, settings: Settings, serve: Serve, expel: Callable[[str, AwexdError], None]
    ) -> None:
        address = settings.advertise
        self._service, self._refusal = service, -math.inf
        self._announcer = Announcer(service, settings)
        self._mapped = Mapped(service)
        service.store.clustered = True
        self._ending: list[asyncio.Task[None]] = []
        self._server, self._serving = None, None
        peers = peer_settings(settings, PEERS)
        self._routes = Routes(*transports(settings, peers), self._noted)
        if settings.listen is not None:
            host, _, port = settings.listen.rpartition(":")
            if address is None and host.strip("[]") in WILDCARDS:
                raise InvalidArgument(f"listen = {settings.listen}: advertise must say where others reach it")
            self._server = serving(settings, peers, self._announcer.admission, host.strip("[]"), int(port))
            self._server.unproven_tls = self._refused
            address = address or f"{host}:{self._server.address[1]}"
            self._serving = Serving(service, self._server, self._mapped)
        self._announcer.address = address
        service.host = address.rpartition(":")[0].strip("[]") if address is not None else ""
        self._homes = Homes(service, self._announcer, peers, serve, expel)
        if self._server is not None:
            self._server.sessions = self._homes.admit
        self._following = Following(service, self._announcer, self._serving, self._mapped, self._routes)
        self._rounds = Rounds(service, self._announcer)
        self.seen = self._rounds.seen

    def status(self) -> dict[str, Any]:
        """For people."""
        sent = self._serving.sent if self._serving is not None else 0
        told = {"address": self._announcer.address, "sent_bytes": sent, "routes": self._routes.status()}
        return self._announcer.status() | told

    def following(self, job: Job) -> dict[str, Any] | None:
        """Where a job comes from that is decided elsewhere."""
        return self._following.status(job)

    def _noted(self, text: str, level: int) -> None:
        self._service.note("route", "", text, level)
        self._service.settle()

    def _refused(self, text: str) -> None:
        """Somebody without a good certificate; told now and then."""
        now = time.monotonic()
        if now >= self._refusal:
            self._refusal = now + REFUSAL_SECONDS
            self._service.note("refused", "", text, logging.WARNING)
            self._service.settle()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._ending.append(group.create_task(self._following.run()))
            if self._server is not None:
                self._ending.append(group.create_task(self._server.run()))
            group.create_task(self._announcer.keep())
            group.create_task(self._rounds.run())
            group.create_task(self._homes.run())

    async def stop(self, running: asyncio.Task[None]) -> None:
        """Ends it; returns when nothing is fetched or served any more."""
        running.cancel()
        if self._ending:
            await asyncio.wait(self._ending)

    def close(self) -> None:
        """Unmaps what was mapped."""
        self._mapped.close()
