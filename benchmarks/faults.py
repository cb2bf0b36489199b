"""Faults in a cluster of real processes: what they cost whoever uses it.

``fault-rounds-nodes``: every daemon, trainer, engine and the MetaServer is killed (SIGKILL) and frozen (SIGSTOP) while
a version is published, while it is fetched and while engines take it; links are cut, and made to lose 30% of what they
carry and to deliver the rest 200 ms late. A round is one fault in the middle of one step, and the step after it. The
value counts rounds that were torn (a worker has other bytes than it says), lost (a committed version has gone, or what
follows does not come) or hung (a deadline passed). ``join-leave``: in each round one engine joins and another is killed
while a version is on its way; the value counts rounds in which the trainer or the engine that stays fails or is late.

Each host is a network namespace where this may make them (root), else all share the loopback interface and no link is
harmed. Weights are checked in every element. It runs the tests' clusters, and so needs pytest (``make test`` has it).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client"), str(ROOT / "transports")]

import pytest

from awexd.bench.figures import Bar, Figure, names, table, write
from tests.e2e.workers.processes import Nursery, Process, RemoteError
from tests.nodes.clusters import Cluster, held, lasting, until
from tests.nodes.large import PUBLISH, UPDATE, on_its_way, reader_on, writer_on
from tests.peers.hosts import HARMS, Hosts, may

RESULTS = ROOT / "benchmarks" / "results" / "nodes.json"
ELEMENTS = 12 << 20
"""Of the larger tensor, 4 bytes each: a version is caught on its way, and a round takes a second or two."""
TTL = 4.0
FROZEN = (0.5, 7.0)
"""Seconds: shorter and longer than those after which a peer that says nothing is given up."""
PHASES = ("publish", "fetch", "update")
VICTIMS = ("trainer's daemon", "engine's daemon", "trainer", "engine", "MetaServer")
LINKS = ("trainer's link", "engine's link", "MetaServer's link")
JOINS = 20
LATE_SECONDS = 10.0
"""A step of whoever has nothing to do with a fault takes a second."""
BARS = {"fault-rounds-nodes": Bar("value", "<=", 0.0), "join-leave": Bar("value", "<=", 0.0)}
ALLOWED = ("DeadlineExceeded", "VersionUnavailable", "DaemonUnavailable")
"""What an update that a fault has broken off may say."""
FAILURES = (Exception, pytest.fail.Exception)


class Wrong(Exception):
    """A round that is ``torn`` or ``lost``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Tally:
    """Rounds that went wrong, by kind, and what each said; seconds of the rounds that did not."""

    wrong: dict[str, list[str]] = field(default_factory=lambda: {"torn": [], "lost": [], "hung": []})
    caught: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, round_: str, error: BaseException) -> None:
        late = isinstance(error, TimeoutError) or "DeadlineExceeded" in str(error)
        kind = error.kind if isinstance(error, Wrong) else "hung" if late else "lost"
        self.wrong[kind].append(f"{round_}: {error}")
        print(f"{kind}: {round_}: {error!r}", file=sys.stderr)

    @property
    def count(self) -> int:
        return sum(map(len, self.wrong.values()))


