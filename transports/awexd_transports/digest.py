"""An additive checksum of boxes of tensors: the same whatever the sharding and the layout in memory. Against accidents.

A tensor of shape S and of elements of ``itemsize`` bytes is a matrix: one row for each index of all dimensions but the
last, counted row-major; each row's bytes padded with zeros to little-endian words of 64 bits (no dimension: one row of
one element). With

    mix(k, i) = splitmix64's output function of (i * 0x9E3779B97F4A7C15 + k), with its lowest bit set
    weight(row, word) = mix(ROWS, row) * mix(SPANS, word // SPAN) * mix(WORDS, word % SPAN)

all modulo 2**64, the digest of a box is the sum over its elements of ``weight`` times the word with only that element's
bytes in it, in the GLOBAL tensor's coordinates. So the digests of disjoint boxes add up to that of their union.
(splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.)

What it sees: every change of one word (weights are odd), and any other change but for chance, about 2**-64 for changes
spread over the bits of their words. Multiplication carries upwards only, so it sees the less the fewer bits stand above
the changed ones: flips of nothing but the top bit of words (the sign of their last element) cancel out whenever their
number is even, flips of bit 62 alone in half of those cases. And whoever knows this text can forge it.

``native/copy.c`` sums as it copies. Here, where it is missing or does not take a copy, NumPy's einsum does about
20 GB/s a core in cache, without the GIL, where the box's rows are whole aligned words in memory; anything else (odd
widths, unaligned columns, transposed tensors) is gathered into such rows first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from awexd_transports.view import View, array_at

MASK = (1 << 64) - 1
SPAN = 1 << 18
"""Words (2 MiB): along a longer row the words' own weights repeat, times one of the span."""
ROWS, SPANS, WORDS = 0x9F1B_5C3A_7D24_E681, 0x3C6E_F372_FE94_F82B, 0xA54F_F53A_5F1D_36F1

FLAT = 4096
"""Words: below so many, without gaps, each word's whole weight is kept, and one call does all."""
SCRATCH = 256 << 10
_KEPT_ROWS = 1 << 20

Words = npt.NDArray[np.int64]
"""Words and weights are signed here: sums and products have the same bits."""
Term = Callable[[], int]
"""A part of a sum over memory as it is when called; modulo 2**64 only after the caller's mask."""


def digest(view: View, shape: Sequence[int], offset: Sequence[int]) -> int:
    """The digest of the box that begins at ``offset`` of a global tensor of that ``shape`` and lies at ``view``."""
    return total(terms(view, shape, offset))


def total(parts: Sequence[Term]) -> int:
    return sum(part() for part in parts) & MASK


def terms(view: View, shape: Sequence[int], offset: Sequence[int]) -> list[Term]:
    """The digest of a box in memory, prepared: ``total`` of it may be taken again and again.

    They do not keep the memory alive.
    """
    if not view.numel:
        return []
    box = _Rows(view, shape, offset)
    if not box.aligned:
        return [partial(_gathered, box, *part) for part in box.gathers()]
    return [_term(box.words(low, high), box.weights(low), _word_weights(low, high)) for low, high in box.spans()]


def parted(view: View, shape: Sequence[int], offset: Sequence[int], parts: int) -> Callable[[], Words] | None:
    """The digests of a box cut into equal parts along its last dimension, prepared; None where that takes ``terms``."""
    box = _Rows(view, shape, offset)
    low, high = box.first, box.first + box.count
    if not box.aligned or box.count % parts or low // SPAN != (high - 1) // SPAN:
        return None
    whole, weights = box.words(low, high), _word_weights(low, high).reshape(parts, -1)
    held = np.lib.stride_tricks.as_strided(
        whole, (*whole.shape[:-1], *weights.shape), (*whole.strides[:-1], weights.shape[1] * 8, 8)
    )
    rows = box.weights(low)
    if held.size <= FLAT and held.ndim <= 3:
        each = np.multiply.outer(rows, weights).reshape(held.shape)
        return partial(np.einsum, "rbc,rbc->b" if held.ndim == 3 else "bc,bc->b", held, each)
    if held.ndim == 3 and weights.size <= FLAT:
        return partial(_columns, whole, rows, weights.reshape(-1), parts)
    return partial(_parts, held, weights, rows)


def row_weights(shape: Sequence[int], offset: Sequence[int], extent: Sequence[int]) -> Words:
    """``mix(ROWS, row)`` of the rows of a box, row-major."""
    step, dims = 1, []
    for n, low, count in reversed(list(zip(shape[:-1], offset[:-1], extent[:-1], strict=True))):
        dims.append((low * step, count, step))
        step *= n
    first = sum(low for low, _, _ in dims)
    rows = math.prod(count for _, count, _ in dims)
    if rows and 1 + sum((count - 1) * step for _, count, step in dims) == rows:
        if first + rows <= _KEPT_ROWS:
            return _kept_rows(1 << (first + rows - 1).bit_length())[first : first + rows]
        return mixes(ROWS, np.arange(first, first + rows, dtype=np.uint64))
    numbers = np.array([first], np.uint64)
    for _, count, step in reversed(dims):
        numbers = np.add.outer(numbers, np.arange(count, dtype=np.uint64) * np.uint64(step)).reshape(-1)
    return mixes(ROWS, numbers)


