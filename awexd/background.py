"""Work beside the requests: threads for blocking calls, timers, and wake-ups of those who wait for a job."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")
_log = logging.getLogger(__name__)


class Background:
    """Tasks that outlive the request that started them; all of them end before the daemon's group does."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._threads: set[asyncio.Task[None]] = set()
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._later: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Runs to its end even if whoever awaits it goes away; its failure is theirs, not the daemon's."""
        done: asyncio.Future[None] = self._loop.create_future()

        async def run() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - handed to whoever awaits it
                if not done.cancelled():
                    done.set_exception(error)
                    done.exception()  # retrieved: nobody may be left to await it
            else:
                if not done.cancelled():
                    done.set_result(None)

        self._group.create_task(run())
        return done

    def thread(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs a blocking call in a thread; a failure is logged with what failed."""

        async def run() -> None:
            try:
                await asyncio.to_thread(function, *args, **kwargs)
            except OSError:
                _log.exception("%s%r failed", getattr(function, "__qualname__", function), args)

        task = self._group.create_task(run())
        self._threads.add(task)
        task.add_done_callback(self._threads.discard)

    async def threads_done(self) -> None:
        """Waits for the blocking calls that have been started so far."""
        if self._threads:
            await asyncio.wait(list(self._threads))

    def by(self, name: str, due: float | None, callback: Callable[[], None]) -> None:
        """The timer of that name: calls back at ``due`` (monotonic seconds), or earlier if that was asked before.

        So what is put off again and again costs nothing; ``callback`` looks for itself what is due, and asks anew.
        """
        known = self._timers.get(name)
        if due is None or (known is not None and known[0] <= due):
            return
        if known is not None:
            known[1].cancel()

        def fire() -> None:
            self._timers.pop(name, None)
            callback()

        self._timers[name] = due, self._loop.call_later(max(0.0, due - time.monotonic()), fire)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        def fire() -> None:
            del self._later[fire]
            callback()

        self._later[fire] = self._loop.call_later(seconds, fire)

    def stop_timers(self) -> None:
        """Ends the timers; those of ``later`` are called now, so that nothing put off is lost."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for fire, handle in list(self._later.items()):
            handle.cancel()
            fire()


class Signals:
    """Calls back, once and in the order they came, all who wait for something of that name to change."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Callable[[], None], None]] = {}

    def call(self, name: str, callback: Callable[[], None]) -> None:
        self._waiting.setdefault(name, {})[callback] = None

    def forget(self, name: str, callback: Callable[[], None]) -> None:
        waiting = self._waiting.get(name)
        if waiting is not None and callback in waiting:
            del waiting[callback]
            if not waiting:
                del self._waiting[name]

    async def next(self, name: str) -> None:
        """Returns at the next change."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell() -> None:
            if not changed.done():
                changed.set_result(None)

        self.call(name, tell)
        try:
            await changed
        finally:
            self.forget(name, tell)

    def fire(self, name: str) -> None:
        for callback in self._waiting.pop(name, {}):
            callback()
