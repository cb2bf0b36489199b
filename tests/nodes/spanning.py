"""Engines whose workers are on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.daemons import Daemon
from tests.e2e.test_resharding import OPEN_READER
from tests.e2e.workers.processes import Process, together
from tests.nodes.clusters import Side


class Spread(Side):
    """An engine of as many workers as there are processes, each connected to the daemon beside it."""

    def __init__(
        self, processes: Sequence[Process], daemons: Sequence[Daemon], engine: str = "e", job: str = "j", **given: Any
    ) -> None:
        self.processes, self.daemon = list(processes), daemons[0]
        self.given = {"job": job, "engine": engine, "verify": "checksum", "size": len(processes), **given}
        sources = [
            OPEN_READER.format(rank=rank, socket=daemon.socket, **self.given) for rank, daemon in enumerate(daemons)
        ]
        together(processes, sources)

    def replace(self, rank: int, process: Process, daemon: Daemon) -> None:
        """Another process is that worker now."""
        self.processes[rank] = process
        process.do(OPEN_READER.format(rank=rank, socket=daemon.socket, **self.given))

    def update(self, step: int, value: int | None = None, epoch: int = 1) -> None:
        """To that step, and every bit is its."""
        value = step if value is None else value
        found = self.do(
            f"done = reader.update({step}, timeout=60)\nresult = [done.epoch, done.step, held.wrong({value})]"
        )
        assert found == [[epoch, step, []]] * len(self.processes)

    def versions(self) -> list[Any]:
        return self.do("result = [reader.state, reader.version]")
