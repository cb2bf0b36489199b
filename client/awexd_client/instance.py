"""An inference instance's control process: one WeightReader drives all its workers, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from awexd_client.driving import OneByOne, Together, VersionKey, Worker, Workers
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline
from awexd_client.session import socket_path
from awexd_client.updates import UpdateResult
from awexd_client.verify import Verified
from awexd_transports.errors import AwexdError

__all__ = ["VERIFY_TIMEOUT", "WeightReader", "Worker", "Workers"]

VERIFY_TIMEOUT = 600.0
"""Seconds. A checkpoint is read at the rate of its disk."""


class WeightReader:
    """Brings one version into every worker of an instance: staged and checked everywhere before any is touched.

    Args:
        job, engine: of the instance.
        workers: one for each rank, registered already, which stay the caller's to close; or an engine that reaches its
            own: ``awexd_client.vllm.VLLMWorkers(llm)``, ``awexd_client.sglang.SGLangServer(url)`` and their like.
        socket: of a daemon that workers of it are connected to, for the latter; they may be on several nodes.

    Raises:
        InvalidArgument: no workers, or a rank twice or missing.
    """

    def __init__(
        self,
        job: str,
        engine: str,
        workers: Sequence[Worker] | Workers,
        socket: str | os.PathLike[str] | None = None,
    ) -> None:
        self.job = job
        self.engine = engine
        self._drive: OneByOne | Together
        if isinstance(workers, Workers):
            self._drive = Together(job, engine, workers, socket_path(socket))
        else:
            self._drive = OneByOne(engine, workers)

    def update(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        """Updates every worker to the newest version, or that step's.

        Where a worker fails after some were touched, the version that all had before is applied again, if it is held.

        Returns:
            The sum of bytes, the longest stage and pause, and each worker's own result in ``workers``.

        Raises:
            AwexdError: of the first worker that failed; ``details["workers"]`` has the state of each: at the version
                before, or, where that could not be had again, ``"dirty"`` or at different ones.
        """
        deadline = Deadline(timeout)
        before = self.version
        try:
            version = self._drive.stage(step, deadline)
        except AwexdError as error:
            self._tell(error)
            raise
        try:
            results = self._drive.apply(deadline)
        except Exception as error:
            self._return_to(before, error)
            self._tell(error)
            raise
        return UpdateResult(
            epoch=version[0],
            step=version[1],
            bytes=sum(result.bytes for result in results),
            stage_seconds=max(result.stage_seconds for result in results),
            pause_seconds=max(result.pause_seconds for result in results),
            transport=results[0].transport,
            mode=results[0].mode,
            reason=results[0].reason,
            workers=tuple(results),
        )

    def verify(self, checkpoint_dir: str | os.PathLike[str], timeout: float = VERIFY_TIMEOUT) -> Verified:
        """Compares every worker's live tensors with safetensors on disk; see ``WorkerWeightsReader.verify``.

        The workers read the folder themselves. Behind an engine's own calls it does not generate meanwhile, and what
        was staged is given up.

        Raises:
            IntegrityError: a tensor is not the checkpoint's; ``details["differences"]`` has one of each.
            InvalidArgument: that is no checkpoint (behind an engine's own calls an AwexdError that says so).
            DeadlineExceeded: it took longer.
        """
        return self.compare(checkpoint_dir, timeout).check()

    def compare(self, checkpoint_dir: str | os.PathLike[str], timeout: float = VERIFY_TIMEOUT) -> Verified:
        """As ``verify``, but for what differs: that is in the result."""
        return self._drive.verify(os.path.abspath(checkpoint_dir), Deadline(timeout))

    @property
    def state(self) -> str:
        """``"dirty"`` if any worker is, ``"ready"`` if all are at one version, else ``"empty"``."""
        standings = self._drive.standings()
        states = {worker.state for worker in standings} or {"empty"}
        if "dirty" in states or len({worker.version for worker in standings}) > 1:
            return "dirty"
        return states.pop()

    @property
    def version(self) -> VersionKey | None:
        """The (epoch, step) of all workers; None unless every one is ready at it."""
        versions = {worker.version if worker.state == "ready" else None for worker in self._drive.standings()}
        return versions.pop() if len(versions) == 1 else None

    def close(self) -> None:
        self._drive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _return_to(self, version: VersionKey | None, error: Exception) -> None:
        """Applies the last good version again, so that an engine of which a part was touched can serve."""
        if version is None:
            error.add_note(f"{self.engine} had no version before: it is not ready until an update succeeds")
            return
        deadline = Deadline(DEFAULT_TIMEOUT)
        try:
            self._drive.stage(version[1], deadline)
            self._drive.apply(deadline)
            error.add_note(f"{self.engine} runs on epoch {version[0]} step {version[1]} again")
        except Exception as again:  # noqa: BLE001 - the first error is what is raised
            error.add_note(f"epoch {version[0]} step {version[1]} could not be applied again: {again}")

    def _tell(self, error: Exception) -> None:
        if isinstance(error, AwexdError):
            error.details["workers"] = [
                {"rank": worker.rank, "state": worker.state, "version": worker.version}
                for worker in self._drive.standings()
            ]
