"""The channel between daemons against a bare socket copy of the same bytes, by as many streams, over loopback.

A source and a target, each a process of its own, with 1 GiB in memory objects. ``tcp-rate``: from the fetch called to
its end, connections and greeting included, neither TLS nor checksums. ``tcp-rate-checksum``: with each cell compared
with its writer's checksum. The limit is the faster of two bare copies of the same run: blocking sockets, a thread a
stream (``sendall``, ``recv_into``), and non-blocking ones on uvloop. With ``--write`` the figures go to
``benchmarks/results/nodes.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from awexd import tickets
from awexd.bench.figures import Bar, Figure, names, quartiles, table, write
from awexd.peers.cells import Cells
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd_transports.base import Admission, Memory, Source, Subject
from awexd_transports.kernel import Jobs, Sums
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.ranges import Ranges
from awexd_transports.segment import CHECKSUM_BYTES, HEADER_BYTES, first_cells, segment_nbytes
from awexd_transports.view import View

TENSORS, SHAPE = 64, (2048, 4096)
SUBJECT = Subject("bench/tcp", 1, 1, 1)
KEY = b"k" * 32
CHUNK = 1 << 20
WITHIN = 120.0
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"
NAMES = ["tcp-rate", "tcp-rate-checksum"]
BARS = {"tcp-rate": Bar("ratio", ">=", 0.9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=PeerSettings().streams)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--serve", type=int, metavar="FD", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(_serve(arguments.serve, arguments.streams))
        return
    figures = _measure(arguments.rounds, arguments.streams)
    print("\n".join(table(figures)))
    if arguments.write:
        options = f" --streams {arguments.streams}" if arguments.streams != PeerSettings().streams else ""
        command = f"python benchmarks/tcp.py --rounds {arguments.rounds}{options}"
        write(RESULTS, figures, command, keep=names(RESULTS))


def manifest() -> Manifest:
    whole = Box((0,) * len(SHAPE), SHAPE)
    return Manifest.of(
        Entry(TensorSpec(f"layers.{n}.weight", SHAPE, "bfloat16"), whole, n, None) for n in range(TENSORS)
    )


@contextmanager
def memory_of(nbytes: int) -> Iterator[Memory]:
    """An object of memory, all of whose pages are there."""
    fd = os.memfd_create("awexd-bench")
    os.ftruncate(fd, HEADER_BYTES + nbytes)
    memory = Memory(fd, nbytes, writable=True)
    for at in range(0, nbytes, CHUNK):
        part = memory.view[at : at + CHUNK]
        part[:] = bytes([1 + at // CHUNK % 250]) * len(part)
        part.release()
    try:
        yield memory
    finally:
        memory.close()
        os.close(fd)


def _sum(manifest: Manifest, memory: Memory) -> None:
    """Stores the checksums, as a writer does."""
    table, first = memory.address + manifest.segment_nbytes, first_cells(manifest)
    rows = []
    for number, (entry, offset) in enumerate(zip(manifest.pieces, manifest.piece_offsets, strict=True)):
        view = View.packed(memory.address + offset, entry.box.shape, entry.tensor.dtype, None)
        place = table + CHECKSUM_BYTES * first[number]
        rows.append((view, view, Sums(entry.tensor.shape, entry.box.offset, entry.box.shape, (), place)))
    Jobs(rows).start()()


async def _serve(fd: int, streams: int) -> None:
    """The source's process: our server, and the bare senders at two ports of their own."""
    nbytes = segment_nbytes(manifest())
    memory = Memory(fd, nbytes)
    server = Tcp().serve("127.0.0.1", 0, Admission("source", KEY, lambda run: 0))
    server.offer(SUBJECT, {0: memory}, None)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    threading.Thread(target=_send_blocking, args=(listeners[0], memory.view, streams), daemon=True).start()
    listeners[1].setblocking(False)
    print(json.dumps([server.address[1], *(one.getsockname()[1] for one in listeners)]), flush=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run())
        group.create_task(_send_on_loop(listeners[1], memory.view, streams, group))


