"""Exchanges between 2 to 9 processes' host memory: are all bits right, and is everybody freed when one dies or freezes?

``gloo-N``: wrong tensors, and processes that had no answer within their deadline, in all. N processes hand over small
tensors of every kind, cut every way (those of the tests), then one of each role is killed and one frozen in the middle
of a step, and is replaced or goes on. ``more``: seconds from the beginning of such a step, whose deadline is
``deadline_s``, to the last one freed; milliseconds of a hand-over that goes well. With ``--write`` the figures go to
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
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.figures import Bar, Figure, table, write
from tests.daemons import Daemon
from tests.e2e.exchange_node import FAULT, Crew
from tests.e2e.workers.processes import Nursery, Process, RemoteError

CREWS = {2: (1, [1]), 3: (2, [1]), 4: (2, [2]), 5: (3, [2]), 6: (2, [4]), 7: (4, [3]), 8: (4, [4]), 9: (5, [1, 3])}
RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"
DEADLINE = 4.0
GRACE = 3.0
"""Seconds after the deadline in which an answer still comes in time: a daemon's answer to it may take 2."""
BAR = Bar("value", "<=", 0)


@dataclass
class Found:
    wrong: int = 0
    stuck: int = 0
    times: list[float] = field(default_factory=list)
    freed: list[float] = field(default_factory=list)


def hand_over(crew: Crew, step: int, found: Found) -> None:
    started = time.monotonic()
    crew.start(step)
    for worker in crew.workers:
        _, wrong, *_ = worker.finish()
        found.wrong += len(wrong)
    for writer in crew.writers:
        writer.finish()
    found.times.append(time.monotonic() - started)


def break_off(crew: Crew, victim: Process, call: str, number: str, step: int, found: Found) -> None:
    victim.do(FAULT.format(call=call, after=2, signal=number))
    started = time.monotonic()
    crew.start(step, DEADLINE)
    for process in [*crew.writers, *crew.workers]:
        if process is not victim:
            with contextlib.suppress(RemoteError):
                process.finish()
    found.freed.append(time.monotonic() - started)
    if found.freed[-1] > DEADLINE + GRACE:
        found.stuck += 1


def replace(crew: Crew, role: str) -> None:
    """A new process in the place of the killed one."""
    if role == "writer":
        crew.writers[-1] = crew.fork()
        crew.writers[-1].do(crew.writer(len(crew.writers) - 1, len(crew.writers)))
    else:
        workers = crew.engines["e0"]
        workers[0] = crew.fork()
        workers[0].do(crew.reader("e0", 0, len(workers)))


def figure(nursery: Nursery, count: int, rounds: int) -> Figure:
    writers, engines = CREWS[count]
    found, step = Found(), 0
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="awexd-b")))))

        def fork() -> Process:
            process = nursery.fork()
            stack.callback(process.close)
            return process

        crew = Crew(daemon, fork, writers, engines)
        for _ in range(rounds):
            step += 1
            hand_over(crew, step, found)
        for role, call in (("writer", "send"), ("worker", "receive")):
            for number in ("SIGKILL", "SIGSTOP"):
                step += 1
                victim = crew.writers[-1] if role == "writer" else crew.engines["e0"][0]
                break_off(crew, victim, call, number, step, found)
                if number == "SIGSTOP":
                    victim.resume()
                    with contextlib.suppress(RemoteError):
                        victim.finish()
                else:
                    replace(crew, role)
                for writer in crew.writers:
                    writer.do("if 'publication' in globals(): publication.withdraw()")
                step += 1
                crew.recover(step)
                step += 1
                hand_over(crew, step, found)
    more = {
        "wrong": found.wrong,
        "stuck": found.stuck,
        "deadline_s": DEADLINE,
        "freed_s": max(found.freed),
        "hand_over_ms": statistics.median(found.times) * 1e3,
    }
    note = f"{writers} trainer ranks, engines of {' and '.join(map(str, engines))} workers"
    return Figure(f"gloo-{count}", found.wrong + found.stuck, "", bar=BAR, rounds=rounds, more=more, note=note)


def figures(nursery: Nursery, rounds: int) -> Iterator[Figure]:
    for count in CREWS:
        found = figure(nursery, count, rounds)
        print(f"{table([found])[1]}  {found.more}", flush=True)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=20, help="hand-overs that go well, a figure (default %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    nursery = Nursery()
    try:
        found = list(figures(nursery, arguments.rounds))
    finally:
        nursery.close()
    if arguments.write:
        others = [one["name"] for one in json.loads(RESULTS.read_bytes())] if RESULTS.exists() else []
        write(RESULTS, found, f"python benchmarks/gloo.py --rounds {arguments.rounds}", keep=others)


if __name__ == "__main__":
    main()
