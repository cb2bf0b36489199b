"""What the state decides, told in order: first the disk, then everyone.

A job whose record is still to be written shows nobody what has changed since, and answers nobody who has changed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from awexd.metaserver import views
from awexd.metaserver.database import Database
from awexd.metaserver.model import Note
from awexd.metaserver.state import State
from awexd.metaserver.watching import Events, Waiters
from awexd_transports.errors import BudgetExceeded

RETRY_SECONDS = 1.0
DISK_SECONDS = 10.0
"""How long a request waits for the disk before it is told that there is none."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shown:
    """What everyone may know of a job: its last change that is told, and its brief as of that or, ``stale``, before."""

    seq: int
    body: bytes
    answer: bytes
    stale: bool = False


class Publisher:
    """Carries out the effects of one state."""

    def __init__(
        self,
        state: State,
        database: Database,
        number: Callable[[], int],
        answer: Callable[[bytes], bytes],
        quiet: bytes,
    ) -> None:
        self._state = state
        self._database = database
        self._number = number
        self._answer = answer
        self._quiet = quiet
        self.events = Events(number, answer, quiet)
        self._briefs: dict[str, Shown] = {}
        self.watchers: dict[str, Waiters] = {}
        self.flushes = 0
        self._writing: set[str] = set()
        self._again: set[str] = set()
        self._notes: list[Note] = []
        self._written: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        self._nodes_told = 0
        for name, job in state.jobs.items():
            job.seq = number()
            self._show(name)

    def held(self, job: str) -> bool:
        """Whether something of that job is not on disk yet."""
        return job in self._writing or job in self._state.records

    async def durable(self, job: str) -> None:
        """Returns once all that has been decided of that job is on disk.

        Raises:
            BudgetExceeded: the disk does not take it.
        """
        try:
            async with asyncio.timeout(DISK_SECONDS):
                while self.held(job):
                    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._written.append(written)
                    await written
        except TimeoutError:
            text = f"{self._database.path} cannot be written; the MetaServer's log says why"
            raise BudgetExceeded(text) from None

    def settle(self) -> None:
        """After every change of the state: tells what may be told, and has the rest written."""
        state = self._state
        if not (state.touched or state.notes or state.records or state.nodes_changed != self._nodes_told):
            return
        touched, state.touched = state.touched, set()
        for name in touched:
            if self.held(name):
                self._again.add(name)
            else:
                self._publish(name)
        notes, state.notes = state.notes, []
        for note in notes:
            if note.job and self.held(note.job):
                self._notes.append(note)
            else:
                self.events.add(note)
        if notes:
            self.events.tell()
        if state.nodes_changed != self._nodes_told:
            self._nodes_told = state.nodes_changed
            self.events.changed("", self._number())
        if state.records:
            self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled: everything that is due at once, in one transaction."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._state.records:
                await self._flush()

    async def _flush(self) -> None:
        state = self._state
        records, state.records = state.records, {}
        self._writing = set(records)
        self._again -= self._writing
        notes = [note for note in self._notes if note.job in records]
        self._notes = [note for note in self._notes if note.job not in records]
        shown = {name: self._made(name) for name in records}  # as of this record, not of what comes meanwhile
        try:
            while not await self._write(list(records.values())):  # noqa: ASYNC110 - there is no event of a disk
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._writing = set()
        self.flushes += 1
        for name, made in shown.items():
            self._tell(name, made)
        for note in notes:
            self.events.add(note)
        self.events.tell()
        written, self._written = self._written, []
        for future in written:
            if not future.done():
                future.set_result(None)
        again, self._again = self._again, set()
        state.touched |= again
        self.settle()

    async def _write(self, records: list[Any]) -> bool:
        try:
            # Not to be given up half-way: the next one must not overtake it.
            await asyncio.shield(asyncio.to_thread(self._database.write, records))
        except BudgetExceeded as error:
            _log.error("%s; trying again", error)
            return False
        return True

    def _publish(self, name: str) -> None:
        """Tells who waits. Where nobody does, the brief is made when somebody asks."""
        job, shown = self._state.jobs.get(name), self._briefs.get(name)
        if job is None or shown is None or name in self.watchers or self.events.streams:
            self._tell(name, self._made(name))
        else:
            shown.seq = job.seq = self._number()
            shown.stale = True

    def shown(self, name: str) -> Shown | None:
        """As of the last change; ``stale`` where that is not on disk, and so of one before."""
        shown = self._briefs.get(name)
        if shown is not None and shown.stale and not self.held(name):
            shown.body = orjson.dumps(views.brief(self._state.jobs[name]))
            shown.answer = self._answer(shown.body)
            shown.stale = False
        return shown

    def all_shown(self) -> list[bytes]:
        """Of every job, by name."""
        return [shown.body for name in sorted(self._briefs) if (shown := self.shown(name)) is not None]

    def _made(self, name: str) -> tuple[int, bytes]:
        """A job as everyone may see it from now on."""
        seq = self._number()
        job = self._state.jobs.get(name)
        if job is None:
            return seq, orjson.dumps(views.closed(name, seq))
        job.seq = seq
        return seq, orjson.dumps(views.brief(job))

    def _tell(self, name: str, made: tuple[int, bytes]) -> None:
        answer = self._answer(made[1])
        if name in self._state.jobs:
            self._briefs[name] = Shown(*made, answer)
        else:
            self._briefs.pop(name, None)
        waiters = self.watchers.pop(name, None)
        if waiters is not None:
            waiters.tell(answer)
        self.events.changed(name, made[0])

    def _show(self, name: str) -> None:
        made = self._made(name)
        self._briefs[name] = Shown(*made, self._answer(made[1]))

    def waiters(self, name: str) -> Waiters:
        """Who waits for that job."""
        found = self.watchers.get(name)
        if found is None:
            found = self.watchers[name] = Waiters(self._quiet)
        return found
