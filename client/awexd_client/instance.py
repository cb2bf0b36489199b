"""An inference instance's control process: one WeightReader drives all its workers, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline
from awexd_client.updates import UpdateResult
from awexd_transports.errors import AwexdError, DeadlineExceeded, InvalidArgument


class Worker(Protocol):
    """One worker of an instance: a WorkerWeightsReader, or a stand-in that reaches one in another process."""

    @property
    def rank(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def version(self) -> tuple[int, int] | None: ...

    def stage(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Leases and checks a version; what comes back has ``epoch`` and ``step`` and goes to ``apply``."""
        ...

    def apply(self, staged: Any, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult: ...

    def release(self, staged: Any) -> None: ...


class WeightReader:
    """Brings one version into every worker of an instance: staged and checked everywhere before any is touched.

    Args:
        job, engine: of the instance; for messages.
        workers: one for each rank, registered already. They stay the caller's to close.

    Raises:
        InvalidArgument: no workers, or a rank twice or missing.
    """

    def __init__(self, job: str, engine: str, workers: Sequence[Worker]) -> None:
        ranks = sorted(worker.rank for worker in workers)
        if not workers or ranks != list(range(len(workers))):
            raise InvalidArgument(f"{engine}: workers must be ranks 0 to n-1, each once, not {ranks}")
        self.job = job
        self.engine = engine
        self._workers = sorted(workers, key=lambda worker: worker.rank)
        self._pool = ThreadPoolExecutor(len(workers), thread_name_prefix=f"awexd-{engine}")

    def update(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        """Updates every worker to the newest version, or that step's.

        Returns:
            The sum of bytes, the longest stage and pause, and each worker's own result in ``workers``.

        Raises:
            AwexdError: of the first worker that failed; ``details["workers"]`` has the state of each. Where none was
                touched, all run on as before; else those that were are ``"dirty"`` or at the new version, as it says.
        """
        deadline = Deadline(timeout)
        staged = self._stage(step, deadline)
        results = self._each(lambda worker, item: worker.apply(item, deadline.left()), staged)
        failure = next((item for item in results if isinstance(item, BaseException)), None)
        if failure is not None:
            raise self._told(failure)
        return UpdateResult(
            epoch=results[0].epoch,
            step=results[0].step,
            bytes=sum(result.bytes for result in results),
            stage_seconds=max(result.stage_seconds for result in results),
            pause_seconds=max(result.pause_seconds for result in results),
            transport=results[0].transport,
            workers=tuple(results),
        )

    def _stage(self, step: int | None, deadline: Deadline) -> list[Any]:
        """One version staged on every worker, or none on any.

        A worker whose last update failed is given its unfinished round's version again: it catches up first.
        """
        while True:
            staged = self._each(lambda worker, _: worker.stage(step, deadline.left()), [None] * len(self._workers))
            versions = sorted({(item.epoch, item.step) for item in staged if not isinstance(item, BaseException)})
            failure = next((item for item in staged if isinstance(item, BaseException)), None)
            if failure is None and len(versions) == 1:
                return staged
            if failure is None and deadline.left() <= 0:
                failure = DeadlineExceeded(f"{self.engine}: its workers are at different versions: {versions}")
            behind = [failure is None and (item.epoch, item.step) == versions[0] for item in staged]
            for worker, item, late in zip(self._workers, staged, behind, strict=True):
                if not late and not isinstance(item, BaseException):
                    worker.release(item)
            if failure is None:
                caught_up = self._each(
                    lambda worker, item: worker.apply(item, deadline.left()) if item else None,
                    [item if late else None for item, late in zip(staged, behind, strict=True)],
                )
                failure = next((outcome for outcome in caught_up if isinstance(outcome, BaseException)), None)
            if failure is not None:
                raise self._told(failure)

    @property
    def state(self) -> str:
        """``"dirty"`` if any worker is, ``"ready"`` if all are at one version, else ``"empty"``."""
        states = {worker.state for worker in self._workers}
        if "dirty" in states or len({worker.version for worker in self._workers}) > 1:
            return "dirty"
        return states.pop()

    @property
    def version(self) -> tuple[int, int] | None:
        """The (epoch, step) of all workers; None unless every one is ready at it."""
        return self._workers[0].version if self.state == "ready" else None

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, action: Callable[[Worker, Any], Any], items: Sequence[Any]) -> list[Any]:
        """What ``action`` gives for each worker, or the exception that it raised."""
        futures: list[Future[Any]] = [
            self._pool.submit(action, worker, item) for worker, item in zip(self._workers, items, strict=True)
        ]
        return [future.exception() or future.result() for future in futures]

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, AwexdError):
            error.details["workers"] = [
                {"rank": worker.rank, "state": worker.state, "version": worker.version} for worker in self._workers
            ]
        return error