class Fleet:
    """A trainer on one host, an engine on each of two others, and the MetaServer on the last of them."""

    def __init__(self, folder: Path, nursery: Nursery, hosts: Hosts | None) -> None:
        self.hosts = hosts
        self._nursery = nursery
        self._processes: list[Process] = []
        self.cluster = _cluster(folder, hosts)
        self.step = 0

    def __enter__(self) -> Fleet:
        self.cluster.__enter__()
        for number in range(3):
            wrapper, host, more = ((), "127.0.0.1", ()) if self.hosts is None else self._place(number)
            self.cluster.add(f"n{number}", *more, wrapper=wrapper, host=host)
        self.trainer = writer_on(self.cluster["n0"], self.fork(), ELEMENTS)
        self.engines = {name: reader_on(self.cluster[name], self.fork(), name, ELEMENTS) for name in ("n1", "n2")}
        for _ in range(3):  # until there are all slots
            self.go_on()
        return self

    def _place(self, number: int) -> tuple[Any, str, tuple[str, ...]]:
        assert self.hosts is not None
        more = ("--token-file", str(self.cluster.folder / "tokens"))
        return self.hosts.wrapper(number), self.hosts.addresses[number], more

    def __exit__(self, *failure: Any) -> None:
        for process in self._processes:
            process.close()
        self.cluster.__exit__(*failure)

    def fork(self) -> Process:
        self._processes.append(self._nursery.fork())
        return self._processes[-1]

    def go_on(self) -> None:
        """One more step, which all must get."""
        self.step += 1
        self.trainer.do(PUBLISH.format(step=self.step))
        for engine in self.engines.values():
            engine.start(UPDATE.format(step=self.step))
        for name, engine in self.engines.items():
            found = engine.finish()
            if found != [self.step, [self.step]]:
                raise Wrong("torn", f"the engine on {name} says {found} of step {self.step}")

    # one fault

    def suffer(self, victim: str, phase: str, fault: str, moment: float, seconds: float) -> bool:
        """One step with a fault in its middle; whether it was met in its phase."""
        self.step += 1
        before = {name: held(self.cluster[name], "j")[0] for name in ("n0", "n1")}
        for engine in self.engines.values():
            engine.start(UPDATE.format(step=self.step))
        self.trainer.start(PUBLISH.format(step=self.step))
        met = self._reach(phase)
        lasting(moment)
        self._strike(victim, fault, seconds)
        for name, key in before.items():
            newest = max(held(self.cluster[name], "j"), default=[0, 0])
            if newest < key:
                raise Wrong("lost", f"{name} had {key} before and has {newest} now")
        self._settle_trainer(killed=victim == "trainer" and fault == "kill")
        for name in self.engines:
            self._settle_engine(name, killed=victim == "engine" and name == "n1" and fault == "kill")
        return met

    def _reach(self, phase: str) -> bool:
        if phase == "publish":
            return True
        coming = on_its_way(self.cluster["n1"], self.step)
        if phase == "fetch":
            return coming
        until(self.cluster["n1"], lambda _: [1, self.step] in held(self.cluster["n1"], "j"))
        return True

    def _strike(self, victim: str, fault: str, seconds: float) -> None:
        if victim in LINKS:
            assert self.hosts is not None
            with self.hosts.harmed(LINKS.index(victim), fault):
                lasting(seconds)
            return
        servers = {
            "trainer's daemon": self.cluster["n0"],
            "engine's daemon": self.cluster["n1"],
            "MetaServer": self.cluster.server,
        }
        clients = {"trainer": self.trainer, "engine": self.engines["n1"]}
        if fault == "freeze":
            pid = (servers | clients)[victim].pid
            os.kill(pid, signal.SIGSTOP)
            lasting(seconds)
            os.kill(pid, signal.SIGCONT)
        elif victim in clients:
            clients[victim].kill()
        else:
            servers[victim].kill()
            servers[victim].start()

    def _settle_trainer(self, killed: bool) -> None:
        if not killed:
            self.trainer.finish()
            return
        self.trainer = writer_on(self.cluster["n0"], self.fork(), ELEMENTS)
        if [1, self.step] not in held(self.cluster["n0"], "j"):  # who waits for it would do so in vain
            self.trainer.do(PUBLISH.format(step=self.step))

    def _settle_engine(self, name: str, killed: bool) -> None:
        if killed:
            self.engines[name] = reader_on(self.cluster[name], self.fork(), name, ELEMENTS)
            return
        engine = self.engines[name]
        try:
            found = engine.finish()
        except RemoteError as error:
            if error.kind not in ALLOWED:
                raise
            state, version, seen = engine.do(
                "result = [reader.state, reader.version and list(reader.version)[1], seen()]"
            )
            if state != "dirty" and seen != [version]:
                raise Wrong("torn", f"the engine on {name} is {state} at {version} and has {seen}") from error
        else:
            if found != [self.step, [self.step]]:
                raise Wrong("torn", f"the engine on {name} says {found} of step {self.step}")


def _cluster(folder: Path, hosts: Hosts | None) -> Cluster:
    made = Cluster(folder, ttl=TTL)
    if hosts is not None:  # beyond loopback the MetaServer wants tokens
        tokens = folder / "tokens"
        tokens.touch(0o600)
        tokens.write_text("node a-token-of-the-benchmark\n")
        command = [*hosts.wrapper(2), *made.server.command, "--host", hosts.addresses[2], "--token-file", str(tokens)]
        made.server.command = command
    return made


@contextlib.contextmanager
def fleet(nursery: Nursery, apart: bool) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="awexd-f", dir="/tmp")))
        hosts = stack.enter_context(Hosts(3)) if apart else None
        yield stack.enter_context(Fleet(folder, nursery, hosts))


Work = Callable[[Fleet], None]


def run(nursery: Nursery, apart: bool, work: list[tuple[str, Work]]) -> Tally:
    """All of it; what goes wrong is counted, and the rest goes on with a cluster of its own."""
    tally, left = Tally(), list(work)
    while left:
        name = "the beginning"
        try:
            with fleet(nursery, apart) as made:
                while left:
                    name, one = left.pop(0)
                    began = time.monotonic()
                    one(made)
                    tally.seconds.append(time.monotonic() - began)
                name = "the end"
        except FAILURES as error:
            tally.add(name, error)
            if name == "the beginning":
                tally.wrong["hung"] += [f"{other}: not begun" for other, _ in left]
                break
    return tally


