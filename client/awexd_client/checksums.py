"""XXH3-64 of each piece of a segment, in a table after the pieces. Against accidents, not against attackers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from awexd_client.mappings import Mapping
from awexd_transports.layout import Manifest
from awexd_transports.segment import CHECKSUM_BYTES, checksums_at, piece_at


def piece_checksums(manifest: Manifest, mapping: Mapping) -> bytes:
    """The table: one little-endian u64 a piece, of the bytes that lie in the segment."""
    sums = [_checksum(manifest, mapping, piece) for piece in range(len(manifest.pieces))]
    return np.array(sums, dtype="<u8").tobytes()


def wrong_piece(manifest: Manifest, mapping: Mapping, pieces: Iterable[int]) -> str | None:
    """The name of the first of these pieces whose bytes are not what its checksum says; None if all are right."""
    table = mapping.read(checksums_at(manifest), CHECKSUM_BYTES * len(manifest.pieces))
    stored = np.frombuffer(table, dtype="<u8").copy()
    table.release()
    for piece in pieces:
        if _checksum(manifest, mapping, piece) != int(stored[piece]):
            return manifest.pieces[piece].tensor.name
    return None


def _checksum(manifest: Manifest, mapping: Mapping, piece: int) -> int:
    with mapping.read(piece_at(manifest, piece), manifest.pieces[piece].nbytes) as data:
        return xxhash.xxh3_64_intdigest(data)
