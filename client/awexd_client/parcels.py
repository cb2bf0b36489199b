"""What is parked: whole storages in a segment, their checksums, and which tensor lies where in them.

After the header page: the storages as pieces of bytes, a table of checksums as of a version's segment, then JSON, its
length and its digest. A process that knows nothing but the segment can take its tensors out again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import orjson

from awexd_client.checksums import Comparison, summed_rows, table_of
from awexd_client.mappings import Mapping as MappedSegment
from awexd_client.storages import Stored, Tensors, allocate, bits_of, grouped, release
from awexd_transports.copy import CopyTable, Row, overlapping
from awexd_transports.errors import IntegrityError, ManifestMismatch
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.segment import HEADER_BYTES, first_cells, piece_at, segment_nbytes
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

FORMAT = 1
_TAIL = struct.Struct("<I16s")


class Part(NamedTuple):
    """Where a tensor lies in a storage, in elements."""

    storage: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Contents:
    """The form of a parcel.

    Attributes:
        sizes: bytes of each storage.
        tensors: by name.
        summed: whether it has checksums.
    """

    sizes: tuple[int, ...]
    tensors: dict[str, Part]
    summed: bool

    @classmethod
    def of(cls, stored: Sequence[Stored], summed: bool) -> Contents:
        tensors = {
            name: _part(number, tensor) for number, one in enumerate(stored) for name, tensor in one.tensors.items()
        }
        return cls(tuple(one.nbytes for one in stored), tensors, summed)

    @classmethod
    def read(cls, mapping: MappedSegment) -> Contents:
        """As it stands in a segment.

        Raises:
            IntegrityError: it does not.
        """
        end = mapping.nbytes
        length, digest = _TAIL.unpack(mapping.read(end - _TAIL.size, _TAIL.size))
        body = bytes(mapping.read(max(HEADER_BYTES, end - _TAIL.size - length), length))
        if _digest(body) != digest:
            raise IntegrityError("what is parked does not say any more what it is")
        told = orjson.loads(body)
        if told["format"] != FORMAT:
            raise IntegrityError(f"what is parked has format {told['format']}, this version reads {FORMAT}")
        tensors = {
            name: Part(storage, dtype, itemsize, tuple(shape), tuple(strides), offset)
            for name, (storage, dtype, itemsize, shape, strides, offset) in told["tensors"].items()
        }
        return cls(tuple(told["sizes"]), tensors, told["summed"])

    @cached_property
    def body(self) -> bytes:
        tensors = {name: tuple(part) for name, part in self.tensors.items()}
        return orjson.dumps({"format": FORMAT, "sizes": self.sizes, "summed": self.summed, "tensors": tensors})

    @cached_property
    def manifest(self) -> Manifest:
        """The storages as tensors of bytes."""
        specs = (TensorSpec(str(number), (size,), "uint8") for number, size in enumerate(self.sizes))
        return Manifest.of([Entry(spec, Box((0,), spec.shape), at) for at, spec in enumerate(specs)])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its segment, header not counted."""
        return segment_nbytes(self.manifest) + len(self.body) + _TAIL.size


