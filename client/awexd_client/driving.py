"""How a WeightReader reaches its instance's workers: each for itself, or all through the calls of their engine."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, connect_again
from awexd_client.session import Connection
from awexd_client.updates import UpdateResult
from awexd_client.verify import Difference, Verified
from awexd_transports.errors import AwexdError, DaemonUnavailable, DeadlineExceeded, InvalidArgument, from_wire

VersionKey = tuple[int, int]


class Worker(Protocol):
    """One worker of an instance: a WorkerWeightsReader, or a stand-in that reaches one in another process."""

    @property
    def rank(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def version(self) -> VersionKey | None: ...

    def stage(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Leases and checks a version; what comes back has ``epoch`` and ``step`` and goes to ``apply``."""
        ...

    def apply(self, staged: Any, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult: ...

    def release(self, staged: Any) -> None: ...

    def compare(self, checkpoint_dir: str, timeout: float = DEFAULT_TIMEOUT) -> Verified:
        """Its live tensors with a checkpoint; asked for by ``WeightReader.verify`` only."""
        ...


@runtime_checkable
class Workers(Protocol):
    """All workers of an instance, reached together through the calls of their engine.

    Each worker tells the daemon what came of a call; whether the engine passes an error on is no matter.
    """

    def stage(self, step: int | None, timeout: float) -> None:
        """Every worker stages that step's version, or the next of its rounds. Touches no live tensor."""
        ...

    def apply(self, epoch: int, step: int, timeout: float) -> None:
        """Every worker applies what it has staged, and the engine says from then on that it runs on that version."""
        ...

    def abandon(self) -> None:
        """Every worker gives up what it has staged; the engine goes on."""
        ...

    def verify(self, checkpoint_dir: str, token: str, timeout: float) -> None:
        """Every worker calls ``compare_and_tell`` of its reader with these."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a worker stands."""

    rank: int
    state: str
    version: VersionKey | None


class OneByOne:
    """Workers that are called each for itself, all at the same time."""

    def __init__(self, engine: str, workers: Sequence[Worker]) -> None:
        ranks = sorted(worker.rank for worker in workers)
        if not workers or ranks != list(range(len(workers))):
            raise InvalidArgument(f"{engine}: workers must be ranks 0 to n-1, each once, not {ranks}")
        self._engine = engine
        self._workers = sorted(workers, key=lambda worker: worker.rank)
        self._staged: list[Any] = []
        self._pool = ThreadPoolExecutor(len(workers), thread_name_prefix=f"awexd-{engine}")

    def stage(self, step: int | None, deadline: Deadline) -> VersionKey:
        """One version on every worker, or none on any.

        A worker whose last update failed is given its unfinished round's version again: it catches up first.
        """
        while True:
            staged = self._each(lambda worker, _: worker.stage(step, deadline.left()), [None] * len(self._workers))
            versions = sorted({(item.epoch, item.step) for item in staged if not isinstance(item, BaseException)})
            failure = _first_failure(staged)
            if failure is None and len(versions) == 1:
                self._staged = staged
                return versions[0]
            if failure is None and deadline.left() <= 0:
                failure = DeadlineExceeded(f"{self._engine}: its workers are at different versions: {versions}")
            behind = [failure is None and (item.epoch, item.step) == versions[0] for item in staged]
            for worker, item, late in zip(self._workers, staged, behind, strict=True):
                if not late and not isinstance(item, BaseException):
                    worker.release(item)
            if failure is None:
                caught_up = self._each(
                    lambda worker, item: worker.apply(item, deadline.left()) if item else None,
                    [item if late else None for item, late in zip(staged, behind, strict=True)],
                )
                failure = _first_failure(caught_up)
            if failure is not None:
                raise failure

    def apply(self, deadline: Deadline) -> list[UpdateResult]:
        staged, self._staged = self._staged, []
        results = self._each(lambda worker, item: worker.apply(item, deadline.left()), staged)
        failure = _first_failure(results)
        if failure is not None:
            raise failure
        return results

    def verify(self, checkpoint_dir: str, deadline: Deadline) -> Verified:
        found = self._each(
            lambda worker, _: worker.compare(checkpoint_dir, deadline.left()), [None] * len(self._workers)
        )
        failure = _first_failure(found)
        if failure is not None:
            raise failure
        return Verified.joined(found)

    def standings(self) -> list[Standing]:
        return [Standing(worker.rank, worker.state, worker.version) for worker in self._workers]

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, action: Callable[[Worker, Any], Any], items: Sequence[Any]) -> list[Any]:
        """What ``action`` gives for each worker, or the exception that it raised."""
        futures: list[Future[Any]] = [
            self._pool.submit(action, worker, item) for worker, item in zip(self._workers, items, strict=True)
        ]
        return [future.exception() or future.result() for future in futures]


