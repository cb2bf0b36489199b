"""The two processes of a hand-over: a trainer's and an engine's. ``python -m awexd.bench.sides writer|reader ...``.

Each also makes its half of the baseline: a flat copy of the same memory into, or out of, shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator
from typing import Any

from awexd.bench.limits import MADV_POPULATE_WRITE, Copier, address
from awexd.bench.link import Answer, nanoseconds, serve
from awexd.bench.weights import Weights, destination_shards, fill, mapping, mark, source_tensors, unmark, wrong
from awexd_client import WeightWriter, WorkerWeightsReader


class _Half:
    """Memory of one side and the shared memory of the baseline, both in full use from the start."""

    def __init__(self, nbytes: int, shared: int) -> None:
        self.memory = mapping(nbytes)
        self.shared = mmap.mmap(shared, nbytes)
        self.shared.madvise(MADV_POPULATE_WRITE)
        self.copier = Copier()

    def copy(self, nbytes: int, threads: int, *, out: bool) -> Answer:
        ours, theirs = address(self.memory), address(self.shared)
        target, source = (theirs, ours) if out else (ours, theirs)
        return {"seconds": self.copier.copy(target, source, nbytes, threads)}


class WriterSide:
    def __init__(self, nbytes: int, shared: int) -> None:
        self._half = _Half(nbytes, shared)
        self._writer: WeightWriter | None = None
        self._weights: Weights | None = None
        fill(self._half.memory)

    def open(self, weights: dict[str, Any], job: str, socket: str, verify: str, keep: int) -> Answer:
        if self._weights is not None:
            unmark(self._weights, self._half.memory)
        self._weights = Weights(**weights)
        self._writer = WeightWriter(job, 0, 1, socket, verify=verify, keep=keep)
        started = nanoseconds()
        self._writer.register(source_tensors(self._weights, self._half.memory))
        return {"seconds": (nanoseconds() - started) / 1e9}

    def publish(self, step: int) -> Answer:
        assert self._writer is not None
        assert self._weights is not None
        mark(self._weights, self._half.memory, step)
        started = nanoseconds()
        self._writer.publish(step)
        return {"started": started, "ended": nanoseconds()}

    def copy(self, nbytes: int, threads: int) -> Answer:
        return self._half.copy(nbytes, threads, out=True)

    def close(self) -> Answer:
        if self._writer is not None:
            self._writer.close_job()
            self._writer.close()
            self._writer = None
        return {}


class ReaderSide:
    def __init__(self, nbytes: int, shared: int) -> None:
        self._half = _Half(nbytes, shared)
        self._reader: WorkerWeightsReader | None = None
        self._weights: Weights | None = None

    def open(self, weights: dict[str, Any], job: str, socket: str, verify: str) -> Answer:
        self._weights = Weights(**weights)
        self._reader = WorkerWeightsReader(job, "bench", 0, 1, socket, verify=verify)
        self._reader.register(list(destination_shards(self._weights, self._half.memory)))
        return {}

    def update(self, step: int) -> Iterator[Answer]:
        """Says that it is about to wait, then what came."""
        assert self._reader is not None
        yield {}
        result = self._reader.update(step)
        yield {"ended": nanoseconds(), "stage": result.stage_seconds, "pause": result.pause_seconds}

    def check(self, step: int) -> Answer:
        """After an update, before any copy of the baseline."""
        assert self._weights is not None
        return {"wrong": wrong(self._weights, self._half.memory, step)[:5]}

    def copy(self, nbytes: int, threads: int) -> Answer:
        return self._half.copy(nbytes, threads, out=False)

    def close(self) -> Answer:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        return {}


def main() -> None:
    role, nbytes, shared, link = sys.argv[1], *map(int, sys.argv[2:])
    side: Any = {"writer": WriterSide, "reader": ReaderSide}[role](nbytes, shared)
    names = ("open", "publish", "update", "check", "copy", "close")
    try:
        serve(link, {name: getattr(side, name) for name in names if hasattr(side, name)})
    finally:
        # The benchmark may have been killed: its job goes all the same.
        with contextlib.suppress(Exception):
            side.close()


if __name__ == "__main__":
    main()
