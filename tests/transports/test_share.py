from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.errors import ManifestMismatch
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.shard import PAIRS
from awexd_transports.share import share
from tests.transports.strategies import even, manifest, meshes, one, ragged, specs, whole

Cell = tuple[str, tuple[int, ...]]


def elements(entry: Entry) -> list[Cell]:
    spans = (range(a, b) for a, b in zip(entry.box.offset, entry.box.end, strict=True))
    return [(entry.tensor.name, point) for point in product(*spans)]


def check(registered: Sequence[Manifest], shared: Sequence[Manifest]) -> None:
    """Every element once; every box inside one entry of the rank's own, in order; canonical manifests."""
    assert len(shared) == len(registered)
    written = [cell for m in shared for entry in m.entries for cell in elements(entry)]
    assert len(written) == len(set(written))
    assert set(written) == {cell for m in registered for entry in m.entries for cell in elements(entry)}
    for own, segment in zip(registered, shared, strict=True):
        assert Manifest.decode(segment.encoded) == segment
        for name, entries in segment.by_name.items():
            if len(own.by_name[name]) == 1:
                assert [e.box.offset for e in entries] == sorted(e.box.offset for e in entries)
        for entry in segment.entries:
            inside = [e for e in own.by_name[entry.tensor.name] if e.box == entry.box or e.box.intersect(entry.box)]
            assert len(inside) == 1
            assert inside[0].box == entry.box or inside[0].box.intersect(entry.box) == entry.box
            assert entry.box.numel or 0 in entry.tensor.shape


def ratio(shared: Sequence[Manifest]) -> float:
    """Largest load over the mean."""
    loads = [m.nbytes for m in shared]
    return max(loads) * len(loads) / sum(loads)


def replicas(ranks: int, *shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[Manifest]:
    return [manifest(*(one(f"t{at}", shape, dtype=dtype) for at, shape in enumerate(shapes)))] * ranks


def split(ranks: int, names: int, shape: tuple[int, ...], dim: int = 0) -> list[Manifest]:
    held = []
    for low, high in even(shape[dim], ranks):
        box = Box((*(0,) * dim, low, *(0,) * (len(shape) - dim - 1)), (*shape[:dim], high - low, *shape[dim + 1 :]))
        held.append(manifest(*(one(f"w{at}", shape, box) for at in range(names))))
    return held


@settings(deadline=None)
@given(st.data())
def test_share_of_meshes_writes_every_element_once(data: st.DataObject) -> None:
    registered = data.draw(meshes(data.draw(specs())))
    check(registered, share(registered))


@settings(deadline=None)
@given(st.data())
def test_share_of_partly_overlapping_boxes_writes_every_element_once(data: st.DataObject) -> None:
    registered = data.draw(ragged(data.draw(specs()), data.draw(st.integers(1, 6))))
    check(registered, share(registered))


@settings(deadline=None)
@given(st.data())
def test_share_is_the_same_for_equal_input(data: st.DataObject) -> None:
    registered = data.draw(meshes(data.draw(specs())))
    again = [Manifest.decode(m.encoded) for m in registered]
    assert [m.digest for m in share(registered)] == [m.digest for m in share(again)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 10, 12, 24, 33, 48, 64])
def test_share_of_plain_data_parallel_is_balanced(ranks: int) -> None:
    """Cases 38 and 57: also where the number of ranks is no power of two."""
    layer = [(4096, 128), (128, 4096), (384, 128), (128,), (128,)]
    registered = replicas(ranks, (2000, 128), *layer * 8, (128,))
    shared = share(registered)
    assert ratio(shared) <= 1.05
    assert sum(len(m.entries) for m in shared) <= len(registered[0].entries) + 4 * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5, 7, 8, 48, 64])
def test_share_of_one_stack_of_experts_is_balanced(ranks: int) -> None:
    """Rows of the first dimension are coarse here: a cut may go inside one."""
    registered = replicas(ranks, (16, 48, 64))
    shared = share(registered)
    check(registered, shared)
    assert ratio(shared) <= 1.05


