"""What a process holds: boxes of named global tensors. Pure: no I/O, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np

from awexd_transports import encoding
from awexd_transports.columns import ALIGNMENT, Columns, check, columns_of
from awexd_transports.encoding import MANIFEST_FORMAT, MAX_MANIFEST_BYTES, body_digest
from awexd_transports.names import Ints
from awexd_transports.shard import Box, Entry, Shard, TensorSpec, check_tensor_name

__all__ = [
    "ALIGNMENT",
    "MANIFEST_FORMAT",
    "MAX_MANIFEST_BYTES",
    "Box",
    "Entry",
    "Manifest",
    "Shard",
    "TensorSpec",
    "body_digest",
    "check_tensor_name",
    "digest_of",
]


class Manifest:
    """A rank's shards without their bytes, in the rank's own order; addressed by the digest of its encoding.

    Build with :meth:`of`, which checks it. Entry order decides the order of pieces in a segment. What is kept are
    ``columns``; everything else, also each entry as an object, is made when somebody asks for it, and then kept.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Manifest:
        """A checked manifest.

        Raises:
            InvalidArgument: over a limit, a malformed name, or pieces that are not numbered in order of appearance.
            ManifestMismatch: a name with overlapping boxes, two shapes, dtypes or layouts, or aliases that differ.
        """
        entries = tuple(entries)
        manifest = cls(columns_of(entries))
        check(manifest.columns)
        manifest.entries = entries
        return manifest

    @classmethod
    def decode(cls, body: bytes, digest: str | None = None) -> Manifest:
        """The manifest of these bytes.

        Args:
            digest: their digest, where the caller has checked it already.

        Raises:
            ProtocolError: not the canonical encoding of a valid manifest.
        """
        columns, payload = encoding.decode(body)
        manifest = cls(columns)
        manifest.encoded = body
        manifest.digest = encoding.digest(body[: encoding.HEADER_BYTES], payload) if digest is None else digest
        return manifest

    def __len__(self) -> int:
        """How many entries it has."""
        return len(self.columns.name)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Manifest) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Manifest of {len(self)} entries, {self.nbytes} bytes, {self.digest[:12]}>"

    @cached_property
    def encoded(self) -> bytes:
        """The body that travels. Bodies of equal manifests may differ; their digests do not."""
        return encoding.compress(*encoding.encode(self.columns))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the canonical encoding, uncompressed."""
        return encoding.digest(*encoding.encode(self.columns))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return self.columns.entries()

    @cached_property
    def pieces(self) -> tuple[Entry, ...]:
        """The first entry of each stored piece, by piece number."""
        entries = self.entries
        return tuple(entries[at] for at in self.columns.leading.tolist())

    @cached_property
    def piece_nbytes(self) -> Ints:
        """Bytes of each piece's elements, by piece number."""
        return self.columns.nbytes[self.columns.leading]

    @cached_property
    def _piece_ends(self) -> Ints:
        return np.cumsum(-(-self.piece_nbytes // ALIGNMENT) * ALIGNMENT)

    @cached_property
    def piece_offsets(self) -> tuple[int, ...]:
        """Where each piece starts in this rank's segment: bytes from the start of its data, multiples of ALIGNMENT."""
        return (0, *self._piece_ends[:-1].tolist()) if len(self._piece_ends) else ()

    @property
    def segment_nbytes(self) -> int:
        """Bytes of this rank's packed pieces, padding included."""
        return int(self._piece_ends[-1]) if len(self._piece_ends) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves, each alias group once."""
        return int(self.piece_nbytes.sum())

    @cached_property
    def by_name(self) -> Mapping[str, tuple[Entry, ...]]:
        """Entries by tensor name, each in the manifest's order."""
        grouped: dict[str, list[Entry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.tensor.name, []).append(entry)
        return {name: tuple(found) for name, found in grouped.items()}


def digest_of(digests: Iterable[str]) -> str:
    """The digest of a job's manifests in rank order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
