"""Trainers and engines in processes of their own, whose memory is lent: what they run, and what the daemon says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.workers.processes import Process

Fork = Callable[[], Process]

SIDE = """
import torch
from awexd_client import Shard, WeightWriter, WorkerWeightsReader
from tests.devices import {driver}
gpu = {driver}({folder!r}, {uuids!r}, {refuse!r}).install()
result = None
"""
TRAINER = """
writer = WeightWriter("grpo", {rank}, {size}, {socket!r}, mode={mode!r}, verify={verify!r})
first = {rank} * {rows}
own = torch.arange({rows} * 6.0).view({rows}, 6) + 6 * first
live = gpu.tensors({{"a": own, "b": torch.ones(5, dtype=torch.int16)}})
def register(tensors):
    writer.register([
        Shard("a", tensors["a"], ({rows} * {size}, 6), (first, 0)),
        Shard("b", tensors["b"]),
    ])
register(live)
def publish(step):
    for tensor in live.values():
        tensor.add_(1000)
    return writer.publish(step, timeout=20)
"""
ENGINE = """
reader = WorkerWeightsReader("grpo", {engine!r}, {rank}, {size}, {socket!r}, mode={mode!r}, verify={verify!r})
half = 6 // {size}
into = gpu.tensors({{"a": torch.zeros({rows}, half), "b": torch.zeros(5, dtype=torch.int16)}})
reader.register([Shard("a", into["a"], ({rows}, 6), (0, {rank} * half)), Shard("b", into["b"])])
def told(result):
    assert (into["b"] % 1000 == 1).all(), into["b"]
    return [result.step, result.mode, result.transport, result.reason, into["a"].tolist()]
"""


def expected(steps: int, rows: int, columns: slice = slice(0, 6)) -> list[list[float]]:
    return [[6.0 * row + column + 1000 * steps for column in range(6)][columns] for row in range(rows)]


class Node:
    """Makes the processes of a test."""

    driver = "SharedMemoryDriver"

    def __init__(self, daemon: Daemon, fork: Fork, folder: Path) -> None:
        self.daemon, self.fork, self.folder = daemon, fork, folder

    def process(self, uuids: tuple[str, ...], refuse: tuple[str, ...]) -> Process:
        process = self.fork()
        process.do(SIDE.format(driver=self.driver, folder=str(self.folder), uuids=uuids, refuse=refuse))
        return process

    def trainer(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        rows: int = 4,
        mode: str = "direct",
        verify: str = "checksum",
        refuse: tuple[str, ...] = (),
        socket: str | None = None,
    ) -> Process:
        process = self.process(("GPU-0",), refuse)
        path = socket or self.daemon.socket
        source = TRAINER.format(rank=rank, size=size, rows=rows, mode=mode, verify=verify, socket=path)
        if size == 1:
            process.do(source)
        else:
            process.start(source)
        return process

    def engine(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        name: str = "e",
        rows: int = 4,
        mode: str = "auto",
        verify: str = "checksum",
        uuids: tuple[str, ...] = ("GPU-1", "GPU-0"),
        refuse: tuple[str, ...] = (),
        socket: str | None = None,
    ) -> Process:
        process = self.process(uuids, refuse)
        given = {"engine": name, "rank": rank, "size": size, "rows": rows, "mode": mode, "verify": verify}
        process.do(ENGINE.format(**given, socket=socket or self.daemon.socket))
        return process

    def job(self) -> dict[str, Any]:
        (job,) = self.daemon.ask("status")["jobs"]
        return dict(job)

    def await_engine_waits(self, name: str = "e") -> None:
        """Its workers have asked for a version that is not there yet."""
        until(self.daemon.socket, lambda _: self.waiting(name))

    def waiting(self, name: str) -> bool:
        engines = [engine for engine in self.job()["engines"] if engine["engine"] == name]
        return bool(engines) and all(worker["waiting"] for engine in engines for worker in engine["workers"])


UPDATE = "result = told(reader.update({}, timeout=20))"
PUBLISH = "publication = publish({}); result = [publication.mode, publication.reason]"
CAPTURED = "publication.captured(timeout=20)"
CREW = """
from awexd_client import WeightReader

class Crew:
    def stage(self, step, timeout): self.staged = reader.stage(step, timeout)
    def apply(self, epoch, step, timeout): reader.apply(self.staged, timeout)
    def abandon(self): pass
    def verify(self, checkpoint_dir, token, timeout): pass

instance = WeightReader("grpo", "e", Crew(), socket)
"""
