"""A version on its way to the daemon: what ``publish`` and ``begin`` give back."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, failed
from awexd_client.mappings import Mapping
from awexd_transports.errors import VersionConflict
from awexd_transports.layout import Box, Shard

if TYPE_CHECKING:
    from awexd_client.writer import WeightWriter


class Publication:
    """One version on its way. Made by ``publish``, or by ``begin`` as ``update.publication``."""

    def __init__(self, writer: WeightWriter, step: int) -> None:
        self.step = step
        self.epoch = 0
        self.nbytes = 0
        """Bytes that this rank copied: its own share where ranks hold replicas."""
        self.copy_seconds = 0.0
        self._writer = writer
        self._attempt: int | None = None
        self._set = self._slot = ""
        self._captured = False
        self._committed = False

    def captured(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once this rank's bytes are in the segment: its parameters may change from here on.

        Raises:
            VersionConflict: nothing was sealed: the ``with`` block of the long form has not ended, or has failed.
        """
        if not self._captured:
            raise VersionConflict(f"step {self.step} of {self._writer.job} is not sealed; leave the `with` block first")

    def committed(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns once every rank has sealed this version: readers see it.

        Raises:
            DeadlineExceeded: naming the ranks that have not sealed.
            VersionConflict: some rank aborted the attempt; publish the step again.
            EpochChanged: a new run of the trainer has begun.
        """
        self.captured()
        if not self._committed:
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

    def write(self, shards: Iterable[Shard] | object) -> None:
        """Copies these parts, which are among the registered ones; their tensors may be others.

        Args:
            shards: shards, a mapping or a module, as for ``register``.

        Raises:
            ManifestMismatch: a part that is not registered, of another box or dtype, or that was written before.
        """
        self._writer._copy_parts(shards, self._parts, self._mapping, self.publication, Deadline(self._timeout))

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
            self._writer._check_open(self.publication, self._mapping)
            try:
                self._writer._check_whole(self.publication, set(self._parts.values()))
                self._writer._seal(self.publication, self._mapping, deadline)
            except BaseException as problem:
                self._writer._abort(self.publication, failed(problem))
                raise
            finally:
                self._writer._open = None
