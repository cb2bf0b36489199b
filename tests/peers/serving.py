"""A node that serves: a process that does what the lines on its standard input say, and answers each with one line."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
from typing import Any

import uvloop

from awexd.peers.offers import Offered
from awexd.peers.settings import PeerSettings
from awexd_transports.base import Admission, Memory, Piece, Subject
from awexd_transports.ranges import Ranges
from awexd_transports.registry import find

RUN = "run-1"


def now_ms(run: str) -> int | None:
    """The tests' MetaServer has the clock of this machine."""
    return time.monotonic_ns() // 1_000_000 if run == RUN else None


def tls(files: dict[str, str] | None, purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Mutual TLS with these files: ``authority``, ``certificate``, ``key``."""
    if files is None:
        return None
    context = ssl.create_default_context(purpose, cafile=files["authority"])
    context.verify_mode = ssl.CERT_REQUIRED
    if "certificate" in files:
        context.load_cert_chain(files["certificate"], files["key"])
    return context


class Serving:
    """The node's state. ``memories``: by rank, descriptor and bytes of what it serves."""

    def __init__(self, config: dict[str, Any]) -> None:
        settings = PeerSettings(**config["settings"], server_tls=tls(config.get("tls"), ssl.Purpose.CLIENT_AUTH))
        transport = find(config["transport"])(settings)
        admission = Admission(config["node"], bytes.fromhex(config["key"]), now_ms)
        self.server = transport.serve(config["host"], config["port"], admission)
        self._memories = {int(rank): Memory(fd, nbytes) for rank, (fd, nbytes) in config["memories"].items()}
        self._subject = Subject(*config["subject"])
        self._offer: Offered | None = None

    async def offer(self, arrived: dict[str, list[tuple[int, int]]] | None = None) -> None:
        there = None if arrived is None else {int(rank): Ranges(spans) for rank, spans in arrived.items()}
        self._offer = self.server.offer(self._subject, self._memories, there)

    async def extend(self, rank: int, start: int, end: int) -> None:
        if self._offer:
            self._offer.extend(rank, start, end)

    async def extend_rows(self, piece: list[int]) -> None:
        if self._offer:
            self._offer.extend_rows(Piece(*piece))

    async def promise(self, ranges: dict[str, list[tuple[int, int]]], rows: list[list[int]]) -> None:
        if self._offer:
            wanted = {int(rank): Ranges(spans) for rank, spans in ranges.items()}
            self._offer.promise(wanted, [Piece(*piece) for piece in rows])

    async def withdraw(self, grace: float = 0.0) -> None:
        if self._offer:
            await self._offer.withdraw(grace)

    async def status(self) -> dict[str, int]:
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "tasks": len(asyncio.all_tasks()),
            "refused": self.server.refused,
            "sent": self.server.sent,
        }


async def main(config: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    serving = Serving(config)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop.add_reader(0, lambda: lines.put_nowait(sys.stdin.readline()))
    answers = sys.stdout
    running = loop.create_task(serving.server.run())
    answers.write(json.dumps(serving.server.address) + "\n")
    answers.flush()
    while line := await lines.get():
        asked = json.loads(line)
        result = await getattr(serving, asked.pop("do"))(**asked)
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    running.cancel()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
