"""Sums of bytes as they are, for what no table of checksums covers: the digest of a row of single bytes.

Keyed by where in the segment the bytes lie, so that right bytes at a wrong place are seen too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from awexd_transports.digest import MASK, digest
from awexd_transports.segment import CHECKSUM_OFFSET
from awexd_transports.view import View


class Sum:
    """Of parts of a segment of so many bytes; parts add up in any order."""

    def __init__(self, nbytes: int) -> None:
        self._shape = (nbytes,)
        self.value = CHECKSUM_OFFSET

    def add(self, data: bytes | memoryview, offset: int) -> None:
        """Blocks; in a thread it does not hold the interpreter's lock for long."""
        if len(data):
            held = np.frombuffer(data, np.uint8)
            view = View.packed(held.ctypes.data, held.shape, "uint8", held)
            self.value = (self.value + digest(view, self._shape, (offset,))) & MASK

    def add_runs(self, data: Iterable[tuple[int, bytes]]) -> None:
        """Several, each with where it begins; blocks likewise."""
        for start, run in data:
            self.add(run, start)
