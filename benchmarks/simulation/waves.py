"""Workers that copy a version in waves while it arrives, as ``awexd_client.waves`` deals them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from awexd.store.arriving import QUANTUM, SHARE
from awexd_client.waves import WAVE_BYTES, WAVES
from awexd_transports.turns import turn
from benchmarks.simulation.needs import Needs


@dataclass(frozen=True)
class Waves:
    """What each worker of a node copies at once.

    Attributes:
        touched: of each piece, the (worker, wave) that it is a part of.
        pieces: of each worker's waves, how many each has. ``nbytes``: what it copies.
    """

    touched: list[list[tuple[int, int]]]
    pieces: list[list[int]]
    nbytes: list[list[float]]

    @classmethod
    def of(cls, needs: Needs, segments: Sequence[int]) -> Waves:
        """``segments``: bytes of each writer rank's."""
        touched: list[list[tuple[int, int]]] = [[] for _ in range(len(needs))]
        pieces, nbytes = [], []
        turns = np.array([turn(rank) for rank in range(len(segments))])[needs.rank]
        counts, sizes = np.bincount(needs.rank)[needs.rank], np.asarray(segments)[needs.rank]
        order = np.lexsort((turns, counts * (needs.end - 1) // sizes / counts))
        for worker in range(needs.shares.shape[1]):
            share = needs.shares[:, worker]
            total, before = float(share.sum()), 0.0
            count = int(max(1, min(WAVES, total // WAVE_BYTES)))
            of_wave, read = [0] * count, [0.0] * count
            for piece in order[share[order] > 0].tolist():
                mine = float(share[piece])
                low, high = count * before / total, count * (before + mine) / total
                before += mine
                first, last = min(count - 1, int(low)), min(count - 1, math.ceil(high - 1e-9) - 1)
                for wave in range(first, max(first, last) + 1):
                    touched[piece].append((worker, wave))
                    of_wave[wave] += 1
                    part = (min(high, wave + 1) - max(low, wave)) / (high - low) if last > first else 1.0
                    read[wave] += mine * part
            pieces.append(of_wave)
            nbytes.append(read)
        return cls(touched, pieces, nbytes)


class Worker:
    """One worker, which is busy or waits to be told.

    Args:
        copy: begins to copy so many bytes; ``copied`` is to be called when they are.

    Attributes:
        known: bytes that had landed when it was told last.
    """

    def __init__(self, pieces: list[int], nbytes: list[float], copy: Callable[[float], None]) -> None:
        self._missing, self._nbytes, self._copy = list(pieces), nbytes, copy
        self.left = sum(nbytes)
        self._ready = self._under_way = 0.0
        self.begun: float | None = None
        self.known = 0.0

    @property
    def idle(self) -> bool:
        return not self._under_way

    def landed(self, wave: int) -> None:
        """One more piece of that wave is there."""
        self._missing[wave] -= 1
        if not self._missing[wave]:
            self._ready += self._nbytes[wave]

    def go(self, now: float) -> None:
        """Copies all that is ready."""
        if self._ready and self.idle:
            self.begun = now if self.begun is None else self.begun
            self._under_way, self._ready = self._ready, 0.0
            self._copy(self._under_way)

    def copied(self) -> None:
        self.left -= self._under_way
        self._under_way = 0.0


class Told:
    """When the workers of a node are told of what has landed there."""

    def __init__(self, nbytes: float) -> None:
        self._quantum = max(float(QUANTUM), nbytes / SHARE)
        self._untold = 0.0

    def land(self, nbytes: float) -> bool:
        self._untold += nbytes
        if self._untold < self._quantum:
            return False
        self._untold = 0.0
        return True
