"""How a rank's segment is laid out, and which copies of its registered tensors fill it."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from awexd_client.checksums import summed_rows, table_of
from awexd_client.holding import Holding
from awexd_client.mappings import Mapping
from awexd_transports.copy import CopyTable, Row, View
from awexd_transports.cuda.lent import NotLendable
from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import ALIGNMENT, Entry, Manifest
from awexd_transports.segment import first_cells, segment_nbytes

FIRST_SLICE, SLICE = 32 << 20, 256 << 20
"""Bytes after which other nodes are told of them: few at first, so that they begin; then each time twice as many, up to
5 ms of a GPU's link."""


class Slice(NamedTuple):
    """Copies that are made at once. ``end``: bytes from the segment's start that are there then."""

    table: CopyTable
    end: int


def sliced(rows: Iterable[Row], start: int) -> list[Slice]:
    """The copies in the order of the segment, whose bytes begin at address ``start``."""
    found: list[tuple[list[Row], int]] = []
    room = 0
    for at, row in sorted(((row.destination.address - start, row) for row in rows), key=itemgetter(0)):
        if not found or room < row.destination.nbytes:
            found.append(([], at))
            room = min(SLICE, FIRST_SLICE << (len(found) - 1))
        found[-1][0].append(row)
        room -= row.destination.nbytes
    last = found[-1][0][-1].destination if found else None
    ends = [at for _, at in found[1:]] + ([last.address + last.nbytes - start] if last else [])
    return [Slice(CopyTable(some), end) for (some, _), end in zip(found, ends, strict=True)]


class SegmentLayout:
    """How this rank's segment is laid out, and from which registered piece each of its own comes."""

    def __init__(self, holding: Holding, manifest: Manifest, registered_set: str) -> None:
        self.manifest = manifest
        self.registered_set = registered_set
        self.nbytes = segment_nbytes(manifest)
        self._cells = first_cells(manifest)
        self.tables: dict[tuple[int, bool], list[Slice]] = {}
        self.parts: list[list[tuple[int, Entry, tuple[slice, ...]]]] = [[] for _ in holding.manifest.pieces]
        for number, entry in enumerate(manifest.pieces):
            source = _containing(holding.manifest, entry)
            self.parts[source.piece].append((number, entry, entry.box.relative_to(source.box.offset)))

    def sources(self, holding: Holding) -> tuple[View, ...]:
        """Where each piece lies among the registered tensors, as it is, without a copy.

        Raises:
            NotLendable: a piece that is cast on its way.
        """
        found: dict[int, View] = {}
        for piece, view in enumerate(holding.piece_views()):
            for number, entry, box in self.parts[piece]:
                if view.dtype != entry.tensor.dtype:
                    name, wanted = entry.tensor.name, entry.tensor.dtype
                    raise NotLendable(f"{name} is {view.dtype} and published as {wanted}: a cast needs a copy")
                found[number] = view.sub(box)
        return tuple(found[number] for number in range(len(found)))

    def rows(self, piece: int, view: View, mapping: Mapping, *, summed: bool = False) -> Iterable[Row]:
        """Copies of the registered piece, which lies at ``view``, into the segment.

        Args:
            summed: they also fill the pieces' part of the segment's table of checksums.
        """
        table = table_of(self.manifest, mapping, self._cells[-1]) if summed else None
        if view.device is not None:
            mapping.pin()
        for number, entry, box in self.parts[piece]:
            destination = mapping.piece(self.manifest, number)
            row = Row(
                destination,
                view.sub(box),
                entry.tensor.name,
                cast=view.dtype != entry.tensor.dtype,
                padding=-destination.nbytes % ALIGNMENT,
            )
            if table is None:
                yield row
            else:
                yield from summed_rows(row, entry, table[self._cells[number] : self._cells[number + 1]])


def check_same(rows: list[Row]) -> None:
    difference = CopyTable(rows).first_difference()
    if difference:
        raise ManifestMismatch.between(
            "tied tensors were written with two values",
            mismatched={difference.label: f"differs from its alias, first at {list(difference.index)} of its part"},
        )


def _containing(manifest: Manifest, entry: Entry) -> Entry:
    for registered in manifest.by_name[entry.tensor.name]:
        if registered.box == entry.box or registered.box.intersect(entry.box) == entry.box:
            return registered
    raise ManifestMismatch(f"{entry.tensor.name} {entry.box} is in none of this rank's shards")
