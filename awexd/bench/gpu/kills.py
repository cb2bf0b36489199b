"""``kill-rounds``: a trainer's or an engine's process is killed at a random moment of a hand-over, again and again.

The one that is left must not claim weights that it has not, nothing may stay in the daemon, and once the other is
replaced the next hand-over must be right. Every element changes with each step, so that a torn set shows.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from awexd.bench.daemon import close_job
from awexd.bench.figures import Figure
from awexd.bench.gpu.daemon_state import SETTLE_SECONDS, InUse, in_use, settled
from awexd.bench.gpu.measure import BARS
from awexd.bench.gpu.pair import KEEP, WHOLE, Job, Pair, Place
from awexd.bench.gpu.weights import Weights
from awexd.bench.link import Answer, Side, SideFailed

MODES = ("direct", "host")
AHEAD = min(10, os.cpu_count() or 1)
"""Processes that start before they are needed, at most: each takes seconds to import torch."""
USUAL_ROUNDS = 3
MANY_LEAKS = 3
"""From then on it is not waited for what may still go."""
BEYOND = 1.2
"""Kills come up to this many times the usual duration after the beginning."""


@dataclass(slots=True)
class Counts:
    """What was seen. ``torn``: weights reported as loaded that are no version's. ``cut``: kills amid the hand-over."""

    rounds: int = 0
    torn: int = 0
    leaks: int = 0
    wrong: int = 0
    cut: int = 0

    @property
    def faults(self) -> int:
        return self.torn + self.leaks + self.wrong


