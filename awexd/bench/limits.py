"""What this machine can do at best: copying memory by thread count, the cost of fresh shared memory, a round trip."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from awexd.bench.link import Side, serve

PAGE = 4096
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # linux/mman.h; mmap has names for them from Python 3.14 on


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the processors that this process may use."""
    processors = len(os.sched_getaffinity(0))
    return sorted({1 << bit for bit in range(processors.bit_length()) if 1 << bit <= processors} | {processors})


def address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Copier:
    """Flat copies by ``memmove`` in several threads at once, each of one contiguous part. Keeps its threads."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def copy(self, target: int, source: int, nbytes: int, threads: int) -> float:
        """Seconds that it took, threads started before."""
        step = -(-nbytes // threads // PAGE) * PAGE
        parts = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
        pool = self._pools.get(threads) or self._started(threads)
        started = time.perf_counter()
        done = [pool.submit(ctypes.memmove, target + at, source + at, size) for at, size in parts[1:]]
        ctypes.memmove(target, source, parts[0][1])
        wait(done)
        return time.perf_counter() - started

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()

    def _started(self, threads: int) -> ThreadPoolExecutor:
        pool = self._pools[threads] = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="awexd-bench")
        wait([pool.submit(int) for _ in range(threads)])
        return pool


def copy_rates(nbytes: int, rounds: int) -> dict[int, list[float]]:
    """Thread count to bytes a second, a number a round; the counts take turns."""
    copier, counts = Copier(), thread_counts()
    with mmap.mmap(-1, nbytes) as source, mmap.mmap(-1, nbytes) as target:
        for memory in (source, target):
            memory.madvise(MADV_POPULATE_WRITE)
        a, b = address(source), address(target)
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                rates[count].append(nbytes / copier.copy(b, a, nbytes, count))
    copier.close()
    return rates


def fresh_memory_seconds(nbytes: int) -> dict[str, float]:
    """Seconds for ``nbytes`` of new shared memory: to reserve it, to write to its pages, to map what is there."""
    with _descriptor(nbytes, reserve=False) as descriptor:
        started = time.perf_counter()
        os.posix_fallocate(descriptor, 0, nbytes)
        reserved = time.perf_counter() - started
        with mmap.mmap(descriptor, nbytes) as again:
            started = time.perf_counter()
            again.madvise(MADV_POPULATE_READ)
            mapped = time.perf_counter() - started
    with _descriptor(nbytes, reserve=False) as descriptor, mmap.mmap(descriptor, nbytes) as memory:
        started = time.perf_counter()
        memory.madvise(MADV_POPULATE_WRITE)
        populated = time.perf_counter() - started
    return {"reserve": reserved, "populate": populated, "map": mapped}


def round_trips(count: int) -> list[float]:
    """Milliseconds of one byte to another process and back over a Unix socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "awexd.bench.limits", str(theirs.fileno())]
        with Side("the echo", command, fds=[theirs.fileno()]) as side:
            theirs.close()
            side.tell("echo")
            times = []
            for _ in range(count + 1):
                started = time.perf_counter()
                ours.sendall(b"-")
                if not ours.recv(1):
                    side.answer("echo")
                times.append((time.perf_counter() - started) * 1e3)
            ours.shutdown(socket.SHUT_WR)
            side.answer("echo")
    return times[1:]  # the first waited for the process to start


@contextlib.contextmanager
def _descriptor(nbytes: int, *, reserve: bool) -> Iterator[int]:
    """Shared memory without a name: nothing of it can be left behind."""
    descriptor = os.memfd_create("awexd-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        if reserve:
            os.posix_fallocate(descriptor, 0, nbytes)
        yield descriptor
    finally:
        os.close(descriptor)


def shared_memory(nbytes: int) -> contextlib.AbstractContextManager[int]:
    """A descriptor of that much shared memory, reserved."""
    return _descriptor(nbytes, reserve=True)


def peak_gigabytes() -> float:
    """The most memory that this process has had resident. (``ru_maxrss`` would count its parent's before ``exec``.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def _echo(peer: int) -> dict[str, bool]:
    with socket.socket(fileno=peer) as link:
        while data := link.recv(1):
            link.sendall(data)
    return {"done": True}


if __name__ == "__main__":
    serve(int(sys.argv[2]), {"echo": lambda: _echo(int(sys.argv[1]))})
