"""What a process holds: boxes of named global tensors. Pure: no I/O, no torch.

Coordinates are in elements of the Hugging Face tensor (its name and shape are the one format both sides are mapped to).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument, ManifestMismatch, ProtocolError

if TYPE_CHECKING:
    import torch

MANIFEST_FORMAT = 1
MAX_NAME_BYTES = 1024
MAX_DIMS = 16
MAX_ELEMENTS = 1 << 60
MAX_ENTRIES = 2_000_000
MAX_MANIFEST_BYTES = 256 << 20
ALIGNMENT = 256
"""Bytes: every piece of a segment starts on such a boundary (enough for any GPU load and any cache line)."""

_DIGEST_DOMAIN = b"awexd manifest 1\n"
_COLUMNS = ("names", "dtypes", "global", "offset", "shape", "piece", "layout")


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open n-dimensional interval ``[offset, offset + shape)``. Zero dimensions: one element. Any zero: empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def relative_to(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Slices of this box in a local array that starts at ``origin``."""
        return tuple(slice(o - b, o - b + n) for o, b, n in zip(self.offset, origin, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A global tensor: checkpoint name, global shape in elements, torch dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One shard without its bytes.

    Attributes:
        tensor: the global tensor it is part of.
        box: its part, in global coordinates.
        piece: which stored piece of the rank holds it; entries with the same number are aliases of one storage.
        layout: None for a plain slice, else the name of a permutation both sides know.
    """

    tensor: TensorSpec
    box: Box
    piece: int
    layout: str | None = None

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEMSIZE[self.tensor.dtype]


class Shard:
    """One process's part of a tensor: a view of live memory and the box of the global tensor that it holds.

    Args:
        name: the tensor's checkpoint name.
        tensor: the local view, any strides; never copied here.
        global_shape: shape of the whole tensor; omitted together with ``offset``: ``tensor`` is the whole.
        offset: first element of the box, one number a dimension; the box's shape is the view's.
        layout: named permutation, where the part is not a plain slice.

    Raises:
        InvalidArgument: a box that is not inside the global shape, or only one of shape and offset.
    """

    __slots__ = ("box", "global_shape", "layout", "name", "tensor")

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        global_shape: Sequence[int] | None = None,
        offset: Sequence[int] | None = None,
        *,
        layout: str | None = None,
    ) -> None:
        shape = tuple(int(n) for n in tensor.shape)
        if (global_shape is None) != (offset is None):
            raise InvalidArgument(f"{name}: give both global_shape and offset, or neither (the whole tensor)")
        self.name = name
        self.tensor = tensor
        self.layout = layout
        self.global_shape = shape if global_shape is None else tuple(int(n) for n in global_shape)
        self.box = Box((0,) * len(shape) if offset is None else tuple(int(n) for n in offset), shape)
        problem = _box_problem(self.global_shape, self.box)
        if problem:
            raise InvalidArgument(f"{name}: {problem}")

    @property
    def offset(self) -> tuple[int, ...]:
        return self.box.offset

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {self.tensor.dtype}, box={self.box} of {list(self.global_shape)})"


@dataclass(frozen=True)
class Manifest:
    """A rank's shards without their bytes, in the rank's own order; addressed by the digest of its encoding.

    Build with :meth:`of`, which checks it. Entry order decides the order of pieces in a segment.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Manifest:
        """A checked manifest.

        Raises:
            InvalidArgument: over a limit, a malformed name, or pieces that are not numbered in order of appearance.
            ManifestMismatch: a name with overlapping boxes, two shapes or two dtypes, or aliases that differ.
        """
        manifest = cls(tuple(entries))
        _check(manifest.entries)
        return manifest

    @cached_property
    def encoded(self) -> bytes:
        """Canonical encoding: equal manifests have equal bytes."""
        entries = self.entries
        columns: dict[str, Any] = {
            "format": MANIFEST_FORMAT,
            "names": [e.tensor.name for e in entries],
            "dtypes": [e.tensor.dtype for e in entries],
            "global": [e.tensor.shape for e in entries],
            "offset": [e.box.offset for e in entries],
            "shape": [e.box.shape for e in entries],
            "piece": [e.piece for e in entries],
            "layout": [e.layout for e in entries],
        }
        return orjson.dumps(columns, option=orjson.OPT_SORT_KEYS)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoding, in hexadecimal."""
        return body_digest(self.encoded)

    @classmethod
    def decode(cls, body: bytes) -> Manifest:
        """The manifest of these bytes.

        Raises:
            ProtocolError: not the canonical encoding of a valid manifest.
        """
        if len(body) > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"a manifest of {len(body)} bytes; at most {MAX_MANIFEST_BYTES}")
        try:
            manifest = cls.of(_rows(orjson.loads(body)))
        except (orjson.JSONDecodeError, InvalidArgument, ManifestMismatch, TypeError, KeyError, ValueError) as error:
            raise ProtocolError(f"not a manifest: {error}") from error
        if manifest.encoded != body:
            raise ProtocolError("not a manifest: its encoding is not canonical")
        return manifest

    @cached_property
    def pieces(self) -> tuple[Entry, ...]:
        """The first entry of each stored piece, by piece number."""
        first: dict[int, Entry] = {}
        for entry in self.entries:
            first.setdefault(entry.piece, entry)
        return tuple(first[number] for number in sorted(first))

    @cached_property
    def piece_offsets(self) -> tuple[int, ...]:
        """Where each piece starts in this rank's segment: bytes from the start of its data, multiples of ALIGNMENT."""
        offsets, at = [], 0
        for piece in self.pieces:
            offsets.append(at)
            at += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        return tuple(offsets)

    @cached_property
    def segment_nbytes(self) -> int:
        """Bytes of this rank's packed pieces, padding included."""
        return sum(-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in self.pieces)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the elements themselves, each alias group once."""
        return sum(piece.nbytes for piece in self.pieces)

    @cached_property
    def by_name(self) -> Mapping[str, tuple[Entry, ...]]:
        """Entries by tensor name, each in the manifest's order."""
        grouped: dict[str, list[Entry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.tensor.name, []).append(entry)
        return {name: tuple(found) for name, found in grouped.items()}


def body_digest(body: bytes) -> str:
    """The digest of a manifest's encoding, without decoding it."""
    return hashlib.sha256(_DIGEST_DOMAIN + body).hexdigest()


def digest_of(digests: Iterable[str]) -> str:
    """The digest of a job's manifests in rank order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_tensor_name(name: object) -> str:
    """A tensor name as given, if it is one.

    Raises:
        InvalidArgument: empty, too long, or with control characters.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a tensor's name must be a non-empty string, not {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise InvalidArgument(f"a tensor's name of more than {MAX_NAME_BYTES} bytes: {name[:60]!r}...")
    if not name.isprintable():
        raise InvalidArgument(f"a tensor's name with control characters: {name!r}")
    return name


def _rows(columns: Any) -> Iterable[Entry]:
    if columns["format"] != MANIFEST_FORMAT:
        raise ProtocolError(f"manifest format {columns['format']!r}; this build reads {MANIFEST_FORMAT}")
    lists = [columns[name] for name in _COLUMNS]
    if len(lists[0]) > MAX_ENTRIES:
        raise ProtocolError(f"a manifest of {len(lists[0])} entries; at most {MAX_ENTRIES}")
    for name, dtype, shape, offset, extent, piece, layout in zip(*lists, strict=True):
        yield Entry(TensorSpec(name, tuple(shape), dtype), Box(tuple(offset), tuple(extent)), piece, layout)


def _check(entries: Sequence[Entry]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise InvalidArgument(f"{len(entries)} shards in one manifest; at most {MAX_ENTRIES}")
    specs: dict[str, TensorSpec] = {}
    pieces: dict[int, Entry] = {}
    boxes: dict[str, list[Box]] = {}
    mismatched: dict[str, str] = {}
    for entry in entries:
        _check_entry(entry)
        spec = specs.setdefault(entry.tensor.name, entry.tensor)
        if spec != entry.tensor:
            mismatched[spec.name] = f"declared as {_describe(spec)} and as {_describe(entry.tensor)}"
        first = pieces.setdefault(entry.piece, entry)
        if first is entry and entry.piece != len(pieces) - 1:
            raise InvalidArgument(f"{spec.name}: piece {entry.piece} is not numbered in order of appearance")
        if (first.box.shape, first.tensor.dtype) != (entry.box.shape, entry.tensor.dtype):
            mismatched[spec.name] = f"an alias of {first.tensor.name} with another shape or dtype"
        boxes.setdefault(spec.name, []).append(entry.box)
    for name, held in boxes.items():
        clash = None if name in mismatched else first_overlap(held)
        if clash:
            mismatched.setdefault(name, f"declared twice: {clash[0]} and {clash[1]} overlap")
    if mismatched:
        raise ManifestMismatch.between("a rank's shards contradict each other", mismatched=mismatched)


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element (or are the same empty box given twice), or None."""
    if len(boxes) < 2:
        return None
    if len(set(boxes)) < len(boxes):
        twice = next(box for at, box in enumerate(boxes) if box in boxes[:at])
        return twice, twice
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offset)
    for at, box in enumerate(ordered):
        for other in ordered[at + 1 :]:
            if other.offset and other.offset[0] >= box.end[0]:
                break
            if box.intersect(other):
                return box, other
    return None


def _check_entry(entry: Entry) -> None:
    name = check_tensor_name(entry.tensor.name)
    if entry.tensor.dtype not in ITEMSIZE:
        raise InvalidArgument(f"{name}: unknown dtype {entry.tensor.dtype!r}")
    if type(entry.piece) is not int or entry.piece < 0:
        raise InvalidArgument(f"{name}: piece {entry.piece!r} is not a number of a piece")
    if entry.layout is not None:
        check_tensor_name(entry.layout)
    problem = _box_problem(entry.tensor.shape, entry.box)
    if problem:
        raise InvalidArgument(f"{name}: {problem}")


def _box_problem(shape: tuple[int, ...], box: Box) -> str | None:
    numbers = (*shape, *box.offset, *box.shape)
    if any(type(n) is not int or n < 0 for n in numbers):
        return f"sizes and offsets must be whole numbers >= 0, not {numbers}"
    if len(shape) > MAX_DIMS:
        return f"{len(shape)} dimensions; at most {MAX_DIMS}"
    if not len(shape) == len(box.offset) == len(box.shape):
        return f"global shape {list(shape)}, offset {list(box.offset)} and shape {list(box.shape)} differ in dimensions"
    if math.prod(shape) > MAX_ELEMENTS:
        return f"{math.prod(shape)} elements; at most {MAX_ELEMENTS}"
    if any(end > n for end, n in zip(box.end, shape, strict=True)):
        return f"its box {box} is not inside the global shape {list(shape)}"
    return None


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
