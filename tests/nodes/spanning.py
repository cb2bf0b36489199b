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


DRIVEN = """
from concurrent.futures import ThreadPoolExecutor
from awexd_client import WeightReader
from awexd_client.adapters.base import EngineWeights
engines, breaks = globals().setdefault("engines", {{}}), globals().setdefault("breaks", set())

def update(name, step):
    driver, helds, readers = engines[name]
    done = driver.update(step, timeout=60)
    wrong = [found for held in helds for found in held.wrong(step)]
    return [done.step, wrong, driver.state, list(driver.version)]

class Breaking:
    '''Its engine's own loading fails once when it is told to.'''

    name = "breaking"

    def matches(self, target):
        return False

    def shards(self, target):
        return target.shards

    def engine_weights(self, target):
        def load():
            if id(target) in breaks:
                breaks.discard(id(target))
                raise ValueError("it cannot load")
        return EngineWeights(target.shards, load=load)

def broken(name, step, rank):
    driver, helds, _ = engines[name]
    breaks.add(id(helds[rank]))
    try:
        driver.update(step, timeout=60)
    except Exception as error:
        return [type(error).__name__, str(error), driver.state, driver.version]

def opened(name, sockets):
    helds = [weights.Rank("reader", rank, len(sockets)) for rank in range(len(sockets))]
    readers = [WorkerWeightsReader("j", name, rank, len(sockets), at) for rank, at in enumerate(sockets)]
    for held, reader in zip(helds, readers):
        reader.register(held, adapter=Breaking())
    return helds, readers

helds, readers = opened({name!r}, {sockets!r})
engines[{name!r}] = WeightReader("j", {name!r}, readers), helds, readers
"""
"""One process that drives workers which it reaches itself."""

TOGETHER = (
    DRIVEN
    + """
class Workers:
    '''As an engine's own calls: what came of one, only the daemons know.'''

    def __init__(self, readers):
        self.readers, self.staged = readers, []
        self.pool = ThreadPoolExecutor(len(readers))

    def each(self, action, *more):
        def quiet(reader, *given):
            try:
                return action(reader, *given)
            except Exception as error:
                reader.fail(error)
        return list(self.pool.map(quiet, self.readers, *more))

    def stage(self, step, timeout):
        self.staged = self.each(lambda reader: reader.stage(step, timeout))

    def apply(self, epoch, step, timeout):
        self.each(lambda reader, one: reader.apply(one, timeout), self.staged)

    def abandon(self):
        staged, self.staged = self.staged, []
        self.each(lambda reader, one: one and reader.release(one), staged)

    def verify(self, checkpoint_dir, token, timeout):
        self.each(lambda reader: reader.compare_and_tell(checkpoint_dir, token, timeout))

workers = Workers(readers)
engines[{name!r}] = WeightReader("j", {name!r}, workers, {sockets!r}[0]), helds, readers
"""
)
"""One that drives them through the calls of an engine, and hears of them from one daemon."""
