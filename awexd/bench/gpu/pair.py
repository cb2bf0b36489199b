"""A trainer's and an engine's processes on one GPU, and hand-overs between them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from awexd.bench.daemon import close_job
from awexd.bench.gpu.daemon_state import await_waiting
from awexd.bench.gpu.weights import Cut, Weights
from awexd.bench.link import Answer, Side, SideFailed

KEEP = 1
"""Versions held: two slots of a large set are what a node's memory has room for."""
WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides run.

    Attributes:
        device: see ``devices.device_of``.
        module: of the sides, run by ``python -m``.
        path: added to ``PYTHONPATH`` of the sides.
    """

    device: Sequence[str] = ("cuda",)
    module: str = "awexd.bench.gpu.sides"
    path: Path | None = None

    def side(self, role: str, *, fds: Sequence[int] = (), patience: float = 5.0, device: Sequence[str] = ()) -> Side:
        command = [sys.executable, "-m", self.module, role, json.dumps(device or self.device), *map(str, fds)]
        environ = None
        if self.path is not None:
            paths = [str(self.path), os.environ.get("PYTHONPATH", "")]
            environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return Side(f"the {role}", command, fds=fds, environ=environ, patience=patience)


@dataclass(slots=True)
class Rounds:
    """Seconds, a number a round.

    Attributes:
        total: from publish called to the last update done; where they do not overlap, the sum.
        publish, update: of each call; the slowest process's.
        limit, down, up: one flat copy within the device, from it, to it, of the bytes that one hand-over moves.
        beside: what else took turns, by name.
    """

    total: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)


class Job:
    """An open job. ``first``: seconds of each side's opening."""

    def __init__(self, pair: Pair, name: str, first: dict[str, float]) -> None:
        self.pair = pair
        self.name = name
        self.first = first

    def hand_over(self, step: int) -> tuple[float, float, float]:
        """Readers wait, then the writers publish. Seconds: all of it, of publish, of the slowest reader's pause."""
        for reader in self.pair.readers:
            reader.ask("update", job=self.name, step=step)  # it is about to wait
        if not await_waiting(self.pair.socket, self.name, len(self.pair.readers)):
            raise SideFailed(f"an engine does not wait for step {step}")
        published = self._publish(step)
        updated = [reader.answer("update") for reader in self.pair.readers]
        self.captured()
        started = min(one["started"] for one in published)
        return (
            (max(one["ended"] for one in updated) - started) / 1e9,
            (max(one["ended"] for one in published) - started) / 1e9,
            max(float(one["pause"]) for one in updated),
        )

    def publish(self, step: int) -> float:
        """Seconds."""
        published = self._publish(step)
        return seconds(published)

    def update(self, step: int) -> float:
        """Seconds, of a version that is there."""
        for reader in self.pair.readers:
            reader.ask("update", job=self.name, step=step)
        updated = [reader.answer("update") for reader in self.pair.readers]
        return seconds(updated)

    def captured(self) -> None:
        for writer in self.pair.writers:
            writer.tell("captured")
        for writer in self.pair.writers:
            writer.answer("captured")

    def check(self, step: int) -> None:
        """Raises where a reader does not hold what the writers published."""
        for reader in self.pair.readers:
            found = reader.ask("check", step=step)
            if found["count"]:
                raise SideFailed(f"after step {step} {found['count']} tensors hold other bytes: {found['wrong']}")

    def _publish(self, step: int) -> list[Answer]:
        for writer in self.pair.writers:
            writer.tell("publish", job=self.name, step=step)
        return [writer.answer("publish") for writer in self.pair.writers]


class Pair:
    """Trainer's processes and engine's. Use ``pair``, which ends them."""

    def __init__(self, writers: Sequence[Side], readers: Sequence[Side], socket: str) -> None:
        self.writers = list(writers)
        self.readers = list(readers)
        self.socket = socket

    @property
    def writer(self) -> Side:
        return self.writers[0]

    @property
    def reader(self) -> Side:
        return self.readers[0]

    @property
    def sides(self) -> list[Side]:
        return [*self.writers, *self.readers]

    def prepare(self, weights: Weights, cut: Cut = WHOLE) -> None:
        """Every process's tensors. Several writers hold rows, several readers columns; one reader is cut as asked."""
        for sides, dim in ((self.writers, 0), (self.readers, 1)):
            several = len(sides) > 1
            for at, side in enumerate(sides):
                own = Cut(dim, len(sides), at) if several else (cut if sides is self.readers else WHOLE)
                side.tell("prepare", weights=asdict(weights), cut=asdict(own))
        for side in self.sides:
            side.answer("prepare")

    @contextlib.contextmanager
    def job(
        self,
        name: str,
        weights: Weights,
        *,
        mode: str,
        transport: str = "auto",
        verify: str = "off",
        cut: Cut = WHOLE,
        ring_bytes: int | None = None,
    ) -> Iterator[Job]:
        """A job of its own while the block runs."""
        job = f"bench-{os.getpid()}-{name}"
        self.prepare(weights, cut)
        ways: dict[str, Any] = {"mode": mode, "transport": transport, "verify": verify}
        if ring_bytes is not None:
            ways["ring_bytes"] = ring_bytes
        given: dict[str, Any] = {"job": job, "socket": self.socket, **ways}
        try:
            first = {"writer": self._open(self.writers, **given, keep=KEEP)}
            first["reader"] = self._open(self.readers, **given)
            yield Job(self, job, first)
            for side in (*self.readers, *reversed(self.writers)):
                side.ask("close")
        except BaseException:
            close_job(self.socket, job)
            raise

    def _open(self, sides: Sequence[Side], **given: Any) -> float:
        for rank, side in enumerate(sides):
            side.tell("open", **given, rank=rank, world_size=len(sides))
        return max(float(side.answer("open")["seconds"]) for side in sides)


def seconds(answers: Sequence[Answer]) -> float:
    """From the first one's beginning to the last one's end."""
    nanoseconds: int = max(one["ended"] for one in answers) - min(one["started"] for one in answers)
    return nanoseconds / 1e9


@contextlib.contextmanager
def pair(
    place: Place,
    socket: str,
    *,
    count: int = 1,
    fds: Sequence[Sequence[int]] = ((), ()),
    devices: Sequence[Sequence[Sequence[str]]] = ((), ()),
) -> Iterator[Pair]:
    """``count`` processes of each kind.

    Args:
        fds: descriptors for the writers' and the readers'.
        devices: of each of the writers and of the readers, instead of the place's.
    """
    with contextlib.ExitStack() as stack:
        writers, readers = (
            [stack.enter_context(place.side(role, fds=passed, device=own)) for own in on or [place.device] * count]
            for role, passed, on in zip(("writer", "reader"), fds, devices, strict=True)
        )
        yield Pair(writers, readers, socket)
