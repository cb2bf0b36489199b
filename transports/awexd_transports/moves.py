"""Copies in columns: what a plan consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from awexd_transports.layout import Box
from awexd_transports.names import Ints


class Copy(NamedTuple):
    """One box, in global coordinates, from a source rank's entry to a destination rank's entry (by their numbers)."""

    source: int
    source_entry: int
    destination: int
    destination_entry: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies to destinations that all differ, in order of destination, destination entry, source and source entry.

    Attributes:
        source, source_entry: shape (n,): rank, and number of the entry in its segment's manifest.
        destination: shape (n,): which of the distinct destination manifests.
        destination_entry: shape (n,): number of the entry in that.
        offset, shape: shape (n, dims): the box in global coordinates, filled up with 0 and 1.
        ndim: shape (n,): the tensor's own dimensions.
        nbytes: shape (n,).
    """

    source: Ints
    source_entry: Ints
    destination: Ints
    destination_entry: Ints
    offset: Ints
    shape: Ints
    ndim: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: slice | Ints) -> Moves:
        return Moves(*(column[rows] for column in self._columns()))

    def to(self, destination: int) -> Moves:
        """Those to one of the distinct destinations: a view."""
        low, high = np.searchsorted(self.destination, [destination, destination + 1]).tolist()
        return self[low:high]

    def copies(self, rank: int) -> Iterator[Copy]:
        """Every row as an object that names ``rank`` as its destination."""
        columns = (self.source, self.source_entry, self.destination_entry, self.offset, self.shape, self.ndim)
        rows = (column.tolist() for column in columns)
        for source, entry, own, offset, shape, dims in zip(*rows, strict=True):
            yield Copy(source, entry, rank, own, Box(tuple(offset[:dims]), tuple(shape[:dims])))

    def tobytes(self) -> bytes:
        """All numbers, column by column, little-endian."""
        counts = np.array([len(self), self.offset.shape[1]])
        parts = [counts, *(np.ascontiguousarray(column) for column in self._columns())]
        return b"".join(part.astype("<i8", copy=False).tobytes() for part in parts)

    def _columns(self) -> Sequence[Ints]:
        return (
            self.source,
            self.source_entry,
            self.destination,
            self.destination_entry,
            self.offset,
            self.shape,
            self.ndim,
            self.nbytes,
        )
