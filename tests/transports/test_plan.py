from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import cover
from awexd_transports.copy import CopyTable
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import ManifestMismatch
from awexd_transports.joined import runs
from awexd_transports.layout import Box, Entry, Manifest
from awexd_transports.names import Ints
from awexd_transports.plan import Copy, Plan, compare, plan, unexpected
from awexd_transports.shard import PAIRS
from awexd_transports.share import share
from tests.transports.strategies import (
    Memory,
    dense,
    even,
    fill,
    held_by,
    identities,
    manifest,
    meshes,
    one,
    ragged,
    rows_of,
    seal,
    specs,
    strided,
    whole,
    wrong,
)


def move(
    data: st.DataObject, registered: Sequence[Manifest], destinations: Sequence[Manifest]
) -> tuple[Plan, list[Memory], list[str]]:
    """Trainer memory to segments to engine memory; what is wrong at the end."""
    tensors = {e.tensor.name: e.tensor for m in (*registered, *destinations) for e in m.entries}
    truth = identities(tensors.values())
    segments = share(registered)
    held = [data.draw(strided(held_by(m))) for m in registered]
    for m, memory in zip(registered, held, strict=True):
        fill(m, memory, truth)
    sealed = [seal(*of) for of in zip(registered, held, segments, strict=True)]
    memories = [data.draw(strided(held_by(m))) for m in destinations]
    made = plan(segments, destinations)
    CopyTable(rows_of(made, segments, sealed, destinations, memories)).run()
    assert all(memory.untouched() for memory in (*held, *sealed, *memories))
    return made, memories, [text for m, at in zip(destinations, memories, strict=True) for text in wrong(m, at, truth)]


@settings(deadline=None)
@given(st.data())
def test_any_mesh_to_any_mesh_brings_every_element_to_its_place(data: st.DataObject) -> None:
    """Cases 38, 39, 43: uneven, empty, replicated and strided shards on either side, every dtype."""
    tensors = data.draw(specs())
    destinations = data.draw(meshes(tensors))
    made, _, faults = move(data, data.draw(meshes(tensors)), destinations)
    assert not faults
    assert made.nbytes == sum(m.nbytes for m in destinations)


