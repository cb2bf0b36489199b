"""The MetaServer: requests a second, and how late the last of a thousand watchers is told of a change.

``metaserver-requests``: 32 connections, each of which asks again once it has its answer, for four things in turn: put a
small state (to ours: what a node has of a job, checked and told to who waits; to awex's: the same bytes under a key),
get it, keep in touch (a renewal; awex's clients poll ``has_key``), get it. ``put_get_ratio`` is of puts and gets alone.
The same process asks both, in turns; the limit is a server that answers anything with the same bytes.
``metaserver-lateness-p99``: 1,000 watchers are 125 nodes, each of which waits for the eight jobs that it follows, as
a daemon does: in one request, ``POST /v1/watch``. The change is that a node with something of all eight leaves; the end
is when the last of the 125 connections, all of one process, has read all eight jobs' views. The limit is as many sends
of as many bytes by a bare loop to the same sockets' like. Beside it: 1,000 connections that wait for one job each, and
the bare loop to them. With ``--write`` the figures go to ``benchmarks/results/nodes.json``. Without awex's environment
(``make peers``) the first has no ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import orjson

from awexd.bench.figures import Bar, Figure, names, quantile, quartiles, table, write
from awexd.bench.link import Side
from benchmarks.peers.environments import environment, python

CONNECTIONS = 32
REQUESTS = 20_000
WATCHERS = 1000
NODES = 125
JOBS = [f"bench/watched{number}" for number in range(WATCHERS // NODES)]
"""What each of the nodes follows."""
READY_SECONDS = 30.0
RUN, DIGEST = "run-of-a-benchmark", "a" * 64
BARS = {"metaserver-requests": Bar("ratio", ">=", 3.0), "metaserver-lateness-p99": Bar("value", "<=", 5.0)}
RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"
Maker = Callable[[int, int], bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--changes", type=int, default=400)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * WATCHERS), hard))
    with metaserver() as port:
        figures = [_requests(port, arguments.rounds), _lateness(port, arguments.changes)]
    print("\n".join(table(figures)))
    if arguments.write:
        command = f"python benchmarks/nodes.py --rounds {arguments.rounds} --changes {arguments.changes}"
        write(RESULTS, figures, command, keep=names(RESULTS))


@contextlib.contextmanager
def metaserver() -> Iterator[int]:
    """The port of one of its own, that knows node ``n0``."""
    with tempfile.TemporaryDirectory(prefix="awexd-b") as folder, contextlib.ExitStack() as stack:
        notices = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notices.bind(f"{folder}/n")
        notices.settimeout(READY_SECONDS)
        command = [sys.executable, "-m", "awexd", "metaserver", "--port", "0", "--state-dir", f"{folder}/state"]
        settings = ["--log-level", "ERROR", "--node-ttl", "3600"]
        process = subprocess.Popen([*command, *settings], env=os.environ | {"NOTIFY_SOCKET": f"{folder}/n"})
        stack.callback(process.wait)
        stack.callback(process.terminate)
        found = re.search(rb"STATUS=serving http://127\.0\.0\.1:(\d+)", notices.recv(4096))
        if not found:
            raise RuntimeError("the MetaServer did not say where it serves")
        _put(int(found[1]), "/v1/nodes/n0", json.dumps({"run": RUN, "address": None, "version": "0"}))
        yield int(found[1])


# requests


def _requests(port: int, rounds: int) -> Figure:
    """Turns of ours, theirs and the bare server; the ratio is the median of the turns'."""
    ours, theirs, bare = list[float](), list[float](), list[float]()
    pairs = list[float]()
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(_bare())
        interpreter = python("awex")
        peer = None
        if interpreter is not None:
            command = [str(interpreter), "-m", "benchmarks.peers.awex_side", "server"]
            side = stack.enter_context(Side("awex's MetaServer", command, environ=environment()))
            peer = side.ask("start")["port"]
            stack.callback(side.ask, "stop")
        for _ in range(rounds + 1):  # the first warms all of them
            ours.append(_rate(port, _ours))
            bare.append(_rate(plain, _ours))
            if peer is not None:
                theirs.append(_rate(int(peer), _theirs))
                pairs.append(_rate(port, _our_pair) / _rate(int(peer), _their_pair))
    low, value, high = quartiles(ours[1:])
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)] if theirs else []
    return Figure(
        "metaserver-requests",
        value,
        "requests/s",
        limit=statistics.median(bare[1:]),
        ratio=statistics.median(ratios) if ratios else None,
        bar=BARS["metaserver-requests"],
        low=low,
        high=high,
        rounds=rounds,
        peer={"name": "awex 0.9.0's MetaServer", "value": statistics.median(theirs[1:]), "quoted": False}
        if theirs
        else None,
        note=f"{CONNECTIONS} connections of one process: put, get, renew (theirs: has_key), get",
        more={"put_get_ratio": statistics.median(pairs[1:])} if pairs else {},
    )


