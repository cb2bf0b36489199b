from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import layout
from awexd_transports.dtypes import ITEMSIZE, dtype_name
from awexd_transports.errors import InvalidArgument, ManifestMismatch, ProtocolError
from awexd_transports.layout import ALIGNMENT, Box, Entry, Manifest, Shard, TensorSpec, digest_of
from tests.transports.strategies import manifest, meshes, one, specs, whole

GOLDEN = Manifest.of(
    [
        Entry(TensorSpec("model.embed_tokens.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("lm_head.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("model.norm.scale", (), "float32"), Box((), ()), 1),
        Entry(TensorSpec("model.layers.0.mlp.été", (3, 0), "float8_e4m3fn"), Box((1, 0), (2, 0)), 2, "marlin"),
    ]
)
Columns = dict[str, Any]


def columns() -> Columns:
    """A good manifest's columns: tensors a (4, 2), b (4, 2) and c (5,)."""
    good = manifest(one("a", (4, 2)), one("b", (4, 2), Box((2, 0), (2, 2))), one("c", (5,), dtype="float32"))
    parsed: Columns = orjson.loads(good.encoded)
    return parsed


def canonical(changed: object) -> bytes:
    return orjson.dumps(changed, option=orjson.OPT_SORT_KEYS)


def put(column: str, at: int, value: object) -> Callable[[Columns], None]:
    def change(found: Columns) -> None:
        found[column][at] = value

    return change


def put_all(at: int, **values: object) -> Callable[[Columns], None]:
    def change(found: Columns) -> None:
        for column, value in values.items():
            found[column][at] = value

    return change


def drop(column: str) -> Callable[[Columns], object]:
    return lambda found: found.pop(column)


def shorten(column: str) -> Callable[[Columns], object]:
    return lambda found: found[column].pop()


MALFORMED: dict[str, tuple[Callable[[Columns], object], str]] = {
    "an unknown format": (lambda c: c.update(format=2), "format 2"),
    "no format": (lambda c: c.pop("format"), "format"),
    **{f"no column {name}": (drop(name), name) for name in layout._COLUMNS},
    **{f"a short column {name}": (shorten(name), "zip") for name in layout._COLUMNS},
    "a column that is a number": (lambda c: c.update(names=3), "not a manifest"),
    "an extra column": (lambda c: c.update(extra=1), "canonical"),
    "an empty name": (put("names", 0, ""), "non-empty"),
    "a name that is a number": (put("names", 0, 7), "non-empty"),
    "a name that is null": (put("names", 0, None), "non-empty"),
    "a name too long": (put("names", 0, "x" * (layout.MAX_NAME_BYTES + 1)), "more than"),
    "a name too long in bytes": (put("names", 0, "é" * (layout.MAX_NAME_BYTES // 2 + 1)), "more than"),
    "a name with NUL": (put("names", 0, "a\0b"), "control"),
    "a name with a line feed": (put("names", 0, "a\nb"), "control"),
    "an unknown dtype": (put("dtypes", 0, "float7"), "float7"),
    "a dtype that is null": (put("dtypes", 0, None), "dtype"),
    "a dtype that is a list": (put("dtypes", 0, []), "not a manifest"),
    "a shape that is a number": (put("global", 0, 4), "not a manifest"),
    "a shape that is a string": (put("global", 0, "42"), "whole numbers"),
    "a fractional extent": (put("shape", 0, [4.0, 2]), "whole numbers"),
    "an extent that is true": (put("shape", 0, [True, 2]), "whole numbers"),
    "a negative extent": (put("shape", 0, [-1, 2]), "whole numbers"),
    "a negative offset": (put("offset", 0, [-1, 0]), "whole numbers"),
    "a negative global extent": (put("global", 0, [-4, 2]), "whole numbers"),
    "an offset of fewer dimensions": (put("offset", 0, [0]), "differ in dimensions"),
    "an extent of more dimensions": (put("shape", 0, [4, 2, 1]), "differ in dimensions"),
    "a box outside its tensor": (put("offset", 0, [1, 0]), "not inside"),
    "too many dimensions": (put_all(2, **{"global": [1] * 17, "offset": [0] * 17, "shape": [1] * 17}), "at most 16"),
    "too many elements": (put("global", 0, [1 << 60, 2]), "elements; at most"),
    "a piece out of order": (put("piece", 0, 1), "order of appearance"),
    "a piece left out": (put("piece", 2, 3), "order of appearance"),
    "a negative piece": (put("piece", 0, -1), "piece -1"),
    "a fractional piece": (put("piece", 0, 0.0), "piece 0.0"),
    "a piece that is true": (put("piece", 1, True), "piece True"),
    "a layout that is empty": (put("layout", 0, ""), "non-empty"),
    "a layout that is a list": (put("layout", 0, ["x"]), "non-empty"),
    "an alias of another shape": (lambda c: c.update(piece=[0, 0, 1]), "alias of a"),
    "an alias of another dtype": (
        lambda c: c.update(
            piece=[0, 0, 1],
            offset=[[0, 0], [0, 0], [0]],
            shape=[[4, 2], [4, 2], [5]],
            dtypes=["bfloat16", "float16", "float32"],
        ),
        "alias of a",
    ),
    "a tensor declared twice": (put("names", 1, "a"), "overlap"),
    "a tensor with two dtypes": (put_all(1, names="a", dtypes="float16"), "declared as"),
    "a tensor with two shapes": (put_all(1, names="a", **{"global": [8, 2], "offset": [4, 0]}), "declared as"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_decode_refuses(what: str) -> None:
    change, message = MALFORMED[what]
    found = columns()
    change(found)
    with pytest.raises(ProtocolError, match=message):
        Manifest.decode(canonical(found))


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80\x04.", b"null", b"[]", b'"x"', b"{}", b"{", b"[" * 100_000, b"\xff", b'{"format":1', b"NaN"],
)
def test_decode_refuses_what_is_no_object_of_columns(body: bytes) -> None:
    """Case 53: a pickle, half a message, deep nesting."""
    with pytest.raises(ProtocolError):
        Manifest.decode(body)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body + b" ",
        lambda body: b" " + body,
        lambda body: body.replace(b":", b": ", 1),
        lambda body: b'{"format":1,' + body[1:],
        lambda body: body.replace(b'"a"', b'"\\u0061"'),
        lambda body: orjson.dumps(dict(reversed(orjson.loads(body).items()))),
    ],
)
def test_decode_refuses_another_spelling_of_the_same_manifest(spoil: Callable[[bytes], bytes]) -> None:
    """One manifest, one digest: bytes that would mean the same are still refused."""
    with pytest.raises(ProtocolError, match="canonical"):
        Manifest.decode(spoil(canonical(columns())))


def test_decode_refuses_too_many_bytes_before_it_reads_them() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        Manifest.decode(bytes(layout.MAX_MANIFEST_BYTES + 1))


def test_decode_refuses_too_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    body = canonical(columns())
    monkeypatch.setattr(layout, "MAX_ENTRIES", 2)
    with pytest.raises(ProtocolError, match="3 entries; at most 2"):
        Manifest.decode(body)


def test_encoding_does_not_change_by_accident() -> None:
    """Golden bytes: segments and peers of other builds name manifests by this digest."""
    assert GOLDEN.encoded.decode() == (
        "{"
        '"dtypes":["bfloat16","bfloat16","float32","float8_e4m3fn"],'
        '"format":1,'
        '"global":[[8,4],[8,4],[],[3,0]],'
        '"layout":[null,null,null,"marlin"],'
        '"names":["model.embed_tokens.weight","lm_head.weight","model.norm.scale","model.layers.0.mlp.été"],'
        '"offset":[[4,0],[4,0],[],[1,0]],'
        '"piece":[0,0,1,2],'
        '"shape":[[4,4],[4,4],[],[2,0]]'
        "}"
    )
    assert GOLDEN.digest == "9ca1697af079943ce266b6ea40f12dec3e13c81da2c6e5fb9d118a3bdd580fa1"
    assert (
        digest_of([GOLDEN.digest, GOLDEN.digest]) == "4b69569811582336e7b5296482b274b0af957cc696bd23121d6c86eb22e2cfe1"
    )


@settings(deadline=None)
@given(st.data())
def test_decode_gives_back_what_was_encoded(data: st.DataObject) -> None:
    for found in data.draw(meshes(data.draw(specs()))):
        again = Manifest.decode(found.encoded)
        assert again == found
        assert again.digest == found.digest


def test_the_digest_tells_order_and_pieces_apart() -> None:
    a, b = one("a", (4,)), one("b", (4,))
    tied = Manifest.of([a, b])
    assert len({manifest(a, b).digest, manifest(b, a).digest, tied.digest, manifest(a).digest}) == 4


def test_pieces_are_aligned_whatever_precedes_them() -> None:
    """Case 32."""
    found = manifest(
        one("a", (3,), dtype="float16"),
        one("b", (2,), dtype="float32"),
        one("c", (5,), dtype="uint8"),
        one("d", (200,), dtype="bfloat16"),
        one("e", (0,), dtype="float32"),
        one("f", (), dtype="complex128"),
    )
    assert found.piece_offsets == (0, 256, 512, 768, 1280, 1280)
    assert found.segment_nbytes == 1536
    assert found.nbytes == 6 + 8 + 5 + 400 + 0 + 16
    assert all(at % ALIGNMENT == 0 for at in found.piece_offsets)


def test_aliases_are_stored_once() -> None:
    """Case 40."""
    assert [piece.tensor.name for piece in GOLDEN.pieces] == [
        "model.embed_tokens.weight",
        "model.norm.scale",
        "model.layers.0.mlp.été",
    ]
    assert GOLDEN.nbytes == 4 * 4 * 2 + 4


def test_entries_of_one_name_stay_in_order() -> None:
    low, high = one("w", (4,), Box((0,), (2,))), one("w", (4,), Box((2,), (2,)))
    assert [entry.box.offset for entry in manifest(high, one("x", (1,)), low).by_name["w"]] == [(2,), (0,)]


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    numbers = st.tuples(*[st.integers(0, 4)] * dims)
    return Box(draw(numbers), draw(numbers)), Box(draw(numbers), draw(numbers))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.offset, box.end, strict=True))))


@given(two_boxes())
def test_intersection_is_the_elements_of_both(pair: tuple[Box, Box]) -> None:
    common = pair[0].intersect(pair[1])
    assert (points(common) if common else set()) == points(pair[0]) & points(pair[1])
    assert len(points(pair[0])) == pair[0].numel


@given(two_boxes())
def test_overlap_within_a_rank_is_refused(pair: tuple[Box, Box]) -> None:
    shape = (9,) * len(pair[0].offset)
    same = pair[0] == pair[1]
    if same or points(pair[0]) & points(pair[1]):
        with pytest.raises(ManifestMismatch, match="overlap"):
            manifest(one("w", shape, pair[0]), one("w", shape, pair[1]))
    else:
        manifest(one("w", shape, pair[0]), one("w", shape, pair[1]))


def test_a_name_with_two_numbers_of_dimensions_is_refused_by_name() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        manifest(one("w", (4,)), one("w", (2, 2)))
    assert set(caught.value.mismatched) == {"w"}


def test_box_slices_and_text() -> None:
    box = Box((2, 3), (4, 5))
    assert box.relative_to((1, 3)) == (slice(1, 5), slice(0, 5))
    assert str(box) == "[2:6, 3:8]"
    assert Box((), ()).numel == 1


def test_a_shard_without_a_box_is_the_whole_tensor() -> None:
    shard = Shard("w", torch.zeros(3, 4).t())
    assert (shard.global_shape, shard.box) == ((4, 3), whole((4, 3)))
    assert shard.offset == (0, 0)


def test_a_shard_keeps_its_view() -> None:
    parameter = torch.zeros(6, 4)
    shard = Shard("w", parameter[2:4], (8, 4), (6, 0))
    assert shard.tensor.data_ptr() == parameter[2].data_ptr()
    assert shard.box == Box((6, 0), (2, 4))
    assert "w" in repr(shard)


@pytest.mark.parametrize(
    ("shape", "offset", "message"),
    [
        ((8, 4), None, "give both"),
        (None, (0, 0), "give both"),
        ((8, 4), (7, 0), "not inside"),
        ((8,), (0,), "differ in dimensions"),
        ((8, 4), (-1, 0), "whole numbers"),
        ((8, 4), (0,), "differ in dimensions"),
    ],
)
def test_a_shard_refuses_a_box_that_is_not_one(
    shape: tuple[int, ...] | None, offset: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"w: .*{message}"):
        Shard("w", torch.zeros(2, 4), shape, offset)


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_item_sizes_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}; a newer one would run it")
    assert dtype_name(dtype) == dtype_name(name) == name
    assert dtype.itemsize == ITEMSIZE[name]


def test_an_unknown_dtype_is_refused_naming_the_known() -> None:
    with pytest.raises(InvalidArgument, match=r"float7.*bfloat16"):
        dtype_name("float7")


def test_every_dtype_of_torch_is_known() -> None:
    """A dtype that a new torch brings must be looked at, not be refused in silence."""
    found = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert found <= set(ITEMSIZE)


def test_replacing_an_entry_changes_the_digest() -> None:
    entries = list(GOLDEN.entries)
    entries[2] = replace(entries[2], tensor=replace(entries[2].tensor, dtype="int32"))
    assert Manifest.of(entries).digest != GOLDEN.digest
