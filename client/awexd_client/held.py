"""Versions that the daemon holds, read in place by whoever may read their job, without tensors of its own to fill."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from awexd.protocol import MAX_DEADLINE_MS
from awexd_client.checksums import Comparison
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, Endpoint, told
from awexd_client.mappings import Mapping
from awexd_client.tables import Sources, build, comparison
from awexd_client.verify import Checkpoint, Progress, Verified, verify
from awexd_transports.errors import ManifestMismatch, VersionUnavailable
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.plan import Copy, plan
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch


class HeldReader(Endpoint):
    """Leases versions, one at a time, and reads them: for what has no tensors of its own that could be filled in place.

    Shows as an engine of one worker, outside the rounds of others. A context manager.

    Args:
        job: ``owner/name``; a bare name is this user's own.
        engine: the name that it shows under.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        verify: ``"checksum"``: what ``tensors`` yields was compared with what its writer stored, or where it stored
            nothing, with what is held. ``"off"``: nothing is compared.
        sharing: processes of this node that copy at the same time.
        timeout: seconds for the daemon's greeting.

    Raises:
        AccessDenied, DaemonUnavailable, InvalidArgument
    """

    def __init__(
        self,
        job: str,
        engine: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        verify: str = "checksum",
        sharing: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(
            job, 0, 1, socket, mode="auto", transport="auto", verify=verify, writable=False, timeout=timeout
        )
        self.engine = engine
        self.sharing = sharing
        self._joined: int | None = None
        self._read: tuple[int, int] | None = None
        self._whole: Wholes | None = None
        self._leased: Leased | None = None

    @property
    def version(self) -> tuple[int, int] | None:
        """(epoch, step) that was last confirmed."""
        return self._read

    @property
    def joined(self) -> int | None:
        """The job's epoch when this registered last."""
        return self._joined

    @property
    def epoch(self) -> int:
        return self._held.epoch

    @property
    def step(self) -> int:
        return self._held.step

    @property
    def parts(self) -> Sequence[tuple[Entry, View]]:
        """What is held, as it was published: each entry of each writer rank's segment, and where its bytes lie."""
        return self._held.parts

    def join(self, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Registers, or does it again in the epoch that the job is in by now; returns that.

        ``lease`` waits for versions of that epoch, and says ``EpochChanged`` once if another has begun.
        """
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._leased = self._read = None
            return self._surviving(lambda deadline: self._register(deadline.left()), deadline)

    def lease(
        self, step: int | None = None, timeout: float = DEFAULT_TIMEOUT, *, hold: float | None = None
    ) -> tuple[int, int]:
        """Leases the newest version, or that step's, in place of the one before; waits for one that is still to come.

        Args:
            hold: seconds that the lease lasts, at most as many as the daemon gives; None: as ``timeout``.

        Raises:
            VersionUnavailable: that step is not held any more.
            EpochChanged: the trainer has begun anew; the step will not come.
            DeadlineExceeded: names what was waited for.
        """
        deadline = Deadline(timeout)
        with self._turn(deadline):
            self._leased = None
            seconds = deadline.seconds if hold is None else hold
            self._surviving(lambda deadline: self._lease(step, seconds, deadline), deadline)
            return self.epoch, self.step

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The leased version's tensors, whole, in the order in which they were published, each copied when asked for.

        Tensors of which writer ranks published parts are assembled. Each is new memory, the caller's to keep. When the
        last is read, say so by ``confirm``: only then is it known that the version was good to the end.

        Raises:
            ManifestMismatch: something was published in a layout of its own, or not whole.
            IntegrityError: bytes are not what their writer wrote; they are not yielded.
            VersionUnavailable: the version was given up meanwhile, or went with its connection to the daemon.
        """
        leased = self._held
        wholes = self._wholes(leased)
        sums = self._comparison(leased, wholes.sources)
        for number in range(len(wholes.manifest.entries)):
            with self._turn(Deadline(DEFAULT_TIMEOUT)):
                self._check_usable()
                if leased is not self._leased or any(mapping.closed for mapping in leased.mappings):
                    raise VersionUnavailable(
                        f"{self.job}: step {leased.step} was given up while it was read, or went with its connection "
                        "to the daemon"
                    )
                tensor = wholes.copy(number, leased, sums.fresh() if sums else None, self.sharing)
                leased.nbytes += wholes.manifest.entries[number].nbytes
            yield wholes.manifest.entries[number].tensor.name, tensor

    def confirm(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Says that the leased version was read to its end and is in use; ends the lease.

        Raises:
            VersionUnavailable: it was withdrawn meanwhile, or the lease has run out: what was read must not count.
        """
        leased, deadline = self._held, Deadline(timeout)
        with self._turn(deadline):
            self._leased = self._read = None
            self._ask(
                "read.confirm",
                deadline.left(),
                lease=leased.id,
                nbytes=leased.nbytes,
                stage_us=int((leased.ready - leased.started) * 1e6),
                pause_us=int((time.monotonic() - leased.ready) * 1e6),
            )
            self._read = leased.epoch, leased.step

    def release(self, error: BaseException | None = None, *, dirty: bool = False) -> None:
        """Gives the leased version up, if there is one. Never raises.

        Args:
            error: why, for ``status`` and events.
            dirty: something was done with a part of it.
        """
        leased, self._leased = self._leased, None
        if self._joined is None or (leased is None and error is None):
            return
        if dirty:
            self._read = None
        self._tell("read.release", lease=leased.id if leased else None, dirty=dirty, error=told(error))

    def verify(self, checkpoint_dir: str | os.PathLike[str], *, progress: Progress | None = None) -> Verified:
        """Compares the leased version with safetensors on disk, bit by bit; what differs stands in the result."""
        with Checkpoint(checkpoint_dir) as checkpoint:
            return verify(self.parts, checkpoint, progress=progress)

    # internals

    @property
    def _held(self) -> Leased:
        if self._leased is None:
            raise VersionUnavailable(f"{self.job}: no version is leased; it was given up, or lease() comes first")
        return self._leased

    def _register(self, timeout: float) -> int:
        nothing = Manifest.of(())
        answer = self._ask_with_body(
            "read.register",
            timeout,
            nothing.encoded,
            job=self.job,
            engine=self.engine,
            rank=0,
            world_size=1,
            digest=nothing.digest,
            version=list(self._read) if self._read else None,
            updates=None,
            alone=True,
            aside=None,
            devices=None,
        )
        self._joined = epoch = int(answer["epoch"])
        return epoch

    def _register_again(self, timeout: float) -> None:
        if self._joined is not None:
            self._register(timeout)

    def _lease(self, step: int | None, hold: float, deadline: Deadline) -> None:
        if self._joined is None:
            self._register(deadline.left())
        lease_ms = max(1000, min(int(hold * 1000), MAX_DEADLINE_MS))
        answer = self._ask("read.resolve", deadline.left(), step=step, lease_ms=lease_ms, stage=False)
        started = time.monotonic()
        try:
            sources = self._ask_for_manifests("read.sources", deadline.left(), job=self.job, set=answer["set"])
            if sources["set"] is None:
                raise VersionUnavailable(f"{self.job}: what this version's bytes mean is not known any more")
            manifests = tuple(self._manifests[digest] for digest in sources["ranks"])
            self._manifests = {digest: self._manifests[digest] for digest in sources["ranks"]}
            mappings = self._map([(segment, nbytes) for segment, nbytes, _ in answer["segments"]], deadline)
        except BaseException as error:
            self._tell("read.release", lease=answer["lease"], dirty=False, error=told(error))
            raise
        self._leased = Leased.of(answer, manifests, mappings, started)

    def _wholes(self, leased: Leased) -> Wholes:
        """Planned once for each set of manifests."""
        if self._whole is None or self._whole.set_digest != leased.set_digest:
            self._whole = Wholes.of(leased.set_digest, leased.manifests)
        return self._whole

    def _comparison(self, leased: Leased, sources: Sources) -> Comparison | None:
        summed = leased.summed if self.verify_mode == "checksum" else None
        return comparison(sources, dict(enumerate(leased.mappings)), summed)

    def _forget_tables(self, segments: Sequence[str] | None) -> None:
        """Nothing is kept over mappings but what is leased."""
        if self._leased is not None and (segments is None or set(segments) & set(self._leased.segments)):
            self._leased = None


class HeldVersion(HeldReader):
    """Holds a version for as long as this is open. A context manager.

    Args:
        job: ``owner/name``; a bare name is this user's own.
        step: None for the newest.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        timeout: seconds that the version may take to come.
        engine: the name that it shows under.
        verify: as for ``HeldReader``.

    Raises:
        VersionUnavailable: none is held, or not that one.
        AccessDenied, DaemonUnavailable
    """

    def __init__(
        self,
        job: str,
        step: int | None = None,
        socket: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        engine: str | None = None,
        verify: str = "checksum",
    ) -> None:
        deadline = Deadline(timeout)
        super().__init__(job, engine or f"verify-{os.getpid()}", socket, verify=verify, timeout=timeout)
        try:
            held = self._ask("versions", deadline.left(), job=job)["versions"]
            if not held:
                raise VersionUnavailable(f"{job}: no version is held")
            # Reading a large model may take longer than a version is waited for.
            self.lease(step, deadline.left(), hold=MAX_DEADLINE_MS / 1000)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self


@dataclass
class Leased:
    """A version under lease: what was published, and the mappings it lies in, by writer rank."""

    id: str
    epoch: int
    step: int
    set_digest: str
    segments: tuple[str, ...]
    summed: frozenset[int]
    manifests: tuple[Manifest, ...]
    mappings: tuple[Mapping, ...]
    started: float
    ready: float
    nbytes: int = 0

    @classmethod
    def of(
        cls, answer: dict[str, Any], manifests: tuple[Manifest, ...], mappings: Sequence[Mapping], started: float
    ) -> Leased:
        segments = answer["segments"]
        return cls(
            answer["lease"],
            answer["epoch"],
            answer["step"],
            answer["set"],
            tuple(segment for segment, _, _ in segments),
            frozenset(rank for rank, (_, _, stored) in enumerate(segments) if stored),
            manifests,
            tuple(mappings),
            started,
            time.monotonic(),
        )

    @cached_property
    def parts(self) -> list[tuple[Entry, View]]:
        return [
            (entry, mapping.piece(manifest, entry.piece))
            for manifest, mapping in zip(self.manifests, self.mappings, strict=True)
            for entry in manifest.entries
        ]


class _One(NamedTuple):
    """One tensor that is being filled, as a destination of copies."""

    manifest: Manifest
    views: dict[int, View]


@dataclass(frozen=True)
class Wholes:
    """Every published tensor whole, and the copies that assemble each from the segments."""

    set_digest: str
    sources: Sources
    manifest: Manifest
    copies: tuple[tuple[Copy, ...], ...]

    @classmethod
    def of(cls, set_digest: str, manifests: tuple[Manifest, ...]) -> Wholes:
        """Raises ManifestMismatch where whole checkpoint tensors cannot be had."""
        whole = Manifest.of(_whole_entries(manifests))
        sources = Sources(manifests, plan(manifests, [whole]))
        copies: list[list[Copy]] = [[] for _ in whole.entries]
        for copy in sources.plan.copies:
            copies[copy.destination_entry].append(copy)
        return cls(set_digest, sources, whole, tuple(map(tuple, copies)))

    def copy(self, number: int, leased: Leased, sums: Comparison | None, sharing: int) -> torch.Tensor:
        """A tensor of its own with that entry's bytes, compared in the copy's own pass."""
        import torch

        entry = self.manifest.entries[number]
        tensor = torch.empty(entry.tensor.shape, dtype=getattr(torch, entry.tensor.dtype))
        into = _One(self.manifest, {number: View.of(tensor)})
        segments = dict(enumerate(leased.mappings))
        build(into, self.sources, segments, sums, self.copies[number]).run(sharing=sharing)
        return tensor


def _whole_entries(manifests: Sequence[Manifest]) -> Iterator[Entry]:
    seen: dict[str, Entry] = {}
    for entry in (entry for manifest in manifests for entry in manifest.entries):
        if entry.tensor.name in seen:
            continue
        if entry.layout is not None:
            raise ManifestMismatch.between(
                "a tensor that was not published as checkpoints have it",
                mismatched={entry.tensor.name: f"published in the layout {entry.layout}"},
            )
        shape = entry.tensor.shape
        spec = TensorSpec(entry.tensor.name, shape, entry.tensor.dtype)
        seen[spec.name] = Entry(spec, Box((0,) * len(shape), shape), len(seen))
        yield seen[spec.name]
