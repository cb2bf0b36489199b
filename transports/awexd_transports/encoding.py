"""A manifest as bytes: a header, then zlib of a vocabulary and of columns of numbers, each in as few bytes as it needs.

A column is kept as the differences of neighbouring rows (the first one's from 0), zigzag, the lowest byte of all rows
first, then the next: regular names and boxes come down to runs that zlib removes. There is one such spelling of a
manifest, and its digest is of that: it does not depend on how zlib was told to work.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson

from awexd_transports.columns import Columns, check, check_amount, in_order
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import InvalidArgument, ManifestMismatch, ProtocolError
from awexd_transports.names import FIELD, MAX_FIELDS, MAX_NUMBER, Bools, Ints, Names, is_template, pack
from awexd_transports.shard import MAX_DIMS, MAX_NAME_BYTES, check_tensor_name

MANIFEST_FORMAT = 2
MAGIC = b"awxm"
MAX_MANIFEST_BYTES = 64 << 20
"""Of a body as it travels."""
MAX_PAYLOAD_BYTES = 128 << 20
"""Of what it unpacks to."""
_DIGEST_DOMAIN = b"awexd manifest 2\n"
_HEADER = struct.Struct("<4sHBBIIII")
HEADER_BYTES = _HEADER.size
_LEVEL = 9
_CHUNK = 1 << 20
_PER_NAME = 4
"""Columns of numbers a name has beside its fields and extents: template, dtype, layout, dimensions."""


class Header(NamedTuple):
    """Counts, all of which are checked before anything is unpacked.

    Attributes:
        dims, fields: columns that boxes and names have.
        names, entries: rows.
        vocabulary, payload: bytes; the vocabulary is the payload's beginning.
    """

    dims: int
    fields: int
    names: int
    entries: int
    vocabulary: int
    payload: int

    @property
    def name_columns(self) -> int:
        return _PER_NAME + self.fields + self.dims

    @property
    def entry_columns(self) -> int:
        return 2 + 2 * self.dims

    def packed(self) -> bytes:
        return _HEADER.pack(MAGIC, MANIFEST_FORMAT, *self)


class Vocabulary(NamedTuple):
    """Texts by their numbers, and of each template its bytes beside numbers and the numbers it has no field for.

    ``spare`` has shape (templates, fields).
    """

    templates: tuple[str, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    sizes: Ints
    spare: Bools


def encode(columns: Columns) -> tuple[bytes, bytes]:
    """The canonical header and payload, not yet compressed."""
    template_order, template = in_order(columns.names.template)
    dtype_order, dtype = in_order(columns.dtype)
    layouts = in_order(columns.layout[columns.layout > 0])[0]
    place = np.zeros(len(columns.layouts) + 1, np.int64)
    place[layouts] = np.arange(1, len(layouts) + 1)
    templates = [columns.names.templates[at] for at in template_order.tolist()]
    fields = max((text.count(FIELD) for text in templates), default=0)
    dims = int(columns.ndim.max(initial=0))
    texts = [columns.dtypes[at] for at in dtype_order.tolist()], [columns.layouts[at - 1] for at in layouts.tolist()]
    vocabulary = orjson.dumps([templates, *texts])
    once = [template, dtype, place[columns.layout], columns.ndim]
    once += [*columns.names.numbers.T[:fields], *columns.extent.T[:dims]]
    each = [columns.name, columns.piece, *columns.offset.T[:dims], *columns.shape.T[:dims]]
    payload = vocabulary + _pack(np.array(once)) + _pack(np.array(each))
    header = Header(dims, fields, len(columns.names), len(columns.name), len(vocabulary), len(payload))
    check_amount(header.names, header.entries, dims, fields)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvalidArgument(f"a manifest of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
    return header.packed(), payload


def compress(header: bytes, payload: bytes) -> bytes:
    """The body that travels."""
    return header + zlib.compress(payload, _LEVEL)


def digest(header: bytes, payload: bytes) -> str:
    """SHA-256, in hexadecimal, of a manifest's one spelling."""
    return hashlib.sha256(_DIGEST_DOMAIN + header + payload).hexdigest()


def body_digest(body: bytes) -> str:
    """The digest of a body, in bounded memory and without reading more than its header.

    What is no manifest of this format is digested as it stands: whoever keeps bodies need not know them.

    Raises:
        ProtocolError: it claims to be of this format and is not.
    """
    if not body.startswith(_HEADER.pack(MAGIC, MANIFEST_FORMAT, *[0] * 6)[:6]):
        return hashlib.sha256(_DIGEST_DOMAIN + body).hexdigest()
    header = read_header(body)
    state = hashlib.sha256(_DIGEST_DOMAIN + body[: _HEADER.size])
    _unpack_into(state.update, body, header)
    return state.hexdigest()


def decode(body: bytes) -> tuple[Columns, bytes]:
    """A body's columns and payload.

    Raises:
        ProtocolError: not the canonical encoding of a valid manifest.
    """
    header = read_header(body)
    parts: list[bytes] = []
    _unpack_into(parts.append, body, header)
    payload = b"".join(parts)
    try:
        columns = _columns(header, payload)
        check(columns)
    except (InvalidArgument, ManifestMismatch) as error:
        raise ProtocolError(f"not a manifest: {error}") from error
    return columns, payload


