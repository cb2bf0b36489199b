"""A daemon's own time for a piece: the real fetcher and server over loopback, and pieces too small to take time."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack

import uvloop

from awexd import tickets
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd_transports.base import Admission, Memory, Source, Subject
from awexd_transports.ranges import Ranges
from awexd_transports.segment import HEADER_BYTES

RANKS, PIECES, PIECE_BYTES = 256, 64, 256
SUBJECT = Subject("bench/scale", 1, 1, 1)
RUN, KEY = "run", b"k" * tickets.KEY_BYTES
WITHIN = 120.0


def piece_seconds() -> float:
    """Of 256 ranks' segments, one source: processor's time, of which each side, both of this process, takes half."""
    return uvloop.run(_measured())


async def _measured() -> float:
    settings = PeerSettings(piece_bytes=PIECE_BYTES)
    transport = Tcp(settings)
    server = transport.serve("127.0.0.1", 0, Admission("source", KEY, _now_ms))
    serving = asyncio.get_running_loop().create_task(server.run())
    with ExitStack() as held:
        served, taken = ({rank: _memory(held) for rank in range(RANKS)} for _ in range(2))
        offer = server.offer(SUBJECT, served, None)
        ticket = tickets.Ticket(*SUBJECT, "source", "target", RUN, _now_ms(RUN) + 60_000, "1").encode()
        source = Source("source", *server.address, ticket, tickets.key_of(KEY, ticket))
        wants = {rank: Ranges([(0, memory.nbytes)]) for rank, memory in taken.items()}
        fetcher = Fetcher(transport, SUBJECT, wants, taken, verify=False, settings=settings)
        started = time.process_time()
        await fetcher.run([source], WITHIN)
        seconds = time.process_time() - started
        await offer.withdraw()
        serving.cancel()
        await asyncio.wait([serving])
    return seconds / (RANKS * PIECES) / 2


def _memory(held: ExitStack) -> Memory:
    fd = os.memfd_create("awexd-bench")
    os.ftruncate(fd, HEADER_BYTES + PIECES * PIECE_BYTES)
    memory = Memory(fd, PIECES * PIECE_BYTES, writable=True)
    os.close(fd)
    held.callback(memory.close)
    return memory


def _now_ms(run: str) -> int:
    return time.monotonic_ns() // 1_000_000
