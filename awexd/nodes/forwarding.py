"""A session that one node forwards to another: the two ends of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
from collections.abc import Callable, Sequence

from awexd import __version__, access
from awexd.access import Peer
from awexd.peers.messages import Messages
from awexd.protocol import FORWARDED, Message, bye, check_hello, close_descriptors, hello
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    ProtocolError,
    from_wire,
)

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
                self._say(bye(DaemonUnavailable(why)), [])
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
            said = message["bye"]
            self._greeted.set_exception(from_wire(str(said.get("code")), f"node {self.node}: {said.get('reason')}", {}))
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
