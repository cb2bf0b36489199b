"""Many tensor names as few templates and columns of numbers: ``model.layers.{}.mlp.experts.{}.up_proj.weight``, 3, 17.

Names are compared as integers; their text is made again only where somebody asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FIELD = "\0"
"""Stands for a number in a template: no valid name has a control character."""
MAX_FIELDS = 6
MAX_NUMBER = 10**9 - 1
# Digits that a number gives back as they were: no leading zeros, at most nine. All others stay in the template.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_KEY_LIMIT = 1 << 62
TABLE_LIMIT = 8
"""Keys up to so many times their number are looked up in a table; above, sorted."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Names in columns.

    Attributes:
        templates: what ``template`` counts; a few.
        template: shape (n,).
        numbers: shape (n, fields), each from 0 to MAX_NUMBER, and 0 where the template has fewer fields.
    """

    templates: tuple[str, ...]
    template: Ints
    numbers: Ints

    @classmethod
    def of(cls, texts: Sequence[str]) -> Names:
        known: dict[str, int] = {}
        template, found = [], []
        for text in texts:
            parts = _NUMBER.split(text, maxsplit=MAX_FIELDS)
            template.append(known.setdefault(FIELD.join(parts[::2]), len(known)))
            found.append(parts[1::2])
        width = max(map(len, found), default=0)
        numbers = np.zeros((len(found), width), np.int64)
        for count in range(1, width + 1):
            at = [row for row, digits in enumerate(found) if len(digits) == count]
            if at:
                numbers[at, :count] = [list(map(int, found[row])) for row in at]
        return cls(tuple(known), np.array(template, np.int64), numbers)

    def __len__(self) -> int:
        return len(self.template)

    def take(self, rows: Ints) -> Names:
        return Names(self.templates, self.template[rows], self.numbers[rows])

    def text(self, row: int) -> str:
        return self.take(np.array([row])).texts()[0]

    def texts(self) -> list[str]:
        """The names themselves."""
        forms = [template.replace("%", "%%").replace(FIELD, "%d") for template in self.templates]
        fields = [template.count(FIELD) for template in self.templates]
        rows = zip(self.template.tolist(), self.numbers.tolist(), strict=True)
        return [forms[at] % tuple(numbers[: fields[at]]) for at, numbers in rows]

    def same_as(self, other: Names) -> bool:
        """Whether both hold the same names in the same order (False may also mean: other templates)."""
        return self is other or (
            self.templates == other.templates
            and np.array_equal(self.template, other.template)
            and np.array_equal(self.numbers, other.numbers)
        )


def is_template(text: str) -> bool:
    """Whether names of this template give this template again, whatever their numbers."""
    return Names.of([text.replace(FIELD, "1")]).templates == (text,)


def keys(tables: Sequence[Names]) -> Ints:
    """One number a name over all tables, one table after another: equal exactly where the names are equal."""
    template, _ = renumbered([table.templates for table in tables], [table.template for table in tables])
    return pack([template, *padded([table.numbers for table in tables], 0).T])


def renumbered(words: Sequence[tuple[str, ...]], codes: Sequence[Ints]) -> tuple[Ints, tuple[str, ...]]:
    """Codes, each list of which counts its own words, one list after another in one count of all words; and those."""
    ids: dict[str, int] = {}
    starts: dict[tuple[str, ...], int] = {}
    numbers: list[int] = []
    for own in words:
        if own not in starts:
            starts[own] = len(numbers)
            numbers += [ids.setdefault(word, len(ids)) for word in own]
    if not numbers:
        return np.zeros(0, np.int64), ()
    if len(starts) == 1:  # ranks of one job share their words: nothing to renumber
        return np.concatenate(codes), tuple(ids)
    first = np.repeat([starts[own] for own in words], [len(own) for own in codes])
    return np.array(numbers, np.int64)[first + np.concatenate(codes)], tuple(ids)


def pack(columns: Iterable[Ints]) -> Ints:
    """One number a row of columns of numbers >= 0: equal exactly where the rows are. Mixed radix of their maxima."""
    packed, limit = np.zeros(0, np.int64), 0
    for column in columns:
        radix = int(column.max(initial=0)) + 1
        if not limit:
            packed, limit = column.copy(), radix
            continue
        if radix == 1:
            continue
        if limit * radix >= _KEY_LIMIT:
            packed = numbered(packed)
            limit = int(packed.max(initial=0)) + 1
            if limit * radix >= _KEY_LIMIT:
                column = numbered(column)
                radix = int(column.max(initial=0)) + 1
        packed *= radix
        packed += column
        limit *= radix
    return packed


def numbered(keys: Ints) -> Ints:
    """For each key >= 0 how many lower ones there are: numbers from 0, equal exactly where the keys are."""
    limit = int(keys.max(initial=-1)) + 1
    if limit > TABLE_LIMIT * (len(keys) + 64):
        return np.unique(keys, return_inverse=True)[1].reshape(-1)
    seen = np.zeros(limit, bool)
    seen[keys] = True
    place = np.cumsum(seen, dtype=np.int32)
    place -= 1
    return place[keys].astype(np.int64)


def padded(tables: Sequence[Ints], fill: int, width: int | None = None) -> Ints:
    """Rows of all tables, one after another, filled up to the widest (or to ``width``)."""
    width = max((table.shape[1] for table in tables), default=0) if width is None else width
    if all(table.shape[1] == width for table in tables):
        return np.concatenate(tables) if tables else np.zeros((0, width), np.int64)
    joined = np.full((sum(map(len, tables)), width), fill, np.int64)
    at = 0
    for table in tables:
        joined[at : at + len(table), : table.shape[1]] = table
        at += len(table)
    return joined
