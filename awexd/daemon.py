"""The daemon's life: adopt, listen, serve, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import MutableMapping

import uvloop

from awexd import __version__
from awexd.adoption import adopt
from awexd.background import Background
from awexd.budget import Budget
from awexd.channel import Channel
from awexd.config import Settings
from awexd.control import Control
from awexd.journal import Journal
from awexd.listener import listening
from awexd.memory import Memory
from awexd.protocol import MAX_FDS, Message, check_hello, close_descriptors, error_reply, hello, parse_request
from awexd.report import Report
from awexd.service import Call, Reply, Service, invalid_request
from awexd.store import Store
from awexd.store.ledger import Session
from awexd.systemd import Notifier, inherited_socket, keep_watchdog, watchdog_interval
from awexd_transports.errors import AccessDenied, AwexdError, ProtocolError

HELLO_SECONDS = 10.0
EXIT_GRACE_SECONDS = 0.2
"""How long a closed connection's process is given to be seen dead: sockets close a moment before a process ends."""
MAX_OPEN_REQUESTS = 256
MAX_DROPS = MAX_FDS
"""Segments to unmap that one reply names: the client gives them back in one request."""
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
            if interval is not None:
                serving.append(group.create_task(keep_watchdog(notifier, interval)))
            notifier.ready(daemon.summary())
            _log.info("serving %s: %s", settings.socket, daemon.summary())
            await stop.wait()
            notifier.stopping()
            for task in serving:
                task.cancel()
            await daemon.stop()
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
        Report(self._service)
        Control(self._service)

    async def adopt(self) -> None:
        """Finds committed versions of the daemon before; returns when they are checked and can be served."""
        jobs = await asyncio.to_thread(self._journal.load)
        manifests = await self._service.shelf.load()
        await asyncio.to_thread(adopt, self._store, self._memory, jobs, manifests, time.monotonic())
        self._service.settle()

    def summary(self) -> str:
        """One line for systemd's status and the log."""
        held = sum(len(job.held()) for job in self._store.jobs.values())
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
        for channel in self._sessions.values():
            channel.send({"bye": {"reason": "the daemon is stopping"}})
        if self._sessions:
            await asyncio.wait(list(self._sessions))
        self._service.settle()
        self._background.stop_timers()
        for job in self._store.jobs.values():
            held = {segment_id for version in job.versions.values() for segment_id in version.segments}
            for segment_id in job.segments.keys() - held:
                self._background.thread(self._memory.unlink, segment_id)
        await self._background.threads_done()

    async def _session(self, channel: Channel) -> None:
        peer = channel.peer
        session = Session(next(self._session_ids), peer.pid, peer.uid)
        said_goodbye = asyncio.Event()
        try:
            await self._greet(channel, session)
            self._store.open_session(session)
            try:
                async with asyncio.TaskGroup() as requests:
                    open_requests: set[asyncio.Task[None]] = set()
                    async for message, fds in channel.messages():
                        if len(open_requests) >= MAX_OPEN_REQUESTS or len(fds) > 1:
                            close_descriptors(fds)
                            raise ProtocolError(f"over {MAX_OPEN_REQUESTS} requests, or one descriptor on a request")
                        task = requests.create_task(self._request(channel, session, message, fds, said_goodbye))
                        open_requests.add(task)
                        task.add_done_callback(open_requests.discard)
                    raise _Over
            finally:
                session.ending = True
                exited = channel.exited or (not said_goodbye.is_set() and await self._exits(channel))
                unmapped = exited or said_goodbye.is_set()
                self._service.end_session(session, unmapped=unmapped, why=channel.ended or "the daemon is stopping")
        except* _Over:
            pass
        except* (AwexdError, TimeoutError) as failed:
            error = failed.exceptions[0]
            _log.info("session %s (process %d, uid %d) refused: %s", session.id, peer.pid, peer.uid, error)
            code = error.code if isinstance(error, AwexdError) else "deadline_exceeded"
            channel.send({"bye": {"code": code, "reason": str(error) or "no hello in time"}})
        except* Exception:  # noqa: BLE001 - a fault of ours ends this session, never the daemon
            _log.exception("session %s (process %d, uid %d) failed", session.id, peer.pid, peer.uid)
        finally:
            channel.close()

    async def _exits(self, channel: Channel) -> bool:
        """Shielded from the daemon's own stop, which is no reason to take a living process for a dead one."""
        try:
            return await channel.process_exit(EXIT_GRACE_SECONDS)
        except asyncio.CancelledError:
            return channel.exited

    async def _greet(self, channel: Channel, session: Session) -> None:
        async with asyncio.timeout(HELLO_SECONDS):
            async for message, fds in channel.messages():
                for fd in fds:
                    os.close(fd)
                check_hello(message)
                break
            else:
                raise ProtocolError("the connection ended before its hello")
        uids, gids, peer = self._settings.allow_uids, self._settings.allow_gids, channel.peer
        if (uids or gids) and not (peer.admin or peer.uid in uids or peer.groups & set(gids)):
            raise AccessDenied(f"uid {peer.uid} is not among those whom this daemon serves (allow_uids, allow_gids)")
        channel.send(hello(__version__, session=session.id, boot=self._boot, pid=os.getpid()))

    async def _request(
        self, channel: Channel, session: Session, message: Message, fds: list[int], said_goodbye: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        named: int | None = None
        try:
            request_id, operation, arguments, seconds = parse_request(message)
            named = request_id
            if said_goodbye.is_set():
                raise ProtocolError("a request after goodbye")
            if operation == "goodbye":
                said_goodbye.set()
                channel.send({"id": request_id, "ok": {}})
                return
            call = Call(session, channel.peer, arguments, fds, loop.time() + seconds)
            reply = await self._answer(operation, call)
            channel.send(_with_drops({"id": request_id, "ok": reply.result}, session), reply.fds)
        except AwexdError as error:
            named = invalid_request(error) if named is None else named
            if named is None or (isinstance(error, ProtocolError) and said_goodbye.is_set()):
                raise
            channel.send(_with_drops(error_reply(named, error), session))
        finally:
            close_descriptors(fds)

    async def _answer(self, operation: str, call: Call) -> Reply:
        try:
            return await self._service.answer(operation, call)
        except AwexdError:
            raise
        except Exception as error:
            _log.exception("%s failed for process %d", operation, call.peer.pid)
            raise AwexdError(f"{operation} failed inside the daemon: {type(error).__name__}; see its log") from error


def _with_drops(reply: Message, session: Session) -> Message:
    if session.to_drop:
        reply["drop"] = sorted(session.to_drop)[:MAX_DROPS]
    return reply