@settings(deadline=None)
@given(st.data())
def test_ragged_readers_of_any_mesh_get_every_element(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    destinations = data.draw(ragged(tensors, data.draw(st.integers(1, 4))))
    made, _, faults = move(data, data.draw(meshes(tensors)), destinations)
    assert not faults
    assert made.nbytes == sum(m.nbytes for m in destinations)


@settings(deadline=None)
@given(st.data())
def test_overlapping_sources_give_each_element_once_from_the_first(data: st.DataObject) -> None:
    """Manifests that were not shared: the planner subtracts boxes."""
    tensors = data.draw(specs())
    sources = [*data.draw(ragged(tensors, 3)), *data.draw(meshes(tensors, 2))]
    destinations = data.draw(meshes(tensors))
    truth = identities(tensors)
    held = [dense(held_by(m)) for m in sources]
    for m, memory in zip(sources, held, strict=True):
        fill(m, memory, truth)
    memories = [dense(held_by(m)) for m in destinations]
    made = plan(sources, destinations)
    assert made.nbytes == sum(m.nbytes for m in destinations)
    CopyTable(rows_of(made, sources, held, destinations, memories)).run()
    assert not [text for m, at in zip(destinations, memories, strict=True) for text in wrong(m, at, truth)]
    for copy in made.copies:
        name = destinations[copy.destination].entries[copy.destination_entry].tensor.name
        earlier = [
            (r, e)
            for r in range(copy.source + 1)
            for e in sources[r].by_name.get(name, ())
            if (r, sources[r].entries.index(e)) < (copy.source, copy.source_entry)
        ]
        assert not any(entry.box.intersect(copy.box) for _, entry in earlier)


@settings(deadline=None)
@given(st.data())
def test_copies_stand_in_order_and_the_digest_follows_them(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources, destinations = share(data.draw(meshes(tensors))), data.draw(meshes(tensors))
    made = plan(sources, destinations)
    order = [(c.destination, c.destination_entry, c.source, c.source_entry) for c in made.copies]
    assert order == sorted(order)
    again = plan([Manifest.decode(m.encoded) for m in sources], [Manifest.decode(m.encoded) for m in destinations])
    assert again == made
    assert again.copies == made.copies
    assert again.digest == made.digest
    reordered = sources[::-1]
    assert (plan(reordered, destinations).digest == made.digest) == (list(reordered) == list(sources))


def element_by_element(
    sources: Sequence[Manifest], destinations: Sequence[Manifest]
) -> dict[tuple[int, int, tuple[int, ...]], tuple[int, int]]:
    """Reference: for each element of each destination entry, the first source entry that has it."""
    holders: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
    for rank, found in enumerate(sources):
        for at, entry in enumerate(found.entries):
            for point in product(*map(range, entry.box.offset, entry.box.end)):
                holders.setdefault((entry.tensor.name, point), (rank, at))
    return {
        (rank, at, point): holders[entry.tensor.name, point]
        for rank, found in enumerate(destinations)
        for at, entry in enumerate(found.entries)
        for point in product(*map(range, entry.box.offset, entry.box.end))
    }


@settings(deadline=None)
@given(st.data())
def test_copies_are_what_a_planner_of_single_elements_finds(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    raw = data.draw(st.booleans())
    sources = data.draw(meshes(tensors))
    sources = [*data.draw(ragged(tensors, 2)), *sources] if raw else list(share(sources))
    destinations = data.draw(st.one_of(meshes(tensors), ragged(tensors, 3)))
    destinations = [*destinations, *data.draw(st.lists(st.sampled_from(destinations), max_size=3))]
    found: dict[tuple[int, int, tuple[int, ...]], tuple[int, int]] = {}
    for copy in plan(sources, destinations).copies:
        for point in product(*map(range, copy.box.offset, copy.box.end)):
            element = copy.destination, copy.destination_entry, point
            assert element not in found
            found[element] = copy.source, copy.source_entry
    assert found == element_by_element(sources, destinations)


@settings(deadline=None)
@given(st.data())
def test_pairs_are_looked_at_in_chunks_of_any_size(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources, destinations = share(data.draw(meshes(tensors))), data.draw(meshes(tensors))
    made = plan(sources, destinations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "CHUNK", data.draw(st.integers(1, 7)))
        patch.setattr(cover, "FEW", data.draw(st.integers(0, 3)))
        assert plan(sources, destinations).digest == made.digest


@settings(deadline=None)
@given(st.data())
def test_traffic_and_each_destination_are_what_the_copies_say(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources, distinct = share(data.draw(meshes(tensors))), data.draw(meshes(tensors))
    destinations = data.draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6))
    made = plan(sources, destinations, partial=True)
    counts, nbytes = made.traffic()
    assert counts.shape == nbytes.shape == (len(sources), len(destinations))
    for rank, found in enumerate(destinations):
        own = [copy for copy in made.copies if copy.destination == rank]
        assert list(made.to(rank).copies(rank)) == own
        for source in range(len(sources)):
            taken = [copy for copy in own if copy.source == source]
            sizes = [ITEMSIZE[found.entries[c.destination_entry].tensor.dtype] * c.box.numel for c in taken]
            assert (counts[source, rank], nbytes[source, rank]) == (len(taken), sum(sizes))
    assert counts.sum() == len(made) == len(made.copies)
    assert nbytes.sum() == made.nbytes


def test_slices_over_many_ranks_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(starts: Ints, counts: Ints) -> Ints:
        nonlocal compared
        compared += int(counts.sum())
        return runs(starts, counts)

    monkeypatch.setattr(cover, "runs", counted)
    shape = (960, 2)
    sides = [
        [manifest(*(one(f"w.{at}", shape, rows(shape, *span)) for at in range(5))) for span in even(960, parts)]
        for parts in (96, 80)
    ]
    assert len(plan(*sides).copies) == compared == 5 * (96 + 80 - 16)


def test_slices_that_end_too_early_are_not_made_up_for_by_those_of_the_next_name() -> None:
    """``a`` lacks two rows; the first slice of ``b``, which follows it, has two."""
    parts = [(0, 2), *((at, at + 1) for at in range(2, 8))]
    sources = [manifest(one("a", (10, 1), rows((10, 1), at, at + 1))) for at in range(8)]
    sources += [manifest(one("b", (10, 1), rows((10, 1), *span))) for span in parts]
    with pytest.raises(ManifestMismatch, match=r"a \[8:10, 0:1\]"):
        plan(sources, [manifest(one("a", (10, 1)))], partial=True)


def test_equal_destinations_are_planned_once() -> None:
    """Eight engines of two ranks are two destinations; what each rank gets is not spelled out."""
    shape = (8, 2)
    engine = [manifest(one("w", shape, rows(shape, *span))) for span in even(8, 2)]
    again = [Manifest.decode(m.encoded) for m in engine]
    made = plan([manifest(one("w", shape))], [*engine * 4, *again * 4])
    assert len(made.moves) == 2
    assert made.destinations.tolist() == [0, 1] * 8
    assert len(made) == len(made.copies) == 16
    assert made.nbytes == 8 * 8 * 2 * 2


def rows(shape: tuple[int, int], low: int, high: int) -> Box:
    return Box((low, 0), (high - low, shape[1]))


def test_tensor_parallel_6_to_4() -> None:
    """Case 39."""
    shape = (24, 2)
    sources = [manifest(one("w", shape, rows(shape, *span))) for span in even(24, 6)]
    destinations = [manifest(one("w", shape, rows(shape, *span))) for span in even(24, 4)]
    assert [(c.source, c.destination, c.box.offset[0], c.box.shape[0]) for c in plan(sources, destinations).copies] == [
        (0, 0, 0, 4),
        (1, 0, 4, 2),
        (1, 1, 6, 2),
        (2, 1, 8, 4),
        (3, 2, 12, 4),
        (4, 2, 16, 2),
        (4, 3, 18, 2),
        (5, 3, 20, 4),
    ]


def test_four_key_value_heads_to_tensor_parallel_8_are_replicated() -> None:
    """Case 43: two ranks hold each head."""
    shape = (4 * 16, 8)
    sources = [manifest(one("k", shape, rows(shape, *span))) for span in even(64, 2)]
    destinations = [manifest(one("k", shape, rows(shape, rank // 2 * 16, rank // 2 * 16 + 16))) for rank in range(8)]
    made = plan(sources, destinations)
    assert [(c.source, c.destination) for c in made.copies] == [(rank // 4, rank) for rank in range(8)]
    assert made.nbytes == 8 * 16 * 8 * 2


def test_gate_and_up_fused_per_rank_are_two_boxes_each() -> None:
    """Case 41: rank 0 holds gate 0..3 then up 10..13 in one parameter; each half is its own entry."""
    data = [manifest(one("gate", (8, 1)), one("up", (8, 1)))]
    destinations = [
        manifest(one("gate", (8, 1), rows((8, 1), *span)), one("up", (8, 1), rows((8, 1), *span)))
        for span in even(8, 2)
    ]
    copies = plan(data, destinations).copies
    assert [(c.destination, c.source_entry, c.destination_entry, c.box.offset[0]) for c in copies] == [
        (0, 0, 0, 0),
        (0, 1, 1, 0),
        (1, 0, 0, 4),
        (1, 1, 1, 4),
    ]


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (5, 2)])
def test_padding_of_a_vocabulary_is_not_declared_and_not_planned(writers: int, readers: int) -> None:
    """Case 42: five real rows; padding to 8 and to 6 is each side's own business."""
    shape = (5, 2)
    sources = [manifest(one("embed", shape, rows(shape, *span))) for span in even(5, writers)]
    destinations = [manifest(one("embed", shape, rows(shape, *span))) for span in even(5, readers)]
    assert plan(sources, destinations).nbytes == 5 * 2 * 2


def test_sixty_four_trainers_feed_one_engine_evenly() -> None:
    """Case 57: every trainer sends the same share."""
    registered = [manifest(*(one(f"w{at}", (64, 64)) for at in range(16)))] * 64
    destinations = [
        manifest(*(one(f"w{at}", (64, 64), rows((64, 64), *span)) for at in range(16))) for span in even(64, 8)
    ]
    loads = [0] * 64
    for copy in plan(share(registered), destinations).copies:
        loads[copy.source] += copy.box.numel
    assert max(loads) <= 1.05 * sum(loads) / 64


def tied(*names: str, shape: tuple[int, ...] = (6, 2)) -> Manifest:
    return Manifest.of(one(name, shape) for name in names)


def test_tied_names_of_a_reader_are_written_once_from_the_first_that_is_published() -> None:
    """Case 40: the engine ties, the trainer has either name."""
    made = plan([manifest(one("head", (6, 2)))], [tied("embed", "head")])
    assert made.copies == (Copy(0, 0, 0, 1, whole((6, 2))),)
    assert made.checks == ()


def test_tied_names_of_a_reader_that_come_apart_are_checked_against_each_other() -> None:
    """Case 40: separate in the trainer; if their bytes differ, the tie would lose one of them silently."""
    shape = (6, 2)
    sources = [
        manifest(one("head", shape, rows(shape, *span)), one("embed", shape, rows(shape, *span))) for span in even(6, 2)
    ]
    made = plan(sources, [tied("embed", "head")])
    assert [(c.source, c.source_entry, c.destination_entry) for c in made.copies] == [(0, 1, 0), (1, 1, 0)]
    assert [(c.source, c.source_entry, c.destination_entry) for c in made.checks] == [(0, 0, 1), (1, 0, 1)]
    assert made.nbytes == 6 * 2 * 2


def test_names_tied_on_both_sides_need_no_check() -> None:
    made = plan(share([tied("embed", "head")] * 3), [tied("embed", "head")])
    assert made.checks == ()
    assert made.nbytes == 6 * 2 * 2


def test_names_tied_by_the_trainer_reach_an_engine_that_has_them_apart() -> None:
    """Case 40: stored once, delivered under both names."""
    made = plan(share([tied("embed", "head")]), [manifest(one("embed", (6, 2)), one("head", (6, 2)))])
    assert [(c.source_entry, c.destination_entry) for c in made.copies] == [(0, 0), (1, 1)]
    assert made.nbytes == 2 * 6 * 2 * 2


def test_a_tied_name_that_the_reader_does_not_have_is_not_unexpected() -> None:
    sources, destinations = [tied("embed", "head")], [manifest(one("embed", (6, 2)))]
    assert unexpected(sources, destinations) == []
    assert len(plan(sources, destinations).copies) == 1


def test_a_tied_group_that_nobody_publishes_is_missing_by_all_its_names() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        plan([manifest(one("other", (6, 2)))], [tied("embed", "head")])
    assert caught.value.missing == ["embed", "head"]
    assert caught.value.unexpected == ["other"]


@settings(deadline=None)
@given(st.data())
def test_ties_on_either_side_bring_all_names(data: st.DataObject) -> None:
    """Case 40 on random meshes: the same bytes under both names, tied or not on each side."""
    tensors = data.draw(specs())[:1]
    twin = replace(tensors[0], name="twin")
    truth = identities(tensors)
    truth["twin"] = truth[tensors[0].name]

    def doubled(manifests: Sequence[Manifest], together: bool) -> list[Manifest]:
        return [
            Manifest.of(
                e
                for at, entry in enumerate(m.entries)
                for e in (
                    replace(entry, piece=at if together else 2 * at),
                    replace(entry, tensor=twin, piece=at if together else 2 * at + 1),
                )
            )
            for m in manifests
        ]

    sources = share(doubled(data.draw(meshes(tensors)), data.draw(st.booleans())))
    destinations = doubled(data.draw(meshes(tensors)), data.draw(st.booleans()))
    held = [dense(held_by(m)) for m in sources]
    for m, memory in zip(sources, held, strict=True):
        fill(m, memory, truth)
    memories = [dense(held_by(m)) for m in destinations]
    made = plan(sources, destinations)
    assert made.nbytes == sum(m.nbytes for m in destinations)
    CopyTable(rows_of(made, sources, held, destinations, memories)).run()
    assert not [text for m, at in zip(destinations, memories, strict=True) for text in wrong(m, at, truth)]
    checked = rows_of(made, sources, held, destinations, memories, made.checks)
    assert CopyTable(checked).first_difference() is None


def test_a_missing_name_is_refused() -> None:
    """Case 3: both sets are named."""
    with pytest.raises(ManifestMismatch, match=r"1 missing \(a\); 1 unexpected \(model\.a\)") as caught:
        plan([manifest(one("model.a", (4,)))], [manifest(one("a", (4,)))])
    assert (caught.value.missing, caught.value.unexpected) == (["a"], ["model.a"])


def test_a_part_that_nobody_publishes_is_missing_and_shown() -> None:
    shape = (8, 2)
    sources = [manifest(one("w", shape, rows(shape, 0, 3))), manifest(one("w", shape, rows(shape, 5, 8)))]
    with pytest.raises(ManifestMismatch, match=r"w \[3:5, 0:2\]") as caught:
        plan(sources, [manifest(one("w", shape, rows(shape, 0, 2))), manifest(one("w", shape, rows(shape, 2, 8)))])
    assert caught.value.missing == ["w"]


def test_overlap_does_not_hide_a_hole_of_the_same_size() -> None:
    """Counting elements alone would be fooled: four of eight twice, four never."""
    shape = (8, 2)
    sources = [manifest(one("w", shape, rows(shape, 0, 4))), manifest(one("w", shape, rows(shape, 0, 4)))]
    with pytest.raises(ManifestMismatch, match=r"w \[4:8, 0:2\]"):
        plan(sources, [manifest(one("w", shape))])


@pytest.mark.parametrize(
    ("published", "declared", "text"),
    [
        (one("w", (4, 4), dtype="float32"), one("w", (4, 4)), r"published as float32\[4, 4\], .*bfloat16\[4, 4\]"),
        (one("w", (4, 3)), one("w", (4, 4)), r"published as bfloat16\[4, 3\], .*bfloat16\[4, 4\]"),
        (one("w", (16,)), one("w", (4, 4)), r"published as bfloat16\[16\], .*bfloat16\[4, 4\]"),
        (replace(one("w", (4, 4)), layout="marlin"), one("w", (4, 4)), "in layout marlin, .*"),
    ],
)
def test_what_differs_is_refused_naming_both_sides(published: Entry, declared: Entry, text: str) -> None:
    """Cases 37 and 49: no cast and no broadcast is ever planned."""
    for call in (plan, compare):
        with pytest.raises(ManifestMismatch, match=text) as caught:
            call([manifest(published)], [manifest(declared)])
        assert set(caught.value.mismatched) == {"w"}
        assert not caught.value.missing


def test_a_mixed_dtype_model_keeps_each_dtype() -> None:
    """Case 45: an fp32 bias among bf16 weights."""
    tensors = [one("w", (4, 4)), one("e_score_correction_bias", (256,), dtype="float32")]
    made = plan([manifest(*tensors)], [manifest(*tensors)])
    assert made.nbytes == 4 * 4 * 2 + 256 * 4


def test_published_names_that_nobody_declares_are_refused_unless_the_view_is_partial() -> None:
    """Case 44: MTP layers and buffers are told, not dropped."""
    sources, destinations = [manifest(one("a", (4,)), one("mtp.b", (4,)))], [manifest(one("a", (4,)))]
    with pytest.raises(ManifestMismatch) as caught:
        plan(sources, destinations)
    assert caught.value.unexpected == ["mtp.b"]
    assert unexpected(sources, destinations) == ["mtp.b"]
    assert len(plan(sources, destinations, partial=True).copies) == 1


def test_compare_ignores_names_of_one_side_only() -> None:
    compare([manifest(one("a", (4,)))], [manifest(one("b", (4,)))])


def test_a_layout_moves_whole_or_not_at_all() -> None:
    shape = (6, 4)
    source = Manifest.of([replace(one("m", shape), layout="marlin")])
    assert len(plan([source], [source]).copies) == 1
    half = Manifest.of([replace(one("m", shape, rows(shape, 0, 3)), layout="marlin")])
    with pytest.raises(ManifestMismatch, match="layout marlin moves whole"):
        plan([source], [half])


def test_a_layout_that_is_only_another_shape_is_cut_as_a_plain_tensor_is() -> None:
    shape = (6, 4, 2)
    source = [Manifest.of([replace(one("m", shape), layout=PAIRS)])] * 2
    box = Box((1, 2, 1), (3, 2, 1))
    destination = Manifest.of([replace(one("m", shape, box), layout=PAIRS)])
    copies = plan(share(source), [destination], partial=True).copies
    assert sum(copy.box.numel for copy in copies) == box.numel
    assert all(copy.box.intersect(box) == copy.box for copy in copies)
    with pytest.raises(ManifestMismatch, match="in layout pairs"):
        plan(source, [manifest(one("m", shape, box))], partial=True)


def test_a_tensor_without_elements_must_still_be_known() -> None:
    nothing = manifest(one("none", (0, 4)))
    made = plan(share([nothing] * 2), [nothing])
    assert (made.copies, made.nbytes) == ((), 0)
    with pytest.raises(ManifestMismatch) as caught:
        plan([manifest()], [nothing])
    assert caught.value.missing == ["none"]


def test_scalars_are_planned() -> None:
    scalar = manifest(one("scale", (), dtype="float32"))
    assert plan([scalar], [scalar]).copies == (Copy(0, 0, 0, 0, Box((), ())),)


def test_the_digest_depends_on_both_sides() -> None:
    a, b = manifest(one("a", (4,))), manifest(one("b", (4,)))
    both = manifest(one("a", (4,)), one("b", (4,)))
    assert len({plan([a, b], [both]).digest, plan([both], [both]).digest, plan([both], [a, b]).digest}) == 3


def test_the_digest_does_not_depend_on_what_a_segment_was_cut_from() -> None:
    """The writer makes its segment's manifest of one with more dimensions; the reader gets it in bytes."""
    both, own = one("both", (2, 2)), one("own", (1000,))
    segment = share([manifest(both), manifest(both, own)])[1]
    assert [entry.tensor.name for entry in segment.entries] == ["own"]
    here, there = (plan([found], [manifest(own)]) for found in (segment, Manifest.decode(segment.encoded)))
    assert here.digest == there.digest


def test_a_plan_does_not_change_by_accident() -> None:
    """Golden: writer and reader of two builds compare this. A new value needs a new PLANNER_VERSION."""
    shape = (10, 4)
    registered = [manifest(one("w", shape), one("norm", (4,), dtype="float32"))] * 3
    destinations = [
        manifest(one("w", shape, rows(shape, *span)), one("norm", (4,), dtype="float32")) for span in even(10, 2)
    ]
    made = plan(share(registered), destinations)
    assert made.digest == "5ccf5bb551bfa5b6cd55871411ee9e07fdbd0c97decbfe9c66025bae0edfddf9"


def test_planning_thousands_of_names_for_64_ranks_takes_seconds() -> None:
    """Bound to show a quadratic blow-up or names looked at one by one, not to measure."""
    shape = (640, 8)
    registered = [manifest(*(one(f"w{at}", shape, rows(shape, *span)) for at in range(1000))) for span in even(640, 64)]
    destinations = [
        manifest(*(one(f"w{at}", shape, Box((0, 4 * half), (640, 4))) for at in range(1000))) for half in range(2)
    ]
    started = time.monotonic()
    made = plan(share(registered), destinations)
    assert len(made.copies) == 2 * 64 * 1000
    assert time.monotonic() - started < 5
