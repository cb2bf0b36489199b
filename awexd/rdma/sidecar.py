"""The process that owns a NIXL agent: ``python -m awexd.rdma.sidecar FD PARENT NAME MODULE``.

It does what the daemon at the other end of the socket ``FD`` says, and dies with it. Everything that a peer may do to
UCX ends at worst this process: bytes still on their way are stopped for certain by killing it, and by nothing else.
It never destroys its agent: to do so with a transfer under way may take all memory.

    daemon: map {key, nbytes, base} and an fd   answer: {address}     unmap {key}        no answer
            describe {key}                              {metadata}    attach {metadata}  {agent}
            put {key, offset, nbytes, agent, address}   {} at its end, before it {at}: bytes that are there
                {rows, run, stride} too: ``run`` bytes of every ``stride``, so many times
            detach {agent}, pace {busy}: no answer      {error} instead of any answer
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import orjson

MAX_MESSAGE = 128 << 10
PART_BYTES = 8 << 20
"""What is posted at once: progress goes by it, and a post may block for the time of its copy."""
PARTS = 4
"""Of one put that are posted at a time."""
PROGRESS_SECONDS = 0.05
"""Between two words of how far a put has come."""
MAX_ROWS = 4096
"""Of one part."""
BUSY_SECONDS, IDLE_SECONDS = 0.0001, 0.002
"""Between two looks at the network, while something is expected and else."""
MEMORY_BYTES = 4 << 30
"""Of its own; segments that it maps are not counted."""
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Region:
    """A segment's data, mapped and registered."""

    mapped: mmap.mmap
    address: int
    nbytes: int
    descriptors: Any


@dataclass(slots=True)
class Put:
    """Bytes on their way to a peer.

    Attributes:
        parts: not posted yet.
        posted: handles, and the bytes of each.
        done, told: bytes that are there, and those that the daemon knows of.
    """

    id: int
    agent: str
    local: int
    remote: int
    parts: deque[list[tuple[int, int]]]
    done: int = 0
    told: int = 0
    told_at: float = 0.0
    error: str | None = None
    posted: list[tuple[Any, int]] = field(default_factory=list)


