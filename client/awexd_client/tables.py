"""From a plan and mapped segments to copies into live memory. Built once for each set of slots, run every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from awexd_client.checksums import Comparison
from awexd_client.holding import Holding
from awexd_client.mappings import Segment
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.errors import IntegrityError, ManifestMismatch
from awexd_transports.layout import Box, Manifest
from awexd_transports.plan import Copy, Plan

if TYPE_CHECKING:
    from awexd_client.waves import Wave

Segments = Mapping[int, Segment]
"""Mapped segments by writer rank."""


class Views(Protocol):
    """Where the bytes of entries lie, by entry number."""

    def __getitem__(self, number: int, /) -> View: ...


class Destination(Protocol):
    """What copies fill. A ``Holding`` is one."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def views(self) -> Views: ...


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
        entry = self.manifests[copy.source].entries[copy.source_entry]
        return self.piece(copy, segments).sub(box.relative_to(entry.box.offset))

    def piece(self, copy: Copy, segments: Segments) -> View:
        """Where all of the piece lies of which that copy takes a part."""
        manifest = self.manifests[copy.source]
        return segments[copy.source].piece(manifest, manifest.entries[copy.source_entry].piece)


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one worker for one set of slots.

    Attributes:
        copies: fill the live tensors.
        same: only compared: what the names of one tensor are published with.
        sums: of what ``copies`` brings from segments with checksums, if they are to be compared.
        bare: the copies from segments without checksums, if what they bring is to be compared with its source.
    """

    copies: CopyTable
    same: CopyTable
    sums: Comparison | None
    bare: CopyTable

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

    def run(self, threads: int | None = None, *, sharing: int = 1, meanwhile: Callable[[], object] = bool) -> None:
        """Copies, and compares what arrived in the same pass. Arguments as of ``CopyTable.run``.

        Raises:
            IntegrityError: some of what is in the live tensors now is not what its writer wrote.
        """
        if self.sums:
            self.sums.forget()
        self.copies.run(threads, sharing=sharing, meanwhile=meanwhile)
        if self.sums:
            self.sums.check(self.copies.wrong())
        difference = self.bare.first_difference(threads) if self.bare.nbytes else None
        if difference:
            raise IntegrityError(
                f"{difference.label} differs after the copy from what is held, first at {list(difference.index)} of "
                "its part"
            )


def run_all(tables: Sequence[Tables], *, sharing: int = 1) -> None:
    """As ``Tables.run`` of each; raises as that does."""
    if any(one.sums or one.bare.nbytes for one in tables):
        for one in tables:
            one.run(sharing=sharing)
    else:
        CopyTable.run_all([one.copies for one in tables], sharing=sharing)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """All that an update needs for one set of slots.

    Attributes:
        live: fills what the engine runs on.
        aside: fills what its engine loads itself; None where there is nothing of that kind.
        mappings: of the segments that are read.
        waves: the same copies as ``live``, once an update has overlapped with an arrival.
    """

    live: Tables
    aside: Tables | None
    mappings: tuple[Segment, ...]
    waves: list[Wave] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.live.copies.nbytes + (self.aside.copies.nbytes if self.aside else 0)

    def fill_aside(self, *, sharing: int = 1) -> None:
        """Raises as ``Tables.run``; nothing that the engine runs on is touched."""
        if self.aside:
            self.aside.run(sharing=sharing)


NOTHING = Prepared(Tables(CopyTable(()), CopyTable(()), None, CopyTable(())), None, ())
"""Of a version that is exchanged: it is not read, but sent."""


def prepare(holding: Holding, sources: Sources, segments: Segments, summed: Collection[int] | None) -> Prepared:
    """The tables of one worker for one set of slots.

    Args:
        summed: the writer ranks whose segments have checksums to compare with; None: nothing is to be compared.
    """
    if holding.on_device:
        for mapping in segments.values():
            mapping.pin()
    copies, first = sources.plan.copies, holding.first_aside
    same = CopyTable(_same(holding, sources, segments))
    if not holding.weights.aside:
        live = build(holding, sources, segments, comparison(sources, segments, summed), copies, same)
        return Prepared(live, None, tuple(segments.values()))
    live, aside = (
        build(holding, sources, segments, comparison(sources, segments, summed), part, table)
        for part, table in (
            ([copy for copy in copies if copy.destination_entry < first], same),
            ([copy for copy in copies if copy.destination_entry >= first], CopyTable(())),
        )
    )
    return Prepared(live, aside, tuple(segments.values()))


def comparison(sources: Sources, segments: Segments, summed: Collection[int] | None) -> Comparison | None:
    """Of what comes from segments with checksums. ``summed`` as for ``prepare``."""
    if summed is None:
        return None
    return Comparison(sources.manifests, {rank: segments[rank] for rank in sources.ranks if rank in summed})


def build(
    destination: Destination,
    sources: Sources,
    segments: Segments,
    sums: Comparison | None,
    copies: Iterable[Copy],
    same: CopyTable | None = None,
) -> Tables:
    """The tables of these copies.

    Args:
        sums: takes the rows; what comes from other segments than its own is compared with them. None: nothing is to be
            compared.
    """
    same = same or CopyTable(())
    if sums is None:
        plain: Iterable[Row] = (_row(destination, sources, copy, segments) for copy in copies)
        return Tables(CopyTable(plain), same, None, CopyTable(()))
    rows: list[Row] = []
    bare: list[Row] = []
    for copy in copies:
        row = _row(destination, sources, copy, segments)
        if copy.source not in sums.ranks:
            bare.append(row)
            continue
        manifest = sources.manifests[copy.source]
        entry = manifest.entries[copy.source_entry]
        low = tuple(a - b for a, b in zip(copy.box.offset, entry.box.offset, strict=True))
        whole = sources.piece(copy, segments)
        summed = row, copy.source, manifest.pieces[entry.piece], whole, low
        if sums.takes(*summed):
            rows += sums.rows(*summed)
        else:
            bare.append(row)
    return Tables(CopyTable([*rows, *bare]), same, sums, CopyTable(bare))


def _row(destination: Destination, sources: Sources, copy: Copy, segments: Segments) -> Row:
    entry = destination.manifest.entries[copy.destination_entry]
    part = destination.views[copy.destination_entry].sub(copy.box.relative_to(entry.box.offset))
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
