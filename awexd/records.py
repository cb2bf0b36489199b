"""Jobs' records on disk: saved in order, off the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from weakref import WeakValueDictionary

from awexd.background import Background
from awexd.journal import Journal
from awexd.store.model import Job
from awexd_transports.errors import AwexdError

_log = logging.getLogger(__name__)
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
        self._epochs: dict[str, int] = {}

    async def save(self, job: Job) -> None:
        """Returns once the record is on disk. Goes on if its caller goes away: a later save must not overtake it."""
        await asyncio.shield(self._background.task(self._save(job)))

    async def _save(self, job: Job) -> None:
        turn = self._turns.setdefault(job.name, asyncio.Lock())
        async with turn:
            if self._jobs.get(job.name) is job:
                record = self._journal.record(job)
                await asyncio.to_thread(self._journal.save, record)
                self._epochs[job.name] = record["epoch"]

    async def save_epoch(self, job: Job) -> None:
        """Returns once the job's epoch is on disk: no rank may work in one that a restart would forget."""
        if self._epochs.get(job.name) != job.epoch:
            await self.save(job)

    def save_soon(self, job: Job) -> None:
        """Saves the record off the hot path, once for many changes."""
        if job.name in self._due:
            return
        self._due.add(job.name)

        def save() -> None:
            self._due.discard(job.name)
            self._background.task(self._save_or_log(job))

        self._background.later(DELAY_SECONDS, save)

    async def _save_or_log(self, job: Job) -> None:
        try:
            await self._save(job)
        except AwexdError as error:
            _log.error("the last step of job %s is not on disk: %s", job.name, error)

    async def forget(self, job: Job) -> None:
        """Removes the record, unless a job of that name has begun anew."""
        turn = self._turns.setdefault(job.name, asyncio.Lock())
        async with turn:
            self._epochs.pop(job.name, None)
            if job.name not in self._jobs:
                await asyncio.to_thread(self._journal.forget, job.name)
