"""Every destination box as disjoint parts of source boxes, intersected in chunks; and what is not covered."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from awexd_transports.boxes import BoxIndex, entangled, subtract_all
from awexd_transports.joined import Joined, runs
from awexd_transports.layout import Box
from awexd_transports.moves import Moves
from awexd_transports.names import Bools, Ints

CHUNK = 1 << 17
"""Pairs of a destination box and a source box that are looked at together: bounds memory."""
FEW = 4
"""So many source boxes of a name are all looked at."""
_Parts = tuple[Ints, Ints, Ints, Ints]
"""Rows of sources and of destinations, and the offsets and shapes of what they share."""
_Turn = tuple[int, bool, int]


class Cover:
    """How the first ``split`` manifests fill the others.

    Attributes:
        moves: to rows that are written.
        further: to ``followers``: what their names are published with.
        missing: name to the first box that nobody publishes; None where the name itself is unknown.
        mismatched: number of a name to what is wrong with its parts.
    """

    def __init__(self, joined: Joined, split: int, wrong: Collection[int], followers: Mapping[int, int]) -> None:
        self._joined = joined
        self._split = split
        self._end = int(joined.row_start[split])
        self.missing: dict[str, Box | None] = {}
        self.mismatched: dict[int, str] = {}
        wanted = self._wanted(wrong, followers)
        held, start, count = self._held(wanted)
        start, count = _narrowed(joined, wanted, held, start, count)
        tangled = self._tangled(held)
        by_hand = tangled[joined.row_name[wanted]]
        parts = [*_intersections(joined, wanted[~by_hand], held, start[~by_hand], count[~by_hand])]
        parts += [self._first_come(wanted[by_hand], held, start[by_hand], count[by_hand])]
        source, destination, offset, shape = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        if by_hand.any():
            order = np.argsort(destination, kind="stable")
            source, destination, offset, shape = source[order], destination[order], offset[order], shape[order]
        self._followers = followers
        refused = self._check_layouts(source, destination, offset, shape)
        self._find_missing(wanted, destination, offset, shape, refused)
        moves = self._moves(source, destination, offset, shape)
        if followers:
            behind = np.isin(destination, list(followers))
            self.moves, self.further = moves[np.flatnonzero(~behind)], moves[np.flatnonzero(behind)]
        else:
            self.moves, self.further = moves, moves[:0]

    def _wanted(self, wrong: Collection[int], followers: Mapping[int, int]) -> Ints:
        """Destination rows with elements whose name is published; names that are not are missing."""
        joined = self._joined
        names = joined.row_name[self._end :]
        offered = joined.first[names] < joined.place_start[self._split]
        bare = np.flatnonzero(~offered) + self._end
        if followers:  # a leader brings the storage under another of its names
            led = [row for row in bare.tolist() if row in followers and offered[followers[row] - self._end]]
            bare = np.setdiff1d(bare, led)
        if len(bare):
            unknown = np.sort(joined.first[np.unique(joined.row_name[bare])])
            self.missing |= dict.fromkeys(joined.texts_at(unknown))
        wanted = offered & ~joined.empty[self._end :]
        if wrong:
            wanted &= ~np.isin(names, list(wrong))
        return np.flatnonzero(wanted) + self._end

    def _held(self, wanted: Ints) -> tuple[Ints, Ints, Ints]:
        """Source rows with elements, by name, and for each wanted row where its name's begin and how many they are."""
        joined = self._joined
        asked = np.zeros(len(joined.first), bool)
        asked[joined.row_name[wanted]] = True
        held = np.flatnonzero(asked[joined.row_name[: self._end]] & ~joined.empty[: self._end])
        names = joined.row_name[held]
        held = held[np.argsort(names, kind="stable")]
        counts = np.bincount(names, minlength=len(joined.first))
        starts = np.cumsum(counts) - counts
        return held, starts[joined.row_name[wanted]], counts[joined.row_name[wanted]]

    def _tangled(self, held: Ints) -> Bools:
        """Names whose source boxes may overlap."""
        joined = self._joined
        tangled = np.zeros(len(joined.first), bool)
        rows = held[entangled(joined.row_name[held], joined.offset[held], joined.shape[held])]
        tangled[joined.row_name[rows]] = True
        return tangled

    def _first_come(self, wanted: Ints, held: Ints, start: Ints, count: Ints) -> _Parts:
        """As ``_intersections``, where source boxes may overlap: the first source is taken."""
        joined = self._joined
        patterns: dict[tuple[Box, ...], _Pattern] = {}
        by_name: dict[int, _Pattern] = {}
        found: list[tuple[int, int, Box]] = []
        for row, low, many in zip(wanted.tolist(), start.tolist(), count.tolist(), strict=True):
            name = int(joined.row_name[row])
            if name not in by_name:
                boxes = tuple(joined.box(at) for at in held[low : low + many].tolist())
                by_name[name] = patterns.setdefault(boxes, _Pattern(boxes))
            found += [(int(held[low + at]), row, part) for at, part in by_name[name].cover(joined.box(row))]
        spare = joined.dims
        offset = [(*part.offset, *(0,) * (spare - len(part.offset))) for _, _, part in found]
        shape = [(*part.shape, *(1,) * (spare - len(part.shape))) for _, _, part in found]
        return (
            np.array([source for source, _, _ in found], np.int64),
            np.array([row for _, row, _ in found], np.int64),
            np.array(offset, np.int64).reshape(len(found), spare),
            np.array(shape, np.int64).reshape(len(found), spare),
        )

    def _check_layouts(self, source: Ints, destination: Ints, offset: Ints, shape: Ints) -> dict[int, _Turn]:
        """What follows a layout moves whole; for names that do not, at whose turn that was seen."""
        joined = self._joined
        refused: dict[int, _Turn] = {}
        inside = np.flatnonzero(joined.atomic[joined.place[destination]])
        for at in sorted(inside.tolist(), key=lambda at: self._turn(int(destination[at]))):
            row, name = int(destination[at]), int(joined.row_name[destination[at]])
            whole = joined.box(row)
            if joined.box(int(source[at])) != whole or (shape[at] != joined.shape[row]).any():
                text = f"layout {joined.entry(row).layout} moves whole; {whole} is not a box that is published"
                self.mismatched.setdefault(name, text)
                refused.setdefault(name, self._turn(row))
        return refused

    def _find_missing(
        self, wanted: Ints, destination: Ints, offset: Ints, shape: Ints, refused: Mapping[int, _Turn]
    ) -> None:
        """Parts of one row are disjoint, so it is covered exactly if their elements are as many as its own."""
        joined = self._joined
        # Whole numbers below 2^53: exact as floats.
        covered = np.bincount(destination - self._end, shape.prod(axis=1), len(joined.manifest) - self._end)
        bare = wanted[covered[wanted - self._end] != joined.numel[wanted]].tolist()
        for row in sorted(bare, key=self._turn):
            name = int(joined.row_name[row])
            text, box = joined.text(name), joined.box(row)
            if text in self.missing or (name in refused and refused[name] < self._turn(row)):
                continue
            dims = len(box.shape)
            parts = [
                Box(tuple(offset[at, :dims].tolist()), tuple(shape[at, :dims].tolist()))
                for at in np.flatnonzero(destination == row).tolist()
            ]
            self.missing[text] = subtract_all(box, parts)[0]

    def _turn(self, row: int) -> _Turn:
        """Destinations are told about in order, each one's followers last."""
        return int(self._joined.manifest[row]), row in self._followers, row

    def _moves(self, source: Ints, destination: Ints, offset: Ints, shape: Ints) -> Moves:
        joined = self._joined
        rank, place = joined.manifest[source], joined.place[destination]
        into = joined.manifest[destination]
        return Moves(
            source=rank,
            source_entry=source - joined.row_start[rank],
            destination=into - self._split,
            destination_entry=destination - joined.row_start[into],
            offset=offset,
            shape=shape,
            ndim=joined.ndim[place],
            nbytes=shape.prod(axis=1) * joined.itemsize[place],
        )


