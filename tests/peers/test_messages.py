"""A session's messages between two daemons: what is sent arrives, and what is none ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from awexd.manifests import read_sealed, sealed_memfd
from awexd.peers.link import SocketLink
from awexd.peers.messages import HEARTBEAT, MAX_BODY_BYTES, Messages
from awexd.protocol import MAX_FRAME_BYTES, Message, encode
from awexd_transports.errors import ProtocolError

STALL = 2.5 * HEARTBEAT


@asynccontextmanager
async def connected(stall: float = STALL) -> AsyncIterator[tuple[Messages, SocketLink]]:
    """One side's messages, and the other side's bare link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    for one in (here, there):
        one.setblocking(False)
    messages, link = Messages(SocketLink(here), stall), SocketLink(there)
    try:
        yield messages, link
    finally:
        messages.end()
        link.abort()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(within())


def test_messages_and_bodies_arrive_in_order_and_silence_is_filled() -> None:
    async def test() -> None:
        got: list[tuple[Message, list[bytes]]] = []

        def take(message: Message, fds: list[int]) -> None:
            got.append((message, [read_sealed(fd) for fd in fds]))
            for fd in fds:
                os.close(fd)

        async with connected() as (one, link):
            other = Messages(link, STALL)
            tasks = [asyncio.create_task(side.run(take)) for side in (one, other)]
            body = os.urandom(3 << 20)
            one.send({"id": 1, "op": "a"}, [sealed_memfd("test", [body])])
            one.send({"id": 2})
            await asyncio.sleep(1.5 * STALL)
            one.send({"id": 3}, [sealed_memfd("test", [b""])])
            await one.finish(5.0)
            with contextlib.suppress(ConnectionError):
                await tasks[1]
            assert got == [({"id": 1, "op": "a", "fds": 1}, [body]), ({"id": 2}, []), ({"id": 3, "fds": 1}, [b""])]
            tasks[0].cancel()

    run(test)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "a frame of"),
        (struct.pack("<I", 3) + b"[1]", "a JSON list"),
        (struct.pack("<I", 3) + b"{{{", "not JSON"),
        (encode({"fds": 2}), "more bodies"),
        (encode({"fds": -1}), "more bodies"),
        (encode({"fds": "1"}), "more bodies"),
        (encode({"fds": 1}) + struct.pack("<Q", MAX_BODY_BYTES + 1), "a body of"),
    ],
)
def test_what_is_no_message_ends_it(data: bytes, text: str) -> None:
    async def test() -> None:
        async with connected() as (messages, link):
            await link.send(data, 5.0)
            with pytest.raises(ProtocolError, match=text):
                await messages.run(lambda message, fds: None)

    run(test)


@pytest.mark.parametrize("begun", [b"", struct.pack("<I", 10) + b"{", encode({"fds": 1}) + struct.pack("<Q", 9)])
def test_silence_ends_it_in_time(begun: bytes) -> None:
    async def test() -> None:
        async with connected() as (messages, link):
            await link.send(begun, 5.0)
            with pytest.raises(TimeoutError, match="not a byte"):
                await messages.run(lambda message, fds: None)

    run(test)


def test_what_is_not_sealed_or_too_many_is_not_sent_and_nothing_leaks() -> None:
    async def test() -> None:
        async with connected() as (messages, _link):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(ProtocolError, match="2 descriptors"):
                messages.send({"id": 1}, [os.memfd_create("a"), os.memfd_create("b")])
            messages.send({"id": 2}, [os.memfd_create("unsealed")])
            with pytest.raises(ProtocolError, match="sealed"):
                await messages.run(lambda message, fds: None)
            messages.send({"id": 3}, [os.memfd_create("late")])
            assert len(os.listdir("/proc/self/fd")) <= before

    run(test)


def test_what_an_answer_raises_ends_it() -> None:
    def take(message: Message, fds: list[int]) -> None:
        raise ProtocolError("no such thing")

    async def test() -> None:
        async with connected() as (messages, link):
            await link.send(encode({"id": 1}), 5.0)
            with pytest.raises(ProtocolError, match="no such thing"):
                await messages.run(take)

    run(test)
