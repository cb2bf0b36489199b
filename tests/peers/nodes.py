"""Nodes for tests of transports: processes that serve, tickets for them, memory here, and what it should hold."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from awexd import tickets
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd_transports.base import Memory, Piece, Source, Subject
from awexd_transports.cells import grid
from awexd_transports.digest import digest
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Manifest
from awexd_transports.ranges import Ranges
from awexd_transports.registry import find
from awexd_transports.segment import CHECKSUM_OFFSET, HEADER_BYTES, segment_nbytes
from awexd_transports.view import View
from tests.peers.serving import RUN, now_ms

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
SUBJECT = Subject("me/grpo", 3, 7, 11)
TARGET = "target"
FILL = 0xEE
Bytes = npt.NDArray[np.uint8]


class Segment:
    """An object of memory that nobody names, and its bytes here. ``with`` gives it back."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.fd = os.memfd_create("awexd-test")
        self.nbytes = nbytes
        os.ftruncate(self.fd, HEADER_BYTES + nbytes)
        self.memory = Memory(self.fd, nbytes, writable=True)
        with self.bytes() as held:
            held[:] = FILL if seed is None else np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)

    @contextlib.contextmanager
    def bytes(self) -> Iterator[Bytes]:
        """The very memory; it must not be kept."""
        yield np.frombuffer(self.memory.view, np.uint8)

    def copy(self) -> Bytes:
        with self.bytes() as held:
            return held.copy()

    def fill(self, value: int) -> None:
        with self.bytes() as held:
            held[:] = value

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *failure: object) -> None:
        self.memory.close()
        os.close(self.fd)


def sealed(manifest: Manifest, seed: int) -> Segment:
    """A segment of random bytes with its table of checksums, summed cell by cell."""
    segment = Segment(segment_nbytes(manifest), seed)
    at = manifest.segment_nbytes
    for entry, offset in zip(manifest.pieces, manifest.piece_offsets, strict=True):
        cells = grid(entry.box.shape, ITEMSIZE[entry.tensor.dtype])
        view = View.packed(segment.memory.address + offset, entry.box.shape or (1,), entry.tensor.dtype, None)
        for number in range(cells.cells):
            low, high = cells.cell(number)
            part = view.sub([slice(a, b) for a, b in zip(low, high, strict=True)])
            place = tuple(a + b for a, b in zip(entry.box.offset or (0,), low, strict=True))
            found = (digest(part, entry.tensor.shape or (1,), place) + CHECKSUM_OFFSET) % (1 << 64)
            segment.memory.view[at : at + 8] = found.to_bytes(8, "little")
            at += 8
    return segment


class Node:
    """A process that serves segments; ``close`` kills it."""

    def __init__(
        self,
        transport: str,
        name: str,
        segments: Mapping[int, Segment],
        *,
        wrapper: Sequence[str] = (),
        host: str = "127.0.0.1",
        tls: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.name, self.key = name, name.encode().ljust(32, b".")
        fds = {rank: (segment.fd, segment.nbytes) for rank, segment in segments.items()}
        config = {
            "transport": transport,
            "node": name,
            "key": self.key.hex(),
            "host": host,
            "port": 0,
            "memories": fds,
            "subject": SUBJECT,
            "settings": settings,
            "tls": tls,
        }
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.peers.serving", json.dumps(config)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd, _ in fds.values()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._buffer = b""
        self.host, self.port = self._answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def source(self, holds: Mapping[int, Ranges] | None = None, **changes: Any) -> Source:
        """With a good ticket, but for ``changes`` of its fields, or of ``key``, ``host`` and ``port``."""
        ticket = tickets.Ticket(
            *SUBJECT,
            source=self.name,
            target=TARGET,
            run=RUN,
            expires=(now_ms(RUN) or 0) + 60_000,
            serial=os.urandom(8).hex(),
        )
        fields = {name: value for name, value in changes.items() if name not in ("key", "host", "port")}
        body = replace(ticket, **fields).encode()
        key = tickets.key_of(changes.get("key", self.key), body)
        host, port = changes.get("host", self.host), changes.get("port", self.port)
        return Source(self.name, host, port, body, key, holds)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout
        end = time.monotonic() + START_SECONDS
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"node {self.name} said nothing; its status is {self.process.poll()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class Fetching:
    """A process that fetches; ``close`` kills it."""

    def __init__(
        self,
        transport: str,
        into: dict[int, Segment],
        sources: Sequence[tuple[Source, list[int] | None]],
        *,
        wrapper: Sequence[str] = (),
        verify: bool = True,
        within: float = 60.0,
        **settings: Any,
    ) -> None:
        config = {
            "transport": transport,
            "subject": SUBJECT,
            "memories": {rank: (one.fd, one.nbytes) for rank, one in into.items()},
            "sources": [
                {
                    "node": one.node,
                    "host": one.host,
                    "port": one.port,
                    "ticket": one.ticket.hex(),
                    "key": one.key.hex(),
                    "ranks": ranks,
                }
                for one, ranks in sources
            ],
            "settings": settings,
            "verify": verify,
            "within": within,
        }
        self._process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.peers.fetching", json.dumps(config)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            pass_fds=[one.fd for one in into.values()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def result(self) -> dict[str, Any]:
        while "begun" in (line := self.line()):
            continue
        return line

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def fetcher(
    transport: str,
    into: Mapping[int, Segment],
    wants: Mapping[int, Ranges] | None = None,
    *,
    tls: Any = None,
    arrived: Callable[[int, int, int], None] = lambda rank, start, end: None,
    cells: Mapping[int, Any] | None = None,
    verify: bool = True,
    rows: Mapping[int, Sequence[Piece]] | None = None,
    rows_arrived: Callable[[Piece], None] = lambda piece: None,
    **settings: Any,
) -> Fetcher:
    """Of everything, unless ``wants`` says what, and ``rows``."""
    if wants is None:
        wants = {rank: Ranges([(0, segment.nbytes)]) for rank, segment in into.items()}
    given = PeerSettings(**settings, client_tls=tls)
    memories = {rank: segment.memory for rank, segment in into.items()}
    return Fetcher(
        find(transport)(given),
        SUBJECT,
        wants,
        memories,
        cells=cells,
        verify=verify,
        arrived=arrived,
        rows=rows,
        rows_arrived=rows_arrived,
        settings=given,
    )
