from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports import columns
from awexd_transports.dtypes import ITEMSIZE, dtype_name
from awexd_transports.errors import InvalidArgument, ManifestMismatch
from awexd_transports.layout import ALIGNMENT, Box, Entry, Manifest, Shard, TensorSpec
from awexd_transports.shard import MAX_NAME_BYTES
from tests.transports.strategies import manifest, one, whole

GOLDEN = Manifest.of(
    [
        Entry(TensorSpec("model.embed_tokens.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("lm_head.weight", (8, 4), "bfloat16"), Box((4, 0), (4, 4)), 0),
        Entry(TensorSpec("model.norm.scale", (), "float32"), Box((), ()), 1),
        Entry(TensorSpec("model.layers.0.mlp.été", (3, 0), "float8_e4m3fn"), Box((1, 0), (2, 0)), 2, "marlin"),
    ]
)
A, B, C = one("a", (4, 2)), one("b", (4, 2), Box((2, 0), (2, 2))), one("c", (5,), dtype="float32")


def changed(entry: Entry, **values: Any) -> Entry:
    """``name``, ``dtype`` and ``extent`` are the tensor's, ``offset`` and ``shape`` the box's."""
    tensor = {"name": "name", "dtype": "dtype", "extent": "shape"}
    for key, value in values.items():
        if key in tensor:
            entry = replace(entry, tensor=replace(entry.tensor, **{tensor[key]: value}))
        elif key in ("offset", "shape"):
            entry = replace(entry, box=replace(entry.box, **{key: value}))
        else:
            entry = replace(entry, **{key: value})
    return entry


MALFORMED: dict[str, tuple[list[Entry], str]] = {
    "an empty name": ([changed(A, name="")], "non-empty"),
    "a name that is a number": ([changed(A, name=7)], "non-empty"),
    "a name that is null": ([changed(A, name=None)], "non-empty"),
    "a name too long": ([changed(A, name="x" * (MAX_NAME_BYTES + 1))], "more than"),
    "a name too long in bytes": ([changed(A, name="é" * (MAX_NAME_BYTES // 2 + 1))], "more than"),
    "a name with NUL": ([changed(A, name="a\0b")], "control"),
    "a name with a line feed": ([changed(A, name="a\nb")], "control"),
    "an unknown dtype": ([changed(A, dtype="float7")], "float7"),
    "a dtype that is null": ([changed(A, dtype=None)], "dtype"),
    "a shape that is a string": ([changed(A, extent="42")], "whole numbers"),
    "a fractional extent": ([changed(A, shape=(4.0, 2))], "whole numbers"),
    "an extent that is true": ([changed(A, shape=(True, 2))], "whole numbers"),
    "a negative extent": ([changed(A, shape=(-1, 2))], "whole numbers"),
    "a negative offset": ([changed(A, offset=(-1, 0))], "whole numbers"),
    "a negative offset further back": ([A, changed(B, piece=1, offset=(-1, 0))], "b: .*whole numbers"),
    "a negative global extent": ([changed(A, extent=(-4, 2))], "whole numbers"),
    "an offset of fewer dimensions": ([changed(A, offset=(0,))], "differ in dimensions"),
    "an extent of more dimensions": ([changed(A, shape=(4, 2, 1))], "differ in dimensions"),
    "a box outside its tensor": ([changed(A, offset=(1, 0))], "not inside"),
    "a box outside its tensor, of a later entry": (
        [changed(A, shape=(1, 2)), changed(A, piece=1, offset=(4, 0), shape=(1, 2))],
        r"a: its box \[4:5, 0:2\] is not inside",
    ),
    "too many dimensions": ([changed(A, extent=(1,) * 17, offset=(0,) * 17, shape=(1,) * 17)], "at most 16"),
    "too many elements": ([changed(A, extent=(1 << 48, 2))], "elements; at most"),
    "an extent too large beside an empty one": ([changed(A, extent=(1 << 50, 0), shape=(4, 0))], "elements; at most"),
    "an extent beyond 64 bits": ([changed(A, extent=(1 << 64, 0), shape=(4, 0))], "elements; at most"),
    "an offset beyond 64 bits": ([changed(A, offset=(1 << 64, 0))], "not inside"),
    "too many bytes": (
        [one(f"x{at}", (1 << 48,), dtype="complex128", piece=at) for at in range(257)],
        "shards of more than",
    ),
    "a piece out of order": ([changed(A, piece=1)], "order of appearance"),
    "a piece left out": ([A, changed(B, piece=2)], "b: piece 2 is not numbered in order of appearance"),
    "a negative piece": ([changed(A, piece=-1)], "piece -1"),
    "a negative piece further back": ([A, changed(B, piece=-1)], "piece -1"),
    "a piece beyond 64 bits": ([changed(A, piece=1 << 64)], "order of appearance"),
    "a fractional piece": ([changed(A, piece=0.0)], r"piece 0\.0"),
    "a piece that is true": ([A, changed(B, piece=True)], "piece True"),
    "a layout that is empty": ([changed(A, layout="")], "non-empty"),
    "a layout that is a list": ([changed(A, layout=["x"])], "non-empty"),
}
CONTRADICTING: dict[str, tuple[list[Entry], str]] = {
    "an alias of another shape": ([A, B], "b: an alias of a"),
    "an alias of fewer dimensions": ([one("a", (4, 1)), one("b", (4,))], "b: an alias of a"),
    "an alias of another dtype": ([A, changed(A, name="b", dtype="float16")], "b: an alias of a"),
    "a tensor declared twice": ([A, changed(A, piece=1)], r"a: declared twice: \[0:4, 0:2\] and \[0:4, 0:2\] overlap"),
    "boxes that overlap": ([A, changed(B, name="a", piece=1)], "a: declared twice"),
    "an empty box twice": ([one("e", (0, 3), piece=at) for at in range(2)], "e: declared twice"),
    "a tensor with two dtypes": (
        [A, changed(B, name="a", piece=1, dtype="float16")],
        r"a: declared as bfloat16\[4, 2\] and as float16\[4, 2\]",
    ),
    "a tensor with two shapes": ([A, changed(B, name="a", piece=1, extent=(8, 2))], "a: declared as"),
    "a tensor with two layouts": (
        [changed(B, layout="marlin"), changed(A, name="b", piece=1, shape=(2, 2))],
        "b: declared as .* in layout marlin and as ",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_entries_that_are_not_well_formed_are_refused(what: str) -> None:
    entries, message = MALFORMED[what]
    with pytest.raises(InvalidArgument, match=message):
        Manifest.of(entries)


@pytest.mark.parametrize("what", CONTRADICTING)
def test_entries_that_contradict_each_other_are_refused_by_name(what: str) -> None:
    entries, message = CONTRADICTING[what]
    with pytest.raises(ManifestMismatch, match=message) as caught:
        Manifest.of(entries)
    assert len(caught.value.mismatched) == 1


def test_all_names_that_contradict_are_told_at_once() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        Manifest.of([A, changed(A, piece=1), B, one("t", (3,), dtype="int8", piece=2), one("u", (4,), piece=2)])
    assert set(caught.value.mismatched) == {"a", "b", "u"}


def test_more_entries_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_ENTRIES", 2)
    with pytest.raises(InvalidArgument, match="3 shards in one manifest; at most 2"):
        manifest(A, B, C)


def test_more_numbers_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_NUMBERS", 30)
    with pytest.raises(InvalidArgument, match="36 numbers; at most 30"):
        manifest(A, B, C)


def test_boxes_too_entangled_to_be_told_apart_are_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    sails = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    windmill = [one("w", (3, 3), Box(*sail)) for sail in sails]
    assert manifest(*windmill).nbytes == 9 * 2
    monkeypatch.setattr(columns, "MAX_ENTANGLED", 4)
    with pytest.raises(InvalidArgument, match="w: 5 boxes that overlap or are too entangled"):
        manifest(*windmill)


def test_many_boxes_of_one_name_are_checked_quickly() -> None:
    """Columns of columns: all start in row 0. Bound to show a quadratic blow-up (minutes), not to measure."""
    started = time.monotonic()
    found = manifest(*(one("w", (4, 20_000), Box((0, at), (4, 1))) for at in range(20_000)))
    assert found.nbytes == 4 * 20_000 * 2
    assert time.monotonic() - started < 10


def test_entries_come_back_as_they_were_given() -> None:
    entries = (*GOLDEN.entries, one("w.1.x", (4, 4), Box((0, 1), (4, 2)), piece=3))
    found = Manifest.of(entries)
    assert found.entries == entries
    assert [found.columns.entry(row) for row in range(len(found))] == list(entries)
    assert len(found) == 5


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