@pytest.mark.parametrize(("shards", "copies"), [(2, 2), (4, 2), (8, 8), (3, 5), (6, 7), (5, 12)])
@pytest.mark.parametrize("dim", [0, 1])
def test_share_of_hsdp_is_balanced(shards: int, copies: int, dim: int) -> None:
    registered = split(shards, 30, (512, 480), dim) * copies
    shared = share(registered)
    check(split(shards, 3, (24, 24), dim) * copies, share(split(shards, 3, (24, 24), dim) * copies))
    assert ratio(shared) <= 1.05


@pytest.mark.parametrize(("tensor", "data"), [(2, 2), (8, 8), (3, 4), (6, 2), (4, 5)])
def test_share_of_tensor_times_data_parallel_with_replicated_norms_is_balanced(tensor: int, data: int) -> None:
    shards = split(tensor, 12, (480, 120))
    norms = [one(f"norm{at}", (30_000,), dtype="float32") for at in range(12)]
    registered = [manifest(*m.entries, *norms) for m in shards] * data
    assert ratio(share(registered)) <= 1.05


def test_share_gives_replicated_tensors_to_the_ranks_that_hold_less() -> None:
    big, small = one("mine", (64, 64)), one("ours", (64, 64))
    shared = share([manifest(big, small), manifest(small)])
    assert [[e.tensor.name for e in m.entries] for m in shared] == [["mine"], ["ours"]]


def test_share_of_chained_holders_reaches_the_lower_bound() -> None:
    """Ranks 0-1, 1-2, 2-3 hold a tensor each; only filling again and again gives every rank three quarters."""
    names = [one(name, (1200, 10)) for name in "abc"]
    registered = [manifest(names[0]), manifest(*names[:2]), manifest(*names[1:]), manifest(names[2])]
    shared = share(registered)
    assert ratio(shared) <= 1.05


def test_share_without_replicas_returns_the_manifests_themselves() -> None:
    registered = split(64, 10, (256, 8))
    assert all(a is b for a, b in zip(share(registered), registered, strict=True))


def test_share_drops_empty_boxes_and_keeps_the_order() -> None:
    """torch.chunk of 5 rows over 4 ranks leaves the last one empty."""
    boxes = [Box((at,), (n,)) for at, n in ((0, 2), (2, 2), (4, 1), (5, 0))]
    registered = [manifest(one("b", (5,), box), one("a", (5,), box)) for box in boxes]
    shared = share(registered)
    assert [[e.tensor.name for e in m.entries] for m in shared] == [["b", "a"]] * 3 + [[]]


def test_share_keeps_a_tensor_without_elements_on_its_lowest_rank() -> None:
    shared = share([manifest(), manifest(one("none", (0, 4))), manifest(one("none", (0, 4)))])
    assert [len(m.entries) for m in shared] == [0, 1, 0]


def test_share_spreads_scalars_over_their_holders() -> None:
    """Zero dimensions cannot be cut: each goes to one holder."""
    registered = [manifest(*(one(f"s{at}", (), dtype="float32") for at in range(6)))] * 3
    shared = share(registered)
    check(registered, shared)
    assert [len(m.entries) for m in shared] == [2, 2, 2]


def tied(box: Box, shape: tuple[int, ...] = (64, 8), *, apart: bool = False) -> Manifest:
    embed, head = one("embed", shape, box), one("head", shape, box)
    return Manifest.of([embed, replace(head, piece=int(apart))])


def test_share_of_names_tied_everywhere_stores_them_once() -> None:
    """Case 40: on the writer's side."""
    registered = [tied(whole((64, 8)))] * 3
    shared = share(registered)
    check(registered, shared)
    for segment in shared:
        assert len(segment.pieces) * 2 == len(segment.entries)
        boxes = {name: [(e.box, e.piece) for e in entries] for name, entries in segment.by_name.items()}
        assert boxes["embed"] == boxes["head"]
    assert ratio(shared) <= 1.05
    assert sum(m.nbytes for m in shared) == 64 * 8 * 2