def _state(number: int) -> bytes:
    """What a node has of a job: one engine, whose version differs from that of the number before."""
    worker = {"rank": 0, "state": "ready", "version": [1, number], "digest": DIGEST}
    told = {"run": RUN, "local": False, "epoch": 0, "world_size": 0, "keep": 0, "ranks": [], "versions": []}
    told |= {
        "joined": False,
        "waiting": [],
        "withdrawn": [],
        "fetching": [],
        "coming": [],
        "home": False,
        "sends": False,
    }
    return json.dumps(told | {"engines": [{"engine": "e", "world_size": 1, "workers": [worker]}]}).encode()


def _ours(connection: int, number: int) -> bytes:
    if number % 4 == 3:
        return _request("POST", "/v1/nodes/n0/renew", b'{"run":"%s"}' % RUN.encode())
    return _our_pair(connection, number)


def _theirs(connection: int, number: int) -> bytes:
    return _request("GET", f"/v1/has_key/j{connection}") if number % 4 == 3 else _their_pair(connection, number)


def _our_pair(connection: int, number: int) -> bytes:
    if number % 2:
        return _request("PUT", f"/v1/nodes/n0/jobs/bench/j{connection}", _state(number))
    return _request("GET", f"/v1/jobs/bench/j{connection}")


def _their_pair(connection: int, number: int) -> bytes:
    if number % 2:
        return _request("PUT", f"/v1/put_binary/j{connection}", _state(number))
    return _request("GET", f"/v1/get_binary/j{connection}")


def _request(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def _rate(port: int, maker: Maker) -> float:
    """Requests a second, by a process of its own."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    asker = context.Process(target=_ask, args=(theirs, port, maker))
    asker.start()
    theirs.close()
    try:
        return float(ours.recv())
    finally:
        asker.join()


def _ask(link: Connection, port: int, maker: Maker) -> None:
    import uvloop

    link.send(uvloop.run(_asking(port, maker)))


async def _asking(port: int, maker: Maker) -> float:
    loop = asyncio.get_running_loop()
    askers = []
    for number in range(CONNECTIONS):
        done = loop.create_future()
        requests = [maker(number, at) for at in range(1, 65)]
        _, asker = await loop.create_connection(lambda: _Asker(requests, done), "127.0.0.1", port)  # noqa: B023
        askers.append(asker)
    started = time.perf_counter()
    for asker in askers:
        asker.start(REQUESTS // CONNECTIONS)
    await asyncio.gather(*(asker.done for asker in askers))
    return REQUESTS / (time.perf_counter() - started)


class _Asker(asyncio.Protocol):
    """Asks again once it has its answer."""

    def __init__(self, requests: list[bytes], done: asyncio.Future[None]) -> None:
        self.done = done
        self._requests = requests
        self._sent = self._left = 0
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def start(self, count: int) -> None:
        self._left = count
        self._send()

    def _send(self) -> None:
        self._transport.write(self._requests[self._sent % len(self._requests)])  # type: ignore[attr-defined]
        self._sent += 1

    def data_received(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        end = data.find(b"\r\n\r\n")
        length = data.find(b"Content-Length: ")
        if end < 0 or len(data) < end + 4 + int(data[length + 16 : data.find(b"\r", length)]):
            self._data = data
            return
        if not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(data[:200].decode(errors="replace")))
            return
        self._data = b""
        self._left -= 1
        if self._left:
            self._send()
        else:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError("the server closed a connection"))


@contextlib.contextmanager
def _bare() -> Iterator[int]:
    """A server that answers whatever comes with the same bytes."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer_all, args=(theirs,), daemon=True)
    process.start()
    try:
        yield int(ours.recv())
    finally:
        process.terminate()
        process.join()


def _answer_all(link: Connection) -> None:
    import uvloop

    class Answer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")  # type: ignore[attr-defined]

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Answer, "127.0.0.1", 0)
        link.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(serve())


# lateness


def _lateness(port: int, changes: int) -> Figure:
    late = sorted(_last_node_told(port, changes))
    alone = sorted(_last_told(port, changes))
    limits, bare = sorted(_last_sent(changes, NODES, 3600)), sorted(_last_sent(changes, WATCHERS, 600))
    low, _, high = quartiles(late)
    value, limit = quantile(late, 0.99), quantile(limits, 0.99)
    return Figure(
        "metaserver-lateness-p99",
        value,
        "ms",
        limit,
        value / limit,
        BARS["metaserver-lateness-p99"],
        low,
        high,
        rounds=changes,
        note=f"{WATCHERS} watchers: {NODES} nodes wait for {len(JOBS)} jobs each, which change at once; on loopback, "
        "which carries both ends of each connection",
        more={
            "median": statistics.median(late),
            "limit_median": statistics.median(limits),
            f"p99_of_{WATCHERS}_connections": quantile(alone, 0.99),
            f"median_of_{WATCHERS}_connections": statistics.median(alone),
            f"bare_p99_of_{WATCHERS}_connections": quantile(bare, 0.99),
            f"bare_median_of_{WATCHERS}_connections": statistics.median(bare),
        },
    )