def _parts(nbytes: int, streams: int) -> list[tuple[int, int]]:
    return [(nbytes * n // streams, nbytes * (n + 1) // streams) for n in range(streams)]


def _send_blocking(listener: socket.socket, view: memoryview, streams: int) -> None:
    def send(sock: socket.socket) -> None:
        with sock:
            low, high = _parts(len(view), streams)[sock.recv(1)[0]]
            sock.sendall(view[low:high])

    while True:
        threading.Thread(target=send, args=(listener.accept()[0],), daemon=True).start()


async def _send_on_loop(listener: socket.socket, view: memoryview, streams: int, group: asyncio.TaskGroup) -> None:
    loop = asyncio.get_running_loop()

    async def send(sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            low, high = _parts(len(view), streams)[(await loop.sock_recv(sock, 1))[0]]
            await loop.sock_sendall(sock, view[low:high])

    while True:
        group.create_task(send((await loop.sock_accept(listener))[0]))


def _receive_blocking(port: int, view: memoryview, streams: int) -> None:
    def receive(number: int, low: int, high: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(bytes([number]))
            while low < high:
                low += sock.recv_into(view[low : min(high, low + CHUNK)])

    threads = [
        threading.Thread(target=receive, args=(number, *part)) for number, part in enumerate(_parts(len(view), streams))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _receive_on_loop(port: int, view: memoryview, streams: int) -> None:
    loop = asyncio.get_running_loop()

    async def receive(number: int, low: int, high: int) -> None:
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, bytes([number]))
            while low < high:
                low += await loop.sock_recv_into(sock, view[low : min(high, low + CHUNK)])

    await asyncio.gather(*(receive(number, *part) for number, part in enumerate(_parts(len(view), streams))))


def _measure(rounds: int, streams: int) -> list[Figure]:
    made = manifest()
    nbytes = segment_nbytes(made)
    settings = PeerSettings(streams=streams)
    cells = Cells(made)
    with memory_of(nbytes) as held, memory_of(nbytes) as into:
        _sum(made, held)
        command = [sys.executable, __file__, "--serve", str(held.fd), "--streams", str(streams)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[held.fd], env=environ) as serving:
            try:
                ports = json.loads(serving.stdout.readline()) if serving.stdout else []
                source = source_at(ports[0])

                def fetch(**options: Any) -> Callable[[], None]:
                    def run() -> None:
                        wants = {0: Ranges([(0, nbytes)])}
                        one = Fetcher(Tcp(settings), SUBJECT, wants, {0: into}, settings=settings, **options)
                        uvloop.run(one.run([source], WITHIN))

                    return run

                ways: dict[str, Callable[[], None]] = {
                    "tcp-rate": fetch(verify=False),
                    "tcp-rate-checksum": fetch(cells={0: cells}),
                    "blocking": lambda: _receive_blocking(ports[1], into.view, streams),
                    "loop": lambda: uvloop.run(_receive_on_loop(ports[2], into.view, streams)),
                }
                rates = in_turn(ways, rounds, held, into)
            finally:
                serving.kill()
    return list(_figures(rates, streams))


def in_turn(ways: Mapping[str, Callable[[], None]], rounds: int, held: Memory, into: Memory) -> dict[str, list[float]]:
    """GB/s of each way from one memory to the other, whose bytes are compared after each; the first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            for at in range(0, held.nbytes, CHUNK):
                into.view[at] = 0
            started = time.perf_counter()
            way()
            seconds = time.perf_counter() - started
            if not np.array_equal(np.frombuffer(into.view, np.uint8), np.frombuffer(held.view, np.uint8)):
                raise RuntimeError(f"{name}: the bytes differ")
            if number:
                rates[name].append(held.nbytes / seconds / 1e9)
    return rates


def _figures(rates: dict[str, list[float]], streams: int) -> Iterator[Figure]:
    bare = max((rates["blocking"], rates["loop"]), key=statistics.median)
    more = {"streams": streams, **{f"bare_{name}": statistics.median(rates[name]) for name in ("blocking", "loop")}}
    for name in NAMES:
        low, value, high = quartiles(rates[name])
        ratio = statistics.median(ours / limit for ours, limit in zip(rates[name], bare, strict=True))
        limit = statistics.median(bare)
        yield Figure(name, value, "GB/s", limit, ratio, BARS.get(name), low, high, len(bare), more=more)


def source_at(port: int) -> Source:
    body = tickets.Ticket(*SUBJECT, "source", "target", "run", 1, "serial").encode()
    return Source("source", "127.0.0.1", port, body, tickets.key_of(KEY, body))


if __name__ == "__main__":
    main()
