"""What the state decides, told in order: first the disk, then everyone.

A job whose record is still to be written shows nobody what has changed since, and answers nobody who has changed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from awexd.metaserver import views
from awexd.metaserver.database import Database
from awexd.metaserver.model import Job, Note
from awexd.metaserver.state import State
from awexd.metaserver.watching import Events, Waiters, Watches
from awexd_transports.errors import BudgetExceeded

RETRY_SECONDS = 1.0
KEPT_VIEWS = 64
"""Of whole jobs, kept until they change."""
DISK_SECONDS = 10.0
"""How long a request waits for the disk before it is told that there is none."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Shown:
    """What everyone may know of a job: its last change that is told, and its brief as of that or, ``stale``, before.

    ``view``: all there is to say of it as of that, where it was made for somebody.
    """

    seq: int
    body: bytes
    answer: bytes
    view: bytes | None = None
    stale: bool = False


class View(NamedTuple):
    """All that is said of a job, as of a change of it, and the answer that this is."""

    seq: int
    body: bytes
    answer: bytes


class Made(NamedTuple):
    """A job as everyone may see it from some moment on; ``view`` is None where nobody waits for it.

    ``gist``: the view less what ranks that begin and seal change, which wakes nobody who waits for several jobs.
    """

    seq: int
    brief: bytes
    view: bytes | None
    gist: bytes | None


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
        self.watches = Watches(quiet)
        self._views: dict[str, View] = {}
        self._told: dict[str, bytes] = {}
        self._gists: dict[str, tuple[int, bytes]] = {}
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
        self._tell_watches()
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
        shown = {name: self._made(name, True) for name in records}  # as of this record, not of what comes meanwhile
        try:
            while not await self._write(list(records.values())):  # noqa: ASYNC110 - there is no event of a disk
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._writing = set()
        self.flushes += 1
        for name, made in shown.items():
            self._tell(name, made)
        self._tell_watches()
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
        watched = name in self.watches
        if job is None or shown is None or watched or name in self.watchers or self.events.streams:
            self._tell(name, self._made(name, watched))
        else:
            shown.seq = job.seq = self._number()
            shown.stale, shown.view = True, None

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

    def view(self, job: Job) -> View:
        """All there is to say of a job now. Nothing of it may be ``held``."""
        known = self._views.get(job.name)
        if known is None or known.seq != job.seq:
            body = orjson.dumps(views.view(job))
            known = self._views[job.name] = View(job.seq, body, self._answer(body))
            while len(self._views) > KEPT_VIEWS:
                del self._views[next(iter(self._views))]
        return known

    def told(self, name: str) -> bytes | None:
        """All there is to say of a job as of what is on disk, or that it is closed; None: once the disk has more."""
        if self.held(name):
            shown = self._briefs.get(name)
            return shown.view if shown is not None else None
        job = self._state.jobs.get(name)
        if job is None:
            return orjson.dumps(views.closed_view(name, self.events.last))
        return self.view(job).body

    def _tell_watches(self) -> None:
        """Who waits for several jobs gets those that were told just now, as they were told."""
        if self._told:
            self.watches.tell(lambda names: self._answer(views.several(self._told[name] for name in names)))
            self._told.clear()

    def _made(self, name: str, whole: bool = False) -> Made:
        """A job as everyone may see it from now on; ``whole``: its view too."""
        seq = self._number()
        job = self._state.jobs.get(name)
        if job is None:
            brief, view = views.closed(name, seq), views.closed_view(name, seq) if whole else None
            self._gists.pop(name, None)
        else:
            job.seq = seq
            brief, view = views.brief(job), views.view(job) if whole else None
        if view is None:
            return Made(seq, orjson.dumps(brief), None, None)
        return Made(seq, orjson.dumps(brief), orjson.dumps(view), orjson.dumps(views.gist(view)))

    def _tell(self, name: str, made: Made) -> None:
        answer = self._answer(made.brief)
        before = self._briefs.get(name)
        if name in self._state.jobs:
            self._briefs[name] = Shown(made.seq, made.brief, answer, made.view)
        else:
            self._briefs.pop(name, None)
        if made.view is not None and made.gist is not None and name in self.watches:
            # Compared with the change before this one: whoever waits knows that, or has been told nothing since.
            if before is None or self._gists.get(name) != (before.seq, made.gist):
                self._told[name] = made.view
                self.watches.changed(name)
            if name in self._state.jobs:
                self._gists[name] = made.seq, made.gist
        waiters = self.watchers.pop(name, None)
        if waiters is not None:
            waiters.tell(answer)
        self.events.changed(name, made.seq)

    def _show(self, name: str) -> None:
        made = self._made(name)
        self._briefs[name] = Shown(made.seq, made.brief, self._answer(made.brief))

    def waiters(self, name: str) -> Waiters:
        """Who waits for that job."""
        found = self.watchers.get(name)
        if found is None:
            found = self.watchers[name] = Waiters(self._quiet)
        return found
