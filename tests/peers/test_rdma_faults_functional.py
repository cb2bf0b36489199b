"""Faults and abuse of the rdma transport: sidecars that die or freeze in the middle, and peers that say anything."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from awexd import tickets
from awexd.nodes.routes import Routes
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd.peers.wire import (
    ADDRESS,
    FRAME_BYTES,
    MAX_ATTACH,
    MAX_METADATA,
    PROTOCOL,
    Frame,
    Kind,
    decode,
    encode_attach,
    encode_error,
    encode_greeting,
)
from awexd.rdma.lane import TRIES
from awexd.rdma.transport import TARGET, Rdma
from awexd_transports.base import Piece, Source
from awexd_transports.errors import AwexdError, DaemonUnavailable
from awexd_transports.ranges import Ranges
from tests.peers.conformance import check, stays
from tests.peers.nodes import SUBJECT, Node, Segment, fetcher
from tests.peers.rdma import ends, needs_nixl, sidecar, sidecars
from tests.peers.test_tcp_attacks import _all, dial, ended, hear, shake

__all__ = ["sidecar"]
pytestmark = [needs_nixl, pytest.mark.usefixtures("sidecar")]
MiB = 1 << 20
WITHIN = 60.0
NodeMaker = Callable[..., Node]
SegmentMaker = Callable[..., Segment]
READY = {"ready": True, "serves": ["tcp", "rdma"]}

WRONG = [
    Frame(Kind.ATTACH, Piece(0, 0, MAX_ATTACH + 1)).encode(),
    Frame(Kind.ATTACH, Piece(0, 0, 6)).encode() + b"\x80\x02]q\x00.",
    Frame(Kind.ATTACH, Piece(0, 0, 2)).encode() + b"[]",
    Frame(Kind.ATTACH, Piece(0, 0, 13)).encode() + b'{"agent":"a"}',
    encode_attach("", b"x"),
    encode_attach("a" * 101, b"x"),
    encode_attach("a", b""),
    encode_attach("a", bytes(MAX_METADATA + 1)),
    Frame(Kind.PUT, Piece(0, 0, 1)).encode() + ADDRESS.pack(1),
    encode_attach("a", b"x") + Frame(Kind.PUT, Piece(0, MiB, 1)).encode() + ADDRESS.pack(1),
    encode_attach("a", b"x") + Frame(Kind.PUT, Piece(3, 0, 1)).encode() + ADDRESS.pack(1),
    Frame(Kind.DONE, Piece(0, 0, 1)).encode(),
    Frame(Kind.WRITTEN, Piece(0, 0, 1)).encode(),
    Frame(Kind.FAILED, Piece(0, 0, 1)).encode(),
    b"\xff" * FRAME_BYTES,
]
"""What no target says."""


class TestFaults:
    transport = "rdma"

    @pytest.mark.parametrize("whose", ["source", "target"])
    @pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
    async def test_sidecar_that_fails_costs_no_byte_and_no_source(
        self, node: NodeMaker, segment: SegmentMaker, whose: str, fault: signal.Signals
    ) -> None:
        held, into = segment(128 * MiB, 1), segment(128 * MiB)
        source = node("a", {0: held}, stall=0.5)
        hurt: list[int] = []

        def arrived(rank: int, start: int, end: int) -> None:
            if not hurt:
                hurt.extend(sidecars(source.process.pid) if whose == "source" else [TARGET.child().pid])
                os.kill(hurt[0], fault)

        fetch = fetcher(self.transport, {0: into}, arrived=arrived, piece_bytes=4 * MiB, retries=0)
        await fetch.run([source.source()], WITHIN)
        check(into, held, Ranges([(0, held.nbytes)]))
        assert fetch.delivered.total() == held.nbytes
        assert ends(hurt[0])
        assert len(sidecars(source.process.pid)) == 1
        await stays(into)

    async def test_sidecar_dies_with_its_daemon(self, node: NodeMaker, segment: SegmentMaker) -> None:
        source = node("a", {0: segment(MiB, 1)})
        (pid,) = sidecars(source.process.pid)
        source.send_signal(signal.SIGSTOP)
        source.send_signal(signal.SIGKILL)
        assert ends(pid)

    async def test_source_whose_sidecar_never_works_is_left_for_tcp_with_one_warning(
        self, node: NodeMaker, segment: SegmentMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        monkeypatch.setenv("UCX_TLS", "nothing")
        source = node("a", {0: held})
        monkeypatch.setenv("UCX_TLS", "tcp")
        told: list[str] = []
        settings = PeerSettings()
        routes = Routes([Rdma(settings), Tcp(settings)], "", lambda text, level: told.append(text))
        fetch = Fetcher(routes, SUBJECT, {0: Ranges([(0, MiB)])}, {0: into.memory}, settings=settings)
        await fetch.run([source.source()], WITHIN)
        check(into, held, Ranges([(0, MiB)]))
        (text,) = told
        assert text.startswith("node a by tcp from now on: rdma failed: me/grpo (3, 7) from a")
        assert routes.status()[0]["transport"] == "tcp"

    async def test_node_without_rdma_is_said_to_be_so(self, node: NodeMaker, segment: SegmentMaker) -> None:
        held, into = segment(MiB, 1), segment(MiB)
        type(self).transport = "tcp"
        try:
            source = node("a", {0: held})
        finally:
            type(self).transport = "rdma"
        with pytest.raises(DaemonUnavailable, match=r"me/grpo \(3, 7\) from a .* handshake: it does not serve by rdma"):
            await fetcher("rdma", {0: into}, retries=0).run([source.source()], WITHIN)

    async def served(self, source: Node) -> None:
        with Segment(MiB) as into:
            await fetcher(self.transport, {0: into}).run([source.source()], WITHIN)

    async def test_wrong_requests_of_a_proven_peer_end_their_connection(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        source = node("a", {0: segment(MiB, 1)})
        before = sidecars(source.process.pid)
        for said in WRONG:
            with dial(source) as sock:
                assert shake(source, sock, secrets.token_bytes(32)) == READY
                sock.sendall(said)
                assert _kind(sock) is Kind.ERROR, said
                assert ended(sock)
        assert sidecars(source.process.pid) == before
        await self.served(source)

    async def test_agents_and_addresses_that_are_none_fail_their_piece_only(
        self, node: NodeMaker, segment: SegmentMaker
    ) -> None:
        source, into = node("a", {0: segment(MiB, 1)}), segment(MiB)
        region = await TARGET.region(into.memory)
        mine = encode_attach(region.child.name, region.metadata)
        put = Frame(Kind.PUT, Piece(0, 0, 1000)).encode()
        with dial(source) as sock:
            shake(source, sock, secrets.token_bytes(32))
            for attach in (
                encode_attach("nobody", b"x"),
                encode_attach("nobody", bytes(MAX_METADATA)),
                encode_attach(region.child.name, region.metadata[:100]),
            ):
                sock.sendall(attach + put + ADDRESS.pack(region.address))
                assert _kind(sock) is Kind.FAILED
            for address in (0, 1, region.address - 1, region.address + MiB, (1 << 64) - 1):
                sock.sendall(encode_attach("other", b"x") + mine + put + ADDRESS.pack(address))
                assert _kind(sock) is Kind.FAILED
            sock.sendall(encode_attach("other", region.metadata[:200] + os.urandom(118)) + put + ADDRESS.pack(1))
            assert _kind(sock) in (Kind.FAILED, Kind.ERROR)
        assert (into.copy() == 0xEE).all()
        await self.served(source)

    async def test_agent_that_calls_itself_otherwise_is_refused(self, node: NodeMaker, segment: SegmentMaker) -> None:
        source, into = node("a", {0: segment(MiB, 1)}), segment(MiB)
        region = await TARGET.region(into.memory)
        with dial(source) as sock:
            shake(source, sock, secrets.token_bytes(32))
            sock.sendall(encode_attach("another", region.metadata))
            sock.sendall(Frame(Kind.PUT, Piece(0, 0, 1000)).encode() + ADDRESS.pack(region.address))
            assert _kind(sock) is Kind.ERROR
        await self.served(source)

    @pytest.mark.parametrize(
        ("said", "times"),
        [
            (b"\xff" * FRAME_BYTES, 1),
            (Frame(Kind.DONE, Piece(0, 0, 7)).encode(), 1),
            (Frame(Kind.BYTES, Piece(0, 0, MiB)).encode(), 1),
            (Frame(Kind.WRITTEN, Piece(0, 0, 9)).encode() + Frame(Kind.WRITTEN, Piece(0, 0, 8)).encode(), 1),
            (Frame(Kind.WRITTEN, Piece(0, 0, MiB + 1)).encode(), 1),
            (Frame(Kind.FAILED, Piece(0, 0, 3)).encode() + b"no!", TRIES),
            (encode_error(DaemonUnavailable("a lie"), Kind.FAILED), TRIES),
            (b"", 1),
        ],
    )
    async def test_source_that_says_anything_gets_nothing_written_later(
        self, segment: SegmentMaker, said: bytes, times: int
    ) -> None:
        into = segment(MiB)
        before = TARGET.child()
        with false_source(said) as (source, asked):
            fetch = fetcher(self.transport, {0: into}, retries=0, first_byte=0.3, stall=0.3, verify=False)
            with pytest.raises(AwexdError, match=r"me/grpo \(3, 7\) from a"):
                await fetch.run([source], WITHIN)
            assert len(asked) == times
        assert not before.alive
        await stays(into)


def _kind(sock: socket.socket) -> Kind:
    """Of the next frame that is no sign of life; its body is read."""
    while True:
        kind, piece, _ = decode(_all(sock, FRAME_BYTES))
        if kind in (Kind.ERROR, Kind.FAILED):
            json.loads(_all(sock, piece.nbytes))
        if kind is not Kind.WAITING:
            return kind


@contextmanager
def false_source(said: bytes) -> Iterator[tuple[Source, list[Piece]]]:
    """A node that knows its key, and answers every PUT with that; and what it was asked."""
    asked: list[Piece] = []
    body = tickets.Ticket(*SUBJECT, "a", "target", "r", 1, "s").encode()
    key = b"k" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def answer() -> None:
            sock, _ = listener.accept()
            sock.settimeout(20)
            with sock, suppress(EOFError, ConnectionError):
                theirs, ours = bytes.fromhex(str(hear(sock)["nonce"])), secrets.token_bytes(32)
                proof = tickets.proof(key, "source", ours, theirs).hex()
                sock.sendall(encode_greeting({"protocol": PROTOCOL, "nonce": ours.hex(), "proof": proof}))
                hear(sock)
                sock.sendall(encode_greeting(READY))
                while True:
                    kind, piece, _ = decode(_all(sock, FRAME_BYTES))
                    if kind is Kind.ATTACH:
                        _all(sock, piece.nbytes)
                        continue
                    _all(sock, ADDRESS.size)
                    asked.append(piece)
                    sock.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        yield Source("a", "127.0.0.1", listener.getsockname()[1], body, key), asked
        answering.join()
