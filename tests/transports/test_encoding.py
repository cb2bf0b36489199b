from __future__ import annotations

import hashlib
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import columns, encoding
from awexd_transports.columns import Columns
from awexd_transports.encoding import HEADER_BYTES, Header, body_digest, compress, encode, read_header
from awexd_transports.errors import ProtocolError
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec, digest_of
from awexd_transports.names import FIELD, Names
from tests.transports.strategies import manifest, meshes, one, specs

GOLDEN = Manifest.of(
    [
        Entry(TensorSpec("model.embed_tokens.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("lm_head.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("model.norm.scale", (), "float32"), Box((), ()), 1),
        Entry(TensorSpec("model.layers.0.mlp.été", (3, 0), "float8_e4m3fn"), Box((1, 0), (2, 0)), 2, "marlin"),
        Entry(TensorSpec("model.layers.1.mlp.été", (300, 0), "float8_e4m3fn"), Box((1, 0), (299, 0)), 3),
    ]
)
GOOD = manifest(one("x.1.w", (4, 2)), one("x.2.w", (4, 2), Box((2, 0), (2, 2))), one("c", (5,), dtype="float32"))


def header_of(found: Manifest) -> Header:
    return read_header(found.encoded)


def forged(found: Columns) -> bytes:
    """The encoding of columns that nobody has checked."""
    return compress(*encode(found))


def spelt(header: Header, payload: bytes) -> bytes:
    return compress(header.packed(), payload)


def with_words(change: Callable[[list[Any]], object], text: Callable[[Any], bytes] = orjson.dumps) -> bytes:
    """GOOD with another vocabulary over the same columns."""
    header, payload = header_of(GOOD), encode(GOOD.columns)[1]
    lists = orjson.loads(payload[: header.vocabulary])
    change(lists)
    words = text(lists)
    size = len(payload) - header.vocabulary + len(words)
    return spelt(header._replace(vocabulary=len(words), payload=size), words + payload[header.vocabulary :])


def with_columns(**values: Any) -> bytes:
    arrays: dict[str, Any] = {name: np.array(value) for name, value in values.items()}
    return forged(replace(GOOD.columns, **arrays))


def with_names(template: list[int], numbers: list[list[int]]) -> bytes:
    own = GOOD.columns.names
    return forged(replace(GOOD.columns, names=Names(own.templates, np.array(template), np.array(numbers))))


def swapped(lists: list[Any], at: int, word: int, value: object) -> None:
    lists[at][word] = value


def relabelled() -> bytes:
    """The same manifest with its two templates counted the other way round."""
    header, payload = header_of(GOOD), encode(GOOD.columns)[1]
    once = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0], [2, 2, 1], [1, 2, 0], [4, 4, 5], [2, 2, 1]])
    words = orjson.dumps([["c", f"x.{FIELD}.w"], ["bfloat16", "float32"], []])
    size = len(payload) - header.vocabulary
    start = len(payload) - _each_bytes()
    body = words + encoding._pack(once) + payload[start:]
    assert len(body) == size + len(words)
    return spelt(header._replace(vocabulary=len(words), payload=len(body)), body)


def _each_bytes() -> int:
    own = GOOD.columns
    return len(encoding._pack(np.array([own.name, own.piece, *own.offset.T, *own.shape.T])))


def wide() -> bytes:
    """A column in one byte more than it needs."""
    found = manifest(one("c", (5,)))
    header, payload = header_of(found), encode(found.columns)[1]
    assert payload.endswith(bytes([1]) + bytes([10]))
    widths = len(payload) - 1 - header.entry_columns
    body = payload[:widths] + bytes([*payload[widths:-2], 2]) + bytes([10, 0])
    return spelt(header._replace(payload=header.payload + 1), body)


def _long() -> tuple[Any, Any]:
    return np.array([0, 0, 1]), np.array([[1], [123_456_789], [0]])