def read_header(body: bytes) -> Header:
    """The checked header.

    Raises:
        ProtocolError: not of this format, or over a limit.
    """
    if len(body) > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"a manifest of {len(body)} bytes; at most {MAX_MANIFEST_BYTES}")
    if len(body) < _HEADER.size or not body.startswith(MAGIC):
        raise ProtocolError("not a manifest: no header")
    _, number, *counts = _HEADER.unpack_from(body)
    if number != MANIFEST_FORMAT:
        raise ProtocolError(f"manifest format {number}; this build reads {MANIFEST_FORMAT}")
    header = Header(*counts)
    if header.dims > MAX_DIMS or header.fields > MAX_FIELDS or header.names > header.entries:
        raise ProtocolError(f"not a manifest: its header is not sound: {header}")
    if not header.vocabulary <= header.payload <= MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a manifest of {header.payload} bytes unpacked; at most {MAX_PAYLOAD_BYTES}")
    try:
        check_amount(header.names, header.entries, header.dims, header.fields)
    except InvalidArgument as error:
        raise ProtocolError(str(error)) from error
    return header


def _unpack_into(take: Callable[[bytes], Any], body: bytes, header: Header) -> None:
    """Unpacks a chunk at a time, and never more than the header says."""
    stream, left, packed = zlib.decompressobj(), header.payload, memoryview(body)[_HEADER.size :]
    try:
        for at in range(0, len(packed), _CHUNK):
            rest: bytes | memoryview = packed[at : at + _CHUNK]
            while len(rest) and left >= 0:
                if stream.eof:
                    raise ProtocolError("not a manifest: bytes after its end")
                part = stream.decompress(rest, min(left + 1, _CHUNK))
                left -= len(part)
                take(part)
                rest = stream.unconsumed_tail
    except zlib.error as error:
        raise ProtocolError(f"not a manifest: {error}") from error
    if left or not stream.eof or stream.unused_data:
        raise ProtocolError("not a manifest: its bytes are not as many as its header says")


def _columns(header: Header, payload: bytes) -> Columns:
    words = _vocabulary(payload[: header.vocabulary])
    at = header.vocabulary
    once, at = _unpack(payload, at, header.name_columns, header.names)
    each, at = _unpack(payload, at, header.entry_columns, header.entries)
    if at != len(payload):
        raise ProtocolError("not a manifest: its columns are of another length")
    dims, fields = header.dims, header.fields
    names = Names(words.templates, once[0], once[_PER_NAME : _PER_NAME + fields].T)
    _check_codes(words, once, each, names)
    return Columns(
        names=names,
        dtypes=words.dtypes,
        layouts=words.layouts,
        dtype=once[1],
        layout=once[2],
        ndim=once[3],
        extent=once[_PER_NAME + fields :].T,
        name=each[0],
        offset=each[2 : 2 + dims].T,
        shape=each[2 + dims :].T,
        piece=each[1],
    )


def _check_codes(words: Vocabulary, once: Ints, each: Ints, names: Names) -> None:
    """One spelling only: codes in order of first appearance, none unused, names distinct, spare numbers constant."""
    for what, codes, start, known in (
        ("a word", once[0], -1, len(words.templates)),
        ("a word", once[1], -1, len(words.dtypes)),
        ("a word", once[2], 0, len(words.layouts) + 1),
        ("a name", each[0], -1, once.shape[1]),
    ):
        if not _in_order_all(codes, start, known - 1):
            raise ProtocolError(f"not a manifest: its encoding is not canonical ({what} out of order)")
    numbers, dims = names.numbers, (len(each) - 2) // 2
    sound = once.min(initial=0) >= 0 and each[0].min(initial=0) >= 0 and int(once[3].max(initial=0)) == dims
    sound = sound and words.spare.shape[1] == numbers.shape[1] and numbers.max(initial=0) <= MAX_NUMBER
    if not sound:
        raise ProtocolError("not a manifest: its encoding is not canonical (a number out of bounds)")
    spare = words.spare[names.template]
    if (numbers * spare).any() or _spare_dims(once, each, dims):
        raise ProtocolError("not a manifest: its encoding is not canonical (a spare number)")
    # In a checkpoint's order these ascend, mostly.
    keys = pack([*numbers.T, names.template])
    if not (keys[1:] > keys[:-1]).all():
        keys.sort()
        if (keys[1:] == keys[:-1]).any():
            raise ProtocolError("not a manifest: its encoding is not canonical (a name twice)")
    if int(words.sizes.max(initial=0)) + 9 * numbers.shape[1] > MAX_NAME_BYTES:
        digits = 1 + sum((numbers >= 10**power).astype(np.int64) for power in range(1, 9))
        taken = np.where(spare, 0, digits).sum(axis=1)
        if (words.sizes[names.template] + taken > MAX_NAME_BYTES).any():
            raise InvalidArgument(f"a tensor's name of more than {MAX_NAME_BYTES} bytes")


