from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from awexd.channel import MAX_QUEUED_BYTES, Channel
from awexd.protocol import MAX_FDS, MAX_FRAME_BYTES, Decoder, Message, encode
from awexd_transports.errors import ProtocolError


class Pair:
    """A channel and the blocking socket of its client; what arrives waits for ``next``."""

    def __init__(self) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.client.settimeout(10)
        self.channel = Channel(ours)
        self.arrived: asyncio.Queue[tuple[Message, list[int]]] = asyncio.Queue()
        self.take: Callable[[Message, list[int]], None] = lambda *arrived: self.arrived.put_nowait(arrived)
        self.serving = asyncio.create_task(self.channel.serve(lambda *arrived: self.take(*arrived)))

    async def close(self) -> None:
        self.channel.close()
        self.client.close()
        await asyncio.wait([self.serving])
        self.serving.exception()

    async def next(self) -> tuple[Message, list[int]]:
        """The next message; EOFError, or what ``serve`` raised, once there are no more."""
        waiting = asyncio.create_task(self.arrived.get())
        await asyncio.wait([waiting, self.serving], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        await self.serving
        raise EOFError


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    await made.close()


async def test_peer_is_the_process_at_the_other_end(pair: Pair) -> None:
    assert (pair.channel.peer.pid, pair.channel.peer.uid) == (os.getpid(), os.geteuid())
    assert not pair.channel.exited
    assert not await pair.channel.process_exit(0.0)


async def test_message_arrives_with_its_descriptors(pair: Pair) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair.client, [encode({"a": 1, "fds": 1})], [writing])
    message, (fd,) = await pair.next()
    os.close(writing)
    os.write(fd, b"x")
    os.close(fd)
    assert os.read(reading, 2) == b"x"
    assert message["a"] == 1
    os.close(reading)


async def test_message_goes_out_with_its_descriptors_which_are_closed_here(pair: Pair) -> None:
    reading, writing = os.pipe()
    pair.channel.send({"a": 1}, [writing])
    data, fds, _, _ = socket.recv_fds(pair.client, 1000, 10)
    assert data == encode({"a": 1, "fds": 1})
    os.close(fds[0])
    assert os.read(reading, 1) == b"", "the channel kept one open"
    os.close(reading)


async def test_end_of_the_connection_ends_the_messages(pair: Pair) -> None:
    pair.client.sendall(encode({"a": 1}) + encode({"a": 2})[:5])
    pair.client.shutdown(socket.SHUT_WR)
    assert await pair.next() == ({"a": 1}, [])
    with pytest.raises(EOFError):
        await pair.next()
    assert pair.channel.ended == "its connection was closed"


async def test_malformed_frame_comes_after_the_messages_before_it_and_can_be_answered(pair: Pair) -> None:
    pair.client.sendall(encode({"a": 1}) + b"\xff\xff\xff\xff")
    assert await pair.next() == ({"a": 1}, [])
    with pytest.raises(ProtocolError):
        await pair.next()
    pair.channel.send({"bye": {}})
    assert pair.client.recv(100) == encode({"bye": {}})


async def test_descriptors_in_flight_are_closed_with_the_channel() -> None:
    pair = Pair()
    reading, writing = os.pipe()
    socket.send_fds(pair.client, [encode({"fds": 2})], [writing, writing])
    _, fds = await pair.next()
    pair.channel.send({}, fds)
    socket.send_fds(pair.client, [encode({"fds": 1})], [writing])
    await asyncio.sleep(0)
    for _ in range(50):  # more than the socket takes
        pair.channel.send({"x": "y" * (1 << 16)}, [os.dup(writing)])
    await pair.close()
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_message_too_large_for_a_frame_is_refused_and_its_descriptors_closed(pair: Pair) -> None:
    reading, writing = os.pipe()
    with pytest.raises(ProtocolError):
        pair.channel.send({"x": "y" * MAX_FRAME_BYTES}, [writing])
    assert os.read(reading, 1) == b""
    os.close(reading)
    pair.channel.send({"a": 1})
    assert pair.client.recv(100) == encode({"a": 1})


async def test_large_messages_arrive_whole_though_the_socket_takes_them_in_pieces(pair: Pair) -> None:
    sent = [{"n": n, "x": "y" * 900_000} for n in range(5)]
    for message in sent:
        pair.channel.send(dict(message))
    decoder = Decoder()
    got: list[Message] = []
    while len(got) < len(sent):
        data = await asyncio.to_thread(pair.client.recv, 1 << 16)
        got += [message for message, _ in decoder.feed(data)]
    assert got == sent


async def test_client_that_does_not_read_is_ended_with_a_bounded_queue(pair: Pair) -> None:
    message = {"x": "y" * 900_000}
    for _ in range(2 + MAX_QUEUED_BYTES // 900_000):
        pair.channel.send(dict(message))
    assert pair.channel.ended == "it left its replies unread"
    with pytest.raises(EOFError):
        await pair.next()


async def test_too_many_descriptors_at_once_are_refused_and_none_is_kept() -> None:
    pair = Pair()
    reading, writing = os.pipe()
    socket.send_fds(pair.client, [encode({"fds": MAX_FDS + 1})], [writing] * (MAX_FDS + 1))
    os.close(writing)
    with pytest.raises(ProtocolError, match="descriptors"):
        await pair.next()
    await pair.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_sending_after_the_end_closes_the_descriptors_and_says_nothing(pair: Pair) -> None:
    pair.client.close()
    with pytest.raises(EOFError):
        await pair.next()
    reading, writing = os.pipe()
    pair.channel.send({"a": 1}, [writing])
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_answers_to_messages_that_came_together_leave_together(pair: Pair) -> None:
    gone_early: list[bool] = []

    def answer(message: Message, _: list[int]) -> None:
        pair.channel.send({"to": message["n"]})
        gone_early.append(bool(select.select([pair.client], [], [], 0)[0]))

    pair.take = answer
    pair.client.sendall(encode({"n": 1}) + encode({"n": 2}))
    data = await asyncio.to_thread(pair.client.recv, 100)
    assert data == encode({"to": 1}) + encode({"to": 2})
    assert gone_early == [False, False]


async def test_failure_of_who_takes_a_message_ends_the_connection_and_is_raised(pair: Pair) -> None:
    def fail(message: Message, _: list[int]) -> None:
        raise ZeroDivisionError

    pair.take = fail
    pair.client.sendall(encode({"a": 1}))
    with pytest.raises(ZeroDivisionError):
        await pair.next()
