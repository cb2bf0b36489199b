"""The daemon's life: adopt, listen, serve, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import uvloop

from awexd import __version__
from awexd.access import Peer
from awexd.adoption import adopt
from awexd.background import Background
from awexd.budget import Budget
from awexd.channel import Channel, Client
from awexd.config import Settings
from awexd.conversation import Conversation
from awexd.journal import Journal
from awexd.listener import listening
from awexd.memory import Memory
from awexd.operations.control import Control
from awexd.operations.engines import Engines
from awexd.operations.groups import Groups
from awexd.operations.lending import Lenders
from awexd.operations.parking import Parking
from awexd.operations.phasing import Phasing
from awexd.operations.relay import Relay
from awexd.operations.report import Report
from awexd.operations.trainers import Trainers
from awexd.protocol import Message, bye, check_hello, hello
from awexd.service import Service
from awexd.store import Store
from awexd.store.ledger import Session
from awexd.systemd import Notifier, inherited_socket, keep_watchdog, watchdog_interval
from awexd_transports.errors import AccessDenied, AwexdError, DeadlineExceeded, InvalidArgument, ProtocolError

if TYPE_CHECKING:
    from awexd.nodes.among import Cluster

HELLO_SECONDS = 10.0
EXIT_GRACE_SECONDS = 0.2
"""How long a closed connection's process is given to be seen dead: sockets close a moment before a process ends."""
ACCEPT_RETRY_SECONDS = 0.5

_log = logging.getLogger(__name__)


class _Over(Exception):
    """The session has ended."""