def _narrowed(joined: Joined, wanted: Ints, held: Ints, start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Fewer source rows for each wanted one: where a name's boxes follow each other along a dimension, those in reach.

    Without this, slices over many ranks would be compared each with each.
    """
    names, asked = joined.row_name[held], joined.row_name[wanted]
    for dim in range(joined.dims):
        rows = np.flatnonzero(count > FEW)
        if not len(rows):
            break
        low, high = joined.offset[held, dim], joined.offset[held, dim] + joined.shape[held, dim]
        span = int(high.max()) + 1
        if len(joined.first) * span >= 1 << 62:
            continue
        follow = np.ones(len(joined.first), bool)
        follow[names[1:][(names[1:] == names[:-1]) & (low[1:] < high[:-1])]] = False
        rows = rows[follow[asked[rows]]]
        # Names ascend, so one search serves them all; names whose boxes do not follow each other are never asked for.
        first, last = (
            joined.offset[wanted[rows], dim],
            joined.offset[wanted[rows], dim] + joined.shape[wanted[rows], dim],
        )
        begin = np.searchsorted(names * span + high, asked[rows] * span + np.minimum(first, span - 1), side="right")
        end = np.searchsorted(names * span + low, asked[rows] * span + np.minimum(last, span - 1), side="left")
        start, count = start.copy(), count.copy()
        start[rows], count[rows] = begin, np.maximum(end - begin, 0)
    return start, count


def _intersections(joined: Joined, wanted: Ints, held: Ints, start: Ints, count: Ints) -> Iterator[_Parts]:
    """What each wanted row shares with its name's source rows, in that order."""
    ends = np.cumsum(count)
    low = 0
    while low < len(wanted):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + CHUNK, side="right")))
        source = held[runs(start[low:high], count[low:high])]
        destination = np.repeat(wanted[low:high], count[low:high])
        offset, shape, common = [], [], np.ones(len(source), bool)
        for dim in range(joined.dims):
            first, second = joined.offset[source, dim], joined.offset[destination, dim]
            begin = np.maximum(first, second)
            length = np.minimum(first + joined.shape[source, dim], second + joined.shape[destination, dim]) - begin
            common &= length > 0
            offset.append(begin)
            shape.append(length)
        kept = np.flatnonzero(common)
        yield (
            source[kept],
            destination[kept],
            _beside([column[kept] for column in offset], len(kept)),
            _beside([column[kept] for column in shape], len(kept)),
        )
        low = high


def _beside(columns: Sequence[Ints], rows: int) -> Ints:
    """Columns as one array, kept column by column in memory."""
    return np.array(columns, np.int64).reshape(len(columns), rows).T


class _Pattern:
    """The boxes of one name over all sources. Layers repeat, so most names share a few patterns and their answers."""

    __slots__ = ("_answers", "_disjoint", "_index")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._index = BoxIndex(boxes)
        self._answers: dict[Box, tuple[tuple[int, Box], ...]] = {}
        self._disjoint = next(self._index.overlaps(), None) is None

    def cover(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Disjoint parts of ``wanted`` with the position of the box that gives each."""
        answer = self._answers.get(wanted)
        if answer is None:
            found = self._index.hits(wanted)
            answer = tuple(found if self._disjoint else _in_turn(found, wanted))
            self._answers[wanted] = answer
        return answer


def _in_turn(found: Sequence[tuple[int, Box]], wanted: Box) -> Iterator[tuple[int, Box]]:
    rest = [wanted]
    for at, common in found:
        yield from ((at, part) for whole in rest if (part := whole.intersect(common)))
        rest = [left for whole in rest for left in subtract_all(whole, [common])]