class Killing:
    """Rounds of one pair whose members are replaced."""

    def __init__(
        self, place: Place, socket: str, weights: Weights, victims: Sequence[str], stack: contextlib.ExitStack
    ):
        self._place, self._socket, self._weights, self._stack = place, socket, weights, stack
        self._upcoming = deque(victims)
        self._spares: deque[tuple[str, Side]] = deque()
        self._pair = Pair([self._started("writer")], [self._started("reader")], socket)
        for side in self._pair.sides:
            side.answer("prepare")
        self._start_ahead()
        self._random = random.Random(len(victims))
        self._step = 0
        self.counts = Counts()
        self.leaked: list[str] = []

    def rounds(self, mode: str, victims: Sequence[str]) -> None:
        """One job, whose rounds have these victims."""
        name = f"bench-{os.getpid()}-kills-{mode}"
        job = Job(self._pair, name, {})
        try:
            for role, side in zip(("writer", "reader"), self._pair.sides, strict=True):
                side.ask("open", **self._given(name, mode, role))
            usual = self._usual(job, mode)
            before = in_use(self._socket)
            for victim in victims:
                before = self._round(job, mode, victim, usual, before)
            for side in (self._pair.reader, self._pair.writer):
                side.ask("close")
        except BaseException:
            close_job(self._socket, name)
            raise

    def _round(self, job: Job, mode: str, victim: str, usual: float, before: InUse) -> InUse:
        """What the daemon has in use after it; ``before``: what it had."""
        pair, self.counts.rounds = self._pair, self.counts.rounds + 1
        self._step += 1
        step = self._step
        pair.writer.ask("change", step=step)
        pair.reader.ask("update", job=job.name, step=step, fails=True)  # it is about to wait
        pair.writer.tell("publish", job=job.name, step=step, changed=True)
        select.select([], [], [], self._random.uniform(0, BEYOND * usual))
        side = pair.writer if victim == "writer" else pair.reader
        side.kill()
        if victim == "writer":
            published = _said(pair.writer, "publish")
            self._replace(victim, job, mode)
            self._publish_next(job)
            updated = pair.reader.answer("update")
            self.counts.cut += published is None or "failed" in updated
            self._look_for_torn(job.name)
            job.update(self._step)
        else:
            pair.writer.answer("publish")
            self.counts.cut += _said(pair.reader, "update") is None
            self._replace(victim, job, mode)
            job.update(step)
        self._check(job, self._step)
        job.captured()
        self._step += 1
        job.hand_over(self._step)
        self._check(job, self._step)
        seconds = SETTLE_SECONDS if self.counts.leaks < MANY_LEAKS else 0.0
        found = settled(self._socket, lambda now: now == before, seconds)
        if found != before:
            self.counts.leaks += 1
            left = (f"{key} {before[key]} -> {count}" for key, count in found.items() if count != before[key])
            self.leaked.append(", ".join(left))
        return found

    def _publish_next(self, job: Job) -> None:
        self._step += 1
        job.pair.writer.ask("publish", job=job.name, step=self._step)

    def _look_for_torn(self, name: str) -> None:
        """A reader that says it is ready has every element of the version that it names."""
        told = self._pair.reader.ask("state", job=name)
        if told["state"] == "ready":
            self.counts.torn += self._pair.reader.ask("check", step=told["version"][1])["count"] > 0

    def _check(self, job: Job, step: int) -> None:
        told = self._pair.reader.ask("state", job=job.name)
        right = told["state"] == "ready" and told["version"][1] == step
        self.counts.wrong += not right or self._pair.reader.ask("check", step=step)["count"] > 0

    def _replace(self, role: str, job: Job, mode: str) -> None:
        sessions = in_use(self._socket)["sessions"]
        role_, side = self._spares.popleft()
        if role_ != role:
            raise SideFailed(f"a {role_} is ready where a {role} is needed")
        side.answer("prepare")
        self._start_ahead()
        settled(self._socket, lambda now: now["sessions"] < sessions or now["sessions"] <= 2)
        (self._pair.writers if role == "writer" else self._pair.readers)[0] = side
        side.ask("open", **self._given(job.name, mode, role))

    def _usual(self, job: Job, mode: str) -> float:
        """Seconds of a hand-over that nobody disturbs."""
        found = []
        for _ in range(USUAL_ROUNDS + KEEP + 1):
            self._step += 1
            found.append(job.hand_over(self._step)[0])
        return min(found)

    def _started(self, role: str) -> Side:
        side = self._stack.enter_context(self._place.side(role))
        side.tell("prepare", weights=asdict(self._weights), cut=asdict(WHOLE))
        return side

    def _start_ahead(self) -> None:
        while self._upcoming and len(self._spares) < AHEAD:
            role = self._upcoming.popleft()
            self._spares.append((role, self._started(role)))

    def _given(self, name: str, mode: str, role: str) -> Answer:
        given = {"job": name, "socket": self._socket, "verify": "off", "mode": mode}
        return given | ({"keep": KEEP} if role == "writer" else {})


def kill_rounds(place: Place, socket: str, weights: Weights, rounds: int) -> Figure:
    """Half of the rounds with lent versions, half through host memory; the victims take turns."""
    victims = [("writer", "reader")[at % 2] for at in range(rounds)]
    half = (rounds + 1) // 2
    with contextlib.ExitStack() as stack:
        killing = Killing(place, socket, weights, victims, stack)
        killing.rounds(MODES[0], victims[:half])
        killing.rounds(MODES[1], victims[half:])
    counts = killing.counts
    note = (
        f"kill -9 of a trainer and of an engine in turn, {weights.nbytes / 1e9:.2f} GB, the first {half} lent, then "
        "through host memory; value: torn sets reported as loaded, rounds that left something in the daemon, wrong "
        "next hand-overs"
    )
    if killing.leaked:
        note += f"; left: {killing.leaked[0]}"
    more = asdict(counts)
    rounds = more.pop("rounds")
    return Figure("kill-rounds", counts.faults, "faults", bar=BARS["kill-rounds"], rounds=rounds, more=more, note=note)


def _said(side: Side, operation: str) -> Answer | None:
    """What a killed process had answered, if it had."""
    try:
        return side.answer(operation)
    except SideFailed:
        return None
