"""Pieces of several rows: chunk by chunk, and from a stream to their places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from awexd_transports.base import Piece

Runs = list[tuple[int, int]]


def chunks(piece: Piece, limit: int) -> Iterator[Runs]:
    """Starts and ends of its bytes, in order, so many together that they have at most ``limit`` bytes; a row as one.

    What is one run is cut.
    """
    if piece.rows == 1:
        for start in range(piece.offset, piece.end, limit):
            yield [(start, min(piece.end, start + limit))]
        return
    together: Runs = []
    most = max(1, limit // piece.run)
    for run in piece.runs():
        together.append(run)
        if len(together) == most:
            yield together
            together = []
    if together:
        yield together


def scatter(data: memoryview, into: memoryview, first: int, run: int, stride: int) -> None:
    """Rows that came one after the other, to their places from row ``first`` on. Keeps neither memory."""
    rows = len(data) // run
    places = np.ndarray((rows, run), np.uint8, into, first * stride, (stride, 1))
    places[...] = np.frombuffer(data, np.uint8).reshape(rows, run)
