from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import digest as digests
from awexd_transports.digest import MASK, SPAN, digest, parted, terms, total
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Box
from awexd_transports.view import View
from tests.transports.strategies import dense, part_of, strided, whole

Bytes = npt.NDArray[np.uint8]
DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128")


def mix(key: int, number: int) -> int:
    z = (number * 0x9E3779B97F4A7C15 + key) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def by_definition(truth: Bytes, box: Box, span: int) -> int:
    """Element by element, from the tensor's bytes of shape (*shape, itemsize)."""
    *shape, size = truth.shape
    found = 0
    for index in product(*(range(a, b) for a, b in zip(box.offset, box.end, strict=True))):
        row = 0
        for at, extent in zip(index[:-1], shape[:-1], strict=True):
            row = row * extent + at
        for byte in range(size):
            word, within = divmod((index[-1] if index else 0) * size + byte, 8)
            weight = mix(0x9F1B5C3A7D24E681, row) * mix(0x3C6EF372FE94F82B, word // span)
            found += weight * mix(0xA54FF53A5F1D36F1, word % span) * (int(truth[index][byte]) << (8 * within))
    return found & MASK


def filled(shape: tuple[int, ...], size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (*shape, size), dtype=np.uint8)


def packed(truth: Bytes, dtype: str) -> View:
    held = np.ascontiguousarray(truth)
    return View.packed(held.ctypes.data, truth.shape[:-1], dtype, held)


@st.composite
def cut(draw: st.DrawFn, box: Box) -> list[Box]:
    """Disjoint boxes that are all of it."""
    if draw(st.booleans()) or box.numel < 2:
        return [box]
    dim = draw(st.sampled_from([d for d, n in enumerate(box.shape) if n > 1]))
    at = draw(st.integers(1, box.shape[dim] - 1))
    first = (*box.shape[:dim], at, *box.shape[dim + 1 :])
    second = (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :])
    moved = (*box.offset[:dim], box.offset[dim] + at, *box.offset[dim + 1 :])
    return [*draw(cut(Box(box.offset, first))), *draw(cut(Box(moved, second)))]


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Spans of 4 words instead of 256 Ki, so that small rows have several."""
    for kept in (digests.kept_words, digests._kept_rows):
        kept.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(digests, "SPAN", 4)
        yield 4
    digests.kept_words.cache_clear()


class TestDefinition:
    @pytest.mark.parametrize(
        ("shape", "dtype", "golden"),
        [
            ((), "float32", 0x34FDB581B16D94BD),
            ((7,), "uint8", 0x0DCEA932B16D94BD),
            ((3, 5), "bfloat16", 0x4FAE6F19EE003292),
            ((2, 3, 4), "float32", 0x331CF8209DFC7024),
            ((2, 2), "complex128", 0x4D2066FA8C1DE558),
        ],
    )
    def test_golden_values(self, shape: tuple[int, ...], dtype: str, golden: int) -> None:
        """The bytes are 1, 2, 3, ..."""
        count = math.prod(shape) * ITEMSIZE[dtype]
        truth = (np.arange(count) + 1).astype(np.uint8).reshape(*shape, ITEMSIZE[dtype])
        assert digest(packed(truth, dtype), shape, (0,) * len(shape)) == golden

    @settings(deadline=None, max_examples=60)
    @given(st.data())
    def test_additive_over_any_boxes_in_any_memory(self, data: st.DataObject) -> None:
        """Every element size, odd widths, gaps between rows and elements, dimensions in any order."""
        shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 16)), max_size=3)))
        dtype = data.draw(st.sampled_from(DTYPES))
        truth = filled(shape, ITEMSIZE[dtype])
        expected = by_definition(truth, whole(shape), SPAN)
        boxes = data.draw(cut(whole(shape)))
        asked = [(box, dtype) for box in boxes]
        memory = data.draw(strided(asked)) if data.draw(st.booleans()) else dense(asked)
        found = 0
        for box, view in zip(boxes, memory.views, strict=True):
            view.bytes_array()[...] = part_of(truth, box).view(np.int8)
            one = digest(view, shape, box.offset)
            if box.numel < 40:
                assert one == by_definition(truth, box, SPAN)
            found += one
        assert found & MASK == expected

    @settings(deadline=None, max_examples=60)
    @given(data=st.data())
    @pytest.mark.usefixtures("short_spans")
    def test_rows_of_several_spans(self, data: st.DataObject) -> None:
        shape = (3, data.draw(st.sampled_from((64, 65, 40))))
        dtype = data.draw(st.sampled_from(("uint8", "bfloat16", "float32")))
        truth = filled(shape, ITEMSIZE[dtype])
        boxes = data.draw(cut(whole(shape)))
        memory = dense((box, dtype) for box in boxes)
        found = 0
        for box, view in zip(boxes, memory.views, strict=True):
            view.bytes_array()[...] = part_of(truth, box).view(np.int8)
            found += digest(view, shape, box.offset)
        assert found & MASK == by_definition(truth, whole(shape), 4)

    @pytest.mark.parametrize("rows", [1, 3, 600])
    @pytest.mark.parametrize("outer", [(), (2,)])
    def test_equal_parts_are_the_digests_of_those_parts(self, rows: int, outer: tuple[int, ...]) -> None:
        shape = (*outer, rows, 256)
        view = packed(filled(shape, 2), "bfloat16")
        together = parted(view, shape, (0,) * len(shape), 4)
        assert together is not None
        for at, found in enumerate(together().view(np.uint64).tolist()):
            place = (*(slice(0, n) for n in shape[:-1]), slice(64 * at, 64 * at + 64))
            assert found == digest(view.sub(place), shape, (*(0 for _ in shape[1:]), 64 * at))

    def test_parts_that_are_no_whole_words_are_left_to_terms(self) -> None:
        assert parted(packed(filled((3, 12), 2), "bfloat16"), (3, 12), (0, 0), 2) is None
        assert parted(packed(filled((3, 16), 2), "bfloat16"), (3, 24), (0, 4), 3) is None
        assert parted(View.of(torch.zeros(8, 8).t()), (8, 8), (0, 0), 2) is None

    def test_large_tensors_of_every_kind_of_memory(self) -> None:
        """The same bytes, whole rows, gathered, transposed, flat: one digest."""
        base = torch.from_numpy(filled((700, 1001), 2, 3).view(np.int16)[..., 0])
        expected = digest(View.of(base), (700, 1001), (0, 0))
        wide = torch.zeros(700, 1008, dtype=torch.int16)
        wide[:, 4:1005] = base
        turned = base.t().contiguous().t()
        for held in (wide[:, 4:1005], turned, base.clone()):
            assert digest(View.of(held), (700, 1001), (0, 0)) == expected
        halves = digest(View.of(base[:, :500]), (700, 1001), (0, 0)) + digest(
            View.of(base[:, 500:]), (700, 1001), (0, 500)
        )
        assert halves & MASK == expected

    def test_prepared_terms_see_what_is_there_when_they_are_called(self) -> None:
        tensor = torch.zeros(100, 100, dtype=torch.float64)
        prepared = terms(View.of(tensor), (100, 100), (0, 0))
        assert total(prepared) == 0
        tensor[3, 4] = 1.5
        assert total(prepared) == digest(View.of(tensor), (100, 100), (0, 0)) != 0

    def test_nothing_sums_to_nothing(self) -> None:
        assert terms(View.of(torch.zeros(0, 4)), (0, 4), (0, 0)) == []
        assert digest(View.of(torch.zeros(4, 0)), (4, 0), (0, 0)) == 0


def element_swap(held: Bytes) -> None:
    held[0, 0], held[4, 3] = held[4, 3].copy(), held[0, 0].copy()


def neighbour_swap(held: Bytes) -> None:
    held[2, 5], held[2, 6] = held[2, 6].copy(), held[2, 5].copy()


def row_swap(held: Bytes) -> None:
    held[[1, 6]] = held[[6, 1]]


def column_swap(held: Bytes) -> None:
    held[:, [0, 9]] = held[:, [9, 0]]


def tile_swap(held: Bytes) -> None:
    held[:4, :8], held[4:8, 8:16] = held[4:8, 8:16].copy(), held[:4, :8].copy()


def transposed(held: Bytes) -> None:
    held[:] = held.transpose(1, 0, 2).copy()


def shifted(held: Bytes) -> None:
    held[:] = np.roll(held, 1, axis=1)


def stale_tile(held: Bytes) -> None:
    held[4:8, 4:8] = filled((4, 4), held.shape[2], 99)


def two_bits(held: Bytes) -> None:
    held[0, 0, 0] ^= 0x40
    held[9, 1, 0] ^= 0x40


class TestSight:
    @pytest.mark.parametrize(("shape", "dtype"), [((3, 5), "bfloat16"), ((2, 2, 3), "float32"), ((13,), "uint8")])
    def test_every_single_bit(self, shape: tuple[int, ...], dtype: str) -> None:
        truth = filled(shape, ITEMSIZE[dtype])
        right = digest(packed(truth, dtype), shape, (0,) * len(shape))
        seen = set()
        for bit in range(truth.size * 8):
            flipped = truth.copy()
            flipped.reshape(-1)[bit // 8] ^= 1 << (bit % 8)
            seen.add(digest(packed(flipped, dtype), shape, (0,) * len(shape)))
        assert right not in seen

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "change",
        [element_swap, neighbour_swap, row_swap, column_swap, tile_swap, transposed, shifted, stale_tile, two_bits],
    )
    def test_misplaced_and_stale_bytes(self, change: Callable[[Bytes], None], dtype: str) -> None:
        truth = filled((16, 16), ITEMSIZE[dtype], 5)
        held = truth.copy()
        change(held)
        assert not np.array_equal(truth, held)
        assert digest(packed(truth, dtype), (16, 16), (0, 0)) != digest(packed(held, dtype), (16, 16), (0, 0))

    def test_rows_of_an_identity_that_change_places(self) -> None:
        """Equal sums along each row and column."""
        truth = torch.eye(64, dtype=torch.bfloat16)
        held = truth[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
        assert digest(View.of(truth), (64, 64), (0, 0)) != digest(View.of(held.contiguous()), (64, 64), (0, 0))

    def test_blind_to_an_even_number_of_top_bits(self) -> None:
        """What the module's text says it cannot see: kept true, so that the text is."""
        truth = torch.zeros(4, 4, dtype=torch.float64)
        held = truth.clone()
        held[0, 0] = held[2, 3] = -0.0
        assert digest(View.of(held), (4, 4), (0, 0)) == digest(View.of(truth), (4, 4), (0, 0))
        held[1, 1] = -0.0
        assert digest(View.of(held), (4, 4), (0, 0)) != digest(View.of(truth), (4, 4), (0, 0))
