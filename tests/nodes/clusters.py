"""Several daemons on this machine, or in network namespaces, with one MetaServer; and what their clients are told."""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.daemons import Daemon
from tests.e2e.test_resharding import OPEN_READER
from tests.e2e.workers.processes import Process, RemoteError, together
from tests.metaserver.servers import MetaServer

PATIENCE = 60.0

OPEN_WRITER = """
rank = weights.Rank("writer", {rank}, {size})
writer = WeightWriter({job!r}, {rank}, {size}, {socket!r}, verify={verify!r}, epoch={epoch!r}, mode="host")
writer.register(rank.shards)
"""
PUBLISH = """
rank.fill({value})
publication = writer.publish({step})
publication.captured()
rank.fill(99)
publication.committed()
"""
UPDATE = "done = reader.update({step}, timeout=60)\nresult = [done.epoch, done.step, held.wrong({value})]"


class Cluster:
    """A MetaServer and daemons by name, each of which serves the others. A context manager.

    Leaving it checks of every daemon what ``Daemon`` checks.
    """

    def __init__(self, folder: Path, *names: str, ttl: float = 15.0) -> None:
        self.folder = folder
        self.server = MetaServer(folder, "--node-ttl", f"{ttl:g}")
        self.url: str | None = None
        self._names = names
        self._stack = ExitStack()
        self.daemons: dict[str, Daemon] = {}

    def __getitem__(self, name: str) -> Daemon:
        return self.daemons[name]

    def add(
        self, name: str, *more: str, wrapper: Sequence[str] = (), host: str = "127.0.0.1", listen: bool = True
    ) -> Daemon:
        folder = self.folder / name
        folder.mkdir()
        with socket.socket() as free:  # the same one after a restart: two of one name at different places are two nodes
            free.bind(("", 0))
            port = free.getsockname()[1]
        url = self.server.url if self.url is None else self.url
        served = ("--listen", f"{host}:{port}") if listen else ()
        arguments = ("--metaserver", url, "--node", name, *served, *more)
        daemon = Daemon(folder, *arguments, wrapper=wrapper)
        self.daemons[name] = self._stack.enter_context(daemon)
        return daemon

    def __enter__(self) -> Self:
        self._stack.__enter__()
        try:
            self._stack.enter_context(self.server)
            for name in self._names:
                self.add(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for name, daemon in self.daemons.items():
                error.add_note(f"log of {name}:\n{daemon.log()[-3000:]}")
        self._stack.__exit__(kind, error, traceback)

    def until(self, name: str, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """That daemon's status, once it is so; looked at again at its events."""
        return until(self[name], true)


def until(daemon: Daemon, true: Callable[[dict[str, Any]], object], patience: float = PATIENCE) -> dict[str, Any]:
    end = time.monotonic() + patience
    while True:
        status = daemon.ask("status")
        if true(status):
            return status
        assert time.monotonic() < end, status
        lasting(0.02)  # not all that is waited for makes an event


def lasting(seconds: float) -> None:
    """How long a fault goes on."""
    select.select([], [], [], seconds)


def job_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    """Of a job whose bare name that is; {} where there is none."""
    return next((job for job in status["jobs"] if job["job"].endswith(f"/{name}")), {})


def held(daemon: Daemon, name: str) -> list[list[int]]:
    found: list[list[int]] = job_of(daemon.ask("status"), name).get("held", [])
    return found


def texts(daemon: Daemon, kind: str) -> list[str]:
    return [event["text"] for event in daemon.ask("events", job=None, after=None)["events"] if event["kind"] == kind]


def fds(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


class Side:
    """Processes that are a trainer's ranks or an engine's workers."""

    def __init__(self, source: str, processes: Sequence[Process], daemon: Daemon, job: str = "j", **given: Any) -> None:
        self.processes, self.daemon = list(processes), daemon
        common = {"job": job, "socket": daemon.socket, "verify": "checksum", "size": len(processes), **given}
        together(processes, [source.format(rank=rank, **common) for rank in range(len(processes))])

    def do(self, source: str) -> list[Any]:
        return together(self.processes, [source] * len(self.processes))

    def start(self, source: str) -> None:
        for process in self.processes:
            process.start(source)

    def finish(self) -> list[Any]:
        return [process.finish() for process in self.processes]

    def errors(self) -> list[tuple[str, str]]:
        """What each of them raised: kind and message."""
        found = []
        for process in self.processes:
            with pytest.raises(RemoteError) as raised:
                process.finish()
            found.append((raised.value.kind, raised.value.message))
        return found

    def fails(self, source: str, kind: str, text: str) -> None:
        """All of them raise that."""
        self.start(source)
        for found, message in self.errors():
            assert found == kind, (found, message)
            assert re.search(text, message), message


class Trainer(Side):
    def __init__(self, processes: Sequence[Process], daemon: Daemon, epoch: str = "continue", **given: Any) -> None:
        super().__init__(OPEN_WRITER, processes, daemon, epoch=epoch, **given)

    def publish(self, step: int, value: int | None = None) -> None:
        self.do(PUBLISH.format(step=step, value=step if value is None else value))

    def close(self) -> None:
        self.do("writer.close()")


class SpreadTrainer(Trainer):
    """A trainer whose ranks are on several nodes: one process a daemon that is named, in the order of ranks."""

    def __init__(
        self, processes: Sequence[Process], daemons: Sequence[Daemon], epoch: str = "continue", **given: Any
    ) -> None:
        self.processes, self.daemon = list(processes), daemons[0]
        common = {"job": "j", "verify": "checksum", "size": len(processes), "epoch": epoch, **given}
        sources = [OPEN_WRITER.format(rank=rank, socket=daemon.socket, **common) for rank, daemon in enumerate(daemons)]
        together(processes, sources)


class Engine(Side):
    def __init__(self, processes: Sequence[Process], daemon: Daemon, engine: str = "e", **given: Any) -> None:
        super().__init__(OPEN_READER, processes, daemon, engine=engine, **given)

    def update(self, step: int, value: int | None = None, epoch: int = 1) -> None:
        """To that step, and every bit is its."""
        value = step if value is None else value
        for found in self.do(UPDATE.format(step=step, value=value)):
            assert found == [epoch, step, []]

    def close(self) -> None:
        self.do("reader.close()")
