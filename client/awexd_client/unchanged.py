"""Which live tensors still are, bit for bit, what a held version has, and how that version brings them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from awexd_client.holding import Holding
from awexd_client.tables import Segments, Sources, Tables, build, comparison
from awexd_transports.copy import CopyTable, Row
from awexd_transports.cuda.bits import differs
from awexd_transports.layout import Manifest
from awexd_transports.plan import plan
from awexd_transports.view import View


@dataclass(frozen=True)
class _Filled:
    """Some of the registered tensors, as a destination of copies."""

    manifest: Manifest
    views: list[View]


@dataclass(frozen=True)
class Source:
    """A held version, mapped, as the source of registered tensors.

    Attributes:
        manifests: of its segments, by writer rank.
        segments: mapped, by writer rank.
        stored: the ranks whose segments have checksums.
    """

    key: tuple[int, int]
    manifests: tuple[Manifest, ...]
    segments: Segments
    stored: frozenset[int]

    def restores(self, holding: Holding) -> list[int]:
        """Numbers of the entries whose own bytes, not a cast of them, were published."""
        pairs = zip(holding.manifest.entries, holding.views, strict=True)
        return [number for number, (entry, view) in enumerate(pairs) if entry.tensor.dtype == view.dtype]

    def changed(self, holding: Holding, numbers: Sequence[int]) -> set[int]:
        """Those of these entries whose memory is no longer what the version has."""
        sources, destination = self._planned(holding, numbers)
        self._pin(sources, destination)
        rows: dict[int, list[Row]] = {}
        for copy in sources.plan.copies:
            box = copy.box.relative_to(destination.manifest.entries[copy.destination_entry].box.offset)
            live = destination.views[copy.destination_entry].sub(box)
            row = Row(live, sources.view(copy, copy.box, self.segments))
            rows.setdefault(numbers[copy.destination_entry], []).append(row)
        found = {number for number, own in rows.items() if _differ_on_device(own)}
        host = {number: [row for row in own if row.destination.device is None] for number, own in rows.items()}
        if CopyTable([row for own in host.values() for row in own]).first_difference() is None:
            return found
        return found | {number for number, own in host.items() if CopyTable(own).first_difference() is not None}

    def copies(self, holding: Holding, numbers: Sequence[int], *, check: bool) -> Tables:
        """What copies these entries' bytes into live memory, when it is run; nothing is touched yet.

        Raises:
            ManifestMismatch: the version does not have them all.
        """
        sources, destination = self._planned(holding, numbers)
        self._pin(sources, destination)
        summed: Collection[int] | None = self.stored if check else None
        sums = comparison(sources, self.segments, summed)
        return build(destination, sources, self.segments, sums, sources.plan.copies)

    def _pin(self, sources: Sources, destination: _Filled) -> None:
        if any(view.device is not None for view in destination.views):
            for rank in sources.ranks:
                self.segments[rank].pin()

    def _planned(self, holding: Holding, numbers: Sequence[int]) -> tuple[Sources, _Filled]:
        pieces: dict[int, int] = {}
        entries = []
        for entry in (holding.manifest.entries[number] for number in numbers):
            entries.append(replace(entry, piece=pieces.setdefault(entry.piece, len(pieces))))
        manifest = Manifest.of(entries)
        sources = Sources(self.manifests, plan(self.manifests, [manifest], partial=True))
        return sources, _Filled(manifest, [View.of(holding.weights.direct[number].tensor) for number in numbers])


def _differ_on_device(rows: Sequence[Row]) -> bool:
    """Whether a live device tensor among these differs; compared there, a part at a time."""
    return any(row.destination.device is not None and differs(row.destination, row.source) for row in rows)
