"""Trainers and engines in processes of their own that exchange weights: what they run, and what is asked of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from awexd.protocol import Message
from tests.attacks.raw import until
from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError, together

Fork = Callable[[], Process]

WRITER = """
os.environ.update({environ!r})
rank = weights.Rank("writer", {rank}, {size}, {device!r})
writer = WeightWriter({job!r}, {rank}, {size}, {socket!r}, transport="nccl", verify={verify!r}, ring_bytes={ring})
writer.register(rank.shards)
"""
READER = """
os.environ.update({environ!r})
held = weights.Rank("reader", {rank}, {size}, {device!r})
reader = WorkerWeightsReader(
    {job!r}, {engine!r}, {rank}, {size}, {socket!r}, transport="nccl", verify={verify!r}, ring_bytes={ring}
)
reader.register(held.shards)
"""
PUBLISH = """
rank.fill({step})
publication = writer.publish({step}, timeout={seconds})
publication.captured(timeout={seconds})
rank.fill(99)
result = [publication.mode, writer._lender.groups_made]
"""
UPDATE = """
done = reader.update({step}, timeout={seconds})
result = [done.step, held.wrong({step}), done.transport, reader.state, reader._taker.groups_made]
"""
STANDS = "result = [reader.state, reader.version, held.wrong({step})]"
FAULT = """
from awexd_transports.collective.nccl import NcclGroup
from awexd_transports.collective.sockets import SocketGroup
from awexd_transports.collective.tcp import TcpGroup
left = [{after}]
def {call}_of(group):
    whole = group.{call}
    def {call}(self, *given):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.{signal})
        return whole(self, *given)
    group.{call} = {call}
{call}_of(SocketGroup)
{call}_of(TcpGroup)
{call}_of(NcclGroup)
"""
"""The process sends itself a signal when it begins its n-th message."""
SECONDS = 30


class Crew:
    """A trainer and its engines. ``engines``: workers of each.

    Args:
        ring: bytes; small ones make many messages of small tensors.
        devices, sockets: of each process, writers first; those beyond the last have the first one's. Without
            ``sockets`` all are of ``daemon``, which is the one that is asked.
        hosts: to NCCL, each process is on a host of its own.
    """

    def __init__(
        self,
        daemon: Daemon,
        fork: Fork,
        writers: int,
        engines: Sequence[int],
        *,
        verify: str = "checksum",
        ring: int = 2048,
        job: str = "grpo",
        devices: Sequence[str] = ("cpu",),
        sockets: Sequence[str] = (),
        hosts: bool = False,
    ) -> None:
        self.daemon, self.fork, self._hosts = daemon, fork, itertools.count() if hosts else None
        self._devices, self._first = devices, devices[0]
        self._sockets = sockets or [daemon.socket]
        self.given = {"job": job, "socket": daemon.socket, "verify": verify, "ring": ring}
        self.writers = [fork() for _ in range(writers)]
        sources = [self.writer(rank, writers, **self._next_place()) for rank in range(writers)]
        together(self.writers, sources)
        self.engines: dict[str, list[Process]] = {}
        for size in engines:
            self.add(f"e{len(self.engines)}", size)

    def writer(self, rank: int, size: int, **more: object) -> str:
        given = {"rank": rank, "size": size, "device": self._first, "environ": self._environ()}
        return WRITER.format(**self.given | given | more)

    def reader(self, engine: str, rank: int, size: int, **more: object) -> str:
        given = {"engine": engine, "rank": rank, "size": size, "device": self._first, "environ": self._environ()}
        return READER.format(**self.given | given | more)

    def add(self, engine: str, size: int) -> list[Process]:
        self.engines[engine] = workers = [self.fork() for _ in range(size)]
        together(workers, [self.reader(engine, rank, size, **self._next_place()) for rank in range(size)])
        return workers

    def _environ(self) -> dict[str, str]:
        if self._hosts is None:
            return {}
        return {"NCCL_HOSTID": f"host{next(self._hosts)}", "NCCL_SOCKET_IFNAME": "lo"}

    def _next_place(self) -> dict[str, str]:
        device, *self._devices = self._devices or [self._first]
        socket, *self._sockets = self._sockets or [self.daemon.socket]
        return {"device": device, "socket": socket}

    @property
    def workers(self) -> list[Process]:
        return [worker for workers in self.engines.values() for worker in workers]

    def recover(self, step: int) -> list[int]:
        """As ``hand_over``, after a step that failed: a worker whose round was fixed to that is told so once.

        Where a sibling had all of that by then, only once it is taken back: until then all are to have it.
        """
        for writer in self.writers:
            with contextlib.suppress(RemoteError):
                writer.do("publication.withdraw()")
        for worker in self.workers:
            with contextlib.suppress(RemoteError):
                worker.do(UPDATE.format(step=step, seconds=0))
        return self.hand_over(step)

    def start(self, step: int, seconds: float = SECONDS) -> None:
        """All publish and update at the same time: every engine waits when the version comes."""
        for worker in self.workers:
            worker.start(UPDATE.format(step=step, seconds=seconds))
        until(self.daemon.socket, lambda status: waiting(status, len(self.workers)))
        for writer in self.writers:
            writer.start(PUBLISH.format(step=step, seconds=seconds))

    def hand_over(self, step: int) -> list[int]:
        """A whole step; how many groups each process has made so far."""
        self.start(step)
        return self.finish(step)

    def finish(self, step: int) -> list[int]:
        made = []
        for worker in self.workers:
            *told, groups = worker.finish()
            assert told == [step, [], "nccl", "ready"]
            made.append(groups)
        for writer in self.writers:
            mode, groups = writer.finish()
            assert mode == "direct"
            made.append(groups)
        return made

    def close(self) -> None:
        together(
            [*self.writers, *self.workers],
            ["writer.close()"] * len(self.writers) + ["reader.close()"] * len(self.workers),
        )
        assert self.daemon.segments() == []


def waiting(status: Message, workers: int) -> bool:
    """Whether so many workers wait for a version."""
    found = [worker for job in status["jobs"] for engine in job["engines"] for worker in engine["workers"]]
    return sum(bool(worker["waiting"]) for worker in found) == workers
