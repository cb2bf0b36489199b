"""Checksums from a writer's copies to a reader's, over real mapped memory; no daemon."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_client.checksums import table_of
from awexd_client.holding import Holding
from awexd_client.mappings import Mapping
from awexd_client.outgoing import SegmentLayout
from awexd_client.tables import Sources, Tables, prepare
from awexd_transports import cells, kernel
from awexd_transports import copy as copying
from awexd_transports import digest as digests
from awexd_transports.copy import CopyTable
from awexd_transports.digest import digest
from awexd_transports.errors import IntegrityError
from awexd_transports.layout import Shard
from awexd_transports.plan import plan
from awexd_transports.segment import CHECKSUM_OFFSET, checksums_at, first_cells, piece_at
from awexd_transports.view import View
from tests.transports.strategies import chunks, even

pytestmark = pytest.mark.usefixtures("each_way")
PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.bool)


@pytest.fixture(autouse=True)
def small_cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many cells in tensors of a few hundred bytes."""
    cells.grid.cache_clear()
    monkeypatch.setattr(cells, "BLOCK", 128)
    monkeypatch.setattr(cells, "PART", 8)
    yield
    cells.grid.cache_clear()


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


class Segment:
    """One writer rank's segment of these tensors, published once."""

    def __init__(self, target: object, casts: object = None, *, summed: bool = True) -> None:
        self.holding = Holding.of(target, casts=casts)
        self.layout = SegmentLayout(self.holding, self.holding.manifest, "set")
        fd = os.memfd_create("segment")
        os.ftruncate(fd, 4096 + self.layout.nbytes)
        self.mapping = Mapping(fd, 4096 + self.layout.nbytes, writable=True)
        os.close(fd)
        self.manifest = self.layout.manifest
        views = enumerate(self.holding.piece_views())
        rows = (row for at, view in views for row in self.layout.rows(at, view, self.mapping, summed=summed))
        self.table = CopyTable(rows)
        self.table.run(2)

    def flip(self, at: int, bit: int = 3) -> None:
        (byte,) = self.mapping.read(at, 1)
        self.mapping.write(at, bytes([byte ^ (1 << bit)]))


def reading(segments: Iterable[Segment], into: object, summed: set[int] | None = None) -> Tables:
    held = list(segments)
    holding = Holding.of(into)
    manifests = tuple(segment.manifest for segment in held)
    sources = Sources(manifests, plan(manifests, [holding.manifest], partial=True))
    mapped = {rank: held[rank].mapping for rank in sources.ranks}
    return prepare(holding, sources, mapped, set(range(len(held))) if summed is None else summed).live


