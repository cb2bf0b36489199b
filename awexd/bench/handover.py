"""Hand-overs between two processes, each round next to two flat copies of the same bytes by the same processes."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from awexd.bench.daemon import close_job
from awexd.bench.figures import Bar, Figure, quartiles
from awexd.bench.limits import shared_memory, thread_counts
from awexd.bench.link import Side, SideFailed
from awexd.bench.weights import Weights

WARM_ROUNDS = 4
"""More than the slots of a job with ``KEEP``: each is written and read before anything is measured."""
KEEP = 2


@dataclass(slots=True)
class Rounds:
    """Seconds, a number a round.

    Attributes:
        total: from publish called to update done.
        publish, pause: the writer's call; the reader's pause.
        copies: the two flat copies, by thread count.
    """

    total: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    copies: dict[int, list[float]] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """The thread count whose copies were fastest."""
        return min(self.copies, key=lambda count: statistics.median(self.copies[count]))

    @property
    def limit(self) -> list[float]:
        return self.copies[self.threads]


class Pair:
    """A trainer's and an engine's process with ``nbytes`` of weights each. Use ``pair``, which ends them."""

    def __init__(self, writer: Side, reader: Side, socket: str) -> None:
        self.writer = writer
        self.reader = reader
        self.socket = socket

    @contextlib.contextmanager
    def job(self, name: str, weights: Weights, verify: str) -> Iterator[Callable[[int], tuple[float, float, float]]]:
        """A job of its own while the block runs; gives the function that hands over one step.

        That returns seconds: from publish called to update done, of publish, of the reader's pause.
        """
        job = f"bench-{os.getpid()}-{name}"
        described = asdict(weights)
        try:
            self.writer.ask("open", weights=described, job=job, socket=self.socket, verify=verify, keep=KEEP)
            self.reader.ask("open", weights=described, job=job, socket=self.socket, verify=verify)
            yield self._hand_over
            self.reader.ask("close")
            self.writer.ask("close")
        except BaseException:
            close_job(self.socket, job)
            raise

    def copy(self, nbytes: int, threads: int) -> float:
        """Seconds of the two flat copies."""
        sides = (self.writer, self.reader)
        return sum(float(side.ask("copy", nbytes=nbytes, threads=threads)["seconds"]) for side in sides)

    def check(self, step: int) -> None:
        """Raises where the reader does not hold what the writer published."""
        wrong = self.reader.ask("check", step=step)["wrong"]
        if wrong:
            raise SideFailed(f"after step {step} the reader holds other bytes than the writer: {wrong}")

    def _hand_over(self, step: int) -> tuple[float, float, float]:
        self.reader.ask("update", step=step)  # it is about to wait
        self.writer.tell("publish", step=step)
        published, updated = self.writer.answer("publish"), self.reader.answer("update")
        started = published["started"]
        return (updated["ended"] - started) / 1e9, (published["ended"] - started) / 1e9, float(updated["pause"])


@contextlib.contextmanager
def pair(socket: str, nbytes: int) -> Iterator[Pair]:
    """Two processes for hand-overs of up to ``nbytes``."""
    with contextlib.ExitStack() as stack:
        descriptor = stack.enter_context(shared_memory(nbytes))
        sides = [
            stack.enter_context(
                Side(
                    f"the {role}",
                    [sys.executable, "-m", "awexd.bench.sides", role, str(nbytes), str(descriptor)],
                    fds=[descriptor],
                )
            )
            for role in ("writer", "reader")
        ]
        yield Pair(sides[0], sides[1], socket)


def measure(pair: Pair, name: str, weights: Weights, verify: str, rounds: int) -> Rounds:
    """Hand-overs and flat copies in turn, after ``WARM_ROUNDS``; checks every byte of the first and the last."""
    found = Rounds(copies={count: [] for count in thread_counts()})
    with pair.job(name, weights, verify) as hand_over:
        for step in range(1, WARM_ROUNDS + 1):
            hand_over(step)
        pair.check(WARM_ROUNDS)
        for count in found.copies:
            pair.copy(weights.nbytes, count)
        for step in range(WARM_ROUNDS + 1, WARM_ROUNDS + 1 + rounds):
            total, publish, pause = hand_over(step)
            found.total.append(total)
            found.publish.append(publish)
            found.pause.append(pause)
            if step == WARM_ROUNDS + rounds:
                pair.check(step)
            for count, times in found.copies.items():
                times.append(pair.copy(weights.nbytes, count))
    return found


def tiny() -> Weights:
    """The smallest job of the project's figures, whose time is the control path's: 16 tensors of 8 KiB."""
    return Weights(16, 16 * 8192, 64)


def figure(name: str, rounds: Rounds, weights: Weights, bar: Bar | None, note: str | None = None) -> Figure:
    """Its ratio is the median over the rounds of hand-over to copies; quartiles and the ratio of minima beside it."""
    low, value, high = quartiles(rounds.total)
    ratio_low, ratio, ratio_high = quartiles([a / b for a, b in zip(rounds.total, rounds.limit, strict=True)])
    return Figure(
        name,
        value,
        "s",
        limit=statistics.median(rounds.limit),
        ratio=ratio,
        bar=bar,
        low=low,
        high=high,
        rounds=len(rounds.total),
        note=note,
        more={
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
            "ratio_of_minima": min(rounds.total) / min(rounds.limit),
            "limit_threads": rounds.threads,
            "publish": statistics.median(rounds.publish),
            "pause": statistics.median(rounds.pause),
            "bytes": weights.nbytes,
            "tensors": weights.tensors,
        },
    )
