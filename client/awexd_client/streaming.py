"""Publishing what a stream of whole tensors brings, of which nothing is known before it comes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from awexd_client.endpoint import DEFAULT_TIMEOUT
from awexd_client.publication import Publication, Update
from awexd_client.writer import WeightWriter
from awexd_transports.dtypes import dtype_name
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

OPENING = "awexd.opens-an-epoch"
"""The one tensor that is registered until a stream has said what there is. It is never published."""

_Spec = tuple[tuple[int, ...], str]


class StreamWriter:
    """The only writer of a job, whose tensors come one after another.

    Opens a new epoch at once; a writer of the epoch before is told so when it goes on.

    A stream whose tensors are not those of the one before is kept in host memory until its end, then registered and
    published; the others are copied into shared memory as they come. A context manager; ``close`` ends its session.

    Args:
        job, socket, keep, verify, timeout: as for ``WeightWriter``; ``timeout`` is that of every call.

    Raises:
        AccessDenied, BudgetExceeded, DaemonUnavailable, InvalidArgument
    """

    def __init__(
        self,
        job: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        keep: int = 2,
        verify: str = "checksum",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        import torch

        self.timeout = timeout
        self.last: int | None = None
        """The last step that was used, published or not."""
        self._specs: dict[str, _Spec] = {}
        self._writer = WeightWriter(job, 0, 1, socket, "new", keep=keep, verify=verify, timeout=timeout)
        try:
            self._writer.register({OPENING: torch.zeros(1)}, timeout=timeout)
        except BaseException:
            self._writer.close()
            raise

    @property
    def epoch(self) -> int:
        epoch = self._writer.epoch
        if epoch is None:
            raise InvalidArgument("this epoch has not been opened")
        return epoch

    def begin(self, step: int) -> Stream:
        """The stream of that step. Close it by ``finish`` or ``abort``.

        Raises:
            VersionConflict, DeadlineExceeded: as ``WeightWriter.begin``.
        """
        return Stream(self, step)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """The tensors of one version, as they come. Every call may block; one at a time."""

    def __init__(self, owner: StreamWriter, step: int) -> None:
        self.step = step
        self._owner = owner
        self._writer = owner._writer
        self._seen: dict[str, _Spec] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._update: Update | None = None
        if owner._specs:
            self._update = self._writer.begin(step, owner.timeout)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor of the host's; it may change afterwards.

        Raises:
            InvalidArgument: a name that came before, or a tensor that cannot be moved.
        """
        if name in self._seen:
            raise InvalidArgument(f"{name} came twice in one stream")
        spec = tuple(tensor.shape), dtype_name(tensor.dtype)
        if self._update is not None and self._owner._specs.get(name) != spec:
            self._take_back()
        if self._update is not None:
            self._update.write([Shard(name, tensor.detach())])
        else:
            self._kept[name] = tensor.detach().clone()
        self._seen[name] = spec

    def finish(self) -> Publication:
        """Publishes what came.

        Raises:
            InvalidArgument: nothing did.
            BudgetExceeded, VersionConflict, DeadlineExceeded: as ``WeightWriter.register`` and ``begin``.
        """
        if not self._seen:
            raise InvalidArgument(f"step {self.step}: the stream has brought no tensor")
        if self._update is not None and self._seen.keys() != self._owner._specs.keys():
            self._take_back()
        update = self._update or self._write_kept()
        self._update = None
        self._owner.last = self.step  # whatever is said now: the answer may be lost after the version has committed
        update.__exit__(None, None, None)
        return update.publication

    def abort(self, error: BaseException) -> None:
        """Discards what came; readers never see any of it. May be called again, and after ``finish``."""
        update, self._update = self._update, None
        self._kept.clear()
        if update is not None:
            update.__exit__(type(error), error, error.__traceback__)

    def _take_back(self) -> None:
        """These are others than before: copies what was written back, so that all can be registered and written."""
        if self._update is not None:
            written = {name: view.tensor().clone() for name, view in self._update.written()}
            self.abort(InvalidArgument("its tensors are not those of the step before: they are registered anew"))
            self._kept = written

    def _write_kept(self) -> Update:
        self._owner._specs = {}
        self._writer.register(_shapes(self._kept), timeout=self._owner.timeout)
        self._owner._specs = dict(self._seen)
        update = self._writer.begin(self.step, self._owner.timeout)
        try:
            for name in list(self._kept):
                update.write([Shard(name, self._kept.pop(name))])
        except BaseException as error:
            update.__exit__(type(error), error, error.__traceback__)
            raise
        return update


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same shapes and dtypes over one element each: what is registered is never read, only what is written.

    Each has an element of its own, for two over the same memory would count as one tensor under two names.
    """
    import torch

    return {name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in tensors.items()}
