"""A sidecar as its daemon sees it: asked, listened to, and killed when what it has under way must end."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import orjson

from awexd.peers.threads import in_thread
from awexd.rdma.available import devices, module
from awexd.rdma.sidecar import MAX_MESSAGE

START_SECONDS = 30.0
CALL_SECONDS = 5.0
DEFAULTS = {
    "NIXL_LOG_LEVEL": "FATAL",  # a peer that goes away is told by us
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_MEM_EVENTS": "n",  # all is registered and unregistered by name: no hooks in mmap, whose making takes 0.4 s
    "OPENBLAS_NUM_THREADS": "1",
}
"""Of a sidecar's environment; what is set already stays."""
Progress = Callable[[int], None]


class TransferFailed(Exception):
    """The network or a sidecar failed. Bytes may still arrive: at the side that receives, until its sidecar is dead."""


class Child:
    """One sidecar. Used on one event loop at a time; ``kill`` or ``close`` it.

    Attributes:
        ended: it takes no more; after ``kill`` has returned it is dead, too.
        mapping: segments that it is mapping now.
    """

    def __init__(self, name: str) -> None:
        found = module()
        if found is None:
            raise TransferFailed("NIXL is not installed here")
        environ = DEFAULTS | ({"UCX_TLS": "ib"} if devices() else {}) | os.environ
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "awexd.rdma.sidecar", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, name, found],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        ours.setblocking(False)
        self._sock = ours
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], Progress | None]] = {}
        self._watching: asyncio.AbstractEventLoop | None = None
        self._ready = False
        self._why = "it ended"
        self._expected = 0
        self.name, self.pid = name, self._process.pid
        self.ended = False
        self.mapping = 0

    @property
    def alive(self) -> bool:
        return not self.ended and self._process.poll() is None

    async def call(
        self,
        do: str,
        *,
        fd: int | None = None,
        within: float | None = CALL_SECONDS,
        progress: Progress | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """What it answers. ``within``: seconds; None: the caller watches.

        Raises:
            TransferFailed: it says so, ends, or is silent for so long and is killed.
        """
        number = self._send(do, fd, arguments)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer, progress
        self._watch()
        try:
            async with asyncio.timeout(within if self._ready or within is None else within + START_SECONDS):
                found = await answer
        except TimeoutError:
            await self.kill()
            raise TransferFailed(f"the rdma sidecar (process {self.pid}) did not answer {do} in time") from None
        finally:
            self._waiting.pop(number, None)
            self._watch()
        if "error" in found:
            raise TransferFailed(found["error"])
        return found

    async def map(self, fd: int, within: float, arguments: dict[str, Any]) -> int:
        """Maps a segment; where its data lies then. Nothing else goes on meanwhile."""
        self.mapping += 1
        try:
            address: int = (await self.call("map", fd=fd, within=within, **arguments))["address"]
        finally:
            self.mapping -= 1
        return address

    def tell(self, do: str, **arguments: Any) -> None:
        """For what has no answer; nothing happens where it has ended."""
        if not self.ended:
            try:
                self._send(do, None, arguments)
            except TransferFailed:
                return

    def expect(self, count: int) -> None:
        """So many more writes are to come from others: meanwhile it looks at the network often."""
        before, self._expected = self._expected, self._expected + count
        if bool(before) != bool(self._expected):
            self.tell("pace", busy=bool(self._expected))

    async def kill(self) -> None:
        """Returns when it is dead: from then on nothing is read or written by it."""
        self._end("it was ended")
        self._process.kill()
        await in_thread(self._process.wait)

    def close(self) -> None:
        """As ``kill``, and blocks."""
        self._end("it was ended")
        self._process.kill()
        self._process.wait()

    def _send(self, do: str, fd: int | None, arguments: dict[str, Any]) -> int:
        self._read()  # whether it is ready, or has ended since
        if self.ended:
            raise TransferFailed(f"the rdma sidecar (process {self.pid}): {self._why}")
        number = next(self._numbers)
        body = orjson.dumps({"id": number, "do": do, **arguments})
        try:
            socket.send_fds(self._sock, [body], [] if fd is None else [fd])
        except OSError as error:  # also where it is stuck and takes nothing more
            self._end(f"it takes no message: {error.strerror}")
            self._process.kill()
            raise TransferFailed(f"the rdma sidecar (process {self.pid}): {self._why}") from error
        return number

    def _watch(self) -> None:
        """Asks the loop to look at its socket while an answer is waited for, and only then."""
        if self._waiting and self._watching is None and not self.ended:
            self._watching = asyncio.get_running_loop()
            self._watching.add_reader(self._sock.fileno(), self._read)
        elif self._watching is not None and (not self._waiting or self.ended):
            self._watching.remove_reader(self._sock.fileno())
            self._watching = None

    def _read(self) -> None:
        while not self.ended:
            try:
                body = self._sock.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError as error:
                body, self._why = b"", str(error)
            if not body:
                self._end(self._why)
                return
            self._take(orjson.loads(body))

    def _take(self, message: dict[str, Any]) -> None:
        number = message.pop("id")
        if not number:
            self._ready = True
            self._why = message.get("error", self._why)
            return
        answer, progress = self._waiting.get(number, (None, None))
        if answer is None or answer.done():
            return
        if "at" not in message:
            answer.set_result(message)
        elif progress is not None:
            progress(message["at"])

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended, self._why = True, why
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(TransferFailed(f"the rdma sidecar (process {self.pid}): {why}"))
        self._watch()
        self._sock.close()
