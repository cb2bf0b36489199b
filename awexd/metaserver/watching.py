"""Who waits for what: long polls of a job or of events, and streams. One answer is encoded once for all that wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from awexd.metaserver.http import Connection
from awexd.metaserver.model import Note

KEPT_EVENTS = 4096
PAGE_EVENTS = 500
HEARTBEAT_SECONDS = 15.0
MAX_STREAMS = 1024


class Waiters:
    """Connections whose request is open until something changes, or their time is over."""

    def __init__(self, quiet: bytes) -> None:
        self._quiet = quiet
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: Connection, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiting[connection] = loop.call_later(seconds, self._end, connection)
        connection.closed = lambda: self._gone(connection)

    def tell(self, answer: bytes) -> None:
        """Everyone gets this answer; the timers go after the last has been told."""
        waiting, self._waiting = self._waiting, {}
        for connection in waiting:
            connection.finish(answer)
        for timer in waiting.values():
            timer.cancel()

    def _end(self, connection: Connection) -> None:
        if self._waiting.pop(connection, None) is not None:
            connection.finish(self._quiet)

    def _gone(self, connection: Connection) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()


class Watch:
    """One request that waits for several jobs."""

    __slots__ = ("connection", "jobs", "timer")

    def __init__(self, connection: Connection, jobs: tuple[str, ...]) -> None:
        self.connection = connection
        self.jobs = jobs
        self.timer: asyncio.TimerHandle


class Watches:
    """Requests each of which waits for any of its jobs. Those that wait for the same get the same bytes."""

    def __init__(self, quiet: bytes) -> None:
        self._quiet = quiet
        self._by_job: dict[str, dict[Watch, None]] = {}
        self._due: dict[Watch, list[str]] = {}

    def __len__(self) -> int:
        """A request for eight jobs counts as eight."""
        return sum(map(len, self._by_job.values()))

    def __contains__(self, job: str) -> bool:
        return job in self._by_job

    def add(self, connection: Connection, jobs: tuple[str, ...], seconds: float) -> None:
        watch = Watch(connection, jobs)
        watch.timer = asyncio.get_running_loop().call_later(seconds, self._end, watch)
        for name in jobs:
            self._by_job.setdefault(name, {})[watch] = None
        connection.closed = lambda: self._remove(watch)

    def changed(self, job: str) -> None:
        """Who waits for it is told with the next ``tell``."""
        for watch in self._by_job.pop(job, ()):
            self._due.setdefault(watch, []).append(job)

    def tell(self, answer: Callable[[tuple[str, ...]], bytes]) -> None:
        """Everyone who is due gets the answer about what has changed of its jobs."""
        if not self._due:
            return
        due, self._due = self._due, {}
        made: dict[tuple[str, ...], bytes] = {}
        for watch, jobs in due.items():
            changed = tuple(jobs)
            body = made.get(changed)
            if body is None:
                body = made[changed] = answer(changed)
            watch.connection.finish(body)
        for watch in due:
            self._remove(watch)

    def _end(self, watch: Watch) -> None:
        self._remove(watch)
        watch.connection.finish(self._quiet)

    def _remove(self, watch: Watch) -> None:
        watch.timer.cancel()
        self._due.pop(watch, None)
        for name in watch.jobs:
            waiting = self._by_job.get(name)
            if waiting is not None and waiting.pop(watch, watch) is None and not waiting:
                del self._by_job[name]


class Events:
    """The last few thousand events, and who follows them. ``number`` gives each its number."""

    def __init__(self, number: Callable[[], int], answer: Callable[[bytes], bytes], quiet: bytes) -> None:
        self._number = number
        self._answer = answer
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self.waiters = Waiters(quiet)
        self.streams: set[Connection] = set()
        self.last = self._told = number()

    def add(self, note: Note) -> None:
        self.last = self._number()
        event = {"seq": self.last, "at": time.time(), **note._asdict()}
        self._kept.append(event)
        self._send(b"id: %d\nevent: event\ndata: %s\n\n" % (self.last, orjson.dumps(event)))

    def changed(self, topic: str, seq: int) -> None:
        """Tells streams only."""
        if self.streams:
            self._send(b"event: change\ndata: %s\n\n" % orjson.dumps({"topic": topic, "seq": seq}))

    def tell(self) -> None:
        """Answers long polls: each waits for what is newer than all."""
        if len(self.waiters):
            newest = self.page(self._told, PAGE_EVENTS)
            self.waiters.tell(self._answer(orjson.dumps(newest)))
        self._told = self.last

    def after(self, seq: int) -> list[dict[str, Any]]:
        """What is newer, oldest first, as far as it is remembered. A seq from elsewhere: all."""
        newer: list[dict[str, Any]] = []
        for event in reversed(self._kept):
            if event["seq"] <= seq <= self.last:
                break
            newer.append(event)
        return newer[::-1]

    def page(self, seq: int, limit: int) -> dict[str, Any]:
        found = self.after(seq)
        page = found[:limit]
        more = len(page) < len(found)
        return {"events": page, "last": page[-1]["seq"] if more else self.last, "more": more}

    def follow(self, connection: Connection, head: bytes, seq: int) -> None:
        """Writes what is newer than ``seq``, and from then on what comes, until the connection ends."""
        parts = [
            b"id: %d\nevent: event\ndata: %s\n\n" % (event["seq"], orjson.dumps(event)) for event in self.after(seq)
        ]
        if connection.write(head + b"retry: 1000\n\n" + b"".join(parts)):
            self.streams.add(connection)
            connection.closed = lambda: self.streams.discard(connection)

    async def beat(self) -> None:
        """Keeps streams alive, so that what stands between notices none that is gone too late; until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._send(b": still here\n\n")

    def _send(self, data: bytes) -> None:
        for connection in list(self.streams):
            if not connection.write(data):
                self.streams.discard(connection)
