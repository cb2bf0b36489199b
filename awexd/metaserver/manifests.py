"""Manifest bodies by digest, each sent once. Those that nothing names go when room is needed."""

from __future__ import annotations

from collections.abc import Callable

from awexd_transports.encoding import read_header
from awexd_transports.errors import BudgetExceeded, ProtocolError
from awexd_transports.layout import MAX_MANIFEST_BYTES, Manifest

MAX_BYTES = 1 << 30
MAX_BODIES = 1 << 16


def check_body(body: bytes, digest: str) -> None:
    """Refuses what is not the canonical encoding of a manifest with that digest. Bounded by the decoder's own limits.

    Raises:
        ProtocolError: it is not.
    """
    if Manifest.decode(body).digest != digest:
        raise ProtocolError("a manifest whose digest is another than the one named")


def unpacked_bytes(body: bytes) -> int:
    """What a body says it unpacks to, and never more than it does.

    Raises:
        ProtocolError: it is no manifest, or over a limit.
    """
    return max(len(body), read_header(body).payload)


class Manifests:
    """Bodies that were checked. ``used`` tells which digests are in use."""

    def __init__(self, used: Callable[[], set[str]], max_bytes: int = MAX_BYTES, max_bodies: int = MAX_BODIES) -> None:
        self._used = used
        self._max_bytes = max_bytes
        self._max_bodies = max_bodies
        self._bodies: dict[str, bytes] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def __contains__(self, digest: str) -> bool:
        return digest in self._bodies

    def get(self, digest: str) -> bytes | None:
        return self._bodies.get(digest)

    def add(self, digest: str, body: bytes) -> None:
        """Keeps a checked body.

        Raises:
            BudgetExceeded: there is no room for it beside those in use.
        """
        if digest in self._bodies:
            return
        if not self._fits(body):
            self._prune()
        if not self._fits(body):
            raise BudgetExceeded(
                f"manifests in use take {self.nbytes} bytes in {len(self)} bodies, of {self._max_bytes} and "
                f"{self._max_bodies}; one of {len(body)} does not fit"
            )
        self._bodies[digest] = body
        self.nbytes += len(body)

    def _fits(self, body: bytes) -> bool:
        return self.nbytes + len(body) <= self._max_bytes and len(self) < self._max_bodies

    def _prune(self) -> None:
        """The oldest that nothing names, until a tenth is free: whoever sends many does not make each look again."""
        used = self._used()
        for digest in [digest for digest in self._bodies if digest not in used]:
            self.nbytes -= len(self._bodies.pop(digest))
            if (
                self.nbytes + MAX_MANIFEST_BYTES <= self._max_bytes * 9 // 10
                and len(self) <= self._max_bodies * 9 // 10
            ):
                return
