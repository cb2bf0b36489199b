"""The MetaServer's life: its database, its listener, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import itertools
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
from collections.abc import Mapping

import uvloop

from awexd import __version__
from awexd.metaserver.app import App
from awexd.metaserver.config import Settings
from awexd.metaserver.database import Database
from awexd.metaserver.http import Server
from awexd.metaserver.publishing import Publisher
from awexd.metaserver.state import State
from awexd.metaserver.tokens import Tokens, read_tokens
from awexd.systemd import Notifier, keep_watchdog, watchdog_interval
from awexd_transports.errors import InvalidArgument

BACKLOG = 4096
HANDSHAKE_SECONDS = 10.0
OWN_DESCRIPTORS = 64
"""Of the limit of open files, those that are not connections."""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_log = logging.getLogger(__name__)


def run(settings: Settings, environ: Mapping[str, str]) -> None:
    """Serves until SIGTERM or SIGINT, then ends by that signal.

    Raises:
        AwexdError: it could not start; the message says why.
    """
    received: list[int] = []
    with contextlib.closing(Database(settings.state_dir)) as database:
        uvloop.run(_main(settings, database, environ, received))
    for number in received:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


async def _main(settings: Settings, database: Database, environ: Mapping[str, str], received: list[int]) -> None:
    notifier = Notifier(environ)
    interval = watchdog_interval(environ, os.getpid())
    tokens = None if settings.token_file is None else Tokens(read_tokens(settings.token_file))
    context = _tls(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop, received, number)
    app = make_app(database, settings, tokens)
    addresses = await _addresses(settings, tokens)
    listener = await _listen(app.server, addresses, settings, context)
    url = _url(listener, context)
    background = [
        asyncio.create_task(app.publisher.run()),
        asyncio.create_task(app.publisher.events.beat()),
        asyncio.create_task(app.server.sweep()),
        asyncio.create_task(app.expire()),
    ]
    if interval is not None:
        background.append(asyncio.create_task(keep_watchdog(notifier, interval)))
    if tokens is None:
        _log.warning("no token file: only this machine is served, and everyone on it may do everything")
    gc.collect()
    gc.freeze()  # what lives as long as the server is not looked through again while somebody waits
    notifier.ready(f"serving {url}")
    _log.info("awexd %s metaserver: serving %s", __version__, url)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *background], return_when=asyncio.FIRST_COMPLETED)
        notifier.stopping()
    finally:
        listener.close()
        await app.server.stop()
        for task in (stopped, *background):
            task.cancel()
        results = await asyncio.gather(*background, return_exceptions=True)
    for result in results:  # none of them ends by itself
        if isinstance(result, Exception):
            raise result
    _log.info("stopped")


def make_app(database: Database, settings: Settings, tokens: Tokens | None) -> App:
    """Everything but the listener, with what the database has."""
    first = database.start()
    numbers = itertools.count(first + 1)
    state = State(secrets.token_hex(8), first + 1, settings.node_ttl)
    state.restore(database.load())
    app = App(state, tokens)
    limit = min(settings.max_connections, _file_limit() - OWN_DESCRIPTORS)
    app.server = Server(app.route, app.handle, {"Awexd-Run": state.run, **_HEADERS}, limit)
    quiet = app.server.answer(204, b"")
    app.publisher = Publisher(state, database, lambda: next(numbers), lambda body: app.server.answer(200, body), quiet)
    return app


def _stop(stop: asyncio.Event, received: list[int], number: int) -> None:
    if not received:
        received.append(number)
    stop.set()


async def _addresses(settings: Settings, tokens: Tokens | None) -> list[str]:
    """What the host's name stands for.

    Raises:
        InvalidArgument: nothing, or it is not loopback though there are no tokens.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidArgument(f"host {settings.host}: {error.strerror}") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    open_to_all = [one for one in addresses if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]
    if tokens is None and open_to_all:
        raise InvalidArgument(
            f"host {settings.host} ({open_to_all[0]}) can be reached from elsewhere: that needs --token-file"
        )
    return addresses


async def _listen(
    server: Server, addresses: list[str], settings: Settings, context: ssl.SSLContext | None
) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    patience = None if context is None else HANDSHAKE_SECONDS
    try:
        return await loop.create_server(
            server, addresses, settings.port, ssl=context, backlog=BACKLOG, ssl_handshake_timeout=patience
        )
    except OSError as error:
        raise InvalidArgument(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error


def _url(listener: asyncio.Server, context: ssl.SSLContext | None) -> str:
    host, port = listener.sockets[0].getsockname()[:2]
    return f"{'https' if context else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """
    Raises:
        InvalidArgument: a file that cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.tls_client_ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"TLS files: {error}") from error
    if settings.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _file_limit() -> int:
    """As many open files as this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
