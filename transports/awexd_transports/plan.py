"""Which box moves from which rank's segment into which rank's tensors: every destination element exactly once. Pure.

Names are matched, boxes intersected, coverage counted; what does not fit is refused by name before a byte moves.
Destinations with the same manifest are planned once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from awexd_transports.columns import describe
from awexd_transports.cover import Cover
from awexd_transports.errors import ManifestMismatch
from awexd_transports.joined import Joined, classes
from awexd_transports.layout import Manifest
from awexd_transports.moves import Copy, Moves
from awexd_transports.names import Ints
from awexd_transports.ties import alias_groups, checks_of, followers_of

__all__ = ["PLANNER_VERSION", "Copy", "Plan", "Traffic", "compare", "plan", "unexpected"]

PLANNER_VERSION = 2
"""Raised whenever the same manifests give other copies; part of a plan's digest."""

_SUBJECT = "what is published does not fit what is declared"


class Traffic(NamedTuple):
    """Copies and their bytes, shape (sources, destinations), by rank."""

    copies: Ints
    nbytes: Ints


class Plan:
    """What moves, in order of destination rank, destination entry, source rank and source entry.

    Attributes:
        moves: cover every element of the distinct destinations exactly once (each of their alias groups once).
        further: of further names of a destination's alias groups: their bytes must equal what ``moves`` brought.
        destinations: which of the distinct destinations each rank is.
        sources: how many ranks are read from.
    """

    def __init__(
        self, moves: Moves, further: Moves, sources: Sequence[Manifest], destinations: Sequence[Manifest], of_rank: Ints
    ) -> None:
        self.moves = moves
        self.further = further
        self.destinations = of_rank
        self.sources = len(sources)
        self._sides = tuple(sources), tuple(destinations)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Plan of {len(self)} copies, {self.nbytes} bytes, {self.sources} to {len(self.destinations)} ranks>"

    def __len__(self) -> int:
        """Copies, those to equal destinations counted each."""
        return int(self._repeats @ np.bincount(self.moves.destination, minlength=len(self._repeats)))

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(int(self.moves.to(at).nbytes.sum()) * many for at, many in enumerate(self._repeats.tolist()))

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """``moves`` to every rank, as objects."""
        return _spelt_out(self.moves, self.destinations)

    @cached_property
    def checks(self) -> tuple[Copy, ...]:
        """``further`` to every rank, as objects."""
        return _spelt_out(self.further, self.destinations)

    def to(self, rank: int) -> Moves:
        """The copies that fill one destination rank."""
        return self.moves.to(int(self.destinations[rank]))

    def traffic(self) -> Traffic:
        """What each source rank gives each destination rank."""
        shape = self.sources, len(self._repeats)
        pair = self.moves.source * shape[1] + self.moves.destination
        nbytes = np.zeros(shape[0] * shape[1], np.int64)
        np.add.at(nbytes, pair, self.moves.nbytes)
        counts = np.bincount(pair, minlength=len(nbytes))
        return Traffic(*(each.reshape(shape)[:, self.destinations] for each in (counts, nbytes)))

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, over the planner's version, both sides' manifests and all copies."""
        inputs = "\n".join([*(m.digest for m in self._sides[0]), "", *(m.digest for m in self._sides[1])])
        state = hashlib.sha256(f"awexd plan {PLANNER_VERSION}\n{inputs}\n".encode())
        state.update(self.moves.tobytes())
        state.update(self.further.tobytes())
        return state.hexdigest()

    @property
    def _repeats(self) -> Ints:
        """How many ranks are each distinct destination."""
        return np.bincount(self.destinations)


def plan(sources: Sequence[Manifest], destinations: Sequence[Manifest], *, partial: bool = False) -> Plan:
    """The copies that fill every tensor of ``destinations`` from ``sources``.

    Args:
        sources: one segment manifest a writer rank, as :func:`awexd_transports.share.share` gives them: disjoint. Where
            two overlap, the first is taken.
        destinations: one manifest a reader rank.
        partial: ``destinations`` are not all that the engine has, so published names that they lack are no error.

    Raises:
        ManifestMismatch: a name or a part of it is missing, published but not declared, or differs in dtype, global
            shape or layout.
    """
    sources = tuple(sources)
    distinct, of_rank = classes(destinations)
    joined = Joined([*sources, *distinct])
    split = len(sources)
    wrong = _mismatched(joined, split, of_rank)
    followers = followers_of(joined, split)
    cover = Cover(joined, split, wrong, followers)
    mismatched = _spelt(joined, wrong | cover.mismatched)
    extra = [] if partial else _unexpected(joined, split)
    if cover.missing or extra or mismatched:
        holes = [f"{name} {box}" for name, box in cover.missing.items() if box is not None]
        subject = f"{_SUBJECT} (first part that nobody publishes: {holes[0]})" if holes else _SUBJECT
        raise ManifestMismatch.between(subject, missing=cover.missing, unexpected=extra, mismatched=mismatched)
    return Plan(cover.moves, checks_of(joined, split, cover, followers), sources, tuple(destinations), of_rank)


def unexpected(sources: Sequence[Manifest], destinations: Sequence[Manifest]) -> list[str]:
    """Published names that no destination declares, neither they nor an alias of theirs, in order of appearance."""
    return _unexpected(Joined([*sources, *classes(destinations)[0]]), len(sources))


def compare(sources: Sequence[Manifest], destinations: Sequence[Manifest]) -> None:
    """Check dtypes, global shapes and layouts of the names that both sides have; no boxes, so it is cheap.

    Raises:
        ManifestMismatch: with ``mismatched`` only.
    """
    distinct, of_rank = classes(destinations)
    joined = Joined([*sources, *distinct])
    wrong = _mismatched(joined, len(sources), of_rank)
    if wrong:
        raise ManifestMismatch.between(_SUBJECT, mismatched=_spelt(joined, wrong))


def _mismatched(joined: Joined, split: int, of_rank: Ints) -> dict[int, str]:
    """What differs, by name: among the sources (the last rank that does), else in the first destination that does."""
    unlike = joined.unlike_first()
    if not len(unlike):
        return {}
    end = int(joined.place_start[split])
    first = joined.first[joined.name[unlike]]
    unlike = unlike[(first < end) | (unlike < end)]
    wrong: dict[int, str] = {}
    published, declared = unlike[unlike < end], unlike[unlike >= end]
    published = published[np.argsort(joined.first[joined.name[published]], kind="stable")]
    for place in (*published.tolist(), *declared.tolist()):
        name, rank = int(joined.name[place]), joined.manifest_of_place(place)
        one, other = describe(joined.entry_at(int(joined.first[name]))), describe(joined.entry_at(place))
        if place < end:
            wrong[name] = f"published as {one}, and by writer rank {rank} as {other}"
        else:
            rank = int(np.flatnonzero(of_rank == rank - split)[0])
            wrong.setdefault(name, f"published as {one}, declared by reader rank {rank} as {other}")
    return wrong


def _spelt(joined: Joined, wrong: Mapping[int, str]) -> dict[str, str]:
    return {joined.text(name): text for name, text in wrong.items()}


def _unexpected(joined: Joined, split: int) -> list[str]:
    end = int(joined.place_start[split])
    declared = np.zeros(len(joined.first), bool)
    declared[joined.name[end:]] = True
    extra = dict.fromkeys(np.sort(joined.first[~declared]).tolist())
    if extra:
        for group in alias_groups(joined, range(split)):
            boxes = {joined.box(row) for row in group if declared[joined.row_name[row]]}
            for row in group:
                if joined.box(row) in boxes:
                    extra.pop(int(joined.first[joined.row_name[row]]), None)
    return joined.texts_at(np.array(list(extra), np.int64))


def _spelt_out(moves: Moves, of_rank: Ints) -> tuple[Copy, ...]:
    return tuple(copy for rank, at in enumerate(of_rank.tolist()) for copy in moves.to(at).copies(rank))
