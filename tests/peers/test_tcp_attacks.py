"""What strangers and broken peers may send to a daemon: it costs them their connection, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from awexd import tickets
from awexd.peers.wire import FRAME_BYTES, PROTOCOL, Frame, Kind, encode_greeting
from awexd_transports.base import Piece, Source
from awexd_transports.errors import AccessDenied
from tests.peers.conformance import settles
from tests.peers.nodes import TARGET, Node, Segment, fetcher

MiB = 1 << 20
WITHIN = 60.0
NONCE = "00" * 32


@pytest.fixture
def held() -> Iterator[Segment]:
    with Segment(MiB, 1) as made:
        yield made


def dial(node: Node) -> socket.socket:
    made = socket.create_connection((node.host, node.port))
    made.settimeout(20)
    return made


def hear(sock: socket.socket) -> dict[str, object]:
    (length,) = struct.unpack("<I", _all(sock, 4))
    found: dict[str, object] = json.loads(_all(sock, length))
    return found


def _all(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def ended(sock: socket.socket) -> bool:
    """Whether the other side ends the connection; what it still says is read."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def shake(node: Node, sock: socket.socket, ours: bytes) -> dict[str, object]:
    """The greeting as a target does it, by hand; the source's last word."""
    source = node.source()
    sock.sendall(encode_greeting({"protocol": PROTOCOL, "ticket": source.ticket.decode(), "nonce": ours.hex()}))
    theirs = bytes.fromhex(str(hear(sock)["nonce"]))
    sock.sendall(encode_greeting({"proof": tickets.proof(source.key, "target", ours, theirs).hex()}))
    return hear(sock)


