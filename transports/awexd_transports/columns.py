"""A manifest in columns: what is said once a name, and what is said of each entry. Checks of all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from awexd_transports.boxes import entangled, first_overlap
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument, ManifestMismatch
from awexd_transports.names import Bools, Ints, Names
from awexd_transports.shard import MAX_DIMS, MAX_ELEMENTS, Box, Entry, TensorSpec, box_problem, check_tensor_name

MAX_ENTRIES = 2_000_000
MAX_NUMBERS = 1 << 25
"""Numbers that a manifest may come to in memory (eight bytes each), however few its bytes on the wire."""
MAX_BYTES = 1 << 60
"""Bytes of a manifest's shards."""
MAX_ENTANGLED = 4096
"""Boxes of one name that no straight cuts tell apart, or as much work over several; more are refused unseen."""
ALIGNMENT = 256
"""Bytes: every piece of a segment starts on such a boundary (enough for any GPU load and any cache line)."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Rows of names (n), in order of first appearance, and of entries (e). Dimensions are filled up to ``dims``.

    Attributes:
        names: shape (n,).
        dtypes: what ``dtype`` counts. ``layouts``: what ``layout`` counts from 1; 0 is a plain slice.
        ndim: shape (n,): a name's own dimensions.
        extent: shape (n, dims): global shapes, filled up with 1.
        name: shape (e,): row of the entry's name.
        offset, shape: shape (e, dims): boxes, filled up with 0 and 1.
        piece: shape (e,).
    """

    names: Names
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    dtype: Ints
    layout: Ints
    ndim: Ints
    extent: Ints
    name: Ints
    offset: Ints
    shape: Ints
    piece: Ints

    @property
    def itemsize(self) -> Ints:
        """Bytes an element, shape (n,)."""
        return np.array([ITEMSIZE[dtype] for dtype in self.dtypes], np.int64)[self.dtype]

    @property
    def nbytes(self) -> Ints:
        """Bytes of each entry, shape (e,)."""
        numel: Ints = self.shape.prod(axis=1)
        return numel * self.itemsize[self.name]

    @property
    def leading(self) -> Ints:
        """The first entry of each piece, by piece number."""
        return np.flatnonzero(np.diff(np.maximum.accumulate(self.piece), prepend=-1))

    def aliased(self) -> Bools:
        """Which entries share their piece with another."""
        return (np.bincount(self.piece) > 1)[self.piece]

    def spec(self, name: int, text: str | None = None) -> TensorSpec:
        text = self.names.text(name) if text is None else text
        return TensorSpec(text, tuple(self.extent[name, : self.ndim[name]].tolist()), self.dtypes[self.dtype[name]])

    def layout_of(self, name: int) -> str | None:
        return self.layouts[self.layout[name] - 1] if self.layout[name] else None

    def box(self, row: int) -> Box:
        dims = int(self.ndim[self.name[row]])
        return Box(tuple(self.offset[row, :dims].tolist()), tuple(self.shape[row, :dims].tolist()))

    def entry(self, row: int) -> Entry:
        name = int(self.name[row])
        return Entry(self.spec(name), self.box(row), int(self.piece[row]), self.layout_of(name))

    def entries(self) -> tuple[Entry, ...]:
        """All rows as objects; names are spelled out."""
        once = (column.tolist() for column in (self.ndim, self.extent, self.dtype, self.layout))
        layouts = (None, *self.layouts)
        specs, names_layout = [], []
        for text, dims, extent, dtype, layout in zip(self.names.texts(), *once, strict=True):
            specs.append(TensorSpec(text, tuple(extent[:dims]), self.dtypes[dtype]))
            names_layout.append(layouts[layout])
        rows = (column.tolist() for column in (self.name, self.offset, self.shape, self.piece, self.ndim[self.name]))
        return tuple(
            Entry(specs[name], Box(tuple(offset[:dims]), tuple(shape[:dims])), piece, names_layout[name])
            for name, offset, shape, piece, dims in zip(*rows, strict=True)
        )

    def take(self, rows: Ints, offset: Ints, shape: Ints, piece: Ints) -> Columns:
        """Entries of these rows' names, with other boxes and pieces."""
        kept, name = in_order(self.name[rows])
        dims = int(self.ndim[kept].max(initial=0))
        return replace(
            self,
            names=self.names.take(kept),
            dtype=self.dtype[kept],
            layout=self.layout[kept],
            ndim=self.ndim[kept],
            extent=self.extent[kept, :dims],
            name=name,
            offset=offset[:, :dims],
            shape=shape[:, :dims],
            piece=piece,
        )


def in_order(codes: Ints) -> tuple[Ints, Ints]:
    """Distinct codes in order of first appearance, and for each code its place among them."""
    if len(codes) and (np.diff(codes) >= 0).all():
        new = np.diff(codes, prepend=codes[0] - 1) > 0
        return codes[new], np.cumsum(new) - 1
    values, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return values[order], place[inverse]