class Together:
    """Workers behind an engine's own calls; what came of one, the daemon knows."""

    def __init__(self, job: str, engine: str, workers: Workers, path: str) -> None:
        self._job, self._engine, self._workers, self._path = job, engine, workers, path
        self._staged: VersionKey | None = None

    def stage(self, step: int | None, deadline: Deadline) -> VersionKey:
        """One version on every worker, or none on any.

        The version is waited for here: a worker that waits would keep its engine from generating. A worker whose last
        update failed is given its unfinished round's version again: by number all go on together.
        """
        self._await_version(step, deadline)
        versions = self._stage(step, deadline)
        if len(versions) > 1:
            versions = self._stage(max(versions)[1], deadline)
        if len(versions) > 1:
            raise AwexdError(f"{self._engine}: its workers stage different versions: {sorted(versions)}")
        self._staged = versions.pop()
        return self._staged

    def apply(self, deadline: Deadline) -> list[UpdateResult]:
        version, self._staged = self._staged, None
        if version is None:
            raise InvalidArgument(f"{self._engine}: nothing is staged")
        failure = self._call(lambda: self._workers.apply(*version, deadline.left()))
        told = self._told_after(failure, deadline)
        bad = [worker for worker in told if worker["state"] != "ready" or worker["version"] != list(version)]
        if failure or bad:
            failed = next((worker["failure"] for worker in bad if worker["failure"]), None)
            ranks = [worker["rank"] for worker in bad]
            raise _error(failed, failure) or AwexdError(f"{self._engine}: ranks {ranks} did not apply {version}")
        return [_result(worker, version) for worker in told]

    def verify(self, checkpoint_dir: str, deadline: Deadline) -> Verified:
        token = secrets.token_hex(8)
        failure = self._call(lambda: self._workers.verify(checkpoint_dir, token, deadline.left()))
        told = self._told_after(failure, deadline)
        silent = [worker for worker in told if not worker["verified"] or worker["verified"]["token"] != token]
        if failure or silent:
            failed = next((worker["failure"] for worker in silent if worker["failure"]), None)
            ranks = [worker["rank"] for worker in silent]
            raise failure or _error(failed, None) or AwexdError(f"{self._engine}: ranks {ranks} have compared nothing")
        return Verified.joined([_verified(worker) for worker in told])

    def standings(self) -> list[Standing]:
        try:
            told = self._told(Deadline(DEFAULT_TIMEOUT))
        except AwexdError:
            return []
        return [
            Standing(worker["rank"], worker["state"], tuple(worker["version"]) if worker["version"] else None)
            for worker in told
        ]

    def close(self) -> None:
        """The engine and its workers are the caller's."""

    def _stage(self, step: int | None, deadline: Deadline) -> set[VersionKey]:
        """What the workers have staged; where that is not one version, nothing any more."""
        failure = self._call(lambda: self._workers.stage(step, deadline.left()))
        try:
            told = self._told_after(failure, deadline)
        except AwexdError:
            self._call(self._workers.abandon)
            raise
        idle = [worker for worker in told if not worker["staged"]]
        versions = {(worker["staged"][0], worker["staged"][1]) for worker in told if worker["staged"]}
        if failure or idle or len(versions) > 1:
            self._call(self._workers.abandon)
        if failure or idle:
            failed = next((worker["failure"] for worker in idle if worker["failure"]), None)
            ranks = [worker["rank"] for worker in idle]
            raise _error(failed, failure) or AwexdError(f"{self._engine}: ranks {ranks} have staged nothing")
        return versions

    def _call(self, call: Callable[[], None]) -> Exception | None:
        """The error that the engine passed on, if it did: the daemon may know a better one."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - an engine's own, of any kind; raised by whoever asked
            return error
        return None

    def _await_version(self, step: int | None, deadline: Deadline) -> None:
        """Returns once an update need not wait for its version; what that is worth, the workers are told.

        Meanwhile they count as waiting for it: nobody has them do anything else.
        """
        asked = {"job": self._job, "engine": self._engine, "step": step}
        while True:
            try:
                with contextlib.closing(connect_again(self._path, deadline.left())) as connection:
                    self._follow(connection, deadline)
                    connection.call("read.await", asked, timeout=deadline.left())
                return
            except DeadlineExceeded as error:
                what = "its first committed version" if step is None else f"step {step} to be committed"
                raise DeadlineExceeded(f"{self._job}: waited {deadline.seconds:g} s for {what}") from error
            except DaemonUnavailable:
                if not deadline.left():
                    raise

    def _follow(self, connection: Connection, deadline: Deadline) -> None:
        """Where this node's workers are known: their job may have its home on another."""
        connection.call("session.home", {"job": self._job, "join": False}, timeout=max(1.0, deadline.left()))

    def _told_after(self, failure: Exception | None, deadline: Deadline) -> list[dict[str, Any]]:
        """Where the daemon does not know the workers, the engine's own error says why they are not there."""
        try:
            return self._told(deadline)
        except AwexdError as error:
            if failure is not None:
                raise failure from error
            raise

    def _told(self, deadline: Deadline) -> list[dict[str, Any]]:
        with contextlib.closing(Connection(self._path)) as connection:
            self._follow(connection, deadline)
            arguments = {"job": self._job, "engine": self._engine}
            engine = connection.call("read.engine", arguments, timeout=max(1.0, deadline.left()))[0]
        workers: list[dict[str, Any]] = engine["workers"]
        if len(workers) != engine["world_size"]:
            there = [worker["rank"] for worker in workers]
            raise AwexdError(f"{self._engine}: of {engine['world_size']} workers only ranks {there} are registered")
        return workers


def _first_failure(outcomes: Sequence[Any]) -> BaseException | None:
    return next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)


def _error(told: dict[str, str] | None, passed_on: Exception | None) -> Exception | None:
    """What a worker told the daemon, else what the engine passed on."""
    if told:
        error = from_wire(told["code"], told["message"], {})
        error.__cause__ = passed_on
        return error
    return passed_on


def _verified(worker: dict[str, Any]) -> Verified:
    said = worker["verified"]
    differences = tuple(map(Difference.heard, said["differences"]))
    aside = {first if count == 1 else f"{first} and {count - 1} more": why for why, count, first in worker["aside"]}
    more = said["differing"] - len(differences)
    return Verified(said["tensors"], said["nbytes"], differences, (), aside, more)


def _result(worker: dict[str, Any], version: VersionKey) -> UpdateResult:
    said = worker["result"]
    return UpdateResult(
        epoch=version[0],
        step=version[1],
        bytes=said["nbytes"],
        stage_seconds=said["stage_us"] / 1e6,
        pause_seconds=said["pause_us"] / 1e6,
        transport="cuda_ipc" if said["borrowed"] else "shm",
        mode="direct" if said["borrowed"] else "host",
        reason=said["reason"],
    )
