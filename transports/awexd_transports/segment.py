"""The form of a segment: where its header, pieces and checksums stand. Shared by daemon and clients."""

from __future__ import annotations

from itertools import accumulate

from awexd_transports.cells import grid
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Manifest

HEADER_BYTES = 4096
"""One page, written by the daemon alone."""
MAGIC = b"AWEXDSEG"
"""How the header begins while the bytes are a version's, or sealed for one; zeros once it goes or is withdrawn."""
WORDS_AT, WITHDRAWN_AT = 24, 48
"""In a description of lent memory (``cuda.lent``): the words that tell how far a step is; the last is the daemon's."""
CHECKSUM_BYTES = 8
"""One little-endian ``u64`` a cell (see ``cells``), after the last piece, in order of pieces."""
CHECKSUM_OFFSET = 0x6A09_E667_F3BC_C909
"""Added to each cell's digest, modulo 2**64: memory that is all zeros, digests included, must not look right."""


def segment_nbytes(manifest: Manifest) -> int:
    """Bytes of a segment of this manifest, header not counted: packed pieces, then the checksums of their cells."""
    return manifest.segment_nbytes + CHECKSUM_BYTES * first_cells(manifest)[-1]


def piece_at(manifest: Manifest, piece: int) -> int:
    """Where that piece starts, in bytes from the start of the segment's object."""
    return HEADER_BYTES + manifest.piece_offsets[piece]


def checksums_at(manifest: Manifest) -> int:
    """Where the table of checksums starts, in bytes from the start of the segment's object."""
    return HEADER_BYTES + manifest.segment_nbytes


def first_cells(manifest: Manifest) -> list[int]:
    """The number of each piece's first cell in the table, and the number of all cells."""
    counts = (grid(entry.box.shape, ITEMSIZE[entry.tensor.dtype]).cells for entry in manifest.pieces)
    return list(accumulate(counts, initial=0))
