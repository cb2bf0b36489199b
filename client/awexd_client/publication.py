"""A version on its way to the daemon: what ``publish`` and ``begin`` give back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from awexd_client.adapters.registry import shards_of
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, failed
from awexd_client.holding import view_of
from awexd_client.mappings import Mapping
from awexd_client.outgoing import check_same
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.errors import ManifestMismatch, VersionConflict
from awexd_transports.layout import Box, Shard

if TYPE_CHECKING:
    from awexd_client.writer import WeightWriter


class Publication:
    """One version on its way. Made by ``publish``, or by ``begin`` as ``update.publication``."""

    def __init__(self, writer: WeightWriter, step: int, *, lent: bool = False) -> None:
        self.step = step
        self.epoch = 0
        self.nbytes = 0
        """Bytes that this rank copied, or lends: its own share where ranks hold replicas."""
        self.copy_seconds = 0.0
        self.mode = "direct" if lent else "host"
        """``"direct"``: the version's bytes are the live parameters; ``"host"``: a copy in host memory."""
        self.reason = ""
        """Why ``mode="auto"`` did not choose ``"direct"``; empty where it did or was not asked."""
        self._lent = lent
        self._writer = writer
        self._attempt: int | None = None
        self._early = False
        """Other nodes fetch it while it is written."""
        self._set = self._slot = ""
        self._captured = False
        self._committed = False

    def captured(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once this rank's parameters may change: its bytes are in the segment.

        Where the version is ``"direct"``, once every registered engine has copied it; that withdraws it.

        Raises:
            VersionConflict: nothing was sealed: the ``with`` block of the long form has not ended, or has failed. Or it
                was ``"direct"``, and another rank took it back, or died, before every engine had it: publish the next.
            DeadlineExceeded: names the engines that have not; parameters must not change yet. See ``withdraw``.
        """
        if not self._captured and self._lent:
            self._writer._lender.end(self, timeout, at_once=False)
            self._captured = True
        if not self._captured:
            raise VersionConflict(f"step {self.step} of {self._writer.job} is not sealed; leave the `with` block first")

    def withdraw(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Takes a ``"direct"`` version back without waiting for engines that have not begun to copy it.

        Engines that have keep it; one in the midst of its update fails, is dirty, and needs the next version.
        A version in host memory stays: this does nothing.

        Raises:
            DeadlineExceeded: names the readers that still read.
        """
        if self._lent and not self._captured:
            self._writer._lender.end(self, timeout, at_once=True)
            self._captured = True

    def committed(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once every rank has sealed this version: readers see it.

        Raises:
            DeadlineExceeded: naming the ranks that have not sealed.
            VersionConflict: some rank aborted the attempt; publish the step again.
            EpochChanged: a new run of the trainer has begun.
        """
        if not self._lent:
            self.captured()
        if not self._committed and self._lent:
            self._writer._lender.await_commit(self, timeout)
        elif not self._committed:
            self._writer._await_commit(self, timeout)
        self._committed = True

    def __repr__(self) -> str:
        state = "committed" if self._committed else "captured" if self._captured else "open"
        return f"Publication(epoch={self.epoch}, step={self.step}, {state})"


class Update:
    """The long form: parts are written one at a time; leaving the ``with`` block seals, an exception aborts."""

    def __init__(self, writer: WeightWriter, publication: Publication, mapping: Mapping, timeout: float) -> None:
        self.publication = publication
        self._writer = writer
        self._mapping = mapping
        self._timeout = timeout
        self._parts: dict[tuple[str, Box], int] = {}
        """Parts that are written, and which registered piece each is."""
        self._pieces: set[int] = set()

    def write(self, shards: Iterable[Shard] | object) -> None:
        """Copies these parts, which are among the registered ones; their tensors may be others.

        Args:
            shards: shards, a mapping or a module, as for ``register``.

        Raises:
            ManifestMismatch: a part that is not registered, of another box or dtype, or that was written before.
        """
        with self._writer._turn(Deadline(self._timeout)):
            self._check_open()
            new, rows, again = self._rows(shards)
            table = CopyTable(rows)
            started = time.monotonic()
            table.run(sharing=self._writer.world_size)
            self.publication.copy_seconds += time.monotonic() - started
            self.publication.nbytes += table.nbytes
            check_same(again)
            self._parts |= new
            self._pieces.update(new.values())

    def written(self) -> Iterator[tuple[str, View]]:
        """The parts that were written, by name, and where they lie in the segment until the ``with`` block ends."""
        self._check_open()
        segment = self._writer._segment
        for (name, _), piece in self._parts.items():
            for number, _, _ in segment.parts[piece]:
                yield name, self._mapping.piece(segment.manifest, number)

    def __enter__(self) -> Update:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._writer._abort(self.publication, failed(error))
            return
        deadline = Deadline(self._timeout)
        with self._writer._turn(deadline):
            self._check_open()
            try:
                self._check_whole()
                self._writer._seal(self.publication, deadline)
            except BaseException as problem:
                self._writer._abort(self.publication, failed(problem))
                raise
            finally:
                self._writer._open = None

    def _rows(self, shards: Iterable[Shard] | object) -> tuple[dict[tuple[str, Box], int], list[Row], list[Row]]:
        """Which pieces these parts are, what copies them, and what compares further names of a piece with it."""
        writer = self._writer
        segment, summed = writer._segment, writer.verify_mode == "checksum"
        new: dict[tuple[str, Box], int] = {}
        rows: list[Row] = []
        again: list[Row] = []
        fresh: set[int] = set()
        for shard in shards_of(shards):
            part, view = (shard.name, shard.box), view_of(shard)
            piece = self._find(shard, view)
            if part in self._parts or part in new:
                raise ManifestMismatch.between(
                    f"step {self.publication.step}", mismatched={shard.name: f"{shard.box} was written already"}
                )
            # A further name of a piece that is there already: it must bring the same bytes.
            if piece in self._pieces or piece in fresh:
                again += segment.rows(piece, view, self._mapping)
            else:
                rows += segment.rows(piece, view, self._mapping, summed=summed)
            fresh.add(piece)
            new[part] = piece
        return new, rows, again

    def _find(self, shard: Shard, view: View) -> int:
        """The registered piece that this part is."""
        holding = self._writer._holding
        number = holding.index.get((shard.name, shard.box))
        if number is None:
            raise ManifestMismatch.between(
                "a part that is not registered", mismatched={shard.name: f"{shard.box} of {list(shard.global_shape)}"}
            )
        own, entry = holding.views[number].dtype, holding.manifest.entries[number]
        if view.dtype not in (own, entry.tensor.dtype):
            raise ManifestMismatch.between(
                "a part of another dtype", mismatched={shard.name: f"{view.dtype}, registered as {own}"}
            )
        return entry.piece

    def _check_open(self) -> None:
        """The segment of an update that is over may hold another version by now, or be unmapped."""
        self._writer._check_usable()
        if self._writer._open is not self.publication or self._mapping.closed:
            raise VersionConflict(
                f"{self._writer.job}: this update of step {self.publication.step} is over; begin it again"
            )

    def _check_whole(self) -> None:
        pieces = self._writer._holding.manifest.pieces
        missing = {entry.tensor.name for number, entry in enumerate(pieces) if number not in self._pieces}
        if missing:
            raise ManifestMismatch.between(
                f"step {self.publication.step} was not written whole", missing=missing, mismatched={}
            )
