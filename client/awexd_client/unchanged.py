"""Which live tensors still are, bit for bit, what a held version has, and how that version brings them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from awexd_client.holding import Holding
from awexd_client.tables import Segments, Sources, Tables, build, comparison
from awexd_transports.copy import CopyTable, Row
from awexd_transports.layout import Manifest
from awexd_transports.plan import plan
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

CHUNK = 64 << 20
"""Bytes of a device's memory that a comparison there takes."""


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


def differs(live: View, held: View) -> bool:
    """Whether two views of one shape and dtype have any bit different; compared where ``live`` is."""
    import torch

    with torch.inference_mode(False):
        one, other = _bits(live.tensor()), _bits(held.tensor())
        rows = max(1, CHUNK * one.shape[0] // max(1, live.nbytes))
        found = torch.zeros((), dtype=torch.bool, device=one.device)
        for at in range(0, one.shape[0], rows):
            found |= (one[at : at + rows] != other[at : at + rows].to(one.device)).any()
        return bool(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers, with one dimension at least: NaN is not itself, and zeros have signs."""
    import torch

    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integers[tensor.element_size()])
    return bits if bits.dim() else bits[None]
