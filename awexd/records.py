"""Jobs' records on disk: saved in order, off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

from awexd.background import Background
from awexd.journal import Journal
from awexd.store.model import Job

DELAY_SECONDS = 1.0
"""How long the last step waits to be saved: until then the newest segment's header says it."""


class Records:
    """One save of a job at a time, each with the job as it is then; a forgotten job is not saved again."""

    def __init__(self, journal: Journal, background: Background, jobs: Mapping[str, Job]) -> None:
        self._journal = journal
        self._background = background
        self._jobs = jobs
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._due: set[str] = set()

    async def save(self, job: Job) -> None:
        """Returns once the record is on disk."""
        turn = self._turns.setdefault(job.name, asyncio.Lock())
        async with turn:
            if self._jobs.get(job.name) is job:
                await asyncio.to_thread(self._journal.save, self._journal.record(job))

    def save_soon(self, job: Job) -> None:
        """Saves the record off the hot path, once for many changes."""
        if job.name in self._due:
            return
        self._due.add(job.name)

        def save() -> None:
            self._due.discard(job.name)
            self._background.task(self.save(job))

        self._background.later(DELAY_SECONDS, save)

    async def forget(self, job: Job) -> None:
        """Removes the record, unless a job of that name has begun anew."""
        turn = self._turns.setdefault(job.name, asyncio.Lock())
        async with turn:
            if job.name not in self._jobs:
                await asyncio.to_thread(self._journal.forget, job.name)