def test_share_of_names_tied_on_one_rank_only_takes_them_as_separate() -> None:
    registered = [tied(whole((64, 8))), tied(whole((64, 8)), apart=True)]
    shared = share(registered)
    check(registered, shared)


def test_share_keeps_sharded_ties_as_they_are() -> None:
    registered = [tied(Box((low, 0), (high - low, 8))) for low, high in even(64, 4)]
    assert list(share(registered)) == registered


def test_share_never_cuts_a_layout() -> None:
    entries = [replace(one(f"m{at}", (6, 4)), layout="marlin", piece=at) for at in range(5)]
    registered = [Manifest.of(entries)] * 2
    shared = share(registered)
    check(registered, shared)
    assert all(entry.box == whole((6, 4)) for m in shared for entry in m.entries)
    assert sorted(len(m.entries) for m in shared) == [2, 3]


def test_share_cuts_a_layout_that_is_only_another_shape() -> None:
    registered = [Manifest.of([replace(one("m", (4096, 64, 2)), layout=PAIRS)])] * 4
    shared = share(registered)
    check(registered, shared)
    assert [m.nbytes for m in shared] == [registered[0].nbytes // 4] * 4


def test_share_refuses_parts_of_a_layout_that_overlap_without_being_the_same() -> None:
    a = Manifest.of([replace(one("m", (6, 4)), layout="marlin")])
    b = Manifest.of([replace(one("m", (6, 4), Box((0, 0), (3, 4))), layout="marlin")])
    with pytest.raises(ManifestMismatch, match=r"rank 0 .*rank 1") as caught:
        share([a, b])
    assert set(caught.value.mismatched) == {"m"}


@pytest.mark.parametrize(
    "other",
    [
        one("w", (4, 4), dtype="float32"),
        one("w", (4, 5)),
        one("w", (16,)),
        replace(one("w", (4, 4)), layout="marlin"),
    ],
)
def test_share_refuses_ranks_that_disagree_on_a_tensor_naming_them(other: Entry) -> None:
    fine = one("fine", (2,))
    with pytest.raises(ManifestMismatch, match=r"rank 1 has bfloat16.* rank 2 has ") as caught:
        share([manifest(fine), manifest(fine, one("w", (4, 4))), manifest(fine, other)])
    assert set(caught.value.mismatched) == {"w"}


def test_share_leaves_small_tensors_whole() -> None:
    registered = replicas(8, (4096, 64), *[(64,)] * 40)
    shared = share(registered)
    norms = [entry for m in shared for entry in m.entries if entry.tensor.shape == (64,)]
    assert all(entry.box == whole((64,)) for entry in norms)


def test_share_of_nothing_is_nothing() -> None:
    assert share([]) == ()
    assert share([Manifest.of(())]) == (Manifest.of(()),)


def test_share_spec_of_a_segment_is_the_registered_one() -> None:
    registered = replicas(2, (8, 4), dtype="float8_e4m3fn")
    for segment in share(registered):
        assert {entry.tensor for entry in segment.entries} <= {TensorSpec("t0", (8, 4), "float8_e4m3fn")}


def test_the_first_share_and_plan_of_a_process_import_nothing() -> None:
    """Parts of NumPy that load others when they are first called would cost more than the work itself."""
    lines = (
        "import sys",
        "from awexd_transports.layout import Box, Entry, Manifest, TensorSpec",
        "from awexd_transports.plan import plan",
        "from awexd_transports.share import share",
        "spec = TensorSpec('w.0', (8, 4), 'bfloat16')",
        "halves = [Manifest.of([Entry(spec, Box((at, 0), (4, 4)), 0)]) for at in (0, 4, 0, 4)]",
        "before = set(sys.modules)",
        "bodies = [manifest.encoded for manifest in halves]",
        "plan(list(share([Manifest.decode(body) for body in bodies])), halves[:1], partial=True).copies",
        "print(*(set(sys.modules) - before))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "\n"
