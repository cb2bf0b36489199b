"""The same names, awaitable, for engines and controllers that run an event loop.

Each call runs in a thread of its object's own pool, so the loop never waits; copies leave the GIL alone. A cancelled
await stops waiting at once; the call itself ends at its deadline, or when the object is closed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, Self, TypeVar

from awexd_client import instance as _instance
from awexd_client import publication as _publication
from awexd_client import reader as _reader
from awexd_client import writer as _writer
from awexd_client.adapters.base import Adapter
from awexd_client.endpoint import DEFAULT_TIMEOUT
from awexd_client.holding import Casts
from awexd_client.reader import Staged, State, UpdateResult
from awexd_transports.layout import Shard

__all__ = ["Publication", "Shard", "Update", "UpdateResult", "WeightReader", "WeightWriter", "WorkerWeightsReader"]

THREADS = 32
"""Calls of one object that may wait at the same time."""

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")


class _Awaitable(Generic[B]):
    """Runs a blocking object's methods in threads."""

    def __init__(self, blocking: B, pool: ThreadPoolExecutor) -> None:
        self._blocking = blocking
        self._pool = pool

    async def _run(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = functools.partial(method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _pool(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix=f"awexd-{name}")


class Publication(_Awaitable[_publication.Publication]):
    """See :class:`awexd_client.Publication`."""

    @property
    def epoch(self) -> int:
        return self._blocking.epoch

    @property
    def step(self) -> int:
        return self._blocking.step

    @property
    def nbytes(self) -> int:
        return self._blocking.nbytes

    async def captured(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await self._run(self._blocking.captured, timeout)

    async def committed(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await self._run(self._blocking.committed, timeout)


class Update(_Awaitable[_publication.Update]):
    """See :class:`awexd_client.Update`; ``async with await writer.begin(step) as update: await update.write(part)``."""

    @property
    def publication(self) -> Publication:
        return Publication(self._blocking.publication, self._pool)

    async def write(self, shards: object) -> None:
        await self._run(self._blocking.write, shards)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._run(self._blocking.__exit__, *exception)


class WeightWriter(_Awaitable[_writer.WeightWriter]):
    """See :class:`awexd_client.WeightWriter`; made with ``await WeightWriter.connect(...)``, of the same arguments."""

    @classmethod
    async def connect(cls, *args: Any, **kwargs: Any) -> Self:
        pool = _pool("writer")
        make = functools.partial(_writer.WeightWriter, *args, **kwargs)
        return cls(await asyncio.get_running_loop().run_in_executor(pool, make), pool)

    @property
    def epoch(self) -> int | None:
        return self._blocking.epoch

    async def register(
        self,
        target: object,
        adapter: str | Adapter | None = None,
        *,
        dtype: Casts = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        await self._run(self._blocking.register, target, adapter, dtype=dtype, timeout=timeout)

    async def begin(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Update:
        return Update(await self._run(self._blocking.begin, step, timeout), self._pool)

    async def publish(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Publication:
        return Publication(await self._run(self._blocking.publish, step, timeout), self._pool)

    async def grant(self, uids: tuple[int, ...] = (), gids: tuple[int, ...] = ()) -> None:
        await self._run(self._blocking.grant, uids, gids)

    async def close_job(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await self._run(self._blocking.close_job, timeout)

    async def close(self) -> None:
        await asyncio.to_thread(self._blocking.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class WorkerWeightsReader(_Awaitable[_reader.WorkerWeightsReader]):
    """See :class:`awexd_client.WorkerWeightsReader`; made with ``await WorkerWeightsReader.connect(...)``."""

    @classmethod
    async def connect(cls, *args: Any, **kwargs: Any) -> Self:
        pool = _pool("reader")
        make = functools.partial(_reader.WorkerWeightsReader, *args, **kwargs)
        return cls(await asyncio.get_running_loop().run_in_executor(pool, make), pool)

    @property
    def state(self) -> State:
        return self._blocking.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self._blocking.version

    async def register(
        self, target: object, adapter: str | Adapter | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        await self._run(self._blocking.register, target, adapter, timeout)

    def prefetch(self, step: int | None = None) -> None:
        """Returns at once, as the blocking one does."""
        self._blocking.prefetch(step)

    async def update(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        return await self._run(self._blocking.update, step, timeout)

    async def wait(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> tuple[int, int]:
        return await self._run(self._blocking.wait, step, timeout)

    async def stage(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Staged:
        return await self._run(self._blocking.stage, step, timeout)

    async def apply(self, staged: Staged, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        return await self._run(self._blocking.apply, staged, timeout)

    async def release(self, staged: Staged) -> None:
        await self._run(self._blocking.release, staged)

    async def close(self) -> None:
        await asyncio.to_thread(self._blocking.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class WeightReader:
    """See :class:`awexd_client.WeightReader`; its workers are those of this module."""

    def __init__(self, job: str, engine: str, workers: list[WorkerWeightsReader]) -> None:
        self._reader = _instance.WeightReader(job, engine, [worker._blocking for worker in workers])

    @property
    def state(self) -> str:
        return self._reader.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self._reader.version

    async def update(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        return await asyncio.to_thread(self._reader.update, step, timeout)

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