def _in_order_all(codes: Ints, start: int, last: int) -> bool:
    """Whether codes up to ``last`` come in order of first appearance after ``start``, and none is unused."""
    if last <= 0:
        return int(codes.max(initial=start)) == last
    if len(codes) == last - start:  # each once
        return bool((codes == np.arange(start + 1, last + 1)).all())
    highest = np.maximum.accumulate(np.concatenate([[start], codes]))
    return int(highest[-1]) == last and bool((codes <= highest[:-1] + 1).all())


def _spare_dims(once: Ints, each: Ints, dims: int) -> bool:
    """Whether a dimension that a tensor does not have is anything but one element at 0."""
    plain = once.shape[1] == each.shape[1]  # each name once, in order
    for dim in range(int(once[3].min(initial=dims)), dims):
        names = np.flatnonzero(once[3] <= dim)
        entries = names if plain else np.flatnonzero(once[3][each[0]] <= dim)
        extent, offset, shape = once[dim - dims][names], each[2 + dim][entries], each[2 + dims + dim][entries]
        if offset.any() or (extent != 1).any() or (shape != 1).any():
            return True
    return False


@lru_cache(maxsize=64)
def _small_vocabulary(text: bytes) -> Vocabulary:
    """Ranks of one job share a few vocabularies."""
    return _read_vocabulary(text)


def _vocabulary(text: bytes) -> Vocabulary:
    return _small_vocabulary(text) if len(text) <= 1 << 16 else _read_vocabulary(text)


def _read_vocabulary(text: bytes) -> Vocabulary:
    try:
        lists = orjson.loads(text)
        canonical = isinstance(lists, list) and len(lists) == 3 and orjson.dumps(lists) == text
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"not a manifest: {error}") from error
    if not canonical or not all(isinstance(words, list) for words in lists):
        raise ProtocolError("not a manifest: its vocabulary is not three lists in their canonical encoding")
    if not all(isinstance(word, str) for words in lists for word in words):
        raise ProtocolError("not a manifest: a word that is no text")
    templates, dtypes, layouts = (tuple(words) for words in lists)
    if any(len(set(words)) < len(words) for words in (templates, dtypes, layouts)):
        raise ProtocolError("not a manifest: its encoding is not canonical (a word twice)")
    for template in templates:
        check_tensor_name(template.replace(FIELD, "1"))
        if not is_template(template):
            raise ProtocolError(f"not a manifest: its encoding is not canonical (template {template!r})")
    for layout in layouts:
        check_tensor_name(layout)
    unknown = [dtype for dtype in dtypes if dtype not in ITEMSIZE]
    if unknown:
        raise InvalidArgument(f"unknown dtype {unknown[0]!r}")
    fields = np.array([template.count(FIELD) for template in templates], np.int64)
    sizes = np.array([len(template.encode()) for template in templates], np.int64) - fields
    spare: Bools = np.arange(fields.max(initial=0)) >= fields[:, None]
    return Vocabulary(templates, dtypes, layouts, sizes, spare)


def _pack(columns: Ints) -> bytes:
    """Columns, shape (c, n): c widths, then the columns of each width, narrowest first."""
    steps = np.diff(columns, axis=1, prepend=0)
    folded = ((steps << 1) ^ (steps >> 63)).view(np.uint64)
    top = folded.max(axis=1, initial=0)
    widths = np.array([(int(value).bit_length() + 7) // 8 for value in top], np.uint8)
    parts = [widths.tobytes()]
    for width in sorted(set(widths.tolist()) - {0}):
        bytewise = folded[widths == width].astype("<u8").view(np.uint8).reshape(-1, columns.shape[1], 8)
        parts.append(bytewise[:, :, :width].transpose(0, 2, 1).tobytes())
    return b"".join(parts)


def _unpack(payload: bytes, at: int, count: int, rows: int) -> tuple[Ints, int]:
    """The reverse of ``_pack``: the columns, and where they end."""
    widths = payload[at : at + count]
    at += count
    if len(widths) < count or max(widths, default=0) > 8 or at + sum(widths) * rows > len(payload):
        raise ProtocolError("not a manifest: its columns are of another length")
    folded = np.zeros((count, rows), "<u8")
    bytewise, raw = folded.view(np.uint8).reshape(count, rows, 8), np.frombuffer(payload, np.uint8)
    for width in sorted(set(widths) - {0}):
        for column in (column for column, own in enumerate(widths) if own == width):
            for byte in range(width):
                bytewise[column, :, byte] = raw[at : at + rows]
                at += rows
            if not payload[at - rows : at].lstrip(b"\0"):
                raise ProtocolError("not a manifest: its encoding is not canonical (a column wider than it need be)")
    # In place: these may be large.
    folded = folded.astype(np.uint64, copy=False)
    sign = (folded & np.uint64(1)).view(np.int64)
    folded >>= np.uint64(1)
    steps = folded.view(np.int64)
    steps ^= np.negative(sign, out=sign)
    return np.cumsum(steps, axis=1, out=steps), at
