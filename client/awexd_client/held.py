"""A version that the daemon holds, read in place by whoever may read its job: for checking, not for an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, Endpoint
from awexd_client.verify import Checkpoint, Progress, Verified, verify
from awexd_transports.errors import VersionUnavailable
from awexd_transports.layout import Entry, Manifest
from awexd_transports.segment import piece_at
from awexd_transports.view import View


class HeldVersion(Endpoint):
    """Leases a version for as long as this is open. A context manager.

    Shows as an engine of its own while it lives, outside the rounds of others.

    Args:
        job: ``owner/name``; a bare name is this user's own.
        step: None for the newest.
        socket: the daemon's; None: ``$AWEXD_SOCKET``, else the default.
        timeout: seconds that the version may take to come.

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
    ) -> None:
        deadline = Deadline(timeout)
        super().__init__(
            job, 0, 1, socket, mode="auto", transport="auto", verify="off", writable=False, timeout=timeout
        )
        try:
            held = self._ask("versions", deadline.left(), job=job)["versions"]
            if not held:
                raise VersionUnavailable(f"{job}: no version is held")
            self._register_again(deadline.left())
            self._lease(step, deadline)
        except BaseException:
            self.close()
            raise

    def verify(self, checkpoint_dir: str | os.PathLike[str], *, progress: Progress | None = None) -> Verified:
        """Compares it with safetensors on disk, bit by bit; what differs stands in the result."""
        with Checkpoint(checkpoint_dir) as checkpoint:
            return verify(self.parts, checkpoint, progress=progress)

    def __enter__(self) -> Self:
        return self

    def _register_again(self, timeout: float) -> None:
        nothing = Manifest.of(())
        self._ask_with_body(
            "read.register",
            timeout,
            nothing.encoded,
            job=self.job,
            engine=f"verify-{os.getpid()}",
            rank=0,
            world_size=1,
            digest=nothing.digest,
            version=None,
            updates=None,
            aside=None,
        )

    def _lease(self, step: int | None, deadline: Deadline) -> None:
        lease_ms = int(max(deadline.seconds, 1.0) * 1000)
        answer = self._ask("read.resolve", deadline.left(), step=step, lease_ms=lease_ms, stage=True)
        self.epoch, self.step = answer["epoch"], answer["step"]
        sources = self._ask_for_manifests("read.sources", deadline.left(), job=self.job, set=answer["set"])
        manifests = [self._manifests[digest] for digest in sources["ranks"]]
        mappings = self._map([(segment, nbytes) for segment, nbytes, _ in answer["segments"]], deadline)
        self.parts: Sequence[tuple[Entry, View]] = [
            (entry, View.packed(mapping.address + piece_at(manifest, entry.piece), entry.box.shape, dtype, mapping))
            for manifest, mapping in zip(manifests, mappings, strict=True)
            for entry in manifest.entries
            for dtype in (entry.tensor.dtype,)
        ]

    def _forget_tables(self, segments: Sequence[str] | None) -> None:
        """Nothing is kept over mappings but ``parts``, which end with this."""
        if segments is None:
            self.parts = ()