def mixes(key: int, numbers: npt.NDArray[np.uint64]) -> Words:
    """``mix(key, i)`` of each number."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=32)
def _kept_rows(count: int) -> Words:
    return mixes(ROWS, np.arange(count, dtype=np.uint64))


@lru_cache(maxsize=1)
def kept_words() -> Words:
    return mixes(WORDS, np.arange(SPAN, dtype=np.uint64))


def _word_weights(low: int, high: int) -> Words:
    """Of words of one span."""
    return kept_words()[low % SPAN : (high - 1) % SPAN + 1]


class _Rows:
    """A box in memory as rows of words: where they lie, and whether they can be read as they are."""

    __slots__ = ("_weights", "address", "aligned", "count", "first", "items", "lead", "outer", "size", "strides")

    def __init__(self, view: View, shape: Sequence[int], offset: Sequence[int]) -> None:
        shape, offset = tuple(shape) or (1,), tuple(offset) or (0,)
        extent, strides = view.shape or (1,), view.strides or (view.itemsize,)
        self.size, self.address, self.items = view.itemsize, view.address, extent[-1]
        start = offset[-1] * self.size
        end = start + self.items * self.size
        self.first, self.lead = start // 8, start % 8
        self.count = -(-end // 8) - self.first
        self.outer, outer = _collapsed(extent[:-1], strides[:-1])
        inner = strides[-1] if self.items > 1 else self.size
        self.strides = (*outer, inner)
        whole = not (self.lead or end % 8) and inner == self.size
        self.aligned = whole and not any(place % 8 for place in (self.address, *outer))
        self._weights = row_weights(shape, offset, extent)

    def weights(self, word: int) -> Words:
        """One weight a row, for words of the span in which that word is."""
        return self._weights * mixes(SPANS, np.array([word // SPAN], np.uint64))

    def spans(self) -> Iterator[tuple[int, int]]:
        low, end = self.first, self.first + self.count
        while low < end:
            high = min(end, (low // SPAN + 1) * SPAN)
            yield low, high
            low = high

    def words(self, low: int, high: int) -> Words:
        """The rows' words ``low`` to ``high``, where the box is aligned."""
        return array_at(self.address + 8 * (low - self.first), 8, (*self.outer, high - low), (*self.strides[:-1], 8))

    def gathers(self) -> Iterator[tuple[int, int]]:
        """Ranges of the outermost dimension that fit into scratch memory."""
        extent = self.outer[0] if self.outer else 1
        step = max(1, SCRATCH * extent // (len(self._weights) * self.count * 8))
        for low in range(0, extent, step):
            yield low, min(extent, low + step)

    def gathered(self, low: int, high: int) -> tuple[Words, Words]:
        """Those of the outermost dimension, as whole words padded with zeros; and their rows' weights."""
        outer = (high - low, *self.outer[1:]) if self.outer else ()
        address = self.address + (low * self.strides[0] if self.outer else 0)
        held = array_at(address, self.size, (*outer, self.items), self.strides)
        rows = len(self._weights) // (self.outer[0] if self.outer else 1)
        scratch = np.zeros((rows * (high - low if self.outer else 1), self.count), np.int64)
        into = scratch.view(held.dtype)[:, self.lead // self.size :][:, : self.items]
        np.copyto(_folded(into, held.shape), held)
        return scratch, self._weights[low * rows : high * rows] if self.outer else self._weights


def _folded(rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Equally spaced rows as a view of more dimensions."""
    strides, step = [rows.strides[1]], rows.strides[0]
    for extent in reversed(shape[:-1]):
        strides.append(step)
        step *= extent
    folded: npt.NDArray[np.int64] = np.lib.stride_tricks.as_strided(rows, shape, strides[::-1])
    return folded


def _collapsed(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row-major dimensions that continue each other in memory, made one."""
    found: list[tuple[int, int]] = []
    for n, step in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if found and found[-1][1] == n * step:
            found[-1] = (found[-1][0] * n, step)
        else:
            found.append((n, step))
    return tuple(n for n, _ in found), tuple(step for _, step in found)


def _term(held: Words, rows: Words, words: Words) -> Term:
    if held.size <= FLAT and held.flags.c_contiguous:
        return partial(_dot, held.reshape(-1), np.multiply.outer(rows, words).reshape(-1))
    return partial(_weighted, held, rows, words)


def _dot(held: Words, weights: Words) -> int:
    return int(np.dot(held, weights))


def _weighted(held: Words, rows: Words, words: Words) -> int:
    return int(np.dot(np.einsum("...c,c->...", held, words).reshape(-1), rows))


def _columns(held: Words, rows: Words, words: Words, parts: int) -> Words:
    """As ``_parts``, with an inner loop of whole rows: parts may be short."""
    found = np.einsum("rc,r->c", held, rows)
    found *= words
    sums: Words = np.add.reduce(found.reshape(parts, -1), axis=1)
    return sums


def _parts(held: Words, words: Words, rows: Words) -> Words:
    found = np.einsum("...bc,bc->...b", held, words).reshape(len(rows), -1)
    sums: Words = np.einsum("rb,r->b", found, rows)
    return sums


def _gathered(box: _Rows, low: int, high: int) -> int:
    held, rows = box.gathered(low, high)
    found = 0
    for start, stop in box.spans():
        words = held[:, start - box.first : stop - box.first]
        spans = mixes(SPANS, np.array([start // SPAN], np.uint64))
        found += _weighted(words, rows * spans, _word_weights(start, stop))
    return found
