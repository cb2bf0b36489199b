"""Slots of shared memory for writers: budgeted together, made in threads, given to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from awexd.background import Background, Signals
from awexd.memory import Memory
from awexd.store import Segment, Store, parking
from awexd.store.model import Job
from awexd.store.slots import Shortfall, shortfall_of
from awexd_transports.errors import BudgetExceeded, DeadlineExceeded, VersionConflict
from awexd_transports.segment import HEADER_BYTES


class Allocator:
    """Makes what writers lack. ``settle`` carries out what the store has decided and wakes who waits for it."""

    def __init__(self, store: Store, memory: Memory, background: Background, settle: Callable[[], None]) -> None:
        self._store = store
        self._memory = memory
        self._background = background
        self._settle = settle
        self._promised = 0
        self._done = Signals()
        self._turns: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    async def fill(self, job: Job, rank: int, deadline: float) -> None:
        """Makes the missing slots. Goes on if its caller goes away, so that no made segment is lost.

        Raises:
            BudgetExceeded: no room; none of them was made.
            DeadlineExceeded: not done by ``deadline`` (loop time); the next call finds them.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._background.task(self._fill(job, rank)))
        except TimeoutError:
            raise DeadlineExceeded(f"{job.name}: shared memory for rank {rank} is still being reserved") from None

    async def _fill(self, job: Job, rank: int) -> None:
        # One at a time for a rank: two requests must not both make what is missing once.
        turn = self._turns.setdefault((job.name, rank), asyncio.Lock())
        async with turn:
            await self._background.threads_done()  # memory that is being given back counts
            shortfall = shortfall_of(job, rank)
            if shortfall.slots:
                wanted = shortfall.slots * (HEADER_BYTES + shortfall.nbytes)
                await self._check(wanted)
                await self._make(job, shortfall, wanted)

    async def single(self, nbytes: int, take: Callable[[str, bool], None], deadline: float) -> None:
        """Makes one segment and hands its id, and whether it is locked, to ``take``: now, on the loop, or never.

        What ``take`` refuses is unlinked. Goes on if its caller goes away.

        Raises:
            BudgetExceeded, DeadlineExceeded: as ``fill``; or what ``take`` raised.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._background.task(self._single(nbytes, take)))
        except TimeoutError:
            raise DeadlineExceeded(f"{nbytes} bytes of shared memory are still being reserved") from None

    async def _single(self, nbytes: int, take: Callable[[str, bool], None]) -> None:
        await self._background.threads_done()
        wanted = HEADER_BYTES + nbytes
        await self._check(wanted)
        self._promised += wanted
        try:
            segment_id, locked = await asyncio.to_thread(self._memory.create, nbytes)
        finally:
            self._promised -= wanted
            self._done.fire("")
        try:
            take(segment_id, locked)
        except BaseException:
            self._background.thread(self._memory.unlink, segment_id)
            raise

    async def _check(self, wanted: int) -> None:
        """What is being made for others counts twice for a while: a refusal is only true once they are done."""
        while True:
            try:
                self._memory.budget.check(wanted, self._memory.total_nbytes, self._promised)
            except BudgetExceeded:
                if parking.give_up_spares(self._store):
                    self._settle()
                    await self._background.threads_done()
                elif not self._promised:
                    raise
                else:
                    await self._done.next("")
            else:
                return

    async def _make(self, job: Job, shortfall: Shortfall, wanted: int) -> None:
        self._promised += wanted
        try:
            writer = job.writers.get(shortfall.rank)
            node = writer.node if writer else None
            create = [asyncio.to_thread(self._memory.create, shortfall.nbytes, node) for _ in range(shortfall.slots)]
            made = await asyncio.gather(*create, return_exceptions=True)
        finally:
            self._promised -= wanted
            self._done.fire("")
        failures = [outcome for outcome in made if isinstance(outcome, BaseException)]
        segments = [outcome for outcome in made if not isinstance(outcome, BaseException)]
        gone = self._store.jobs.get(job.name) is not job or shortfall.rank not in job.writers
        for segment_id, locked in segments:
            if failures or gone:
                self._background.thread(self._memory.unlink, segment_id)
            else:
                segment = Segment(segment_id, shortfall.rank, shortfall.nbytes, locked=locked)
                self._store.add_segment(job, segment)
        self._settle()
        if failures:
            raise failures[0]
        if gone:
            raise VersionConflict(f"{job.name}: its writer went away while memory was reserved for it")
