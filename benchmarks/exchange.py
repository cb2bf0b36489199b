"""Exchanges of ``transport="nccl"`` between 2 to 9 processes' host memory: right bits, and nobody left waiting.

``gloo-N`` (over the sockets that have taken gloo's place): tensors with wrong bits, and processes that had no answer
within their deadline, in all. N processes hand over tensors of every kind, cut every way (those of the tests). Then a
trainer's and an engine's process each is killed in the middle of a step, and replaced, and each is frozen, and goes on
later; after each of these the next step must be right for all. ``more``: the deadline of such a step, seconds until the
last one had its answer, and milliseconds of a hand-over that goes well. With ``--write`` the figures go to
``benchmarks/results/nodes.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "transports")]

from awexd.bench.figures import Bar, Figure, table, write
from tests.daemons import Daemon
from tests.e2e.exchange_node import FAULT, STANDS, UPDATE, Crew
from tests.e2e.workers.processes import Nursery, Process, RemoteError

CREWS = {2: (1, [1]), 3: (2, [1]), 4: (2, [2]), 5: (3, [2]), 6: (2, [4]), 7: (4, [3]), 8: (4, [4]), 9: (5, [1, 3])}
"""Ranks of the trainer, and workers of each engine, by the number of all."""
NAMES = [f"gloo-{count}" for count in CREWS]
RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"
DEADLINE = 4.0
GRACE = 3.0
"""Seconds beyond the deadline that an answer may take: the daemon gives its own up to two."""
BAR = Bar("value", "<=", 0)
FAULTS = [(role, number) for number in ("SIGKILL", "SIGSTOP") for role in ("writer", "worker")]


@dataclass
class Found:
    """Of one number of processes.

    Attributes:
        times: seconds of hand-overs that went well. ``freed``: of steps that did not, until the last answer.
    """

    wrong: int = 0
    stuck: int = 0
    times: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)


class Rounds:
    """Steps of one crew, good and bad ones."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.found = crew, Found()
        self._step = 0

    def good(self) -> None:
        """Every process must have it right, in time."""
        self._step += 1
        started = time.monotonic()
        self.crew.start(self._step)
        for worker in self.crew.workers:
            self._expect(worker)
        for writer in self.crew.writers:
            try:
                writer.finish()
            except (RemoteError, TimeoutError):
                self.found.stuck += 1
        self.found.times.append(time.monotonic() - started)

    def bad(self, role: str, number: str) -> None:
        """One process of that role gets that signal in the middle of a step."""
        self._step += 1
        crew, step = self.crew, self._step
        victim, call = (crew.writers[-1], "send") if role == "writer" else (crew.engines["e0"][0], "receive")
        victim.do(FAULT.format(call=call, after=2, signal=number))
        started = time.monotonic()
        crew.start(step, DEADLINE)
        others = [process for process in [*crew.writers, *crew.workers] if process is not victim]
        for process in others:
            self._freed(process, started)
        self.found.freed.append(time.monotonic() - started)
        for worker in crew.workers:
            if worker is not victim:
                self._check(worker)
        if number == "SIGSTOP":
            self._go_on(victim)
        else:
            self._replace(role)
        self._recover()

    def _expect(self, worker: Process) -> None:
        try:
            step, wrong, *_ = worker.finish()
        except (RemoteError, TimeoutError):
            self.found.stuck += 1
            return
        self.found.wrong += len(wrong) + (step != self._step)

    def _freed(self, process: Process, started: float) -> None:
        """With or without what it wanted: which it is, ``_check`` looks at."""
        with contextlib.suppress(RemoteError, TimeoutError):
            process.finish()
        self.found.stuck += time.monotonic() - started > DEADLINE + GRACE

    def _check(self, worker: Process) -> None:
        """A worker that says that it has a version has all of it, and only that."""
        state, version, _ = worker.do(STANDS.format(step=self._step))
        if state == "ready":
            self.found.wrong += len(worker.do(STANDS.format(step=version[1]))[2])

    def _go_on(self, victim: Process) -> None:
        victim.await_stop()
        victim.resume()
        with contextlib.suppress(RemoteError):
            victim.finish()

    def _replace(self, role: str) -> None:
        crew = self.crew
        if role == "writer":
            crew.writers[-1] = crew.fork()
            crew.writers[-1].do(crew.writer(len(crew.writers) - 1, len(crew.writers)))
        else:
            workers = crew.engines["e0"]
            workers[0] = crew.fork()
            workers[0].do(crew.reader("e0", 0, len(workers)))

    def _recover(self) -> None:
        """What is left of the bad step is taken back; a worker whose round was that one's is told so, once."""
        for writer in self.crew.writers:
            writer.do("if 'publication' in globals(): publication.withdraw()")
        for worker in self.crew.workers:
            with contextlib.suppress(RemoteError):
                worker.do(UPDATE.format(step=self._step + 1, seconds=0))


def figure(nursery: Nursery, count: int, rounds: int) -> Figure:
    """Of so many processes: ``rounds`` good steps, then each fault with a good step after it."""
    writers, engines = CREWS[count]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="awexd-b")))
        daemon = stack.enter_context(Daemon(folder))

        def fork() -> Process:
            process = nursery.fork()
            stack.callback(process.close)
            return process

        steps = Rounds(Crew(daemon, fork, writers, engines))
        for _ in range(rounds):
            steps.good()
        for role, number in FAULTS:
            steps.bad(role, number)
            steps.good()
        steps.crew.close()
    found = steps.found
    more = {
        "wrong": found.wrong,
        "stuck": found.stuck,
        "faults": len(FAULTS),
        "deadline_s": DEADLINE,
        "freed_s": max(found.freed),
        "hand_over_ms": statistics.median(found.times[:rounds]) * 1e3,
    }
    note = f"{writers} trainer ranks, engines of {' and '.join(map(str, engines))} workers"
    return Figure(f"gloo-{count}", found.wrong + found.stuck, "", bar=BAR, rounds=rounds, more=more, note=note)


def figures(rounds: int, counts: list[int]) -> Iterator[Figure]:
    nursery = Nursery()
    try:
        for count in counts:
            found = figure(nursery, count, rounds)
            print(f"{table([found])[1]}  {found.more}", flush=True)
            yield found
    finally:
        nursery.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="hand-overs that go well (default %(default)s)")
    parser.add_argument("--processes", type=int, choices=[*CREWS], action="append", help="only so many")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    found = list(figures(arguments.rounds, arguments.processes or [*CREWS]))
    if arguments.write:
        others = [one["name"] for one in json.loads(RESULTS.read_bytes())] if RESULTS.exists() else []
        write(RESULTS, found, f"python benchmarks/exchange.py --rounds {arguments.rounds}", keep=others)


if __name__ == "__main__":
    main()
