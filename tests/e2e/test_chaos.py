"""Trainers, engines and the daemon are killed at random while versions go round: nothing torn or lost, no hang."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.daemons import Daemon
from tests.e2e.test_crash import OPEN_READER, OPEN_WRITER, job_status
from tests.e2e.workers.processes import Process, RemoteError

SIZE = 2
ROUNDS = 8
PUBLISH = """
a.fill_({step}); b.fill_({step})
try:
    done = writer.publish({step}, timeout=5)
except VersionConflict as error:
    if "sealed step" not in str(error) and "is not after" not in str(error): raise
"""
TOLD = ("VersionConflict", "DeadlineExceeded", "DaemonUnavailable", "NameError")
"""What a rank may be told while its peers or the daemon are killed; the name is `done`, of a new process."""
COMMITTED = "done.committed(1)"
UPDATE = "done = reader.update(timeout=20); result = [done.step, reader.state, values()]"


class World:
    """Two trainer ranks and two engines of one worker, each a process."""

    def __init__(self, daemon: Daemon, fork: Callable[[], Process]) -> None:
        self.daemon, self.fork = daemon, fork
        self.writers: list[Process] = [self.writer(rank) for rank in range(SIZE)]
        self.readers: list[Process] = [self.reader(number) for number in range(2)]

    def writer(self, rank: int) -> Process:
        process = self.fork()
        process.do(OPEN_WRITER.format(rank=rank, size=SIZE, socket=self.daemon.socket, epoch="continue"))
        return process

    def reader(self, number: int) -> Process:
        process = self.fork()
        process.do(OPEN_READER.format(size=SIZE, engine=f"e{number}", rank=0, workers=1, socket=self.daemon.socket))
        return process

    def strike(self, what: str, at: int) -> None:
        if what == "daemon":
            self.daemon.kill()
            self.daemon.start()
        elif what == "writer":
            self.writers[at].kill()
            self.writers[at] = self.writer(at)
        elif what == "reader":
            self.readers[at].kill()
            self.readers[at] = self.reader(at)


def quietly(process: Process) -> bool:
    try:
        process.finish()
    except RemoteError as error:
        if error.kind not in TOLD:
            raise
        return False
    except EOFError:
        return False
    return True


@pytest.mark.parametrize("seed", [1, 2])
def test_versions_go_on_while_everything_is_killed_at_random(
    daemon: Daemon, fork: Callable[[], Process], seed: int
) -> None:
    chance = random.Random(seed)
    world = World(daemon, fork)
    seen = [0, 0]
    for step in range(1, ROUNDS + 1):
        first = True
        while step not in [held[1] for held in job_status(daemon)["held"]]:
            publishing = list(world.writers)
            for process in publishing:
                process.start(PUBLISH.format(step=step))
            if first:
                world.strike(chance.choice(("daemon", "writer", "reader", "nobody")), chance.randrange(2))
                first = False
            going = [process for process in publishing if quietly(process)]
            for process in going:
                if process in world.writers:
                    process.start(COMMITTED)
            for process in going:
                if process in world.writers:
                    quietly(process)
        for number, reader in enumerate(world.readers):
            reader.start(UPDATE)
            if number == 0 and chance.random() < 0.3:
                world.strike("daemon", 0)
            got, state, values = reader.finish()
            assert (state, values) == ("ready", [float(got)])
            assert got >= seen[number]
            seen[number] = got
    assert seen == [ROUNDS, ROUNDS]
    for process in (*world.readers, *world.writers):
        process.kill()
