"""A process between two nodes that flips bits of what the source sends, delays it, or holds it back.

Its argument is JSON: ``to``, the source's port; ``flip``, byte numbers in each connection's stream from the source of
which one bit is flipped; ``times``, how many connections that happens to; ``hold``: after so many bytes of a
connection's stream from the source, which it says, nothing passes until SIGUSR1; SIGUSR2 makes it so again. It
prints its own port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any


class Proxy:
    def __init__(self, config: dict[str, Any]) -> None:
        self._to, self._flip, self._times = config["to"], config.get("flip", ()), config.get("times", 0)
        self._hold, self._go_on = config.get("hold"), asyncio.Event()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        flip = set(self._flip) if self._times > 0 else set()
        self._times -= 1
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_copy(reader, back, set()), _copy(there, writer, flip, self._held))

    async def _held(self, at: int) -> None:
        if self._hold is not None and at >= self._hold and not self._go_on.is_set():
            sys.stdout.write("held\n")
            sys.stdout.flush()
            await self._go_on.wait()

    async def run(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._go_on.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._go_on.clear)
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve_forever()


async def _passes(at: int) -> None:
    """Nothing is held back."""


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    flip: set[int],
    held: Callable[[int], Awaitable[None]] = _passes,
) -> None:
    at = 0
    try:
        while data := bytearray(await reader.read(1 << 16)):
            for place in flip:
                if at <= place < at + len(data):
                    data[place - at] ^= 0x10
            at += len(data)
            await held(at)
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(Proxy(json.loads(sys.argv[1])).run())