class TestStrangers:
    transport = "tcp"

    async def served(self, node: Node) -> None:
        """The node still serves who has a ticket."""
        with Segment(MiB) as into:
            await fetcher(self.transport, {0: into}).run([node.source()], WITHIN)

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            bytes(64),
            b"\xff" * 64,
            struct.pack("<I", 4097) + b"{" * 4097,
            struct.pack("<I", 2) + b"[]",
            struct.pack("<I", 4000) + b"[" * 4000,
            struct.pack("<I", 5) + b"\x80\x02]q\x00",
            encode_greeting({}),
            encode_greeting({"protocol": PROTOCOL}),
            encode_greeting({"protocol": 99, "ticket": "{}", "nonce": NONCE}),
            encode_greeting({"protocol": PROTOCOL, "ticket": "{}", "nonce": NONCE}),
            encode_greeting({"protocol": PROTOCOL, "ticket": ["x"], "nonce": NONCE}),
            encode_greeting({"protocol": PROTOCOL, "ticket": "{}", "nonce": "00"}),
            encode_greeting({"protocol": PROTOCOL, "ticket": "{}", "nonce": "zz" * 32}),
        ],
    )
    async def test_garbage_is_refused_alike(self, node: Callable[..., Node], held: Segment, said: bytes) -> None:
        source = node("a", {0: held})
        with dial(source) as sock:
            sock.sendall(said)
            assert hear(sock) == {"protocol": PROTOCOL, "refused": True}
            assert ended(sock)
        assert source.ask("status")["refused"] == 1
        await self.served(source)

    async def test_forged_ticket_gets_no_further_than_its_proof(self, node: Callable[..., Node], held: Segment) -> None:
        source = node("a", {0: held})
        with dial(source) as sock:
            body = source.source().ticket.decode()
            sock.sendall(encode_greeting({"protocol": PROTOCOL, "ticket": body, "nonce": NONCE}))
            challenge = hear(sock)
            # Its own proof is of the other side: to send it back proves nothing.
            sock.sendall(encode_greeting({"proof": challenge["proof"]}))
            assert hear(sock) == {"protocol": PROTOCOL, "refused": True}
            assert ended(sock)
        await self.served(source)

    async def test_replayed_greeting_is_refused(self, node: Callable[..., Node], held: Segment) -> None:
        source = node("a", {0: held})
        granted, ours = source.source(), secrets.token_bytes(32)
        hello = encode_greeting({"protocol": PROTOCOL, "ticket": granted.ticket.decode(), "nonce": ours.hex()})
        with dial(source) as sock:
            sock.sendall(hello)
            theirs = bytes.fromhex(str(hear(sock)["nonce"]))
            answer = encode_greeting({"proof": tickets.proof(granted.key, "target", ours, theirs).hex()})
            sock.sendall(answer)
            assert hear(sock) == {"ready": True}
        with dial(source) as sock:
            sock.sendall(hello + answer)
            assert "nonce" in hear(sock)
            assert hear(sock) == {"protocol": PROTOCOL, "refused": True}
        await self.served(source)

    async def test_slow_one_is_ended_by_the_deadline(self, node: Callable[..., Node], held: Segment) -> None:
        source = node("a", {0: held}, handshake=0.5)
        with dial(source) as sock:
            with contextlib.suppress(ConnectionError):
                for byte in encode_greeting({"protocol": PROTOCOL})[:15]:  # never silent for long
                    sock.sendall(bytes([byte]))
                    await asyncio.sleep(0.1)
                pytest.fail("it was heard out")
            assert ended(sock)
        assert source.ask("status")["refused"] == 1

    async def test_slow_ones_are_ended_and_keep_nobody_out(self, node: Callable[..., Node], held: Segment) -> None:
        source = node("a", {0: held}, handshake=60.0, unproven=8)
        before = source.ask("status")
        slow = [dial(source) for _ in range(30)]
        for number, sock in enumerate(slow):
            with contextlib.suppress(ConnectionError):  # it has been ended for those that came after
                sock.sendall(encode_greeting({"protocol": PROTOCOL})[: number % 4])
        await self.served(source)
        for sock in slow[:22]:
            assert ended(sock)
        for sock in slow:
            sock.close()
        await self.served(source)
        await settles(source, before)
        assert source.ask("status")["refused"] == 30

    @pytest.mark.parametrize(
        "frame",
        [
            bytes(FRAME_BYTES),
            b"\xff" * FRAME_BYTES,
            Frame(Kind.BYTES, Piece(0, 0, 1)).encode(),
            Frame(Kind.ERROR, Piece(0, 0, 1)).encode(),
            Frame(Kind.WANT, Piece(0, MiB, 1)).encode(),
            Frame(Kind.WANT, Piece(0, (1 << 64) - 1, 2)).encode(),
            Frame(Kind.WANT, Piece(7, 0, 1)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 4, 0, 0)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 4, 1, 4)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 0, 2, 4)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 5, 2, 4)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 10, 2, 4)).encode(),
            Frame(Kind.WANT, Piece(0, 0, 1 << 20, 1 << 20, 1 << 30)).encode(),
            Frame(Kind.WANT, Piece(0, 0, (1 << 64) - 1)).encode(),
        ],
    )
    async def test_wrong_request_of_a_proven_peer_ends_its_connection(
        self, node: Callable[..., Node], held: Segment, frame: bytes
    ) -> None:
        source = node("a", {0: held})
        with dial(source) as sock:
            assert shake(source, sock, secrets.token_bytes(32)) == {"ready": True}
            sock.sendall(frame)
            assert _all(sock, 1)[0] == Kind.ERROR
            assert ended(sock)
        await self.served(source)

    async def test_peer_that_reads_nothing_is_ended(self, node: Callable[..., Node]) -> None:
        with Segment(64 * MiB, 1) as held:
            source = node("a", {0: held}, stall=0.3)
            before = source.ask("status")
            with dial(source) as sock:
                shake(source, sock, secrets.token_bytes(32))
                sock.sendall(Frame(Kind.WANT, Piece(0, 0, 64 * MiB)).encode())
                await settles(source, before)

    async def test_source_that_does_not_know_the_key_is_not_believed(self, held: Segment) -> None:
        """Somebody who listens at a node's address: its bytes are not taken for that node's."""
        with Segment(MiB) as into, socket.create_server(("127.0.0.1", 0)) as false:
            body = tickets.Ticket("me/grpo", 3, 7, 11, "a", TARGET, "r", 1, "s").encode()
            source = Source("a", "127.0.0.1", false.getsockname()[1], body, b"k" * 32)

            def answer() -> None:
                sock, _ = false.accept()
                with sock:
                    hear(sock)
                    sock.sendall(encode_greeting({"protocol": PROTOCOL, "nonce": NONCE, "proof": NONCE}))
                    ended(sock)

            answering = asyncio.create_task(asyncio.to_thread(answer))
            with pytest.raises(AccessDenied, match="does not know the key"):
                await fetcher(self.transport, {0: into}).run([source], WITHIN)
            await answering
            assert not any(into.copy() != 0xEE)
