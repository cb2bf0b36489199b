"""Jobs whose weights are exchanged are decided by one daemon, their home: sessions on other nodes are forwarded to it.

The MetaServer names it. A forwarded session is one of the home's own: registration, rounds and exchanges are what they
are on one node. What concerns this node's memory and GPUs (``segment``, ``phase``, parcels) stays here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from awexd import access
from awexd.channel import Client
from awexd.nodes.announcing import Announcer, exchanged
from awexd.nodes.forwarding import Forwarded, Remote, introduced
from awexd.nodes.metaclient import MetaClient
from awexd.peers.greeting import hear
from awexd.peers.link import Link
from awexd.peers.messages import Messages
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import greeted
from awexd.peers.wire import encode_greeting
from awexd.protocol import bye, encode
from awexd.service import Call, Reply, Service, late
from awexd.store import Wait
from awexd.tickets import SESSION, Ticket
from awexd_transports.base import Source, Subject
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
)

BACKOFF_SECONDS = (0.05, 1.0)
CONNECTIONS = 8
LAST_WORDS_SECONDS = 1.0
_TRANSIENT = (DaemonUnavailable, DeadlineExceeded)

Serve = Callable[[Client], Awaitable[None]]
"""Serves a session until it ends."""


class Homes:
    """The operation ``session.home``, and sessions of other nodes whose home this one is.

    Args:
        serve: see ``Serve``. ``expel``: ends a session of that id and says why.
    """

    def __init__(
        self,
        service: Service,
        announcer: Announcer,
        settings: PeerSettings,
        serve: Serve,
        expel: Callable[[str, AwexdError], None],
    ) -> None:
        self._service, self._announcer, self._settings = service, announcer, settings
        self._serve, self._expel = serve, expel
        self._client: MetaClient | None = None
        self._forwards: dict[str, Forwarded] = {}
        service.add({"session.home": self._home})
        service.ended.append(self._ended)
        announcer.elsewhere = self._moved

    async def run(self) -> None:
        """Until cancelled."""
        async with self._announcer.client(connections=CONNECTIONS) as client:
            self._client = client
            await asyncio.Event().wait()

    # sessions of this node

    async def _home(self, call: Call) -> Reply:
        """Where a job's exchanges are decided. If that is elsewhere, the session is forwarded from this answer on.

        One that does not ``join`` follows those of this node that have.
        """
        name = access.qualify(call.arguments["job"], call.peer)
        joined = any(forward.job == name for forward in self._forwards.values())
        if call.session.id in self._forwards or not (joined or call.arguments["join"]):
            known = self._forwards.get(call.session.id)
            return Reply({"node": known.node if known else None})
        problem, pause = "", BACKOFF_SECONDS[0]
        try:
            async with asyncio.timeout_at(call.deadline):
                while True:
                    try:
                        return Reply({"node": await self._forward(call, name)})
                    except AwexdError as error:
                        problem = str(error)
                        if not (isinstance(error, _TRANSIENT) or error.details.get("announce")):
                            raise
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(2 * pause, BACKOFF_SECONDS[1])
        except TimeoutError:
            what = f"the home of its exchanges: {problem or 'the MetaServer does not answer'}"
            raise late(call, Wait(name, lambda: what)) from None

    async def _forward(self, call: Call, name: str) -> str | None:
        """The node that the session is forwarded to now; None: this one is the home."""
        try:
            if problem := self._announcer.problem():
                raise DaemonUnavailable(problem)
            answer = await self._ask(name)
        except _TRANSIENT:
            job = self._service.store.jobs.get(name)
            if job is not None and exchanged(job):
                return None  # as far as anybody knows
            raise
        node = str(answer["node"])
        for forward in [one for one in self._forwards.values() if one.job == name and one.node != node]:
            forward.fail(f"{name} has its home on node {node} now")
        if node == self._announcer.node:
            return None
        forward = await self._opened(call, name, answer)
        if call.session.id not in self._service.store.sessions:
            forward.close()
            raise DaemonUnavailable("the session has ended")
        self._forwards[call.session.id] = self._service.forwards[call.session.id] = forward
        return node

    async def _ask(self, name: str) -> dict[str, Any]:
        if self._client is None:
            raise DaemonUnavailable("this daemon is just starting")
        body = {"node": self._announcer.node, "run": self._announcer.run}
        answer: dict[str, Any] = await self._client.call("POST", f"/v1/jobs/{name}/home", body)
        return answer

    async def _opened(self, call: Call, name: str, answer: dict[str, Any]) -> Forwarded:
        """A session of that process with its job's home."""
        host, _, port = str(answer["address"]).rpartition(":")
        try:
            key = bytes.fromhex(answer["key"])
            source = Source(answer["node"], host.strip("[]"), int(port), answer["ticket"].encode(), key)
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("the MetaServer names a home otherwise than this version expects") from error
        try:
            link, _ = await greeted(source, Subject(name, *SESSION), self._settings)
        except AccessDenied as error:  # it was started anew, say, and the MetaServer does not know that yet
            raise DaemonUnavailable(error.message) from error
        try:
            client = {"pid": call.peer.pid, "user": access.user_name(call.peer.uid), "host": self._service.host}
            await link.send(encode_greeting(client), self._settings.stall)
        except (ConnectionError, TimeoutError) as error:
            link.abort()
            raise DaemonUnavailable(f"node {source.node}: {error}") from error
        messages = Messages(link, self._settings.stall)
        forward = Forwarded(name, source.node, messages, call.say, lambda: self._closed(name))
        self._service.background.task(forward.run())
        try:
            await forward.greeted(self._settings.handshake)
        except BaseException:
            forward.close()
            raise
        return forward

    def _closed(self, name: str) -> None:
        """The job was closed there: what was parked here goes with it."""
        job = self._service.store.jobs.get(name)
        if job is not None:
            self._service.close_job(job, "closed at its home")
            self._service.settle()

    def _ended(self, session: str) -> None:
        self._service.forwards.pop(session, None)
        forward = self._forwards.pop(session, None)
        if forward is not None:
            forward.close()

    # sessions of other nodes

    async def admit(self, link: Link, ticket: Ticket) -> None:
        """Serves a session of another node until it ends."""
        try:
            peer, host = introduced(await hear(link, self._settings.stall))
        except AwexdError as error:
            await link.send(encode(bye(error)), self._settings.stall)
            await link.close()
            raise
        channel = Remote(Messages(link, self._settings.stall), peer, ticket.job, ticket.target, host)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(channel.run())
            try:
                await self._serve(channel)
            finally:
                await channel.finish(LAST_WORDS_SECONDS)
                running.cancel()

    def _moved(self, name: str, home: str) -> None:
        """The MetaServer has another node for the home of this job, of which there are sessions here."""
        error = DaemonUnavailable(f"{name} has its home on node {home} now")
        for session in [*self._service.store.sessions.values()]:
            role = session.writer or session.worker
            if role is not None and role[0] == name:
                self._expel(session.id, error)
