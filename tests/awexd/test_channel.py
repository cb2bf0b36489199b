from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from awexd.channel import MAX_QUEUED_BYTES, Channel
from awexd.protocol import MAX_FDS, MAX_FRAME_BYTES, Decoder, Message, encode
from awexd_transports.errors import ProtocolError


class Pair:
    """A channel and the blocking socket of its client."""

    def __init__(self) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.client.settimeout(10)
        self.channel = Channel(ours)

    def close(self) -> None:
        self.channel.close()
        self.client.close()

    async def next(self) -> tuple[Message, list[int]]:
        async for message, fds in self.channel.messages():
            return message, fds
        raise EOFError


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.close()


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
    assert [message async for message, _ in pair.channel.messages()] == [{"a": 1}]
    assert pair.channel.ended == "its connection was closed"


async def test_malformed_frame_comes_after_the_messages_before_it_and_can_be_answered(pair: Pair) -> None:
    pair.client.sendall(encode({"a": 1}) + b"\xff\xff\xff\xff")
    arriving = pair.channel.messages()
    assert await anext(arriving) == ({"a": 1}, [])
    with pytest.raises(ProtocolError):
        await anext(arriving)
    pair.channel.send({"bye": {}})
    assert pair.client.recv(100) == encode({"bye": {}})


async def test_descriptors_in_flight_are_closed_with_the_channel() -> None:
    pair = Pair()
    reading, writing = os.pipe()
    socket.send_fds(pair.client, [encode({"fds": 2})], [writing, writing])
    async for _, fds in pair.channel.messages():
        pair.channel.send({}, fds)
        break
    socket.send_fds(pair.client, [encode({"fds": 1})], [writing])
    await asyncio.sleep(0)
    for _ in range(50):  # more than the socket takes
        pair.channel.send({"x": "y" * (1 << 16)}, [os.dup(writing)])
    pair.close()
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
    pair.close()
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
