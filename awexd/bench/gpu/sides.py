"""The processes of a hand-over on one GPU. ``python -m awexd.bench.gpu.sides writer|reader DEVICE [FD ...] LINK``.

``DEVICE`` is JSON, see ``devices.device_of``. Weights stay from one job to the next where it has the same.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from awexd.bench.gpu.devices import Device, device_of
from awexd.bench.gpu.side import GpuSide, Source, Target
from awexd.bench.link import Answer, nanoseconds, serve
from awexd_client import Publication, WeightWriter, WorkerWeightsReader
from awexd_transports.errors import AwexdError

if TYPE_CHECKING:
    import torch

SECONDS = 60.0
"""Any wait of a side."""
STATES = 251
"""Values that tensors of state have."""


class WriterSide(Source):
    """A trainer's process. Several jobs may be open at once."""

    names = (*Source.names, "open", "publish", "captured", "park", "restore", "discard")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._writers: dict[str, WeightWriter] = {}
        self._publication: Publication | None = None
        self._state: dict[str, torch.Tensor] = {}

    def open(
        self,
        job: str,
        socket: str,
        verify: str,
        mode: str,
        keep: int = 1,
        rank: int = 0,
        world_size: int = 1,
        **ways: Any,
    ) -> Answer:
        started = nanoseconds()
        writer = self._writers[job] = WeightWriter(
            job, rank, world_size, socket, mode=mode, verify=verify, keep=keep, timeout=SECONDS, **ways
        )
        writer.register([part.shard(tensor) for part, tensor in self.held], timeout=SECONDS)
        return {"seconds": (nanoseconds() - started) / 1e9}

    def publish(self, job: str, step: int, changed: bool = False) -> Answer:
        """Changes the weights, if they are not ``changed`` yet, and publishes them."""
        if not changed:
            self.change(step)
        started = nanoseconds()
        self._publication = self._writers[job].publish(step, timeout=SECONDS)
        return {"started": started, "ended": nanoseconds(), "mode": self._publication.mode}

    def captured(self) -> Answer:
        if self._publication is not None:
            self._publication.captured(timeout=SECONDS)
        return {}

    def park(self, job: str) -> Answer:
        """As much state as there are weights; it is made before the first time."""
        if not self._state:
            self._state = self.device.private({part.key: part.shape for part, _ in self.held})
            for at, tensor in enumerate(self._state.values()):
                tensor.fill_(at % STATES)
        self.device.synchronize()
        started = nanoseconds()
        self._writers[job].park("state", self._state, timeout=SECONDS)
        return {"started": started, "ended": nanoseconds()}

    def restore(self, job: str) -> Answer:
        """Brings it back, and looks whether it is what it was."""
        started = nanoseconds()
        self._writers[job].restore("state", timeout=SECONDS)
        ended = nanoseconds()
        wrong = sum(bool((tensor != at % STATES).any()) for at, tensor in enumerate(self._state.values()))
        return {"started": started, "ended": ended, "wrong": wrong}

    def discard(self) -> Answer:
        """Lets go of the state."""
        self._state = {}
        return {}

    def close(self) -> Answer:
        self._publication = None
        self._state = {}
        while self._writers:
            _, writer = self._writers.popitem()
            with contextlib.closing(writer):
                if writer.rank == 0:
                    writer.close_job()
        return {}


class ReaderSide(Target):
    """An engine's process."""

    names = (*Target.names, "open", "update", "state")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._readers: dict[str, WorkerWeightsReader] = {}

    def open(
        self,
        job: str,
        socket: str,
        verify: str,
        mode: str,
        rank: int = 0,
        world_size: int = 1,
        **ways: Any,
    ) -> Answer:
        started = nanoseconds()
        reader = self._readers[job] = WorkerWeightsReader(
            job, "bench", rank, world_size, socket, mode=mode, verify=verify, timeout=SECONDS, **ways
        )
        reader.register([part.shard(tensor) for part, tensor in self.held], timeout=SECONDS)
        return {"seconds": (nanoseconds() - started) / 1e9}

    def update(self, job: str, step: int | None, *, staged: bool = False, fails: bool = False) -> Iterator[Answer]:
        """Says that it is about to wait, then what came.

        Args:
            staged: the version is leased before it says so: a newer one does not end it.
            fails: an error of awexd's is an answer too.
        """
        reader = self._readers[job]
        ready = reader.stage(step, timeout=SECONDS) if staged else None
        yield {}
        started = nanoseconds()
        try:
            result = reader.update(step, timeout=SECONDS) if ready is None else reader.apply(ready, timeout=SECONDS)
        except AwexdError as error:
            if not fails:
                raise
            yield {"failed": f"{type(error).__name__}: {error}"}
            return
        ended = nanoseconds()
        yield {"started": started, "ended": ended, "pause": result.pause_seconds, "mode": result.mode}

    def state(self, job: str) -> Answer:
        reader = self._readers[job]
        return {"state": reader.state, "version": reader.version}

    def close(self) -> Answer:
        while self._readers:
            self._readers.popitem()[1].close()
        return {}


def main(sides: Mapping[str, type[GpuSide]]) -> None:
    role, described, *_, link = sys.argv[1:]
    side = sides[role](device_of(json.loads(described)))
    try:
        serve(int(link), side.operations())
    finally:
        # The benchmark may have been killed: its jobs go all the same.
        with contextlib.suppress(Exception):
            side.close()


if __name__ == "__main__":
    main({"writer": WriterSide, "reader": ReaderSide})
