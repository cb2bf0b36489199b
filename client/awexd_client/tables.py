"""From a plan and mapped segments to copies into live memory. Built once for each set of slots, run every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from awexd_client.checksums import wrong_piece
from awexd_client.holding import Holding
from awexd_client.mappings import Mapping as MappedSegment
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.errors import IntegrityError, ManifestMismatch
from awexd_transports.layout import Box, Manifest
from awexd_transports.plan import Copy, Plan
from awexd_transports.segment import piece_at

Segments = Mapping[int, MappedSegment]
"""Mapped segments by writer rank."""


@dataclass(frozen=True)
class Sources:
    """A version's segment manifests in rank order, and how they fill one worker's tensors."""

    manifests: tuple[Manifest, ...]
    plan: Plan

    @cached_property
    def ranks(self) -> list[int]:
        """The writer ranks whose segments are read."""
        return sorted({copy.source for copy in (*self.plan.copies, *self.plan.checks)})

    def view(self, copy: Copy, box: Box, segments: Segments) -> View:
        """Where ``box`` of that copy's source lies."""
        manifest, segment = self.manifests[copy.source], segments[copy.source]
        entry = manifest.entries[copy.source_entry]
        held = View.packed(
            segment.address + piece_at(manifest, entry.piece), entry.box.shape, entry.tensor.dtype, segment
        )
        return held.sub(box.relative_to(entry.box.offset))


@dataclass(frozen=True, slots=True)
class Tables:
    """``copies`` fills the live tensors; ``same`` only compares what the names of one tensor are published with."""

    copies: CopyTable
    same: CopyTable

    def check(self) -> None:
        """Nothing may be lost where one live tensor stands for several published ones.

        Raises:
            ManifestMismatch: they have different values.
        """
        difference = self.same.first_difference() if self.same.nbytes else None
        if difference:
            raise ManifestMismatch.between(
                "one tensor here is published with two values",
                mismatched={difference.label: f"they differ first at {list(difference.index)} of their part"},
            )


def build(holding: Holding, sources: Sources, segments: Segments) -> Tables:
    """The tables of one worker for one set of slots."""
    rows = (_row(holding, sources, copy, segments) for copy in sources.plan.copies)
    return Tables(CopyTable(rows), CopyTable(_same(holding, sources, segments)))


def check_pieces(sources: Sources, segments: Segments, summed: Sequence[bool]) -> None:
    """Compares the pieces that will be read with their writers' checksums, where there are any.

    Raises:
        IntegrityError: naming the tensor and the rank that wrote it.
    """
    pieces: dict[int, set[int]] = {}
    for copy in sources.plan.copies:
        pieces.setdefault(copy.source, set()).add(sources.manifests[copy.source].entries[copy.source_entry].piece)
    for rank, read in sorted(pieces.items()):
        wrong = wrong_piece(sources.manifests[rank], segments[rank], sorted(read)) if summed[rank] else None
        if wrong:
            raise IntegrityError(f"{wrong}: the bytes that are held are not those that rank {rank} wrote")


def _row(holding: Holding, sources: Sources, copy: Copy, segments: Segments) -> Row:
    entry = holding.manifest.entries[copy.destination_entry]
    part = holding.views[copy.destination_entry].sub(copy.box.relative_to(entry.box.offset))
    return Row(part, sources.view(copy, copy.box, segments), entry.tensor.name)


def _same(holding: Holding, sources: Sources, segments: Segments) -> Iterable[Row]:
    """Pairs of sources that would land on the same bytes: the copy of a leading name, and that of its alias."""
    if not sources.plan.checks:
        return
    entries = holding.manifest.entries
    leading: dict[int, list[Copy]] = {}
    for copy in sources.plan.copies:
        leading.setdefault(entries[copy.destination_entry].piece, []).append(copy)
    for alias in sources.plan.checks:
        own = entries[alias.destination_entry]
        for copy in leading.get(own.piece, ()):
            yield from _pair(sources, copy, entries[copy.destination_entry].box, alias, own.box, segments)


def _pair(
    sources: Sources, copy: Copy, copy_base: Box, alias: Copy, alias_base: Box, segments: Segments
) -> Iterator[Row]:
    """What both bring to the same local elements; each counts in its own global coordinates."""
    common = _moved(copy.box, copy_base, -1).intersect(_moved(alias.box, alias_base, -1))
    if common is None:
        return
    leader = sources.view(copy, _moved(common, copy_base, 1), segments)
    follower = sources.view(alias, _moved(common, alias_base, 1), segments)
    name = sources.manifests[alias.source].entries[alias.source_entry].tensor.name
    yield Row(leader, follower, name)


def _moved(box: Box, base: Box, sign: int) -> Box:
    return Box(tuple(o + sign * b for o, b in zip(box.offset, base.offset, strict=True)), box.shape)