@contextmanager
def two_as_one() -> Iterator[torch.Tensor]:
    """A tensor of two pages that both are the same page of memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE)
    both = mmap.mmap(-1, 2 * PAGE)
    held = torch.frombuffer(memoryview(both), dtype=torch.uint8)
    for at in range(2):
        place = held.data_ptr() + at * PAGE
        assert libc.mmap(place, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, 0) == place
    os.close(fd)
    yield held


@contextmanager
def lost(monkeypatch: pytest.MonkeyPatch, spoil: object) -> Iterator[None]:
    """Copies after which ``spoil`` happens, before their bytes are summed."""
    real = copying._copy_all

    def spoilt(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if spoil is None:
            return
        real(destinations, sources)
        spoil()  # type: ignore[operator]

    with monkeypatch.context() as patched:
        patched.setattr(copying, "_copy_all", spoilt)
        yield


@st.composite
def parts_of(draw: st.DrawFn, tensor: torch.Tensor) -> list[Shard]:
    """One to six shards that are all of a tensor, cut along one dimension; some of them transposed in memory."""
    dim = draw(st.sampled_from(range(max(1, tensor.dim()))))
    extent = tensor.shape[dim] if tensor.dim() else 1
    spans = draw(st.sampled_from((chunks, even)))(extent, draw(st.integers(1, 6)) if tensor.dim() else 1)
    made = []
    for low, high in dict.fromkeys(spans):
        shape = (*tensor.shape[:dim], high - low, *tensor.shape[dim + 1 :]) if tensor.dim() else ()
        empty = torch.zeros(shape[::-1], dtype=tensor.dtype).permute(tuple(reversed(range(len(shape)))))
        into = empty if draw(st.booleans()) else torch.zeros(shape, dtype=tensor.dtype)
        offset = tuple(low if d == dim else 0 for d in range(tensor.dim()))
        made.append(Shard("w", into, tuple(tensor.shape), offset))
    return made


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_sharding_of_both_sides_is_right_and_any_flip_in_what_is_read_is_found(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 16, 24, 64)), max_size=3)))[:3]
    if np.prod(shape) > 4096:
        shape = shape[:2]
    tensor = random(shape, data.draw(st.sampled_from(DTYPES)))
    published = data.draw(parts_of(tensor))
    for shard in published:
        shard.tensor.copy_(tensor[shard.box.relative_to((0,) * tensor.dim())])
    segments = [Segment([shard]) for shard in published]
    into = data.draw(parts_of(tensor))
    tables = reading(segments, into)
    tables.run(2)
    for shard in into:
        expected = tensor[shard.box.relative_to((0,) * tensor.dim())]
        assert torch.equal(bytes_of(shard.tensor), bytes_of(expected))
    rank = data.draw(st.sampled_from([at for at, shard in enumerate(published) if shard.box.numel]))
    entry = segments[rank].manifest.entries[0]
    segments[rank].flip(piece_at(segments[rank].manifest, 0) + data.draw(st.integers(0, entry.nbytes - 1)), 6)
    with pytest.raises(IntegrityError, match=rf"^w .*held are not those that rank {rank} wrote"):
        tables.run(2)
    for segment in segments:
        segment.table.run(1)
    tables.run(1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_flip_is_placed_in_its_cell() -> None:
    segment = Segment({"w": random((16, 16), torch.float32), "x": random((5,), torch.uint8)})
    tables = reading([segment], {"w": torch.zeros(16, 16), "x": torch.zeros(5, dtype=torch.uint8)})
    segment.flip(piece_at(segment.manifest, 0) + 4 * (16 * 9 + 6))
    with pytest.raises(IntegrityError, match=r"^w \[8:10, 6:8\]: the bytes that are held"):
        tables.run()


def test_a_flip_in_a_checksum_is_found_and_each_belongs_to_one_cell() -> None:
    segment = Segment({"w": random((8, 16), torch.float32), "x": random((5,), torch.uint8)})
    tables = reading([segment], {"w": torch.zeros(8, 16), "x": torch.zeros(5, dtype=torch.uint8)})
    for cell in range(first_cells(segment.manifest)[-1]):
        at = checksums_at(segment.manifest) + 8 * cell + cell % 8
        segment.flip(at)
        with pytest.raises(IntegrityError):
            tables.run()
        segment.flip(at)
    tables.run()


def test_a_cell_of_which_a_part_is_read_is_compared_whole() -> None:
    """Also the bytes that this reader does not take: a sum of the cell cannot tell them apart."""
    segment = Segment({"w": random((8, 16), torch.float32)})
    part = torch.zeros(3, 5)
    tables = reading([segment], [Shard("w", part, (8, 16), (2, 3))])
    tables.run()
    assert torch.equal(part.view(torch.int32), segment.holding.target["w"][2:5, 3:8].view(torch.int32))  # type: ignore[index]
    for row, column, found in ((2, 3, True), (4, 7, True), (2, 2, True), (2, 8, False), (7, 3, False)):
        at = piece_at(segment.manifest, 0) + 4 * (16 * row + column)
        segment.flip(at)
        if found:
            with pytest.raises(IntegrityError, match=rf"^w \[{row // 2 * 2}:{row // 2 * 2 + 2}, "):
                tables.run()
        else:
            tables.run()
        segment.flip(at)


@pytest.mark.parametrize("place", [(0, 0), (15, 15), (7, 9)])
@pytest.mark.usefixtures("without_library")
def test_a_destination_that_does_not_keep_what_was_copied(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int]
) -> None:
    """In part of a cell too, where the rest is summed in the source."""
    segment = Segment({"w": random((16, 18), torch.float32)})
    into = torch.zeros(16, 16)
    tables = reading([segment], [Shard("w", into, (16, 18), (0, 1))])

    def spoil() -> None:
        into.view(torch.int32)[place] ^= 4

    with lost(monkeypatch, spoil), pytest.raises(IntegrityError, match=r"^w .*: differs after the copy .* rank 0"):
        tables.run()
    tables.run()


@pytest.mark.usefixtures("without_library")
def test_copies_that_never_happened_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale memory, and sums of an earlier run."""
    tensor = random((16, 16), torch.float32)
    segment = Segment({"w": tensor})
    tables = reading([segment], {"w": torch.zeros(16, 16)})
    tables.run()
    tensor[3, 3] = 7
    segment.table.run()
    with lost(monkeypatch, None), pytest.raises(IntegrityError, match="differs after the copy"):
        tables.run()
    tables.run()
    with monkeypatch.context() as patched:
        patched.setattr(CopyTable, "run", lambda *args, **kwargs: None)
        with pytest.raises(IntegrityError):
            tables.run()


def test_memory_that_is_all_zeros_is_not_right() -> None:
    segment = Segment({"w": random((16, 16), torch.float32)})
    tables = reading([segment], {"w": torch.zeros(16, 16)})
    segment.mapping.write(4096, bytes(segment.layout.nbytes))
    with pytest.raises(IntegrityError):
        tables.run()
    zeros = Segment({"w": torch.zeros(16, 16)})
    reading([zeros], {"w": torch.ones(16, 16)}).run()