def twice_in_a_row() -> bytes:
    columns = manifest(one("x.1.w", (4,)), one("x.2.w", (4,))).columns
    return forged(replace(columns, names=Names(columns.names.templates, np.array([0, 0]), np.array([[1], [1]]))))


def spare_after_two_boxes() -> bytes:
    """The second name's entry is the third."""
    halves = (one("x", (4, 1), Box((at, 0), (2, 1))) for at in (0, 2))
    columns = manifest(*halves, one("c", (5,))).columns
    return forged(replace(columns, offset=np.array([[0, 0], [2, 0], [0, 1]])))


def negative_layout() -> bytes:
    found = manifest(one("c", (5,)))
    header, payload = header_of(found), encode(found.columns)[1]
    once = encoding._pack(np.array([[0], [0], [-1], [1], [5]]))
    each = len(encoding._pack(np.array([[0], [0], [0], [5]])))
    body = payload[: header.vocabulary] + once + payload[-each:]
    return spelt(header._replace(payload=len(body)), body)


MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no vocabulary": (lambda: with_words(lambda lists: lists.clear()), "three lists"),
    "a vocabulary of other kinds": (lambda: with_words(lambda lists: lists.__setitem__(0, {})), "three lists"),
    "a list that is a text": (lambda: with_words(lambda lists: lists.__setitem__(1, "int8")), "three lists"),
    "spaces in the vocabulary": (lambda: with_words(lambda _: None, lambda v: orjson.dumps(v) + b" "), "canonical"),
    "an escaped letter": (
        lambda: with_words(lambda _: None, lambda v: orjson.dumps(v).replace(b"c", b"\\u0063", 1)),
        "canonical",
    ),
    "a vocabulary that is no JSON": (lambda: with_words(lambda _: None, lambda _: b"[["), "not a manifest"),
    "a word that is a number": (lambda: with_words(lambda v: swapped(v, 0, 1, 7)), "no text"),
    "a word twice": (lambda: with_words(lambda v: swapped(v, 1, 1, "bfloat16")), "a word twice"),
    "an unknown dtype": (lambda: with_words(lambda v: swapped(v, 1, 1, "float7")), "unknown dtype 'float7'"),
    "a dtype too many": (lambda: with_words(lambda v: v[1].append("int8")), "a word out of order"),
    "a dtype too few": (lambda: with_words(lambda v: v[1].pop()), "a word out of order"),
    "a template too many": (lambda: with_words(lambda v: v[0].append("d")), "a word out of order"),
    "a layout too many": (lambda: with_words(lambda v: v[2].append("marlin")), "a word out of order"),
    "an empty template": (lambda: with_words(lambda v: swapped(v, 0, 1, "")), "non-empty"),
    "a template with a line feed": (lambda: with_words(lambda v: swapped(v, 0, 1, "a\n")), "control"),
    "a template with a plain number": (lambda: with_words(lambda v: swapped(v, 0, 1, "c.7")), "canonical"),
    "a template with a number beside a field": (
        lambda: with_words(lambda v: swapped(v, 0, 0, f"x.0{FIELD}.w")),
        "canonical",
    ),
    "two fields side by side": (lambda: with_words(lambda v: swapped(v, 0, 0, f"x.{FIELD * 2}.w")), "canonical"),
    "a template of fewer fields than its column": (lambda: with_words(lambda v: swapped(v, 0, 0, "x.w")), "canonical"),
    "a template too long": (lambda: with_words(lambda v: swapped(v, 0, 1, "c" * 1025)), "more than 1024 bytes"),
    "a name too long with its number": (
        lambda: forged(replace(GOOD.columns, names=Names((f"{'x' * 1014}.{FIELD}.", "c"), *_long()))),
        "more than 1024 bytes",
    ),
    "templates in another order": (relabelled, "a word out of order"),
    "a name twice": (lambda: with_names([0, 0, 1], [[1], [1], [0]]), "a name twice"),
    "a name twice in a row": (twice_in_a_row, "a name twice"),
    "a number where the template has no field": (lambda: with_names([0, 0, 1], [[1], [2], [3]]), "spare"),
    "a number too large": (lambda: with_names([0, 0, 1], [[1], [10**9], [0]]), "out of bounds"),
    "a negative number": (lambda: with_names([0, 0, 1], [[1], [-2], [0]]), "out of bounds"),
    "a name that no entry has": (lambda: with_columns(name=[0, 1, 1]), "a name out of order"),
    "a name out of order": (lambda: with_columns(name=[1, 0, 2]), "a name out of order"),
    "an entry of a name that is not there": (lambda: with_columns(name=[0, 1, 3]), "a name out of order"),
    "more dimensions than columns": (lambda: with_columns(ndim=[2, 1, 1]), "spare"),
    "a negative layout": (negative_layout, "bounds"),
    "an extent in a spare dimension": (lambda: with_columns(extent=[[4, 2], [4, 2], [5, 2]]), "spare"),
    "an offset in a spare dimension": (lambda: with_columns(offset=[[0, 0], [2, 0], [0, 1]]), "spare"),
    "an offset in a spare dimension after a name of two boxes": (spare_after_two_boxes, "spare"),
    "a shape in a spare dimension": (lambda: with_columns(shape=[[4, 2], [2, 2], [5, 0]]), "spare"),
    "a negative offset": (lambda: with_columns(offset=[[0, 0], [-2, 0], [0, 0]]), r"x\.2\.w: .*whole numbers"),
    "a box outside its tensor": (lambda: with_columns(offset=[[0, 0], [3, 0], [0, 0]]), r"x\.2\.w: .*not inside"),
    "a sum beyond 64 bits": (lambda: with_columns(offset=[[0, 0], [2**63 - 1, 0], [0, 0]]), "not inside"),
    "too many elements": (lambda: with_columns(extent=[[1 << 48, 2], [4, 2], [5, 1]]), "elements; at most"),
    "elements beyond 64 bits": (lambda: with_columns(extent=[[1 << 62, 1 << 62], [4, 2], [5, 1]]), "elements; at most"),
    "a piece out of order": (lambda: with_columns(piece=[0, 2, 1]), "order of appearance"),
    "a negative piece": (lambda: with_columns(piece=[0, -1, 1]), "piece -1"),
    "an alias of another shape": (lambda: with_columns(piece=[0, 0, 1]), "an alias of x.1.w"),
    "a column wider than it need be": (wide, "wider"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_decode_refuses(what: str) -> None:
    forge, message = MALFORMED[what]
    with pytest.raises(ProtocolError, match=message):
        Manifest.decode(forge())


HEADERS: dict[str, tuple[dict[str, int], str]] = {
    "a dimension too many": ({"dims": 3}, "another length"),
    "a dimension too few": ({"dims": 1}, "canonical"),
    "a field too many": ({"fields": 2}, "another length"),
    "dimensions beyond the limit": ({"dims": 17}, "not sound"),
    "fields beyond the limit": ({"fields": 7}, "not sound"),
    "a name too few": ({"names": 2}, "canonical"),
    "a name too many": ({"names": 4}, "not sound"),
    "an entry too many": ({"entries": 4}, "another length"),
    "entries beyond the limit": ({"entries": 2_000_001}, "2000001 shards in one manifest; at most 2000000"),
    "numbers beyond the limit": ({"entries": 2_000_000, "dims": 16}, "numbers; at most"),
    "a vocabulary beyond the payload": ({"vocabulary": 1 << 20}, "unpacked"),
    "a vocabulary too short": ({"vocabulary": 5}, "not a manifest"),
    "a payload too short": ({"payload": 60}, "not as many"),
    "a payload too long": ({"payload": 1 << 20}, "not as many"),
    "a payload beyond the limit": ({"payload": (128 << 20) + 1}, "unpacked; at most"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_decode_refuses_a_header_with(what: str) -> None:
    values, message = HEADERS[what]
    body = header_of(GOOD)._replace(**values).packed() + GOOD.encoded[HEADER_BYTES:]
    with pytest.raises(ProtocolError, match=message):
        Manifest.decode(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no header"),
        (b"\x80\x04.", "no header"),
        (b'{"format":1}' * 3, "no header"),
        (GOOD.encoded[: HEADER_BYTES - 1], "no header"),
        (GOOD.encoded[:4] + b"\x03\0" + GOOD.encoded[6:], "format 3; this build reads 2"),
        (GOOD.encoded + b"x", "after its end|not as many"),
        (GOOD.encoded + GOOD.encoded[HEADER_BYTES:], "after its end|not as many"),
        (GOOD.encoded[:HEADER_BYTES], "not as many"),
        (GOOD.encoded[:HEADER_BYTES] + b"no zlib", "not a manifest"),
        (bytes(encoding.MAX_MANIFEST_BYTES + 1), "at most"),
    ],
)
def test_decode_refuses_other_bytes(body: bytes, message: str) -> None:
    """Case 53: a pickle, half a message, another format."""
    with pytest.raises(ProtocolError, match=message):
        Manifest.decode(body)


def test_bytes_after_the_end_are_refused_by_their_digest_too() -> None:
    for body in (GOOD.encoded + b"x" * (3 << 20), GOOD.encoded[:-1]):
        with pytest.raises(ProtocolError):
            body_digest(body)


def test_decode_refuses_too_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    body = GOOD.encoded
    monkeypatch.setattr(columns, "MAX_ENTRIES", 2)
    with pytest.raises(ProtocolError, match="3 shards in one manifest; at most 2"):
        Manifest.decode(body)


@pytest.mark.parametrize("claimed", [1 << 20, encoding.MAX_PAYLOAD_BYTES])
@pytest.mark.parametrize("read", [Manifest.decode, body_digest])
def test_a_bomb_is_refused_in_bounded_memory(claimed: int, read: Callable[[bytes], object]) -> None:
    """A mebibyte that would unpack to a gibibyte."""
    body = Header(2, 1, 3, 3, 20, claimed).packed() + _zeros(1 << 30)
    assert len(body) < 2 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"not as many|after its end"):
            read(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) + (claimed if read is not body_digest else 0)


def _zeros(nbytes: int) -> bytes:
    stream, block = zlib.compressobj(9), bytes(16 << 20)
    return b"".join([*(stream.compress(block) for _ in range(nbytes // len(block))), stream.flush()])


def test_encoding_does_not_change_by_accident() -> None:
    """Golden bytes: segments and peers of other builds name manifests by this digest."""
    header, payload = encode(GOLDEN.columns)
    assert header.hex() == "6177786d02000201050000000500000095000000e8000000"
    assert payload.hex() == (
        "5b5b226d6f64656c2e656d6265645f746f6b656e732e776569676874222c226c6d5f686561642e776569676874222c22"
        "6d6f64656c2e6e6f726d2e7363616c65222c226d6f64656c2e6c61796572732e5c75303030302e6d6c702ec3a974c3a9"
        "225d2c5b2262666c6f61743136222c22666c6f61743332222c22666c6f6174385f65346d33666e225d2c5b226d61726c"
        "696e225d5d0101010101020100020202000000020200000000020104000304000000000002080005010010000d045200"
        "00000002010101000201000202020200000202020800070200080005010008000502520000000002"
    )
    assert GOLDEN.digest == "ba12fb8929a588a8ea4557117a01f656c11dbafbb76d14568447c57729aeecda"
    assert GOLDEN.digest == hashlib.sha256(b"awexd manifest 2\n" + header + payload).hexdigest()
    assert GOLDEN.encoded[:HEADER_BYTES] == header
    assert zlib.decompress(GOLDEN.encoded[HEADER_BYTES:]) == payload
    assert (
        digest_of([GOLDEN.digest, GOLDEN.digest]) == "8566932c4871635dce6c08f35be244600e92cb5909e082c721a122e0ab2ccf8a"
    )


@pytest.mark.parametrize("level", range(10))
def test_the_digest_does_not_depend_on_how_zlib_was_told_to_work(level: int) -> None:
    header, payload = encode(GOLDEN.columns)
    body = header + zlib.compress(payload, level)
    assert body_digest(body) == GOLDEN.digest
    assert Manifest.decode(body) == GOLDEN
    assert Manifest.decode(body).encoded == body


def test_bodies_of_other_formats_are_digested_as_they_stand() -> None:
    """The daemon keeps bodies unread; a body of this format never has the digest of another."""
    assert body_digest(b"other") == hashlib.sha256(b"awexd manifest 2\nother").hexdigest()
    header, payload = encode(GOOD.columns)
    with pytest.raises(ProtocolError):
        body_digest(header + payload)


@settings(deadline=None)
@given(st.data())
def test_decode_gives_back_what_was_encoded(data: st.DataObject) -> None:
    for found in data.draw(meshes(data.draw(specs()))):
        again = Manifest.decode(found.encoded)
        assert again.entries == found.entries
        assert again.digest == found.digest == body_digest(found.encoded)
        assert encode(again.columns) == encode(found.columns)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(1 << 59), 1 << 59), min_size=5, max_size=5), min_size=1, max_size=4))
def test_columns_of_any_numbers_come_back(rows: list[list[int]]) -> None:
    packed = encoding._pack(np.array(rows, np.int64))
    found, end = encoding._unpack(packed, 0, len(rows), 5)
    assert found.tolist() == rows
    assert end == len(packed)


def _same_or_refused(body: bytes) -> None:
    """Damage is refused, or (a byte that zlib does not look at) changes nothing."""
    try:
        found = Manifest.decode(body)
    except ProtocolError:
        return
    assert encode(found.columns) == (body[:HEADER_BYTES], zlib.decompress(body[HEADER_BYTES:]))


@pytest.mark.parametrize("found", [GOLDEN, GOOD])
def test_every_truncation_and_every_flipped_bit_is_refused_or_harmless(found: Manifest) -> None:
    body = found.encoded
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            Manifest.decode(body[:length])
    for at in range(len(body) * 8):
        _same_or_refused(body[: at // 8] + bytes([body[at // 8] ^ (1 << at % 8)]) + body[at // 8 + 1 :])


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damage_under_the_compression_is_refused_or_another_manifest(data: st.DataObject) -> None:
    """Bytes of the payload changed, cut or added: what is still accepted is the one spelling of what it says."""
    header, payload = encode(data.draw(st.sampled_from([GOLDEN.columns, GOOD.columns])))
    changed = bytearray(payload)
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(payload) - 1), st.integers(0, 255)), max_size=3)):
        changed[at] = byte
    size = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    payload = bytes(changed[:size]) + data.draw(st.binary(max_size=2))
    _same_or_refused(compress(read_header(header + b"x")._replace(payload=len(payload)).packed(), payload))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.tuples(*[st.integers(0, 6)] * 4), st.integers(0, 200))
def test_random_payloads_are_refused(payload: bytes, counts: tuple[int, int, int, int], vocabulary: int) -> None:
    with pytest.raises(ProtocolError):
        Manifest.decode(spelt(Header(*counts, min(vocabulary, len(payload)), len(payload)), payload))


def test_the_largest_manifest_of_constant_columns_takes_bounded_time() -> None:
    """A few bytes that mean as many entries as there may be: overlapping ones, so refused, but not slowly."""
    count = 2_000_000
    words = orjson.dumps([["w"], ["int8"], []])
    once, each = np.array([[0], [0], [0], [1], [9]]), np.zeros((4, count), np.int64)
    each[3] = 1
    payload = words + encoding._pack(once) + encoding._pack(each)
    body = spelt(Header(1, 0, 1, count, len(words), len(payload)), payload)
    assert len(body) < 10_000
    started = time.monotonic()
    with pytest.raises(ProtocolError, match=r"order of appearance|alias|entangled|overlap"):
        Manifest.decode(body)
    assert time.monotonic() - started < 30