def out_of_order(codes: Ints) -> int | None:
    """The first row that is not 0 and neither among the codes before it nor one above the highest of them."""
    before = np.maximum.accumulate(np.concatenate([[-1], codes[:-1]])) if len(codes) else codes
    wrong = np.flatnonzero((codes < 0) | (codes > before + 1))
    return int(wrong[0]) if len(wrong) else None


def columns_of(entries: Sequence[Entry]) -> Columns:
    """Columns of entries whose values are of the right kinds; not yet checked as a whole.

    Raises:
        InvalidArgument: a value of a wrong kind, by name.
        ManifestMismatch: a name with two shapes, dtypes or layouts.
    """
    if not _plain(entries):
        for entry in entries:
            _check_kinds(entry)
    firsts: dict[str, Entry] = {}
    wrong: dict[str, str] = {}
    for entry in entries:
        first = firsts.setdefault(entry.tensor.name, entry)
        if first is not entry and (entry.tensor != first.tensor or entry.layout != first.layout):
            wrong[first.tensor.name] = f"declared as {describe(first)} and as {describe(entry)}"
    for name, entry in firsts.items():
        check_tensor_name(name)
        if entry.tensor.dtype not in ITEMSIZE or entry.layout is not None:
            _check_kinds(entry)
    if wrong:
        raise ManifestMismatch.between("a rank's shards contradict each other", mismatched=wrong)
    at = {name: row for row, name in enumerate(firsts)}
    specs = list(firsts.values())
    dims = max((len(entry.tensor.shape) for entry in specs), default=0)
    dtypes, dtype = _codes([entry.tensor.dtype for entry in specs])
    layouts, layout = _codes([entry.layout for entry in specs], none_is_zero=True)
    try:
        return Columns(
            names=Names.of(list(firsts)),
            dtypes=dtypes,
            layouts=layouts,
            dtype=dtype,
            layout=layout,
            ndim=np.array([len(entry.tensor.shape) for entry in specs], np.int64),
            extent=_filled([entry.tensor.shape for entry in specs], dims, 1),
            name=np.array([at[entry.tensor.name] for entry in entries], np.int64),
            offset=_filled([entry.box.offset for entry in entries], dims, 0),
            shape=_filled([entry.box.shape for entry in entries], dims, 1),
            piece=np.array([entry.piece for entry in entries], np.int64),
        )
    except OverflowError:
        for entry in entries:
            _check_kinds(entry)
        raise InvalidArgument("a number of a piece that is not in order of appearance") from None


def check(columns: Columns) -> None:
    """Checks boxes, pieces and what they say together.

    Raises:
        InvalidArgument: over a limit, a box outside its tensor, or pieces not numbered in order of appearance.
        ManifestMismatch: overlapping boxes of one name, or aliases that differ.
    """
    check_amount(len(columns.names), len(columns.name), columns.extent.shape[1], columns.names.numbers.shape[1])
    _check_boxes(columns)
    plain = len(columns.piece) and bool((columns.piece == np.arange(len(columns.piece))).all())
    at = None if plain else out_of_order(columns.piece)
    if at is not None:
        piece, name = int(columns.piece[at]), columns.names.text(int(columns.name[at]))
        text = "is not numbered in order of appearance" if piece >= 0 else "is not a number of a piece"
        raise InvalidArgument(f"{name}: piece {piece} {text}")
    _check_bytes(columns)
    mismatched = {**_differing_aliases(columns)}
    for name, text in _overlapping(columns).items():
        mismatched.setdefault(name, text)
    if mismatched:
        raise ManifestMismatch.between("a rank's shards contradict each other", mismatched=mismatched)


def _check_boxes(columns: Columns) -> None:
    # As many names as entries: each has one, and in the same order.
    extent = columns.extent if len(columns.extent) == len(columns.name) else columns.extent[columns.name]
    # Products of whole numbers below 2^53 are exact as floats, and larger ones stay larger.
    elements = np.prod(columns.extent, axis=1, dtype=np.float64)
    largest = int(columns.extent.max(initial=0)), elements.max(initial=0)
    least = min(int(numbers.min(initial=0)) for numbers in (columns.offset, columns.shape, columns.extent))
    if least >= 0 and max(largest) <= MAX_ELEMENTS:
        ends = columns.offset.view(np.uint64) + columns.shape.view(np.uint64)  # cannot overflow
        if not (ends > extent.view(np.uint64)).any():
            return
    wrong: Bools = (columns.offset < 0) | (columns.shape < 0) | (columns.shape > extent)
    wrong |= columns.offset > extent - np.minimum(columns.shape, extent)
    large: Bools = (columns.extent > MAX_ELEMENTS) | (columns.extent < 0)
    bad = np.flatnonzero(wrong.any(axis=1) | (large.any(axis=1) | (elements > MAX_ELEMENTS))[columns.name])
    if len(bad):
        entry = columns.entry(int(bad[0]))
        raise InvalidArgument(f"{entry.tensor.name}: {box_problem(entry.tensor.shape, entry.box)}")


