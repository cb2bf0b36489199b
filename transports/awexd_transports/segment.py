"""The form of a segment: where its header, pieces and checksums stand. Shared by daemon and clients."""

from __future__ import annotations

from awexd_transports.layout import Manifest

HEADER_BYTES = 4096
"""One page, written by the daemon alone."""
CHECKSUM_BYTES = 8
"""One little-endian ``u64`` a piece, after the last piece."""


def segment_nbytes(manifest: Manifest) -> int:
    """Bytes of a segment of this manifest, header not counted: packed pieces, then their checksums."""
    return manifest.segment_nbytes + CHECKSUM_BYTES * len(manifest.piece_nbytes)


def piece_at(manifest: Manifest, piece: int) -> int:
    """Where that piece starts, in bytes from the start of the segment's object."""
    return HEADER_BYTES + manifest.piece_offsets[piece]


def checksums_at(manifest: Manifest) -> int:
    """Where the table of checksums starts, in bytes from the start of the segment's object."""
    return HEADER_BYTES + manifest.segment_nbytes