def run(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Serves until SIGTERM or SIGINT, then ends by that signal, so that the exit status tells the truth.

    Raises:
        AwexdError: it could not start; the message says why.
    """
    faulthandler.enable()
    received: list[int] = []
    try:
        uvloop.run(_main(settings, environ, received))
    except BaseExceptionGroup as group:
        refused: BaseException | None = group.subgroup(AwexdError)
        if refused is None:
            raise
        while isinstance(refused, BaseExceptionGroup):
            refused = refused.exceptions[0]
        raise refused from None
    for number in received:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


async def _main(settings: Settings, environ: MutableMapping[str, str], received: list[int]) -> None:
    notifier = Notifier(environ)
    interval = watchdog_interval(environ, os.getpid())
    with contextlib.ExitStack() as stack:
        inherited = inherited_socket(environ)
        if inherited is None:
            listener = stack.enter_context(listening(settings.socket, settings.socket_mode))
        else:
            listener = stack.enter_context(inherited)
            listener.setblocking(False)
        journal = Journal(settings.state_dir, settings.socket)
        stack.callback(journal.close)
        memory = Memory(journal.namespace, journal.key, Budget(settings.memory_budget), lock=settings.lock_memory)
        stack.callback(memory.close)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stop, received, number)
        async with asyncio.TaskGroup() as group:
            background = Background(group)
            daemon = Daemon(settings, memory, journal, background)
            await daemon.adopt()
            serving = [group.create_task(daemon.accept(listener))]
            cluster = daemon.cluster()
            among = group.create_task(cluster.run()) if cluster is not None else None
            if interval is not None:
                serving.append(group.create_task(keep_watchdog(notifier, interval)))
            gc.collect()
            gc.freeze()  # what lives as long as the daemon is not looked through again while a client waits
            notifier.ready(daemon.summary())
            _log.info("serving %s: %s", settings.socket, daemon.summary())
            await stop.wait()
            notifier.stopping()
            for task in serving:
                task.cancel()
            if cluster is not None and among is not None:
                await cluster.stop(among)
            await daemon.stop()
            if cluster is not None:
                cluster.close()
        _log.info("stopped")


def _stop(stop: asyncio.Event, received: list[int], number: int) -> None:
    if not received:
        received.append(number)
    stop.set()


class Daemon:
    """Sessions over one service. ``stop`` ends them, drops what is not committed and keeps what is."""

    def __init__(self, settings: Settings, memory: Memory, journal: Journal, background: Background) -> None:
        self._settings = settings
        self._memory = memory
        self._journal = journal
        self._background = background
        self._boot = secrets.token_hex(8)
        # Unique across restarts, so that a client's old attempt is never taken for a new one; fits into 53 bits.
        self._store = Store(first_attempt=(time.time_ns() // 1_000_000) << 12)
        self._service = Service(settings, self._store, memory, journal, background)
        self._session_ids = (f"s{n}" for n in itertools.count(1))
        self._sessions: dict[asyncio.Task[None], Channel] = {}
        self._clients: dict[str, Client] = {}
        for operations in (Trainers, Lenders, Relay, Engines, Groups, Parking, Control):
            operations(self._service)
        self._report = Report(self._service)
        self._phasing = Phasing(self._service, journal)

    async def adopt(self) -> None:
        """Finds committed versions of the daemon before; returns when they are checked and can be served."""
        jobs = await asyncio.to_thread(self._journal.load)
        manifests = await self._service.shelf.load()
        await asyncio.to_thread(adopt, self._store, self._memory, jobs, manifests, time.monotonic())
        await self._phasing.adopt()
        self._service.settle()
        self._service.watch_idle()

    def cluster(self) -> Cluster | None:
        """What this daemon has to do with other nodes; None where it is by itself.

        Raises:
            AwexdError: its token or TLS files, or the address to listen on, cannot be used.
        """
        if self._settings.metaserver is None:
            if self._settings.listen is not None:
                raise InvalidArgument("listen: other nodes find this one through a MetaServer; give its URL too")
            return None
        from awexd.nodes.among import Cluster  # aiohttp: only where it is needed

        made = Cluster(self._service, self._settings, self._session, self._expel)
        self._report.cluster, self._report.following, self._report.seen = made.status, made.following, made.seen
        return made

    def summary(self) -> str:
        """One line for systemd's status and the log."""
        held = sum(not version.borrowed for job in self._store.jobs.values() for version in job.held())
        return f"{len(self._store.jobs)} jobs, {held} versions held, {len(self._store.sessions)} sessions"

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError as error:
                    _log.error("cannot accept connections: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                    continue
                channel = Channel(sock)
                task = group.create_task(self._session(channel))
                self._sessions[task] = channel
                task.add_done_callback(lambda done: self._sessions.pop(done, None))

    async def stop(self) -> None:
        """Tells every client, ends its session, and unlinks what no version needs."""
        self._phasing.freeze()
        for channel in self._sessions.values():
            channel.send({"bye": {"reason": "the daemon is stopping"}})
        if self._sessions:
            await asyncio.wait(list(self._sessions))
        self._service.settle()
        self._background.stop_timers()
        for job in self._store.jobs.values():
            held = {segment_id for version in job.versions.values() for segment_id in version.segments}
            for segment_id in {one.id for one in job.segments.values() if not one.borrowed} - held:
                self._background.thread(self._memory.unlink, segment_id)
        await self._background.threads_done()

    def _expel(self, session: str, why: AwexdError) -> None:
        """Ends a session; its client may come again."""
        if client := self._clients.get(session):
            client.send(bye(why))

    async def _session(self, channel: Client) -> None:
        peer = channel.peer
        session = Session(next(self._session_ids), peer.pid, peer.uid, channel.node, channel.host)
        self._clients[session.id] = channel
        try:
            async with asyncio.timeout(HELLO_SECONDS) as patience:
                await self._converse(channel, session, patience)
        except* _Over:
            pass
        except* (AwexdError, TimeoutError) as failed:
            error = failed.exceptions[0]
            _log.info("session %s (process %d, uid %d) refused: %s", session.id, peer.pid, peer.uid, error)
            channel.send(bye(error if isinstance(error, AwexdError) else DeadlineExceeded("no hello in time")))
        except* Exception:  # noqa: BLE001 - a fault of ours ends this session, never the daemon
            _log.exception("session %s (process %d, uid %d) failed", session.id, peer.pid, peer.uid)
        finally:
            del self._clients[session.id]
            channel.close()

    async def _converse(self, channel: Client, session: Session, patience: asyncio.Timeout) -> None:
        """Greets and answers until the connection ends; ``patience`` ends with the greeting."""

        def greet(message: Message) -> None:
            check_hello(message)
            self._check_served(channel.peer)
            patience.reschedule(None)
            self._store.open_session(session)
            channel.send(hello(__version__, session=session.id, boot=self._boot, pid=os.getpid()))

        said_goodbye = False
        try:
            async with asyncio.TaskGroup() as tasks:
                conversation = Conversation(self._service, channel, session, tasks, greet)
                try:
                    await channel.serve(conversation.take)
                finally:
                    said_goodbye = conversation.said_goodbye
                    conversation.close()
                if session.id not in self._store.sessions:
                    raise ProtocolError("the connection ended before its hello")
                raise _Over
        finally:
            if session.id in self._store.sessions:
                session.ending = True
                exited = channel.exited or (not said_goodbye and await self._exits(channel))
                why = channel.ended or "the daemon is stopping"
                self._service.end_session(session, unmapped=exited or said_goodbye, why=why)

    async def _exits(self, channel: Client) -> bool:
        """Shielded from the daemon's own stop, which is no reason to take a living process for a dead one."""
        try:
            return await channel.process_exit(EXIT_GRACE_SECONDS)
        except asyncio.CancelledError:
            return channel.exited

    def _check_served(self, peer: Peer) -> None:
        uids, gids = self._settings.allow_uids, self._settings.allow_gids
        if (uids or gids) and not (peer.admin or peer.uid in uids or peer.groups & set(gids)):
            raise AccessDenied(f"uid {peer.uid} is not among those whom this daemon serves (allow_uids, allow_gids)")
