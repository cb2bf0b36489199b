"""The columns of many manifests one after another, with one number for each name over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Box, Entry, Manifest
from awexd_transports.names import Bools, Ints, Names, keys, numbered, padded, renumbered
from awexd_transports.shard import RESHAPES


class Joined:
    """Manifests side by side. A *place* is a manifest's row of names, a *row* is one of its entries, counted over all.

    Attributes:
        place_start, row_start: where each manifest begins, and the end of the last.
        name: shape (places,): the name's number, from 0; numbers mean nothing but equality.
        first: shape (names,): the first place of each name.
        place, manifest: shape (rows,): of each entry.
        offset, shape: shape (rows, dims).
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.manifests = manifests
        self._columns = [manifest.columns for manifest in manifests]
        self.place_start = _starts([len(columns.names) for columns in self._columns])
        self.row_start = _starts([len(columns.name) for columns in self._columns])
        self.name = _numbered([columns.names for columns in self._columns])
        self.first = np.zeros(int(self.name.max(initial=-1)) + 1, np.int64)
        self._all_places = np.arange(len(self.name))
        self.first[self.name[::-1]] = self._all_places[::-1]
        counts = np.diff(self.row_start)
        self.manifest = np.repeat(np.arange(len(manifests)), counts)
        # As many names as entries: each has one, and in the same order.
        self._plain = len(self.name) == len(self.manifest)
        self.place = self._all_places if self._plain else self._places(counts)
        self.dims = max((columns.extent.shape[1] for columns in self._columns), default=0)
        self.offset = padded([columns.offset for columns in self._columns], 0, self.dims)
        self.shape = padded([columns.shape for columns in self._columns], 1, self.dims)

    @cached_property
    def row_name(self) -> Ints:
        """The name's number of each row."""
        return self.name if self._plain else self.name[self.place]

    @cached_property
    def empty(self) -> Bools:
        """Rows without elements."""
        return _any_zero(self.shape)

    @cached_property
    def elementless(self) -> Bools:
        """Places of tensors without elements."""
        return _any_zero(self.extent)

    @cached_property
    def numel(self) -> Ints:
        """Elements of each row's box."""
        numel: Ints = self.shape.prod(axis=1)
        return numel

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each row's box."""
        words = {word for columns in self._columns for word in columns.dtypes}
        nbytes: Ints = self.shape.prod(axis=1)
        nbytes *= ITEMSIZE[words.pop()] if len(words) == 1 else self.itemsize[self.place]
        return nbytes

    @cached_property
    def ndim(self) -> Ints:
        """Dimensions of each place's tensor."""
        return _joined([columns.ndim for columns in self._columns])

    @cached_property
    def extent(self) -> Ints:
        """Global shape of each place's tensor, filled up with 1."""
        return padded([columns.extent for columns in self._columns], 1, self.dims)

    @cached_property
    def _dtypes(self) -> tuple[Ints, tuple[str, ...]]:
        return renumbered([c.dtypes for c in self._columns], [c.dtype for c in self._columns])

    @cached_property
    def _layouts(self) -> tuple[Ints, tuple[str, ...]]:
        if not any(columns.layouts for columns in self._columns):
            return np.zeros(len(self.name), np.int64), ("",)
        return renumbered([("", *c.layouts) for c in self._columns], [c.layout for c in self._columns])

    @cached_property
    def atomic(self) -> Bools:
        """Whether what lies at each place follows a layout in which it moves whole."""
        codes, words = self._layouts
        return np.array([word not in RESHAPES and word != "" for word in words])[codes]

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes an element of each place."""
        codes, words = self._dtypes
        return np.array([ITEMSIZE[dtype] for dtype in words], np.int64)[codes]

    def unlike_first(self) -> Ints:
        """Places whose name was declared before with another dtype, global shape or layout, ascending."""
        first = self.first[self.name]
        later = np.flatnonzero(first != self._all_places)
        first = first[later]
        unlike = np.zeros(len(first), bool)
        for column in (self._dtypes[0], self._layouts[0], self.ndim, *self.extent.T):
            unlike |= column[later] != column[first]
        return later[unlike]

    def aliased(self) -> Ints:
        """Rows that share their piece with another row of their manifest."""
        found = [
            np.flatnonzero(columns.aliased()) + start
            for columns, start in zip(self._columns, self.row_start.tolist(), strict=False)
            # Numbered in order of appearance: the last of them is its row where none is shared.
            if len(columns.piece) and columns.piece[-1] + 1 < len(columns.piece)
        ]
        return _joined(found)

    def _places(self, counts: Ints) -> Ints:
        return np.concatenate([columns.name for columns in self._columns]) + np.repeat(self.place_start[:-1], counts)

    def manifest_of_place(self, place: int) -> int:
        return int(np.searchsorted(self.place_start, place, side="right")) - 1

    def text(self, name: int) -> str:
        """The name with that number."""
        return self.texts_at(self.first[name : name + 1])[0]

    def texts_at(self, places: Ints) -> list[str]:
        """The names at ascending places."""
        found: list[str] = []
        edges = np.searchsorted(places, self.place_start).tolist()
        for at, (low, high) in enumerate(pairwise(edges)):
            if low < high:
                found += self._columns[at].names.take(places[low:high] - self.place_start[at]).texts()
        return found

    def entry_at(self, place: int) -> Entry:
        """The first entry of that name in its manifest."""
        at = self.manifest_of_place(place)
        columns = self._columns[at]
        return columns.entry(int(np.flatnonzero(columns.name == place - int(self.place_start[at]))[0]))

    def entry(self, row: int) -> Entry:
        at = int(self.manifest[row])
        return self._columns[at].entry(row - int(self.row_start[at]))

    def box(self, row: int) -> Box:
        at = int(self.manifest[row])
        return self._columns[at].box(row - int(self.row_start[at]))

    def piece(self, row: int) -> int:
        at = int(self.manifest[row])
        return int(self._columns[at].piece[row - int(self.row_start[at])])


def classes(manifests: Sequence[Manifest]) -> tuple[list[Manifest], Ints]:
    """Distinct manifests in order of first appearance, and for each rank which of them it has."""
    known: dict[int, int] = {}
    digests: dict[str, int] = {}
    distinct: list[Manifest] = []
    of_rank: list[int] = []
    for manifest in manifests:
        at = known.get(id(manifest))
        if at is None:
            at = known[id(manifest)] = digests.setdefault(manifest.digest, len(distinct))
            distinct += [manifest] if at == len(distinct) else []
        of_rank.append(at)
    return distinct, np.array(of_rank, np.int64)


def runs(starts: Ints, counts: Ints) -> Ints:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, one run after another."""
    ends = np.cumsum(counts)
    found: Ints = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
    return found


def _numbered(tables: Sequence[Names]) -> Ints:
    """Numbers of names, one table after another; tables that are the same (those of replicas) are looked at once."""
    kept: dict[object, int] = {}
    distinct: list[Names] = []
    which: list[int] = []
    for table in tables:
        key = table.templates, len(table), table.numbers[-1:].tobytes()
        at = kept.get(key)
        if at is None or not distinct[at].same_as(table):
            at = kept[key] = len(distinct)
            distinct.append(table)
        which.append(at)
    numbers = numbered(keys(distinct))
    starts = _starts([len(table) for table in distinct])
    if len(distinct) == len(tables):
        return numbers
    return _joined([numbers[starts[at] : starts[at + 1]] for at in which])


def _any_zero(rows: Ints) -> Bools:
    """Which rows have a zero."""
    return (rows == 0).any(axis=1) if not rows.all() else np.zeros(len(rows), bool)


def _starts(counts: Sequence[int]) -> Ints:
    return np.cumsum([0, *counts])


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