@contextlib.contextmanager
def _readers(port: int, count: int) -> Iterator[Connection]:
    """A process that asks on all connections what it is sent; tells when all have asked, and when the last was told."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_all, args=(theirs, port, count))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _read_all(link: Connection, port: int, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * WATCHERS), hard))
    with contextlib.ExitStack() as stack:
        connect = socket.create_connection
        connections = [stack.enter_context(connect(("127.0.0.1", port))) for _ in range(count)]
        poll = stack.enter_context(select.epoll())
        for connection in connections:
            poll.register(connection.fileno(), select.EPOLLIN)
        receive = {connection.fileno(): connection.recv for connection in connections}
        link.send(True)
        with contextlib.suppress(EOFError):
            while True:
                ask = link.recv()
                for connection in connections if ask else ():
                    connection.sendall(ask)
                link.send(True)
                left, missing = count, dict[int, int]()
                while left:
                    for fd, _ in poll.poll(-1, count):
                        data = receive[fd](1 << 16)
                        missing[fd] = (missing[fd] if fd in missing else _length(data)) - len(data)
                        left -= not missing[fd]
                link.send(time.monotonic_ns())


def _length(data: bytes) -> int:
    """Of an answer that begins so."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or not rest:
        raise RuntimeError(f"not an answer: {data[:200]!r}")
    return len(head) + 4 + int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])


def _last_told(port: int, changes: int) -> Iterator[float]:
    """Milliseconds from a report to the last of as many connections that wait for its job."""
    _put(port, "/v1/nodes/n0/jobs/bench/watched", _state(1))
    ask = b"GET /v1/jobs/bench/watched/watch?after=%d&timeout_ms=60000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with _readers(port, WATCHERS) as readers:
        readers.recv()
        for change in range(2, changes + 2):
            _ask_all(port, readers, ask % json.loads(_get(port, "/v1/jobs/bench/watched"))["brief"]["seq"])
            started = _put(port, "/v1/nodes/n0/jobs/bench/watched", _state(change))
            yield (readers.recv() - started) / 1e6


def _last_node_told(port: int, changes: int) -> list[float]:
    """Milliseconds from a change of all jobs to the last of the nodes that wait for them."""
    told = list[float]()
    with _readers(port, NODES) as readers:
        readers.recv()
        for _ in range(changes):
            _put(port, "/v1/nodes/n1", json.dumps({"run": RUN, "address": None, "version": "0"}))
            for job in JOBS:
                for node in ("n0", "n1"):
                    _put(port, f"/v1/nodes/{node}/jobs/{job}", _state(1))
            seqs = [[job, json.loads(_get(port, f"/v1/jobs/{job}"))["brief"]["seq"]] for job in JOBS]
            _ask_all(port, readers, _request("POST", "/v1/watch", orjson.dumps({"jobs": seqs, "timeout_ms": 60_000})))
            started = _send(port, "DELETE", f"/v1/nodes/n1?run={RUN}")
            told.append((readers.recv() - started) / 1e6)
    return told


def _ask_all(port: int, readers: Connection, ask: bytes) -> None:
    """Returns once all of them wait, and nothing else is to be done."""
    readers.send(ask)
    readers.recv()
    _await_watchers(port, WATCHERS)
    time.sleep(0.02)


def _await_watchers(port: int, count: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while f"awexd_metaserver_watchers {count}\n".encode() not in _get(port, "/metrics"):
        if time.monotonic() > end:
            raise RuntimeError(f"not all of {count} watchers wait")
        time.sleep(0.001)


def _last_sent(changes: int, count: int, nbytes: int) -> Iterator[float]:
    """The same of a loop that sends as many bytes to each of so many sockets."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        readers = stack.enter_context(_readers(listener.getsockname()[1], count))
        accepted = [stack.enter_context(listener.accept()[0]) for _ in range(count)]
        for connection in accepted:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        readers.recv()
        sends = [connection.send for connection in accepted]
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (nbytes, bytes(nbytes))
        for _ in range(changes):
            readers.send(b"")
            readers.recv()
            time.sleep(0.02)
            started = time.monotonic_ns()
            for send in sends:
                send(data)
            yield (readers.recv() - started) / 1e6


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def _put(port: int, path: str, body: str | bytes) -> int:
    return _send(port, "PUT", path, body)


def _send(port: int, method: str, path: str, body: str | bytes | None = None) -> int:
    """Sends it; returns the moment before that, by ``time.monotonic_ns``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_SECONDS)
    with contextlib.closing(connection):
        connection.connect()
        started = time.monotonic_ns()
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {response.read()!r}")
        response.read()
    return started


if __name__ == "__main__":
    main()
