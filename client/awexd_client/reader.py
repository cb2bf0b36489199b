"""The inference side: one WorkerWeightsReader in each worker process of an engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from typing import Any

from awexd.protocol import MAX_DIFFERENCES, MAX_KEEP, MAX_REASONS, MAX_RING_BYTES, MAX_STEP
from awexd_client.adapters.base import Adapter, EngineWeights
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, check_whole
from awexd_client.holding import Holding
from awexd_client.overlapping import TOLD, Overlapping, Taken
from awexd_client.session import Asked
from awexd_client.tables import Sources
from awexd_client.updates import Staged, State, TakenBack, UpdateResult, load_of_engine
from awexd_client.verify import Checkpoint, Progress, Verified, verify
from awexd_transports.collective.rings import RING_BYTES, room_of
from awexd_transports.errors import (
    AccessDenied,
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    EpochChanged,
    IntegrityError,
    VersionUnavailable,
)

_log = logging.getLogger(__name__)


class WorkerWeightsReader(Overlapping):
    """Brings versions into one inference process's live tensors, in place.

    Args:
        job: ``owner/name``; a bare name is this user's own.
        engine: the inference instance; its workers get the same version in each round of updates.
        rank, world_size: of this worker in its engine.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        mode: ``"host"``: only versions in host memory. ``"auto"``, ``"direct"``: also what the trainer lends, see
            ``WeightWriter``, if the tensors to be updated are on a GPU and this process sees the trainer's.
        transport: ``"shm"`` means ``mode="host"``, ``"cuda_ipc"`` ``mode="direct"``, ``"nccl"`` what a
            ``WeightWriter`` with the same sends, and nothing else; trainer and workers take part at the same time.
        verify: ``"checksum"``, the default: what arrives is summed in the copy's own pass and compared with what its
            writer stored (with what is held, where it stored none). ``"off"``: nothing is compared.
        keep: versions that this node holds of a job whose trainer is elsewhere; here the trainer's own ``keep`` counts.
        timeout: seconds for the daemon's greeting.
        ring_bytes: with ``"nccl"``: of this process's receive buffer, as its writers'.

    Raises:
        DaemonUnavailable, AccessDenied, InvalidArgument
    """

    def __init__(
        self,
        job: str,
        engine: str,
        rank: int,
        world_size: int,
        socket: str | os.PathLike[str] | None = None,
        *,
        mode: str = "auto",
        transport: str = "auto",
        verify: str = "checksum",
        keep: int = 2,
        timeout: float = DEFAULT_TIMEOUT,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        check_whole("keep", keep, 1, MAX_KEEP)
        check_whole("ring_bytes", ring_bytes, 1, MAX_RING_BYTES)
        room_of(ring_bytes)
        super().__init__(
            job,
            engine,
            rank,
            world_size,
            socket,
            mode=mode,
            transport=transport,
            verify=verify,
            timeout=timeout,
            ring_bytes=ring_bytes,
        )
        self._state: State = "empty"
        self._version: tuple[int, int] | None = None
        self._updates: int | None = None
        self._alone = False
        """As of the last update: all workers of the engine were on this node, whose business its rounds are."""
        self._leased: str | None = None
        self._confirmed: Asked | None = None
        self._prefetching: threading.Thread | None = None

    @property
    def state(self) -> State:
        """``"empty"`` before the first update, ``"dirty"`` after one that failed half-way, else ``"ready"``."""
        return self._state

    @property
    def version(self) -> tuple[int, int] | None:
        """(epoch, step) that the live tensors hold; None unless ready."""
        return self._version

    def register(self, target: object, adapter: str | Adapter | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Declares the live tensors to be updated. They keep their dtype, shape and address.

        Args:
            target: nn.Module, list of modules, {name: tensor}, or an iterable of Shard.
            adapter: None to choose by the target; else a name or an adapter. An engine's may have its engine load some
                tensors itself: see ``EngineWeights``.

        Raises:
            ManifestMismatch: they do not fit what the trainer publishes, or share memory; nothing is registered.
            VersionConflict: another live process is this worker.
        """
        holding = Holding.to_fill(target, adapter)
        holding.check_disjoint()
        deadline = Deadline(timeout)
        with self._turn(deadline):
            before = (self._holding_, self._state, self._version, self._updates)
            # Other tensors: what the former ones held is not true of these, and a reconnection must not register those.
            self._holding_, self._state, self._version, self._updates = None, "empty", None, None
            try:
                self._surviving(lambda deadline: self._register(holding, deadline), deadline)
            except BaseException:
                self._holding_, self._state, self._version, self._updates = before
                raise
            self._holding_ = holding

    def prefetch(self, step: int | None = None) -> None:
        """Returns at once; plans, maps and faults in the newest version (or that one) while generation runs.

        The next ``update`` then has nothing left to stage. What fails here fails there again, and is told there.
        """
        if self._prefetching is not None and self._prefetching.is_alive():
            return
        self._prefetching = threading.Thread(target=self._prefetch, args=(step,), name="awexd-prefetch", daemon=True)
        self._prefetching.start()

    def update(
        self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT, *, overlap: bool = False
    ) -> UpdateResult:
        """Writes the newest committed version, or that step's, into the live tensors.

        Waits for a version that is still to come. All workers of an engine get the same version in their n-th update.
        After an error past the first touched byte the state is ``"dirty"``, until an update succeeds.

        Args:
            overlap: of a version that is still on its way from other nodes, copies what has come while the rest does:
                for engines that stand still until they have it. The pause is longer, and the state ``"dirty"`` if it
                does not come after all.

        Raises:
            ManifestMismatch: the version does not fit; nothing was touched.
            VersionUnavailable: that step is not held any more, or was withdrawn or lost its lease meanwhile.
            EpochChanged: the trainer has begun anew; the step will not come.
            IntegrityError: bytes are not what their writer wrote.
            DeadlineExceeded: names what was waited for.
        """
        return self._update_unless(None, step, timeout, overlap)

    def _update_unless(
        self, given_up: threading.Event | None, step: int | None, timeout: float, overlap: bool
    ) -> UpdateResult:
        """``update``, which touches nothing any more once its caller has given up."""
        resolved: list[int] = []
        deadline = Deadline(timeout)
        with self._turn(deadline):
            return self._surviving(lambda deadline: self._update(step, resolved, given_up, overlap, deadline), deadline)

    def wait(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> tuple[int, int]:
        """Returns the newest version's (epoch, step) once it is at least ``step``; told, not polled.

        Raises:
            EpochChanged: the trainer has begun anew: that step of this epoch will never be.
            DeadlineExceeded: not in time.
        """
        check_whole("step", step, 0, MAX_STEP)
        asked = Deadline(timeout)
        answer = self._surviving(lambda deadline: self._ask("read.wait", deadline.left(), step=step), asked)
        return answer["epoch"], answer["step"]

    def stage(self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> Staged:
        """The first half of ``update``: leases a version, plans, maps and checks it. Touches nothing.

        Follow it with ``apply`` or ``release``; see WeightReader, which stages every worker before it applies any.
        """
        deadline = Deadline(timeout)
        with self._turn(deadline):
            return self._surviving(lambda deadline: self._stage(step, deadline), deadline)

    def apply(self, staged: Staged, timeout: float = DEFAULT_TIMEOUT) -> UpdateResult:
        """The second half of ``update``: copies, compares and confirms."""
        deadline = Deadline(timeout)
        with self._turn(deadline):
            return self._apply(staged, deadline)

    def release(self, staged: Staged) -> None:
        """Gives up what was staged."""
        self._release(staged.lease)

    def verify(
        self,
        checkpoint_dir: str | os.PathLike[str],
        timeout: float = DEFAULT_TIMEOUT,
        *,
        progress: Progress | None = None,
    ) -> Verified:
        """Compares the live tensors with safetensors on disk, bit by bit; no second copy of the model is made.

        What the engine keeps in another form than it loads is not compared: ``aside`` of the result names it.

        Args:
            checkpoint_dir: a folder of safetensors files, as Hugging Face writes them.
            timeout: for another call on this reader to end; not for the comparison.
            progress: called with the bytes compared so far, and all of them.

        Raises:
            IntegrityError: a tensor is not the checkpoint's: names the first element that differs.
            InvalidArgument: that is no checkpoint.
        """
        return self.compare(checkpoint_dir, timeout, progress=progress).check()

    def compare(
        self,
        checkpoint_dir: str | os.PathLike[str],
        timeout: float = DEFAULT_TIMEOUT,
        *,
        progress: Progress | None = None,
    ) -> Verified:
        """As ``verify``, but for what differs: that is in the result."""
        with self._turn(Deadline(timeout)), Checkpoint(checkpoint_dir) as checkpoint:
            self._refresh()
            holding = self._holding
            parts = list(zip(holding.manifest.entries, holding.views, strict=True))[: holding.first_aside]
            return verify(parts, checkpoint, aside=holding.weights.reasons, progress=progress)

    def compare_and_tell(self, checkpoint_dir: str, token: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Compares, and tells the daemon what came of it: for a driver that hears nothing else of its workers.

        Args:
            token: by which the driver knows its own question.
        """
        found = self.compare(checkpoint_dir, timeout)
        self._ask(
            "read.verified",
            timeout,
            token=token,
            checkpoint=checkpoint_dir,
            tensors=found.tensors,
            nbytes=found.nbytes,
            differing=len(found.differences),
            differences=[difference.told() for difference in found.differences[:MAX_DIFFERENCES]],
        )

    def fail(self, error: BaseException) -> None:
        """Tells the daemon why this worker did not update, for ``status``, events and its driver. Never raises.

        What ``stage`` or ``apply`` has raised may have been told by them: it is not told again.
        """
        if not getattr(error, TOLD, False):
            self._release(None, error=error)

    def close(self) -> None:
        if self._prefetching is not None and self._prefetching.is_alive():
            self._connection.close()  # it may be waiting for a version that is still to come
            self._prefetching.join(DEFAULT_TIMEOUT)
        super().close()

    # internals

    def _register(self, holding: Holding, deadline: Deadline) -> None:
        self._confirmed = None
        self._forget_sources()
        self._fetch_sources(holding, None, deadline)
        manifest = holding.manifest
        answer = self._ask_with_body(
            "read.register",
            deadline.left(),
            manifest.encoded,
            job=self.job,
            engine=self.engine,
            rank=self.rank,
            world_size=self.world_size,
            digest=manifest.digest,
            version=list(self._version) if self._version else None,
            updates=self._updates,
            alone=self._alone,
            aside=_reasons(holding.weights) or None,
            devices=self._devices(holding) or None,
        )
        self._updates = answer["updates"]
        if self.exchanging:
            self._ask("read.exchanges", deadline.left())

    def _register_again(self, timeout: float) -> None:
        if self._holding_ is not None:
            self._register(self._holding_, Deadline(timeout))

    def _update(
        self,
        step: int | None,
        resolved: list[int],
        given_up: threading.Event | None,
        overlap: bool,
        deadline: Deadline,
    ) -> UpdateResult:
        """``resolved``: what an earlier try of this call was given, by a daemon that is gone; siblings may have it."""
        while True:
            try:
                staged = self._stage_resolved(step, resolved, overlap and not self.exchanging, deadline)
                if given_up is not None and given_up.is_set() and not staged.begun:
                    self._release(staged.lease)
                    raise DeadlineExceeded(f"{self.job}: the caller gave this update up before it touched anything")
                return self._apply(staged, deadline)
            except TakenBack:
                if not deadline.left():
                    raise

    def _stage_resolved(self, step: int | None, resolved: list[int], overlap: bool, deadline: Deadline) -> Staged:
        wanted = resolved[-1] if resolved else step
        try:
            staged = self._overlapped(wanted, deadline) if overlap else self._stage(wanted, deadline)
        except TakenBack:
            raise
        except (VersionUnavailable, EpochChanged):
            if not resolved:
                raise
            staged = self._stage(step, deadline)
        resolved.append(staged.step)
        return staged

    def _overlapped(self, step: int | None, deadline: Deadline) -> Staged:
        """As ``_stage``, but what is staged may have been copied, in part or all of it."""
        if step is not None:
            check_whole("step", step, 0, MAX_STEP)
        started = time.monotonic()
        self._settle_confirmed()
        self._refresh()
        taken = self._take_in(step, deadline)
        if taken is None and self._state != "dirty":
            return self._stage(step, deadline)
        try:
            staged = self._stage(step, deadline, taken)
        except BaseException as error:
            self._give_up(error)
            raise
        staged.started = started
        if taken is not None and taken.arrival == staged.arrival and taken.prepared is staged.prepared:
            staged.taken = taken
        return staged

    def _stage(self, step: int | None, deadline: Deadline, taken: Taken | None = None) -> Staged:
        """``taken``: for which its version was asked for already."""
        if step is not None:
            check_whole("step", step, 0, MAX_STEP)
        started = time.monotonic()
        self._settle_confirmed()
        self._refresh()
        if taken is not None and taken.resolved is not None:
            started, answer = taken.asked, self._connection.answer(taken.resolved)[0]
        else:
            answer = self._resolve(step, deadline, stage=False)
        self._alone = answer["alone"]
        try:
            with self._in_use:
                prepared = self._prepare(answer, deadline)
                prepared.fill_aside(sharing=self.world_size)
        except BaseException as error:
            self._release(answer["lease"], error=error)
            # Just leased: if the daemon does not know of that any more, the trainer has given this attempt up.
            if answer["borrowed"] and (isinstance(error, AccessDenied) or _is_taken_back(error)):
                text = f"{self.job}: step {answer['step']} was taken back by its trainer; nothing was touched"
                raise TakenBack(text) from error
            raise
        self._leased = answer["lease"]
        return Staged(
            epoch=answer["epoch"],
            step=answer["step"],
            lease=answer["lease"],
            until=started + answer["lease_ms"] / 1000,  # granted after that
            updates=answer["updates"],
            prepared=prepared,
            started=started,
            ready=time.monotonic(),
            lent=answer["borrowed"],
            reason=answer["reason"],
            ranks=len(answer["segments"]),
            exchanged=self._sources[answer["set"]] if answer["exchanged"] else None,
            arrival=answer["arrival"],
        )

    def _apply(self, staged: Staged, deadline: Deadline) -> UpdateResult:
        if staged.exchanged is not None:
            return self._apply_exchanged(staged, staged.exchanged, deadline)
        with self._in_use:
            return self._apply_mapped(staged, deadline)

    def _apply_mapped(self, staged: Staged, deadline: Deadline) -> UpdateResult:
        self._check_usable()
        holding = self._holding
        closed = any(mapping.closed for mapping in staged.prepared.mappings)
        if closed or staged.lease != self._leased:
            gone = TakenBack if closed and staged.lent else VersionUnavailable  # its trainer may lend it again
            raise gone(
                f"{self.job}: what was staged was given up since, or went with its connection to the daemon; "
                "update again"
            )
        # Of thousands of tensors the look takes a tenth of what a copy within a GPU does: there it is made meanwhile,
        # since what was registered is still there to be written.
        hidden = staged.lent and staged.prepared.live.copies.on_device
        error: AwexdError | None = None if hidden or not holding.watch.changed() else self._rebound()
        if error is None and staged.lent and not staged.await_owners(deadline.left()):
            error = TakenBack(f"{self.job}: step {staged.step} was taken back by its trainer; nothing was touched")
        if error is not None:
            self._release(staged.lease, dirty=staged.begun is not None, error=error)
            raise error
        self._state, self._version, self._leased = "dirty", None, None
        began = staged.begun or time.monotonic()
        try:
            if staged.taken is None:
                meanwhile = self._check_unchanged if hidden else bool
                staged.prepared.live.run(sharing=self.world_size, meanwhile=meanwhile)
            load_of_engine(holding.weights)
            result = UpdateResult(
                epoch=staged.epoch,
                step=staged.step,
                bytes=staged.prepared.nbytes,
                stage_seconds=min(staged.ready, began) - staged.started,
                pause_seconds=time.monotonic() - began,
                transport="cuda_ipc" if staged.lent else "shm",
                mode="direct" if staged.lent else "host",
                reason=staged.reason,
            )
            self._confirm(staged, result, deadline)
        except BaseException as error:
            if not isinstance(error, DaemonUnavailable):
                self._release(staged.lease, dirty=True, error=error)
            if isinstance(error, VersionUnavailable | IntegrityError) and not staged.lasts:
                taken = f"{self.job}: step {staged.step} was taken back by its trainer while it was copied"
                raise TakenBack(taken) from error
            raise
        self._state, self._version, self._updates = "ready", (staged.epoch, staged.step), staged.updates
        return result

    def _apply_exchanged(self, staged: Staged, sources: Sources, deadline: Deadline) -> UpdateResult:
        """As ``_apply_mapped``, but the bytes are sent: nothing is touched before everybody is known to be there."""
        self._check_usable()
        holding, touched = self._holding, list[float]()

        def touch() -> None:
            self._state, self._version = "dirty", None
            touched.append(time.monotonic())

        try:
            if staged.lease != self._leased:
                raise VersionUnavailable(f"{self.job}: what was staged was given up since; update again")
            if holding.watch.changed():
                raise self._rebound()
            nbytes = self._taker.take(
                self._connection,
                staged.lease,
                holding,
                sources,
                sums=self.verify_mode == "checksum",
                touched=touch,
                deadline=deadline,
            )
            load_of_engine(holding.weights)
            ended = time.monotonic()
            began = touched[0] if touched else ended
            result = UpdateResult(
                epoch=staged.epoch,
                step=staged.step,
                bytes=nbytes,
                stage_seconds=began - staged.started,
                pause_seconds=ended - began,
                transport="nccl",
                mode="direct",
                reason=staged.reason,
            )
            self._connection.answer(self._confirming(staged, result, deadline))
        except BaseException as error:
            if not isinstance(error, DaemonUnavailable):
                self._release(staged.lease, dirty=bool(touched), error=error)
            if isinstance(error, VersionUnavailable) and "exchange" in error.details:
                raise TakenBack(f"{self.job}: {error.message}") from error
            raise
        self._leased = None
        self._state, self._version, self._updates = "ready", (staged.epoch, staged.step), staged.updates
        return result

    def _check_unchanged(self) -> None:
        if self._holding.watch.changed():
            raise self._rebound()

    def _confirm(self, staged: Staged, result: UpdateResult, deadline: Deadline) -> None:
        """Tells the daemon that the bytes are in; waits for its answer only where that could be a refusal.

        What is found good once the daemon was told was good when it was told, and the daemon takes it so: it looks for
        what was sent before it ends a lease.
        """
        asked = self._confirming(staged, result, deadline)
        if staged.good:
            self._confirmed = asked
        else:
            self._connection.answer(asked)

    def _confirming(self, staged: Staged, result: UpdateResult, deadline: Deadline) -> Asked:
        arguments = {
            "lease": staged.lease,
            "nbytes": result.bytes,
            "stage_us": int(result.stage_seconds * 1e6),
            "pause_us": int(result.pause_seconds * 1e6),
        }
        return self._connection.ask("read.confirm", arguments, timeout=deadline.left())

    def _settle_confirmed(self) -> None:
        """Takes the answer that was not waited for: it may name segments to unmap."""
        asked, self._confirmed = self._confirmed, None
        if asked is not None:
            self._connection.take(asked)
            self._unmap_dropped("read.confirm")

    def _resolve(self, step: int | None, deadline: Deadline, *, stage: bool) -> dict[str, Any]:
        return self._ask("read.resolve", deadline.left(), **self._resolving(step, deadline, stage=stage))

    def _prefetch(self, step: int | None) -> None:
        try:
            deadline = Deadline(DEFAULT_TIMEOUT)
            answer = self._resolve(step, deadline, stage=True)
            try:
                with self._turn(deadline), self._in_use:
                    self._refresh()
                    self._prepare(answer, deadline)
            finally:
                self._release(answer["lease"])
        except AwexdError as error:
            _log.info("prefetch of %s: %s", self.job, error)


def _is_taken_back(error: BaseException) -> bool:
    return isinstance(error, AwexdError) and bool(error.details.get("taken_back"))


def _reasons(weights: EngineWeights) -> list[list[str | int]]:
    """Why tensors are not written in place: each reason, how many they are, and the first."""
    first: dict[str, str] = {}
    for name, reason in weights.reasons.items():
        first.setdefault(reason, name)
    counts = Counter(weights.reasons.values())
    told: list[list[str | int]] = [[reason[:200], counts[reason], name[:200]] for reason, name in first.items()]
    return told[:MAX_REASONS]