def fault_rounds(nursery: Nursery, apart: bool, only: int | None) -> Figure:
    choose = random.Random(7)
    kinds = [(victim, fault) for victim in VICTIMS for fault in ("kill", "freeze")]
    if apart:
        kinds += [(link, fault) for link in LINKS[:2] for fault in HARMS]
    caught = list[bool]()
    work = list[tuple[str, Work]]()
    for number, (phase, (victim, fault)) in enumerate((phase, kind) for kind in kinds for phase in PHASES):
        moment, seconds = choose.random() * 0.05, FROZEN[number % 2] if fault != "loss" else 2.0

        def one(made: Fleet, given: Any = (victim, phase, fault, moment, seconds)) -> None:
            caught.append(made.suffer(*given))
            made.go_on()

        work.append((f"{fault}, {victim}, {phase}", one))
    work = work[:: max(1, len(work) // only)][:only] if only else work
    tally = run(nursery, apart, work)
    return Figure(
        "fault-rounds-nodes",
        float(tally.count),
        "rounds",
        bar=BARS["fault-rounds-nodes"],
        rounds=len(work),
        note=_places(apart),
        more={kind: len(texts) for kind, texts in tally.wrong.items()}
        | {"failures": [text[:300] for texts in tally.wrong.values() for text in texts]}
        | {"met_in_phase": sum(caught), "median_seconds": statistics.median(tally.seconds or [0.0])},
    )


def join_leave(nursery: Nursery, apart: bool, rounds: int) -> Figure:
    calm, disturbed, caught = list[float](), list[float](), list[bool]()

    def alone(made: Fleet) -> None:
        for _ in range(5):
            calm.append(_stays(made, lambda step: None))

    def one(made: Fleet) -> None:
        leaves, joined = made.engines.pop("n2"), list[Process]()

        def disturb(step: int) -> None:
            leaves.start(UPDATE.format(step=step))
            caught.append(on_its_way(made.cluster["n1"], step))
            leaves.kill()
            joined.append(reader_on(made.cluster["n2"], made.fork(), f"joins-{step}", ELEMENTS))

        disturbed.append(_stays(made, disturb))
        made.engines["n2"] = joined[0]
        state = joined[0].do(UPDATE.format(step=made.step) + "\nresult.append(reader.state)")
        if state != [made.step, [made.step], "ready"]:
            raise Wrong("torn", f"the engine that joined says {state} of step {made.step}")

    tally = run(nursery, apart, [("alone", alone), *((f"round {number}", one) for number in range(rounds))])
    return Figure(
        "join-leave",
        float(tally.count),
        "rounds",
        bar=BARS["join-leave"],
        rounds=rounds,
        note=f"the trainer or the engine that stays fails, or takes {LATE_SECONDS:g} s; {_places(apart)}",
        more={"failures": [text[:300] for texts in tally.wrong.values() for text in texts]}
        | {"met_on_its_way": sum(caught)}
        | {
            "calm_seconds": statistics.median(calm or [0.0]),
            "disturbed_seconds": statistics.median(disturbed or [0.0]),
        },
    )


def _stays(made: Fleet, disturb: Callable[[int], None]) -> float:
    """Seconds from a publication until the engine that stays has it."""
    made.step += 1
    stays = made.engines["n1"]
    began = time.monotonic()
    stays.start(UPDATE.format(step=made.step) + "\nimport time; result.append(time.monotonic())")
    made.trainer.start(PUBLISH.format(step=made.step))
    disturb(made.step)
    made.trainer.finish()
    step, seen, ended = stays.finish()
    if [step, seen] != [made.step, [made.step]]:
        raise Wrong("torn", f"the engine that stays says {[step, seen]} of step {made.step}")
    if ended - began > LATE_SECONDS:
        raise Wrong("hung", f"the engine that stays took {ended - began:.1f} s for step {made.step}")
    return float(ended - began)


def _places(apart: bool) -> str:
    if not apart:
        return "three daemons on loopback; links need root"
    return f"three hosts (network namespaces joined by veth), {ELEMENTS * 4 >> 20} MiB a version"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="so many rounds only, spread over all kinds")
    parser.add_argument("--joins", type=int, default=JOINS)
    parser.add_argument("--only", choices=list(BARS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    apart = may()
    with contextlib.closing(Nursery()) as nursery:
        measure = {
            "fault-rounds-nodes": lambda: fault_rounds(nursery, apart, arguments.faults),
            "join-leave": lambda: join_leave(nursery, apart, arguments.joins),
        }
        figures = [one() for name, one in measure.items() if arguments.only in (None, name)]
    print("\n".join(table(figures)))
    for figure in figures:
        print(figure.name, figure.more)
    if arguments.write:
        write(RESULTS, figures, "python benchmarks/faults.py", keep=names(RESULTS))
    sys.exit(any(figure.value for figure in figures))


if __name__ == "__main__":
    main()
