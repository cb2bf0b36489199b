"""The training side: one WeightWriter in each process of the trainer."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence

from awexd.protocol import MAX_DEADLINE_MS, MAX_KEEP, MAX_RING_BYTES, MAX_STEP
from awexd_client.adapters.base import Adapter
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, check_whole, failed
from awexd_client.holding import Casts, Holding
from awexd_client.lending import Lender
from awexd_client.mappings import Mapping
from awexd_client.offering import Offerer
from awexd_client.offloading import Offloading
from awexd_client.outgoing import SegmentLayout, Slice, sliced
from awexd_client.publication import Publication, Update
from awexd_client.session import Asked, NoAnswer
from awexd_transports.collective.rings import RING_BYTES, room_of
from awexd_transports.copy import CopyTable
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    EpochChanged,
    InvalidArgument,
    ManifestMismatch,
    VersionConflict,
)
from awexd_transports.plan import compare
from awexd_transports.segment import HEADER_BYTES
from awexd_transports.share import share

_log = logging.getLogger(__name__)
_RETRIES = 5


class WeightWriter(Offloading):
    """Publishes one training process's weights. All ranks of the trainer make one each.

    Args:
        job: ``owner/name``; a bare name is this user's own.
        rank, world_size: of the trainer.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        epoch: ``"continue"`` joins the job's epoch (opens the first); ``"new"``, passed by all ranks of a restarted
            trainer, opens the next one when the last of them has registered.
        mode: ``"host"``: versions are copied into host memory. ``"direct"``: engines on this node copy them from this
            process's GPU memory; no host memory is reserved, and ``Publication.captured`` waits for the engines.
            ``"auto"``: direct for each step for which every registered engine waits on this node and can open that
            memory, else host. All ranks have the same.
        transport: ``"shm"`` means ``mode="host"``, ``"cuda_ipc"`` ``mode="direct"``. ``"nccl"``, on readers too:
            engines are sent the live parameters, by NCCL where each process's tensors are on a GPU of its own, else by
            sockets; no host memory is reserved, and ``Publication.captured`` waits for the engines.
        verify: ``"checksum"``, the default: checksums are summed in the copy's own pass and stored; readers compare.
            That adds a tenth to a half to a hand-over (without the C library it about doubles it). ``"off"``: neither.
        keep: versions that stay held.
        timeout: seconds for the daemon's greeting.
        ring_bytes: with ``"nccl"``: of this process's send buffer; readers have the same.

    Raises:
        DaemonUnavailable, AccessDenied, InvalidArgument
    """

    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        socket: str | os.PathLike[str] | None = None,
        epoch: str = "continue",
        *,
        mode: str = "auto",
        transport: str = "auto",
        verify: str = "checksum",
        keep: int = 2,
        timeout: float = DEFAULT_TIMEOUT,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        if epoch not in ("continue", "new"):
            raise InvalidArgument(f'epoch must be "continue" or "new", not {epoch!r}')
        check_whole("keep", keep, 1, MAX_KEEP)
        check_whole("ring_bytes", ring_bytes, 1, MAX_RING_BYTES)
        room_of(ring_bytes)
        super().__init__(
            job, rank, world_size, socket, mode=mode, transport=transport, verify=verify, writable=True, timeout=timeout
        )
        self.keep = keep
        self._epoch: str | int = epoch
        self._casts: Casts = None
        self._holding_: Holding | None = None
        self._segment_: SegmentLayout | None = None
        self._after: int | None = None
        self._open: Publication | None = None
        self._lender = Offerer(self, ring_bytes) if self.exchanging else Lender(self)
        self._next: str | Asked | None = None
        """The slot of the next ``publish``, or the request for it: it is asked for before it is needed."""
        self._early = False
        """Other nodes fetch what this rank writes: a step is begun before it is copied, and they are told how far."""

    @property
    def epoch(self) -> int | None:
        """The job's epoch that this rank is in; None until it has opened."""
        return self._epoch if isinstance(self._epoch, int) else None

    def register(
        self,
        target: object,
        adapter: str | Adapter | None = None,
        *,
        dtype: Casts = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Declares what this rank holds and reserves memory for it.

        With several ranks, memory is reserved once all have registered: by the last one's ``register``, and by the
        others' first ``publish``.

        Args:
            target: nn.Module, list of modules, {name: tensor}, or an iterable of Shard.
            adapter: None to choose by the target; else a name or an adapter.
            dtype: cast while writing: one dtype for every floating-point tensor, or {name pattern: dtype}.

        Raises:
            ManifestMismatch: shards that contradict each other, other ranks', or what a registered engine declares.
            BudgetExceeded: no room for ``keep + 1`` versions.
            VersionConflict: another live process has this rank, or world_size or keep differs.
        """
        self._check_present()
        holding = Holding.of(target, adapter, dtype)
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._check_present()
            self._last = None
            self._holding_ = holding
            self._casts = dtype
            self._surviving(lambda deadline: self._register(deadline), deadline)

    def begin(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Update:
        """The long form: ``with writer.begin(step) as update: update.write(part) ...``. Always through host memory.

        Raises:
            InvalidArgument: ``mode="direct"``, which has none.
            VersionConflict: the step is not after the last committed one, or another rank has passed it.
            DeadlineExceeded: no free slot, or a rank that has not registered; names who holds or is missing.
        """
        if self.mode == "direct":
            raise InvalidArgument(f'{self.job}: mode="direct" has no host memory to write parts into; use publish()')
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._check_present()
            self._last = None  # what is written may come from anywhere
            self._surviving(self._lender.take_back, deadline)
            publication, mapping = self._surviving(lambda deadline: self._begin(step, deadline), deadline)
        return Update(self, publication, mapping, timeout)

    def publish(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Publication:
        """Copies the registered tensors into shared memory as version ``step`` and seals it, or lends them (``mode``).

        Lent tensors must not change before ``captured`` of what this returns has returned.
        A daemon that restarts meanwhile is waited for, and the step written again if it was lost.

        Raises:
            VersionConflict, DeadlineExceeded: as ``begin``.
            ManifestMismatch: the registered tensors are no longer what they were.
            InvalidArgument: the adapter knows that they are not the newest weights yet; or ``mode="direct"`` and they
                cannot be lent, which says why.
        """
        deadline = Deadline(timeout)
        sent: list[Publication] = []
        with self._turn(deadline):
            self._check_present()
            self._last = None
            for _ in range(_RETRIES):
                publication = self._surviving(lambda deadline: self._publish(step, sent, deadline), deadline)
                if publication is not None:
                    self._last = publication if publication.mode == "host" else None
                    return publication
            raise DaemonUnavailable(f"step {step} was lost {_RETRIES} times to restarts of the daemon")

    def grant(self, uids: Sequence[int] = (), gids: Sequence[int] = (), timeout: float = DEFAULT_TIMEOUT) -> None:
        """Lets other users, by uid or group, read this job's versions."""
        arguments = {"job": self.job, "uids": list(uids), "gids": list(gids)}
        self._surviving(lambda deadline: self._ask("job.grant", deadline.left(), **arguments), Deadline(timeout))

    def close_job(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Ends the job: its versions and memory go, its engines are told."""
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._surviving(lambda deadline: self._ask("job.close", deadline.left(), job=self.job), deadline)
            self._epoch, self._after = "continue", None  # registering again begins the job anew
            self._segment_ = self._open = self._next = None
            self._lender.forget()
            self._forget_offloaded()

    def close(self) -> None:
        if not self._closed and not self._forked:
            self._lender.close()
        super().close()

    # internals

    def _let_go(self) -> None:
        super()._let_go()
        self._holding_ = self._segment_ = self._open = self._next = None
        self._lender.let_go()
        self._forget_offloaded()

    def _current(self) -> Holding:
        if self._open is not None and not (self._open._captured or self._open._lent):
            raise InvalidArgument(f"{self.job}: step {self._open.step} is being written; leave its `with` block first")
        self._refresh()
        return self._holding

    def _take_back(self, deadline: Deadline) -> None:
        self._lender.revoke(deadline)

    def _forget_copies(self) -> None:
        if self._segment_ is not None:
            self._segment_.tables.clear()

    @property
    def _holding(self) -> Holding:
        if self._holding_ is None:
            raise InvalidArgument("register(...) comes first")
        return self._holding_

    @property
    def _who(self) -> str:
        return f"writer rank {self.rank}"

    def _registered(self) -> Holding | None:
        return self._holding_

    @property
    def _segment(self) -> SegmentLayout:
        if self._segment_ is None:
            raise InvalidArgument("register(...) comes first")
        return self._segment_

    def _register(self, deadline: Deadline) -> None:
        self._segment_ = self._open = self._next = None
        manifest = self._holding.manifest
        answer = self._ask_with_body(
            "write.register",
            deadline.left(),
            manifest.encoded,
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            epoch=self._epoch,
            after=self._after,
            keep=self.keep,
            mode="nccl" if self.exchanging else self.mode,
            lends=self.mode == "auto" and self._lender.intends(self._holding),
            digest=manifest.digest,
        )
        # From here on a reconnection resumes this epoch, or the one that this rank waits for: never another.
        if answer["pending"]:
            self._after = answer["epoch"] if self._after is None else self._after
        else:
            self._epoch = answer["epoch"]
        if answer["complete"]:
            self._prepare(deadline)

    def _register_again(self, timeout: float) -> None:
        if self._holding_ is not None:
            self._register(Deadline(timeout))

    def _prepare(self, deadline: Deadline) -> None:
        """Once every rank has registered: which part of the replicas is this rank's, and memory for it."""
        self._next = None
        answer = self._ask_for_manifests("write.ready", deadline.left())
        ranks = [self._manifests[digest] for digest in answer["ranks"]]
        segments = share(ranks)
        compare(ranks, [self._manifests[digest] for _, _, digest in answer["engines"]])
        segment = SegmentLayout(self._holding, segments[self.rank], answer["set"])
        self._manifests.clear()
        reserved = self._ask_with_body(
            "write.reserve",
            deadline.left(),
            segment.manifest.encoded,
            set=segment.registered_set,
            digest=segment.manifest.digest,
            nbytes=segment.nbytes,
            node=self._holding.node,
        )
        if reserved["lock_problem"]:
            _log.warning("weights of %s are not locked in memory: %s", self.job, reserved["lock_problem"])
        # Pages are faulted in here, once: the first publishes are as fast as the later ones.
        self._map([(slot, HEADER_BYTES + segment.nbytes) for slot in reserved["segments"]], deadline)
        self._epoch = answer["epoch"]
        self._segment_ = segment

    def _start(self, step: int, deadline: Deadline) -> tuple[Publication, Mapping]:
        """A slot for the step: the one that was granted ahead, if it has been by now, which takes no message."""
        granted, self._next = self._next, None
        if isinstance(granted, Asked):
            answer = self._connection.take(granted)
            granted = answer["segment"] if answer else None
        if granted is None or self._early or self._segment_ is None:
            return self._begin(step, deadline)
        check_whole("step", step, 0, MAX_STEP)
        self._refresh()
        try:
            (mapping,) = self._map([(granted, HEADER_BYTES + self._segment.nbytes)], deadline)
        except AwexdError:  # it is not ours any more
            return self._begin(step, deadline)
        publication = self._open = Publication(self, step)
        publication.epoch, publication._set, publication._slot = self.epoch or 1, self._segment.registered_set, granted
        return publication, mapping

    def _begin(self, step: int, deadline: Deadline) -> tuple[Publication, Mapping]:
        check_whole("step", step, 0, MAX_STEP)
        self._next = None
        self._refresh()
        while True:
            if self._segment_ is None:
                self._prepare(deadline)
            segment = self._segment
            try:
                answer = self._ask("write.begin", deadline.left(), step=step, set=segment.registered_set)
                break
            except VersionConflict as error:
                if not error.details.get("set_changed"):
                    raise
                self._segment_ = None
        publication = self._open = Publication(self, step)
        publication.epoch, publication._attempt = answer["epoch"], answer["attempt"]
        try:
            wanted = [(answer["segment"], HEADER_BYTES + segment.nbytes)]
            (mapping,) = self._map(wanted, deadline)
            self._refresh()  # the wait for a slot may have been long
        except BaseException as error:
            self._abort(publication, failed(error))
            raise
        self._early = publication._early = answer["early"]
        self._tell_written(publication, 0)
        return publication, mapping

    def _tell_written(self, publication: Publication, nbytes: int) -> None:
        """So many bytes of the segment, from its start, are there; told where other nodes fetch them."""
        if not publication._early:
            return
        where = {"epoch": publication.epoch, "step": publication.step, "attempt": publication._attempt}
        told = where | {"nbytes": nbytes, "checksums": self.verify_mode == "checksum"}
        with contextlib.suppress(DaemonUnavailable):  # sealing finds out
            self._connection.tell("write.progress", told, timeout=DEFAULT_TIMEOUT)

    def _check_newest(self) -> None:
        """Raises where the adapter knows that these are not the newest weights."""
        holding = self._holding
        if holding.weights.check is not None:
            holding.weights.check(holding.target)

    def _refresh(self) -> None:
        """Looks the target up again where its tensors were rebound or moved: stale memory must never be published."""
        self._check_newest()
        holding = self._holding
        if not holding.watch.changed():
            return
        fresh = Holding.of(holding.target, holding.adapter, self._casts)
        if fresh.manifest.digest != holding.manifest.digest:
            raise ManifestMismatch(
                f"{self.job}: the registered tensors have changed in name, shape or dtype since register(); "
                "register again (an FSDP model must be resharded before it is published)"
            )
        self._holding_ = fresh
        if self._segment_ is not None:
            self._segment_.tables.clear()

    def _publish(self, step: int, sent: list[Publication], deadline: Deadline) -> Publication | None:
        """None: the attempt was lost with its daemon; the caller tries again.

        ``sent`` has what earlier tries of this call asked to seal: if the answer was lost, the version may be there.
        """
        while sent:
            try:
                self._seal(sent[-1], deadline)
            except (VersionConflict, EpochChanged):
                sent.pop()
            else:
                return sent[-1]
        reason = ""
        if self.mode != "host":
            check_whole("step", step, 0, MAX_STEP)
            try:
                lent, reason = self._lender.publish(step, deadline)
            except VersionConflict as error:
                if error.details.get("set_changed"):
                    self._segment_ = None
                elif not error.details.get("again"):
                    raise
                return None
            if lent is not None:
                self._open = lent
                return lent
            self._lender.take_back(deadline)
        publication, mapping = self._start(step, deadline)
        publication.reason = reason
        try:
            started = time.monotonic()
            for table, end in self._slices(mapping, publication._early):
                table.run(sharing=self.world_size)
                publication.nbytes += table.nbytes
                self._tell_written(publication, end)
            publication.copy_seconds = time.monotonic() - started
            sent.append(publication)
            self._seal(publication, deadline)
        except VersionConflict as error:
            if error.details.get("set_changed"):
                self._segment_ = None
            elif not error.details.get("retry") or deadline.left() <= 0:
                raise
            return None
        except BaseException as error:
            refused = isinstance(error, AwexdError) and not isinstance(error, NoAnswer) and publication in sent
            if not refused or publication._attempt is not None:
                self._abort(publication, failed(error))
            raise
        if self._next is None:
            with contextlib.suppress(DaemonUnavailable):  # the next step's business
                self._next = self._connection.ask("write.slot", {}, timeout=MAX_DEADLINE_MS / 1000)
        return publication

    def _slices(self, mapping: Mapping, early: bool) -> list[Slice]:
        """What is copied, one after the other; all at once where nobody fetches it meanwhile."""
        segment = self._segment
        key = mapping.address, early
        if key not in segment.tables:
            summed = self.verify_mode == "checksum"
            views = enumerate(self._holding.piece_views())
            rows = (row for piece, view in views for row in segment.rows(piece, view, mapping, summed=summed))
            whole = [] if early else [Slice(CopyTable(rows), segment.nbytes)]
            segment.tables[key] = sliced(rows, mapping.address + HEADER_BYTES) if early else whole
        return segment.tables[key]

    def _seal(self, publication: Publication, deadline: Deadline) -> None:
        arguments: dict[str, object] = {"step": publication.step, "checksums": self.verify_mode == "checksum"}
        if publication._attempt is not None:
            operation = "write.seal"
            arguments |= {"epoch": publication.epoch, "attempt": publication._attempt}
        else:
            operation = "write.publish"
            arguments |= {"set": publication._set, "segment": publication._slot}
        # The reply may be lost with the daemon: asked again, the next one knows whether the version was committed.
        answer = self._surviving(lambda deadline: self._ask(operation, deadline.left(), **arguments), deadline)
        if operation == "write.publish":
            publication.epoch, publication._attempt = answer["epoch"], answer["attempt"]
        self._next, self._early = answer["next"], answer["early"]
        publication._captured, publication._committed = True, answer["committed"]

    def _abort(self, publication: Publication, reason: str) -> None:
        if self._open is publication:
            self._open = None
        attempted = {"epoch": publication.epoch, "step": publication.step, "attempt": publication._attempt}
        if not self._closed and not self._forked:
            self._tell("write.abort", **attempted, reason=reason)

    def _await_commit(self, publication: Publication, timeout: float) -> None:
        arguments = {"epoch": publication.epoch, "step": publication.step, "attempt": publication._attempt}
        asked = Deadline(timeout)
        self._surviving(lambda deadline: self._ask("write.committed", deadline.left(), **arguments), asked)

    def _forget_tables(self, segments: Sequence[str] | None) -> None:
        if segments is None:
            self._next = None
            self._lender.forget()
        else:
            self._forget_parcels(segments)
        if self._segment_ is not None:
            self._segment_.tables.clear()
