"""Which box moves from which rank's segment into which rank's tensors: every destination element exactly once. Pure.

Names are matched, boxes intersected, coverage counted; what does not fit is refused by name before a byte moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from awexd_transports.boxes import BoxIndex, subtract_all
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import Box, Entry, Manifest

PLANNER_VERSION = 1
"""Raised whenever the same manifests give other copies; part of a plan's digest."""

_SUBJECT = "what is published does not fit what is declared"


class Copy(NamedTuple):
    """One box, in global coordinates, from a source rank's entry to a destination rank's entry (by their numbers)."""

    source: int
    source_entry: int
    destination: int
    destination_entry: int
    box: Box


@dataclass(frozen=True)
class Plan:
    """What moves, in order of destination rank, destination entry, source rank and source entry.

    Attributes:
        copies: cover every destination element exactly once (each alias group of a destination once).
        checks: boxes of further names of a destination's alias groups: their bytes must equal what ``copies`` brought.
        nbytes: bytes of ``copies``.
        inputs: the digests of both sides' manifests, one a line.
    """

    copies: tuple[Copy, ...]
    checks: tuple[Copy, ...]
    nbytes: int
    inputs: str = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, over the planner's version, both sides' manifests and all copies."""
        state = hashlib.sha256(f"awexd plan {PLANNER_VERSION}\n{self.inputs}\n".encode())
        for copies in (self.copies, self.checks):
            numbers: list[int] = [len(copies)]
            for source, source_entry, destination, destination_entry, box in copies:
                numbers += (
                    source,
                    source_entry,
                    destination,
                    destination_entry,
                    len(box.shape),
                    *box.offset,
                    *box.shape,
                )
            state.update(np.array(numbers, dtype="<i8").tobytes())
        return state.hexdigest()


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
    offers = _offers(sources)
    mismatched = _mismatched(offers, destinations)
    builder = _Builder(sources, offers, mismatched)
    for rank, manifest in enumerate(destinations):
        builder.add(rank, manifest)
    extra = [] if partial else unexpected(sources, destinations)
    if builder.missing or extra or mismatched:
        holes = [f"{name} {box}" for name, box in builder.missing.items() if box is not None]
        subject = f"{_SUBJECT} (first part that nobody publishes: {holes[0]})" if holes else _SUBJECT
        raise ManifestMismatch.between(subject, missing=builder.missing, unexpected=extra, mismatched=mismatched)
    inputs = "\n".join([*(m.digest for m in sources), "", *(m.digest for m in destinations)])
    return Plan(tuple(builder.copies), tuple(builder.checks), builder.nbytes, inputs)


def unexpected(sources: Sequence[Manifest], destinations: Sequence[Manifest]) -> list[str]:
    """Published names that no destination declares, neither they nor an alias of theirs, in order of appearance."""
    declared = {entry.tensor.name for manifest in destinations for entry in manifest.entries}
    extra = {e.tensor.name: None for manifest in sources for e in manifest.entries if e.tensor.name not in declared}
    if not extra:
        return []
    for manifest in sources:
        for group in alias_groups(manifest):
            boxes = {e.box for e in (manifest.entries[at] for at in group) if e.tensor.name in declared}
            for entry in (manifest.entries[at] for at in group):
                if entry.box in boxes:
                    extra.pop(entry.tensor.name, None)
    return list(extra)


def compare(sources: Sequence[Manifest], destinations: Sequence[Manifest]) -> None:
    """Check dtypes, global shapes and layouts of the names that both sides have; no boxes, so it is cheap.

    Raises:
        ManifestMismatch: with ``mismatched`` only.
    """
    mismatched = _mismatched(_offers(sources), destinations)
    if mismatched:
        raise ManifestMismatch.between(_SUBJECT, mismatched=mismatched)


def alias_groups(manifest: Manifest) -> list[list[int]]:
    """Entry numbers that share one piece, for the pieces with more than one entry, in order of first appearance."""
    if len(manifest.pieces) == len(manifest.entries):
        return []
    grouped: dict[int, list[int]] = {}
    for at, entry in enumerate(manifest.entries):
        grouped.setdefault(entry.piece, []).append(at)
    return [group for group in grouped.values() if len(group) > 1]


def describe(entry: Entry) -> str:
    """dtype, global shape and layout, for messages."""
    layout = "" if entry.layout is None else f" in layout {entry.layout}"
    return f"{entry.tensor.dtype}{list(entry.tensor.shape)}{layout}"


def same_tensor(a: Entry, b: Entry) -> bool:
    """Whether two entries agree on everything but their boxes."""
    return a.layout == b.layout and (a.tensor is b.tensor or a.tensor == b.tensor)


class _Pattern:
    """The boxes of one name over all sources. Layers repeat, so most names share a few patterns and their answers."""

    __slots__ = ("_answers", "_index", "disjoint")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._index = BoxIndex(boxes)
        self._answers: dict[Box, tuple[tuple[int, Box], ...]] = {}
        self.disjoint = next(self._index.overlaps(), None) is None

    def cover(self, wanted: Box) -> tuple[tuple[int, Box], ...]:
        """Disjoint parts of ``wanted`` with the position of the box that gives each."""
        answer = self._answers.get(wanted)
        if answer is None:
            found = self._index.hits(wanted)
            answer = tuple(found if self.disjoint else _first_come(found, wanted))
            self._answers[wanted] = answer
        return answer


class _Offer(NamedTuple):
    """A published name: its first entry, who holds it (rank and entry number), and the boxes there, none empty."""

    first: Entry
    held: list[tuple[int, int]]
    boxes: list[Box]
    others: dict[int, Entry]


def _first_come(found: Sequence[tuple[int, Box]], wanted: Box) -> Iterable[tuple[int, Box]]:
    rest = [wanted]
    for at, common in found:
        yield from ((at, part) for whole in rest if (part := whole.intersect(common)))
        rest = [left for whole in rest for left in subtract_all(whole, [common])]


def _offers(sources: Sequence[Manifest]) -> dict[str, _Offer]:
    offers: dict[str, _Offer] = {}
    for rank, manifest in enumerate(sources):
        for at, entry in enumerate(manifest.entries):
            offer = offers.get(entry.tensor.name)
            if offer is None:
                offer = offers[entry.tensor.name] = _Offer(entry, [], [], {})
            elif not same_tensor(offer.first, entry):
                offer.others.setdefault(rank, entry)
            if 0 not in entry.box.shape:
                offer.held.append((rank, at))
                offer.boxes.append(entry.box)
    return offers


def _mismatched(offers: Mapping[str, _Offer], destinations: Sequence[Manifest]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, offer in offers.items():
        for rank, entry in offer.others.items():
            wrong[name] = f"published as {describe(offer.first)}, and by writer rank {rank} as {describe(entry)}"
    for rank, manifest in enumerate(destinations):
        for entry in manifest.entries:
            wanted = offers.get(entry.tensor.name)
            if wanted is not None and not same_tensor(wanted.first, entry):
                text = f"published as {describe(wanted.first)}, declared by reader rank {rank} as {describe(entry)}"
                wrong.setdefault(entry.tensor.name, text)
    return wrong


class _Builder:
    """Collects copies, checks and what is missing, one destination after another."""

    def __init__(self, sources: Sequence[Manifest], offers: Mapping[str, _Offer], mismatched: dict[str, str]) -> None:
        self.sources = sources
        self.offers = offers
        self.mismatched = mismatched
        self.copies: list[Copy] = []
        self.checks: list[Copy] = []
        self.missing: dict[str, Box | None] = {}
        """Name to the first box that nobody publishes; None where the name itself is unknown."""
        self.nbytes = 0
        self._patterns: dict[tuple[Box, ...], _Pattern] = {}
        self._by_name: dict[str, _Pattern] = {}

    def add(self, rank: int, manifest: Manifest) -> None:
        """All tensors of one destination rank."""
        followers: dict[int, int] = {}
        for group in alias_groups(manifest):
            followers |= self._followers(manifest, group)
        written: dict[int, list[Copy]] = {}
        leaders = set(followers.values())
        for at, entry in enumerate(manifest.entries):
            if at in followers:
                continue
            copies = self._cover(rank, at, entry)
            self.copies += copies
            self.nbytes += sum(copy.box.numel for copy in copies) * ITEMSIZE[entry.tensor.dtype]
            if at in leaders:
                written[at] = copies
        for at, leader in followers.items():
            self._check(rank, manifest, at, leader, written[leader])

    def _followers(self, manifest: Manifest, group: Sequence[int]) -> dict[int, int]:
        """Entries of an alias group that are not written, to the one that is: the first whose name is published."""
        offered = [at for at in group if manifest.entries[at].tensor.name in self.offers]
        leader = (offered or group)[0]
        return {at: leader for at in group if at != leader}

    def _check(self, rank: int, manifest: Manifest, at: int, leader: int, written: Sequence[Copy]) -> None:
        entry, origin = manifest.entries[at], manifest.entries[leader].box
        if entry.tensor.name not in self.offers:
            if manifest.entries[leader].tensor.name in self.offers:
                return  # the leader brings the storage under another of its names
            self.missing.setdefault(entry.tensor.name, None)
            return
        brought = {self._bytes_of(copy, origin) for copy in written}
        self.checks += [c for c in self._cover(rank, at, entry) if self._bytes_of(c, entry.box) not in brought]

    def _bytes_of(self, copy: Copy, destination: Box) -> tuple[object, ...]:
        """Which stored bytes go to which place of the destination: equal for names that the source aliases too."""
        entry = self.sources[copy.source].entries[copy.source_entry]
        taken = tuple(a - b for a, b in zip(copy.box.offset, entry.box.offset, strict=True))
        put = tuple(a - b for a, b in zip(copy.box.offset, destination.offset, strict=True))
        return copy.source, entry.piece, taken, put, copy.box.shape

    def _cover(self, rank: int, at: int, entry: Entry) -> list[Copy]:
        name, box = entry.tensor.name, entry.box
        offer = self.offers.get(name)
        if offer is None:
            self.missing.setdefault(name, None)
            return []
        if name in self.mismatched:
            return []
        parts = self._pattern(name, offer).cover(box)
        if sum(part.numel for _, part in parts) != box.numel:
            self.missing.setdefault(name, subtract_all(box, [part for _, part in parts])[0])
        if entry.layout is not None and any(part != box or offer.boxes[p] != box for p, part in parts):
            self.mismatched[name] = f"layout {entry.layout} moves whole; {box} is not a box that is published"
        held = offer.held
        return [Copy(*held[p], rank, at, part) for p, part in parts]

    def _pattern(self, name: str, offer: _Offer) -> _Pattern:
        pattern = self._by_name.get(name)
        if pattern is None:
            key = tuple(offer.boxes)
            pattern = self._patterns.get(key)
            if pattern is None:
                pattern = self._patterns[key] = _Pattern(offer.boxes)
            self._by_name[name] = pattern
        return pattern