def test_an_alias_is_compared_in_the_coordinates_of_its_piece() -> None:
    """One storage under two names, of two places in two tensors."""
    held = random((8, 16), torch.float32)
    segment = Segment([Shard("a", held, (16, 16), (8, 0)), Shard("b", held, (8, 32), (0, 16))])
    assert len(segment.manifest.pieces) == 1
    into = torch.zeros(4, 7)
    tables = reading([segment], [Shard("b", into, (8, 32), (3, 18))])
    tables.run()
    assert torch.equal(into.view(torch.int32), held[3:7, 2:9].view(torch.int32))
    segment.flip(piece_at(segment.manifest, 0) + 4 * (16 * 4 + 5))
    with pytest.raises(IntegrityError, match=r"^b "):
        tables.run()


def test_a_cast_is_summed_as_it_is_held() -> None:
    tensor = torch.randn(16, 24, dtype=torch.float32).t()
    segment = Segment({"w": tensor}, torch.bfloat16)
    into = torch.zeros(24, 16, dtype=torch.bfloat16)
    reading([segment], {"w": into}).run()
    assert torch.equal(into, tensor.to(torch.bfloat16))


@pytest.mark.usefixtures("without_library")
def test_segments_without_checksums_are_compared_with_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others that have some."""
    one, other = (
        Segment({"a": random((8, 8), torch.float32)}),
        Segment({"b": random((8, 8), torch.float32)}, summed=False),
    )
    into = {"a": torch.zeros(8, 8), "b": torch.zeros(8, 8)}
    tables = reading([one, other], into, {0})
    tables.run()

    def spoil() -> None:
        into["b"].view(torch.int32)[5, 6] ^= 1

    with lost(monkeypatch, spoil), pytest.raises(IntegrityError, match=r"^b differs after the copy .*\[5, 6\]"):
        tables.run()
    one.flip(piece_at(one.manifest, 0))
    with pytest.raises(IntegrityError, match=r"^a .*rank 0"):
        tables.run()


def test_empty_tensors_have_no_cells() -> None:
    segment = Segment({"w": torch.zeros(0, 4), "x": torch.ones(3)})
    assert first_cells(segment.manifest) == [0, 0, 1]
    reading([segment], {"w": torch.zeros(0, 4), "x": torch.zeros(3)}).run()


def test_the_destination_itself_is_read_back(each_way: str) -> None:
    """Two pages of it that are one in memory: what was copied to the first is gone when it is summed."""
    cells.grid.cache_clear()
    tensor = random((2 * PAGE,), torch.uint8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cells, "BLOCK", 2 << 20)
        segment = Segment({"w": tensor})
        with two_as_one() as into:
            tables = reading([segment], {"w": into})
            with pytest.raises(IntegrityError, match="differs after the copy"):
                tables.run()
            tensor[PAGE:] = tensor[:PAGE]
            segment.table.run()
            tables.run()


def test_rows_that_were_not_copied_by_the_library_are_found(monkeypatch: pytest.MonkeyPatch, each_way: str) -> None:
    segment = Segment({"w": random((16, 16), torch.float32)})
    tables = reading([segment], {"w": torch.zeros(16, 16)})
    tables.run()
    if each_way != "library":
        return

    def nothing(jobs: kernel.Jobs) -> Callable[[], None]:
        jobs._run = kernel._Run()
        return lambda: None

    monkeypatch.setattr(kernel.Jobs, "start", nothing)
    with pytest.raises(IntegrityError, match=r"^w "):
        tables.run()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_cell_has_its_digest_in_the_table(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 16, 24, 64)), min_size=1, max_size=3)))
    tensor = random(shape, data.draw(st.sampled_from(DTYPES)))
    rows = data.draw(st.integers(0, 3))
    columns = data.draw(st.integers(0, 9))
    origin = (rows,) * (len(shape) - 1) + (columns,)
    whole = tuple(n + at + 1 for n, at in zip(shape, origin, strict=True))
    segment = Segment([Shard("w", tensor, whole, origin)])
    grid, table = cells.grid(shape, tensor.element_size()), table_of(segment.manifest, segment.mapping)
    for number in range(grid.cells):
        low, high = grid.cell(number)
        part = tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        expected = digest(View.of(part), whole, tuple(a + b for a, b in zip(origin, low, strict=True)))
        assert int(table[number]) % (1 << 64) == (expected + CHECKSUM_OFFSET) % (1 << 64)


def test_a_row_longer_than_the_words_that_have_weights_of_their_own() -> None:
    """With cells of the size that is used."""
    columns = digests.SPAN * 8 + 1000
    tensor = random((2, columns), torch.uint8)
    segment = Segment([Shard("w", tensor, (3, columns + 9), (1, 5))])
    grid, table = cells.grid((2, columns), 1), table_of(segment.manifest, segment.mapping)
    for number in (0, grid.counts[1] - 1, grid.cells - 1):
        (row, low), (_, high) = grid.cell(number)
        expected = digest(View.of(tensor[row : row + 1, low:high]), (3, columns + 9), (1 + row, 5 + low))
        assert int(table[number]) % (1 << 64) == (expected + CHECKSUM_OFFSET) % (1 << 64)
