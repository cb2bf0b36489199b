"""The same names, awaitable, for engines and controllers that run an event loop.

``writer = await aio.WeightWriter(job=..., ...)`` or ``async with aio.WeightWriter(...) as writer``; then every call
that can wait is awaited. Each runs in a thread of its object's own pool, so the loop never waits; copies leave the GIL
alone. A cancelled await returns at once. A cancelled ``update`` touches nothing any more, unless it is copying already:
then it completes, and ``version`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, Self, TypeVar

from awexd_client import instance as _instance
from awexd_client import phases as _phases
from awexd_client import publication as _publication
from awexd_client import reader as _reader
from awexd_client import writer as _writer
from awexd_client.adapters.base import Adapter
from awexd_client.endpoint import DEFAULT_TIMEOUT, Endpoint
from awexd_client.holding import Casts
from awexd_client.instance import VERIFY_TIMEOUT
from awexd_client.updates import Staged, State, UpdateResult
from awexd_client.verify import Verified
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    BudgetExceeded,
    DaemonUnavailable,
    DeadlineExceeded,
    EpochChanged,
    IntegrityError,
    InvalidArgument,
    ManifestMismatch,
    ProtocolError,
    VersionConflict,
    VersionUnavailable,
)
from awexd_transports.layout import Shard

__all__ = [
    "AccessDenied",
    "AwexdError",
    "BudgetExceeded",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "EpochChanged",
    "IntegrityError",
    "InvalidArgument",
    "ManifestMismatch",
    "ProtocolError",
    "Publication",
    "Shard",
    "Update",
    "UpdateResult",
    "VersionConflict",
    "VersionUnavailable",
    "WeightReader",
    "WeightWriter",
    "WorkerWeightsReader",
]

THREADS = 32
"""Calls of one object that may wait at the same time."""

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")
E = TypeVar("E", bound=Endpoint)
F = TypeVar("F", bound=_phases.Phased)


async def _in(pool: ThreadPoolExecutor, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(method, *args, **kwargs))


class _Part(Generic[B]):
    """Runs the methods of something that a writer has given."""

    def __init__(self, blocking: B, pool: ThreadPoolExecutor) -> None:
        self._blocking = blocking
        self._pool = pool


class Publication(_Part[_publication.Publication]):
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
        await _in(self._pool, self._blocking.captured, timeout)

    @property
    def mode(self) -> str:
        return self._blocking.mode

    @property
    def reason(self) -> str:
        return self._blocking.reason

    async def committed(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.committed, timeout)

    async def withdraw(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.withdraw, timeout)


class Update(_Part[_publication.Update]):
    """See :class:`awexd_client.Update`; ``async with await writer.begin(step) as update: await update.write(part)``."""

    @property
    def publication(self) -> Publication:
        return Publication(self._blocking.publication, self._pool)

    async def write(self, shards: object) -> None:
        await _in(self._pool, self._blocking.write, shards)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await _in(self._pool, self._blocking.__exit__, *exception)


class _Client(Generic[E]):
    """A blocking client, made when this is awaited or entered, and its pool of threads."""

    def __init__(self, make: Callable[[], E]) -> None:
        self._make = make
        self._made: E | None = None
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="awexd-aio")

    @property
    def _blocking(self) -> E:
        if self._made is None:
            raise InvalidArgument(f"await the {type(self).__name__} first, or enter it with `async with`")
        return self._made

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._made is None:
            self._made = await _in(self._pool, self._make)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._made is not None:
            await asyncio.to_thread(self._made.close)
        self._pool.shutdown(wait=False)


class _Phased(_Client[F]):
    """A client that can be in a phase."""

    @contextlib.asynccontextmanager
    async def phase(
        self, phase: str, timeout: float = DEFAULT_TIMEOUT, *, gpus: Iterable[str] | None = None
    ) -> AsyncIterator[None]:
        """``async with client.phase("train"):``; a cancelled entrance gives the claim up."""
        held = self._blocking.phase(phase, timeout, gpus=gpus)
        entering = asyncio.ensure_future(_in(self._pool, held.__enter__))
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            await asyncio.to_thread(self._blocking._tell, "phase.leave", token=held.token)
            with contextlib.suppress(AwexdError):
                await entering  # it had come in a moment before, or is refused now
                await _in(self._pool, held.__exit__, None, None, None)
            raise
        try:
            yield
        finally:
            await _in(self._pool, held.__exit__, *sys.exc_info())


class WeightWriter(_Phased[_writer.WeightWriter]):
    """See :class:`awexd_client.WeightWriter`; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(functools.partial(_writer.WeightWriter, *args, **kwargs))

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
        await _in(self._pool, self._blocking.register, target, adapter, dtype=dtype, timeout=timeout)

    async def begin(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Update:
        return Update(await _in(self._pool, self._blocking.begin, step, timeout), self._pool)

    async def publish(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Publication:
        return Publication(await _in(self._pool, self._blocking.publish, step, timeout), self._pool)

    async def park(self, name: str, tensors: object, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.park, name, tensors, timeout)

    async def offload(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.offload, timeout)

    async def restore(
        self, name: str | None = None, tensors: object = None, timeout: float = DEFAULT_TIMEOUT, *, keep: bool = True
    ) -> None:
        await _in(self._pool, self._blocking.restore, name, tensors, timeout, keep=keep)

    async def discard(self, name: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.discard, name, timeout)

    async def grant(
        self, uids: tuple[int, ...] = (), gids: tuple[int, ...] = (), timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        await _in(self._pool, self._blocking.grant, uids, gids, timeout)

    async def close_job(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        await _in(self._pool, self._blocking.close_job, timeout)


class WorkerWeightsReader(_Phased[_reader.WorkerWeightsReader]):
    """See :class:`awexd_client.WorkerWeightsReader`; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(functools.partial(_reader.WorkerWeightsReader, *args, **kwargs))

    @property
    def state(self) -> State:
        return self._blocking.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self._blocking.version

    async def register(
        self, target: object, adapter: str | Adapter | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        await _in(self._pool, self._blocking.register, target, adapter, timeout)

    def prefetch(self, step: int | None = None) -> None:
        """Returns at once, as the blocking one does."""
        self._blocking.prefetch(step)

    async def update(
        self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT, *, overlap: bool = False
    ) -> UpdateResult:
        given_up = threading.Event()
        try:
            return await _in(self._pool, self._blocking._update_unless, given_up, step, timeout, overlap)
        except asyncio.CancelledError:
            given_up.set()
            raise

    async def wait(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> tuple[int, int]:
        return await _in(self._pool, self._blocking.wait, step, timeout)

    async def stage(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Staged:
        return await _in(self._pool, self._blocking.stage, step, timeout)

    async def apply(self, staged: Staged, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        return await _in(self._pool, self._blocking.apply, staged, timeout)

    async def release(self, staged: Staged) -> None:
        await _in(self._pool, self._blocking.release, staged)


class WeightReader:
    """See :class:`awexd_client.WeightReader`; its workers are those of this module, connected."""

    def __init__(self, job: str, engine: str, workers: list[WorkerWeightsReader]) -> None:
        self._reader = _instance.WeightReader(job, engine, [worker._blocking for worker in workers])
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="awexd-aio")

    @property
    def state(self) -> str:
        return self._reader.state

    @property
    def version(self) -> tuple[int, int] | None:
        return self._reader.version

    async def update(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        return await _in(self._pool, self._reader.update, step, timeout)

    async def verify(self, checkpoint_dir: str | os.PathLike[str], timeout: float = VERIFY_TIMEOUT) -> Verified:
        return await _in(self._pool, self._reader.verify, checkpoint_dir, timeout)

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.close)
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
