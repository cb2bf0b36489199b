"""Jobs whose weights are exchanged are decided by one daemon, their home: sessions on other nodes are forwarded to it.

The MetaServer names it. A forwarded session is one of the home's own: registration, rounds and exchanges are what they
are on one node. What concerns this node's memory and GPUs (``segment``, ``phase``, parcels) stays here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from awexd import __version__, access
from awexd.access import Peer
from awexd.channel import Client
from awexd.nodes.announcing import Announcer, exchanged
from awexd.nodes.metaclient import MetaClient
from awexd.peers.greeting import hear
from awexd.peers.link import Link
from awexd.peers.messages import Messages
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import greeted
from awexd.peers.wire import encode_greeting
from awexd.protocol import FORWARDED, Message, check_hello, close_descriptors, encode, hello
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
    from_wire,
)

BACKOFF_SECONDS = (0.05, 1.0)
CONNECTIONS = 8
LAST_WORDS_SECONDS = 1.0
REMOTE = frozenset(
    {
        *("write.register", "write.ready", "write.reserve", "write.offer"),
        *("write.committed", "write.captured", "write.revoke", "write.abort"),
        *("read.sources", "read.register", "read.siblings", "read.exchanges", "read.resolve", "read.confirm"),
        *("read.release", "read.wait", "read.await", "read.engine", "read.verified"),
        *("group.join", "group.manifests", "group.publish", "group.address"),
        *("group.agree", "group.watch", "group.done"),
        *("park.pin", "park.unpin", "job.close", "job.grant", "goodbye"),
    }
)
"""What a process of another node may ask for: nothing that is answered with memory of this one."""
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
            await link.send(encode(_bye(error)), self._settings.stall)
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


class Forwarded:
    """A session of this node with its job's home. ``run`` it; ``close`` it when the session ends.

    Args:
        say: to the client. ``closed``: called when the job was closed there.
    """

    def __init__(
        self,
        job: str,
        node: str,
        messages: Messages,
        say: Callable[[Message, list[int]], None],
        closed: Callable[[], None],
    ) -> None:
        self.job, self.node = job, node
        self._messages, self._say, self._job_closed = messages, say, closed
        self._closes: set[object] = set()
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False
        messages.send(hello(__version__, pid=os.getpid()))

    async def run(self) -> None:
        try:
            await self._messages.run(self._take)
            self.fail(f"the daemon of node {self.node}, the home of {self.job}, takes no more messages")
        except (ConnectionError, TimeoutError, AwexdError) as error:
            self.fail(f"the daemon of node {self.node}, the home of {self.job}: {error}")
        finally:
            if not self._greeted.done():
                self._greeted.set_exception(DaemonUnavailable(f"node {self.node} ended the session"))
                self._greeted.exception()  # nobody may be left to await it

    async def greeted(self, within: float) -> None:
        """
        Raises:
            AwexdError: why the home does not serve this session.
        """
        try:
            async with asyncio.timeout(within):
                await asyncio.shield(self._greeted)
        except TimeoutError:
            raise DeadlineExceeded(f"node {self.node} did not greet within {within:g} s") from None

    def takes(self, message: Message) -> bool:
        operation = message.get("op")
        return isinstance(operation, str) and (operation.startswith(FORWARDED) or operation == "goodbye")

    def send(self, message: Message, fds: list[int]) -> None:
        if message.get("op") == "job.close" and type(message.get("id")) is int:
            self._closes.add(message["id"])
        self._messages.send(message, fds)

    def fail(self, why: str) -> None:
        """The client is to connect anew."""
        if not self._closed:
            self._closed = True
            if self._greeted.done():
                self._say(_bye(DaemonUnavailable(why)), [])
            else:
                self._greeted.set_exception(DaemonUnavailable(why))
                self._greeted.exception()  # nobody may be left to await it
        self._messages.end()

    def close(self) -> None:
        self._closed = True
        self._messages.end()

    def _take(self, message: Message, fds: list[int]) -> None:
        if self._greeted.done():
            if self._closes and message.get("id") in self._closes and "ok" in message:
                self._job_closed()
            self._say(message, fds)
            return
        if "bye" in message:
            bye = message["bye"]
            self._greeted.set_exception(from_wire(str(bye.get("code")), f"node {self.node}: {bye.get('reason')}", {}))
            return
        check_hello(message)
        self._greeted.set_result(None)


class Remote:
    """A process of another node, as its daemon speaks for it (``channel.Client``). ``run`` it.

    It maps nothing here: it has let go of all when its session ends.
    """

    def __init__(self, messages: Messages, peer: Peer, job: str, node: str, host: str) -> None:
        self.peer, self.node, self.host = peer, node, host
        self._messages, self._job = messages, job
        self._take: Callable[[Message, list[int]], None] | None = None
        self._early: list[tuple[Message, list[int]]] = []
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._ended = ""

    @property
    def exited(self) -> bool:
        return self._over.is_set()

    @property
    def ended(self) -> str:
        return self._ended

    async def run(self) -> None:
        try:
            await self._messages.run(self._arrived)
        except (ConnectionError, TimeoutError, ProtocolError) as error:
            self._end(f"its node {self.node}: {error}")
        finally:
            self._end(f"its node {self.node} ended it")

    async def finish(self, within: float) -> None:
        """What was sent arrives, if that takes no longer."""
        await self._messages.finish(within)

    async def serve(self, take: Callable[[Message, list[int]], None]) -> None:
        self._take = take
        for message, fds in self._early:
            self._taken(message, fds)
        self._early.clear()
        await self._over.wait()
        if self._failure:
            raise self._failure

    async def process_exit(self, within: float) -> bool:
        return True

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        self._messages.send(message, fds)

    def permit(self, operation: str, arguments: Message) -> None:
        if operation not in REMOTE:
            raise AccessDenied(f"{operation} is not for a process on another node")
        if operation == "write.register" and arguments["mode"] != "nccl":
            raise AccessDenied('of trainers on other nodes only those with transport="nccl" register here')
        if "job" in arguments and access.qualify(arguments["job"], self.peer) != self._job:
            raise AccessDenied(f"this session came from node {self.node} for {self._job}")

    def close(self) -> None:
        self._end("the connection was closed")
        for _, fds in self._early:
            close_descriptors(fds)
        self._early.clear()

    def _arrived(self, message: Message, fds: list[int]) -> None:
        if self._take is None:
            self._early.append((message, fds))
        else:
            self._taken(message, fds)

    def _taken(self, message: Message, fds: list[int]) -> None:
        if self._take is None or self._over.is_set():
            close_descriptors(fds)
            return
        try:
            self._take(message, fds)
        except Exception as error:  # noqa: BLE001 - raised by serve: it ends this session, never the daemon
            self._failure = error
            self._end(f"it broke the protocol: {error}")
        if message.get("op") == "goodbye":
            self._end("it said goodbye")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._over.set()


def introduced(client: Message) -> tuple[Peer, str]:
    """A process of another node by the user of its name here, and where it can be reached.

    Raises:
        AccessDenied: there is no such user here.
        ProtocolError: that is none.
    """
    pid, user, host = client.get("pid"), client.get("user"), client.get("host")
    if type(pid) is not int or not isinstance(user, str) or not isinstance(host, str) or len(host) > 256:
        raise ProtocolError("a client that is not described")
    uid = access.owner_uid(user)
    if uid is None:
        raise AccessDenied(f"there is no user {user} on this node")
    gid = uid
    with contextlib.suppress(KeyError):
        gid = pwd.getpwuid(uid).pw_gid
    return Peer(pid, uid, gid), host


def _bye(error: AwexdError) -> Message:
    return {"bye": {"code": error.code, "reason": error.message}}