class Parcel:
    """One parcel in a mapped segment.

    Args:
        stored: the storages of this process that it is of; none where they were another process's.
    """

    def __init__(
        self, name: str, segment: str, mapping: MappedSegment, contents: Contents, stored: Sequence[Stored]
    ) -> None:
        self.name = name
        self.segment = segment
        self.contents = contents
        self.stored = list(stored)
        self._mapping = mapping
        self._let_go: set[int] = set()
        """Numbers of the storages that have no memory now."""
        if any(one.on_device for one in stored):
            mapping.pin()

    def take(self, sharing: int) -> None:
        """Copies the storages into the segment, group by group, and lets go of each as soon as its bytes are there."""
        contents, manifest = self.contents, self.contents.manifest
        table = table_of(manifest, self._mapping)
        self._mapping.write(
            self._mapping.nbytes - len(contents.body) - _TAIL.size,
            contents.body + _TAIL.pack(len(contents.body), _digest(contents.body)),
        )
        for numbers in self._groups():
            rows: list[Row] = []
            for number in numbers:
                row = Row(self._piece(number), self.stored[number].view(), self.stored[number].label)
                entry = manifest.entries[number]
                rows += summed_rows(row, entry, table[self._first[number] :]) if contents.summed else [row]
            CopyTable(rows).run(sharing=sharing)
            release(self.stored[number] for number in numbers)
            self._let_go.update(numbers)

    def give(self, sharing: int, *, check: bool) -> None:
        """Memory and bytes for all of the storages that were let go; on an error none of them has any.

        Raises:
            BudgetExceeded: no room.
            IntegrityError: the bytes are not those that were parked.
        """
        given: list[Stored] = []
        try:
            for numbers in self._groups():
                wanted = [number for number in numbers if number in self._let_go]
                allocate(self.stored[number] for number in wanted)
                given += [self.stored[number] for number in wanted]
                self._fill(wanted, sharing, check)
        except BaseException:
            release(given)
            raise
        self._let_go.clear()

    def fill(self, tensors: Tensors, sharing: int, *, check: bool) -> None:
        """Copies what was parked into other tensors of the same names, shapes and dtypes.

        Raises:
            ManifestMismatch: they are not the same; nothing was touched.
            IntegrityError: the bytes are not those that were parked; nothing was touched.
        """
        rows = self._rows_into(tensors)
        if check and self.contents.summed:
            held = [self._piece(number) for number in range(len(self.contents.sizes))]
            self._run(range(len(held)), held, sharing)  # both sides the same: only summed
        if any(row.destination.device is not None for row in rows):
            self._mapping.pin()
        CopyTable(rows).run(sharing=sharing)

    def _fill(self, numbers: Sequence[int], sharing: int, check: bool) -> None:
        views = [self.stored[number].view() for number in numbers]
        if check and self.contents.summed:
            self._run(numbers, views, sharing)
        else:
            pieces = map(self._piece, numbers)
            CopyTable(list(zip(views, pieces, strict=True))).run(sharing=sharing)

    def _run(self, numbers: Iterable[int], destinations: Iterable[View], sharing: int) -> None:
        manifest = self.contents.manifest
        sums = Comparison((manifest,), {0: self._mapping})
        rows: list[Row] = []
        for number, destination in zip(numbers, destinations, strict=True):
            piece = self._piece(number)
            rows += sums.rows(Row(destination, piece, self._label(number)), 0, manifest.entries[number], piece, (0,))
        table = CopyTable(rows)
        table.run(sharing=sharing)
        sums.check(table.wrong())

    def _groups(self) -> Iterator[list[int]]:
        numbers = {id(one): number for number, one in enumerate(self.stored)}
        for group in grouped(self.stored):
            yield [numbers[id(one)] for one in group]

    @cached_property
    def _first(self) -> list[int]:
        return first_cells(self.contents.manifest)

    def _piece(self, number: int) -> View:
        at = self._mapping.address + piece_at(self.contents.manifest, number)
        return View.packed(at, (self.contents.sizes[number],), "uint8", self._mapping)

    def _label(self, number: int) -> str:
        return next(name for name, part in self.contents.tensors.items() if part.storage == number)

    def _rows_into(self, tensors: Tensors) -> list[Row]:
        """Copies out of strided parts of the storages. What are views of each other on both sides is copied once.

        Raises:
            ManifestMismatch: other names, shapes or dtypes, or tensors that share memory and were parked apart.
        """
        self._check_same(tensors)
        rows = [Row(bits_of(tensor), self._part(name, tensor), name) for name, tensor in tensors.items()]
        alike: dict[tuple[int, int], list[Row]] = {}
        alone: list[Row] = []
        for row in rows:
            if row.destination.numel:
                key = tensors[row.label].untyped_storage()._cdata, row.destination.address - row.source.address
                (alike.setdefault(key, []) if _is_run(row) else alone).append(row)
        merged = [run for (_, moved), own in alike.items() for run in _merged(own, moved)]
        clash = overlapping([(row.label, row.destination) for row in (*merged, *alone)])
        if clash:
            raise ManifestMismatch.between(
                f"what is parked as {self.name!r}", mismatched={clash[0]: f"overlaps {clash[1]} in memory"}
            )
        return [*merged, *alone]

    def _part(self, name: str, tensor: torch.Tensor) -> View:
        part = self.contents.tensors[name]
        at = self._mapping.address + piece_at(self.contents.manifest, part.storage) + part.offset * part.itemsize
        strides = tuple(step * part.itemsize for step in part.strides)
        return View(at, part.shape, strides, bits_of(tensor).dtype, self._mapping)

    def _check_same(self, tensors: Tensors) -> None:
        parked: Mapping[str, Part] = self.contents.tensors
        mismatched = {}
        for name in parked.keys() & tensors.keys():
            here, there = _part(0, tensors[name]), parked[name]
            if (here.dtype, here.shape) != (there.dtype, there.shape):
                mismatched[name] = f"{here.dtype} {list(here.shape)}, parked as {there.dtype} {list(there.shape)}"
        missing, unexpected = tensors.keys() - parked.keys(), parked.keys() - tensors.keys()
        if missing or unexpected or mismatched:
            raise ManifestMismatch.between(
                f"what is parked as {self.name!r} is not what was given",
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
            )


def _is_run(row: Row) -> bool:
    """Whether both sides are the same permutation of one run of bytes."""
    to, of = row.destination, row.source
    loops = sorted((s, n, other) for n, s, other in zip(to.shape, to.strides, of.strides, strict=True) if n > 1)
    step = to.itemsize
    for stride, extent, other in loops:
        if stride != step or other != step:
            return False
        step *= extent
    return True


def _merged(rows: Sequence[Row], moved: int) -> Iterator[Row]:
    """Runs of one storage that are all moved by the same distance, joined where they overlap or touch."""
    high = 0
    joined: list[Row] = []
    for row in sorted(rows, key=lambda row: row.destination.address):
        if joined and row.destination.address > high:
            yield _run(joined, high, moved)
            joined = []
        joined.append(row)
        high = max(high, row.destination.address + row.destination.nbytes)
    yield _run(joined, high, moved)


def _run(rows: Sequence[Row], high: int, moved: int) -> Row:
    """The bytes from the first row up to ``high``; in a device's memory by way of a tensor that has them."""
    import torch

    first, label = rows[0].destination, rows[0].label
    low = first.address
    source = View.packed(low - moved, (high - low,), "uint8", rows[0].source.owner)
    if first.device is None:
        return Row(View.packed(low, (high - low,), "uint8", rows), source, label)
    held: torch.Tensor = first.owner  # type: ignore[assignment]
    whole = torch.empty(0, dtype=torch.uint8, device=held.device)
    offset = int(held.storage_offset()) * held.element_size()
    return Row(View.of(whole.set_(held.untyped_storage(), offset, (high - low,), (1,))), source, label)


def _part(storage: int, tensor: torch.Tensor) -> Part:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Part(storage, dtype, tensor.element_size(), shape, strides, int(tensor.storage_offset()))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