def _check_bytes(columns: Columns) -> None:
    numel = columns.shape.prod(axis=1)
    most = int(numel.max(initial=0)) * len(numel) * max((ITEMSIZE[dtype] for dtype in columns.dtypes), default=0)
    # Only what may be too much is added up.
    if most > MAX_BYTES // 2 and columns.nbytes.astype(np.float64).sum() > MAX_BYTES:
        raise InvalidArgument(f"shards of more than {MAX_BYTES} bytes")


def describe(entry: Entry) -> str:
    """dtype, global shape and layout, for messages."""
    layout = "" if entry.layout is None else f" in layout {entry.layout}"
    return f"{entry.tensor.dtype}{list(entry.tensor.shape)}{layout}"


def check_amount(names: int, entries: int, dims: int, fields: int) -> None:
    """Refuses what would take too much memory as columns, before any is taken."""
    if entries > MAX_ENTRIES:
        raise InvalidArgument(f"{entries} shards in one manifest; at most {MAX_ENTRIES}")
    numbers = names * (4 + fields + dims) + entries * (2 + 2 * dims)
    if numbers > MAX_NUMBERS:
        raise InvalidArgument(f"a manifest of {numbers} numbers; at most {MAX_NUMBERS}")


def _differing_aliases(columns: Columns) -> dict[str, str]:
    if len(columns.piece) == int(columns.piece.max(initial=-1)) + 1:
        return {}
    first, name = columns.leading[columns.piece], columns.name
    differs = (columns.shape != columns.shape[first]).any(axis=1)
    differs |= columns.dtype[name] != columns.dtype[name[first]]
    differs |= columns.ndim[name] != columns.ndim[name[first]]
    text = columns.names.text
    return {
        text(int(name[at])): f"an alias of {text(int(name[first[at]]))} with another shape or dtype"
        for at in np.flatnonzero(differs).tolist()
    }


def _overlapping(columns: Columns) -> dict[str, str]:
    """Names whose boxes share elements, or that have the same empty box twice."""
    if len(columns.names) == len(columns.name):
        return {}
    several = np.flatnonzero((np.bincount(columns.name) > 1)[columns.name])
    empty = several[(columns.shape[several] == 0).any(axis=1)]
    several = several[(columns.shape[several] != 0).all(axis=1)]
    suspect = several[entangled(columns.name[several], columns.offset[several], columns.shape[several])]
    if len(empty):
        rows = np.column_stack([columns.name[empty], columns.offset[empty], columns.shape[empty]])
        _, inverse, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        suspect = np.concatenate([suspect, empty[counts[inverse.reshape(-1)] > 1]])
    suspect = np.sort(suspect)
    suspect = suspect[np.argsort(columns.name[suspect], kind="stable")]
    names, begin, counts = np.unique(columns.name[suspect], return_index=True, return_counts=True)
    if (counts**2).sum() > MAX_ENTANGLED**2:
        name, most = columns.names.text(int(names[counts.argmax()])), int(counts.max())
        raise InvalidArgument(f"{name}: {most} boxes that overlap or are too entangled to be told apart")
    found: dict[str, str] = {}
    for rows in np.split(suspect, begin[1:]) if len(suspect) else ():
        clash = first_overlap([columns.box(row) for row in rows.tolist()])
        if clash:
            found[columns.names.text(int(columns.name[rows[0]]))] = f"declared twice: {clash[0]} and {clash[1]} overlap"
    return found


def _plain(entries: Sequence[Entry]) -> bool:
    """Whether names are texts, numbers are whole and dimensions fit: the rest is checked for all entries together."""
    numbers = chain.from_iterable((*e.tensor.shape, *e.box.offset, *e.box.shape, e.piece) for e in entries)
    return (
        set(map(type, numbers)) <= {int}
        and all(type(entry.tensor.name) is str for entry in entries)
        and all(len(e.tensor.shape) == len(e.box.offset) == len(e.box.shape) <= MAX_DIMS for e in entries)
    )


def _check_kinds(entry: Entry) -> None:
    name = check_tensor_name(entry.tensor.name)
    if entry.tensor.dtype not in ITEMSIZE:
        raise InvalidArgument(f"{name}: unknown dtype {entry.tensor.dtype!r}")
    if type(entry.piece) is not int or entry.piece < 0:
        raise InvalidArgument(f"{name}: piece {entry.piece!r} is not a number of a piece")
    if entry.layout is not None:
        check_tensor_name(entry.layout)
    problem = box_problem(entry.tensor.shape, entry.box)
    if problem:
        raise InvalidArgument(f"{name}: {problem}")


def _codes(values: Sequence[str | None], *, none_is_zero: bool = False) -> tuple[tuple[str, ...], Ints]:
    known: dict[str, int] = {}
    codes = [0 if value is None else known.setdefault(value, len(known) + none_is_zero) for value in values]
    return tuple(known), np.array(codes, np.int64)


def _filled(rows: Sequence[tuple[int, ...]], dims: int, fill: int) -> Ints:
    if set(map(len, rows)) <= {dims}:
        return np.array(rows, np.int64).reshape(len(rows), dims)
    spare = (fill,) * dims
    return np.array([(*row, *spare[len(row) :]) for row in rows], np.int64).reshape(len(rows), dims)
