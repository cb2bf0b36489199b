"""What a node must bring of each writer rank's segment, and to which of its workers it goes: from the real plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from awexd_transports.layout import Manifest
from awexd_transports.names import Ints
from awexd_transports.plan import plan

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Needs:
    """The union of the boxes that the workers of a node need, cut into pieces, in the order of ranks and segments.

    Attributes:
        rank: of each piece, shape (n,): whose segment it is of.
        end: where it ends in that segment, bytes.
        nbytes: shape (n,).
        shares: bytes of it that each worker reads, shape (n, workers); of what several read, each reads all.
    """

    rank: Ints
    end: Ints
    nbytes: Floats
    shares: Floats

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def total(self) -> float:
        return float(self.nbytes.sum())

    @property
    def of_workers(self) -> Floats:
        """Bytes that each worker reads, shape (workers,)."""
        found: Floats = self.shares.sum(axis=0)
        return found

    def of_ranks(self, ranks: int) -> Floats:
        """Bytes from each rank, shape (ranks,)."""
        found: Floats = np.bincount(self.rank, self.nbytes, minlength=ranks)
        return found


def needs_of(segments: Sequence[Manifest], workers: Sequence[Manifest], piece_bytes: int) -> Needs:
    """Of the workers of one engine on one node.

    A piece is what stands together in a segment, at most ``piece_bytes`` of it; entries that are needed in part count
    as if what is needed of them stood together.

    Args:
        segments: what each writer rank publishes.
    """
    made = plan(segments, workers, partial=True)
    moves = made.moves
    boxes = np.column_stack([moves.source, moves.source_entry, moves.offset, moves.shape])
    unique, of_box = np.unique(boxes, axis=0, return_inverse=True)
    nbytes = np.zeros(len(unique))
    nbytes[of_box] = moves.nbytes
    shares = np.zeros((len(unique), int(made.destinations.max()) + 1))
    np.add.at(shares, (of_box, moves.destination), moves.nbytes)
    source, entry = unique[:, 0], unique[:, 1]
    _check_disjoint(segments, source, entry, nbytes)
    gaps = (np.diff(source) != 0) | (np.diff(entry) > 1)
    first = np.flatnonzero(np.concatenate([[True], gaps]))  # of each run of entries that stand together
    rank, length = source[first], np.add.reduceat(nbytes, first)
    counts = np.maximum(1, np.ceil(length / piece_bytes)).astype(np.int64)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    each = np.repeat(length / counts, counts)
    end = np.repeat(_starts(segments, rank, entry[first]), counts) + np.ceil((number + 1) * each).astype(np.int64)
    return Needs(np.repeat(rank, counts), end, each, _dealt(nbytes, shares, each)[:, made.destinations])


def _dealt(nbytes: Floats, shares: Floats, pieces: Floats) -> Floats:
    """What each worker reads of each piece: pieces and boxes are the same bytes in the same order, cut otherwise."""
    places, borders = (np.concatenate([[0.0], np.cumsum(each)]) for each in (nbytes, pieces))
    read = np.concatenate([np.zeros((1, shares.shape[1])), np.cumsum(shares, axis=0)])
    dealt = np.column_stack([np.diff(np.interp(borders, places, column)) for column in read.T])
    dealt[dealt < 1.0] = 0.0
    return dealt


def _starts(segments: Sequence[Manifest], rank: Ints, entry: Ints) -> Ints:
    """Where these entries stand in their ranks' segments."""
    found = np.zeros(len(rank), np.int64)
    for one in np.unique(rank).tolist():
        manifest, mine = segments[one], rank == one
        found[mine] = np.asarray(manifest.piece_offsets)[manifest.columns.piece[entry[mine]]]
    return found


def _check_disjoint(segments: Sequence[Manifest], source: Ints, entry: Ints, nbytes: Floats) -> None:
    """Boxes of one entry are equal or disjoint in the jobs of this benchmark; others would be counted twice."""
    for rank, manifest in enumerate(segments):
        mine = source == rank
        read = np.bincount(entry[mine], nbytes[mine], minlength=len(manifest))
        if (read > manifest.columns.nbytes).any():
            raise ValueError(f"workers of one node read overlapping boxes of rank {rank}'s entries, which differ")