class Sidecar:
    """Serves its daemon until that is gone."""

    def __init__(self, sock: socket.socket, agent: Any) -> None:
        self._sock = sock
        self._agent = agent
        self._regions: dict[int, Region] = {}
        self._puts: list[Put] = []
        self._busy = False

    def run(self) -> None:
        while True:
            wait = BUSY_SECONDS if self._busy or self._puts else IDLE_SECONDS
            if select.select([self._sock], [], [], wait)[0]:
                body, fds, _, _ = socket.recv_fds(self._sock, MAX_MESSAGE, 1)
                if not body:
                    return
                self._take(orjson.loads(body), fds)
            self._agent.get_new_notifs()  # what makes UCX go on
            self._puts = [put for put in self._puts if not self._go_on(put)]

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        number, do = message.pop("id"), message.pop("do")
        try:
            answer = getattr(self, f"_do_{do}")(number, *fds, **message)
        except Exception as error:  # noqa: BLE001 - NIXL's, of any kind: the daemon is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)
        if answer is not None:
            self._say(number, answer)

    def _say(self, number: int, answer: dict[str, Any]) -> None:
        self._sock.sendall(orjson.dumps({"id": number, **answer}))

    def _do_map(self, _: int, fd: int, *, key: int, nbytes: int, base: int, writable: bool) -> dict[str, Any]:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = mmap.mmap(fd, base + nbytes, mmap.MAP_SHARED, protection)
        with contextlib.suppress(AttributeError, OSError):
            mapped.madvise(mmap.MADV_DONTFORK)
        address = _address(mapped, writable) + base
        descriptors = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self._regions[key] = Region(mapped, address, nbytes, descriptors)
        return {"address": address}

    def _do_unmap(self, _: int, *, key: int) -> None:
        """A peer that still writes there would end this process: the daemon lets nobody."""
        region = self._regions.pop(key)
        self._agent.deregister_memory(region.descriptors)
        with contextlib.suppress(BufferError):  # unmapped when the address's owner is collected
            region.mapped.close()

    def _do_describe(self, _: int, *, key: int) -> dict[str, Any]:
        metadata = self._agent.get_partial_agent_metadata(self._regions[key].descriptors, True)
        return {"metadata": metadata.hex()}

    def _do_attach(self, _: int, *, metadata: str) -> dict[str, Any]:
        agent = self._agent.add_remote_agent(bytes.fromhex(metadata))
        return {"agent": agent.decode() if isinstance(agent, bytes) else agent}

    def _do_detach(self, _: int, *, agent: str) -> None:
        self._agent.remove_remote_agent(agent)

    def _do_pace(self, _: int, *, busy: bool) -> None:
        self._busy = busy

    def _do_put(
        self,
        number: int,
        *,
        key: int,
        offset: int,
        nbytes: int,
        agent: str,
        address: int,
        rows: int = 1,
        run: int = 0,
        stride: int = 0,
    ) -> None:
        region = self._regions[key]
        end = offset + (nbytes if rows == 1 else (rows - 1) * stride + run)
        if not 0 <= offset <= end <= region.nbytes or (rows != 1 and (rows * run != nbytes or not 0 < run <= stride)):
            raise ValueError(f"bytes {offset} to {end} of {region.nbytes}, {rows} rows of {run} bytes")
        parts = deque(_parts(nbytes, rows, run, stride))
        self._puts.append(Put(number, agent, region.address + offset, address, parts))

    def _go_on(self, put: Put) -> bool:
        """Whether it is at its end: nothing of it is on its way any more."""
        put.posted = [(handle, nbytes) for handle, nbytes in put.posted if not self._is_done(put, handle, nbytes)]
        while put.error is None and put.parts and len(put.posted) < PARTS:
            self._post(put)
        if put.posted or (put.error is None and put.parts):
            now = time.monotonic()
            if put.done > put.told and now > put.told_at + PROGRESS_SECONDS:
                put.told, put.told_at = put.done, now
                self._say(put.id, {"at": put.done})
            return False
        self._say(put.id, {} if put.error is None else {"error": put.error})
        return True

    def _post(self, put: Put) -> None:
        part, agent = put.parts.popleft(), self._agent
        with self._failing(put):
            local, remote = (
                agent.get_xfer_descs([(base + at, nbytes, 0) for at, nbytes in part], "DRAM")
                for base in (put.local, put.remote)
            )
            handle = agent.initialize_xfer("WRITE", local, remote, put.agent)
            put.posted.append((handle, sum(nbytes for _, nbytes in part)))
            if agent.transfer(handle) == "ERR":
                raise ConnectionError("a write could not be posted")

    def _is_done(self, put: Put, handle: Any, nbytes: int) -> bool:
        state = "ERR"
        with self._failing(put):
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise ConnectionError("a write failed")
        if state == "PROC":
            return False
        if state == "DONE":
            put.done += nbytes
        with self._failing(put):
            handle.release()
        return True

    @contextlib.contextmanager
    def _failing(self, put: Put) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as above
            put.error = put.error or f"{type(error).__name__}: {error}"


def _parts(nbytes: int, rows: int, run: int, stride: int) -> Iterator[list[tuple[int, int]]]:
    """What is posted at once: where each run of bytes begins, and its length."""
    if rows == 1:
        for at in range(0, nbytes, PART_BYTES):
            yield [(at, min(PART_BYTES, nbytes - at))]
        return
    most = max(1, min(MAX_ROWS, PART_BYTES // run))
    for first in range(0, rows, most):
        yield [(row * stride, run) for row in range(first, min(rows, first + most))]


def _address(mapped: mmap.mmap, writable: bool) -> int:
    if writable:
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    import numpy as np

    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def _agent(name: str, module: str) -> Any:
    nixl = import_module(module)
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {})
    return agent


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit() -> None:
    """Rather this process than the daemon or a trainer, if memory runs out."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def main(arguments: list[str]) -> None:
    fd, parent, name, module = arguments
    _die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it is the daemon that ends it
    _limit()
    sock = socket.socket(fileno=int(fd))
    started = time.perf_counter()
    try:
        agent = _agent(name, module)
    except Exception as error:  # noqa: BLE001 - as above
        sock.sendall(orjson.dumps({"id": 0, "error": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    sock.sendall(orjson.dumps({"id": 0, "seconds": time.perf_counter() - started}))
    with contextlib.suppress(OSError):
        Sidecar(sock, agent).run()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
