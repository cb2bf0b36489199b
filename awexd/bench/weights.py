"""The weights of a hand-over benchmark: how many tensors of what shape, where they lie, and what they must hold.

The tensors of one process lie in one flat mapping, so that a plain copy of that mapping moves the very same bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from awexd.bench.limits import MADV_POPULATE_WRITE

if TYPE_CHECKING:
    import torch

    from awexd_client import Shard

ITEMSIZE = 2  # bfloat16
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two words of the pattern are equal


@dataclass(frozen=True, slots=True)
class Weights:
    """``tensors`` bfloat16 matrices of ``columns`` columns, together ``nbytes``.

    Attributes:
        cut: the reader holds every other one as its left and its right half, each contiguous.
    """

    tensors: int
    nbytes: int
    columns: int = 1024
    cut: bool = False

    def shapes(self) -> list[tuple[int, int]]:
        """As equal as whole rows allow, and together exactly ``nbytes``."""
        rows, over = divmod(self.nbytes, self.columns * ITEMSIZE)
        if over or rows < self.tensors:
            raise ValueError(f"{self.nbytes} bytes are not rows of {self.columns} columns for {self.tensors} tensors")
        each, more = divmod(rows, self.tensors)
        return [(each + (number < more), self.columns) for number in range(self.tensors)]

    def places(self) -> list[tuple[int, int, int]]:
        """Offset in the mapping, rows and columns of each tensor."""
        found, at = [], 0
        for rows, columns in self.shapes():
            found.append((at, rows, columns))
            at += rows * columns * ITEMSIZE
        return found

    def halved(self, number: int) -> bool:
        return self.cut and number % 2 == 0


def mapping(nbytes: int) -> mmap.mmap:
    """Private memory, all pages there."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


def source_tensors(weights: Weights, memory: mmap.mmap) -> dict[str, torch.Tensor]:
    """A trainer's tensors, whole, each a storage of its own."""
    flat = memoryview(memory)
    return {
        _name(number): _tensor(flat, at, rows, columns) for number, (at, rows, columns) in enumerate(weights.places())
    }


def destination_shards(weights: Weights, memory: mmap.mmap) -> Iterator[Shard]:
    """A reader's tensors, whole or in halves, in the same order."""
    from awexd_client import Shard

    flat = memoryview(memory)
    for number, (at, rows, columns) in enumerate(weights.places()):
        if not weights.halved(number):
            yield Shard(_name(number), _tensor(flat, at, rows, columns))
            continue
        half = columns // 2
        for side in range(2):
            part = _tensor(flat, at + side * rows * half * ITEMSIZE, rows, half)
            yield Shard(_name(number), part, (rows, columns), (0, side * half))


def fill(memory: mmap.mmap) -> None:
    """Eight-byte words that are all different, so that a byte in a wrong place is seen."""
    words = np.frombuffer(memory, np.uint64)
    words[:] = _pattern(0, len(words))


def mark(weights: Weights, memory: mmap.mmap, step: int) -> None:
    """Changes the first word of every tensor, so that a copy of an older step is seen."""
    words = np.frombuffer(memory, np.uint64)
    for at, _, _ in weights.places():
        words[at // 8] = step


def unmark(weights: Weights, memory: mmap.mmap) -> None:
    """Undoes ``mark``: another job has other tensors."""
    words = np.frombuffer(memory, np.uint64)
    for at, _, _ in weights.places():
        words[at // 8] = _pattern(at // 8, 1)[0]


def wrong(weights: Weights, memory: mmap.mmap, step: int) -> list[str]:
    """Names of the reader's tensors that do not hold what the trainer's held at ``step``."""
    found = []
    for number, (at, rows, columns) in enumerate(weights.places()):
        nbytes = rows * columns * ITEMSIZE
        words = _pattern(at // 8, nbytes // 8)
        words[0] = step
        expected = words.view(np.uint16).reshape(rows, columns)
        held = np.frombuffer(memory, np.uint16, nbytes // ITEMSIZE, at)
        if weights.halved(number):
            halves = held.reshape(2, rows, columns // 2)
            same = all(np.array_equal(half, part) for half, part in zip(halves, np.hsplit(expected, 2), strict=True))
        else:
            same = np.array_equal(held.reshape(rows, columns), expected)
        if not same:
            found.append(_name(number))
    return found


def _pattern(first: int, count: int) -> npt.NDArray[np.uint64]:
    words = np.arange(first, first + count, dtype=np.uint64)
    words *= _MIX
    return words


def _name(number: int) -> str:
    return f"layers.{number}.weight"


def _tensor(flat: memoryview, at: int, rows: int, columns: int) -> Any:
    import torch

    part = flat[at : at + rows * columns * ITEMSIZE]
    return torch.frombuffer(part, dtype=torch.bfloat16).reshape(rows, columns)
