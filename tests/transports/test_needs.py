from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports import cells, needs
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import ALIGNMENT, Box, Manifest
from awexd_transports.needs import Need
from awexd_transports.plan import plan
from awexd_transports.ranges import Ranges
from awexd_transports.segment import segment_nbytes
from awexd_transports.share import share
from benchmarks.jobs import JOBS
from benchmarks.plan import _manifests
from tests.transports.strategies import Bytes, manifest, meshes, one, ragged, specs


@contextmanager
def small_cells() -> Iterator[None]:
    """Cells of a few bytes, so that small tensors are cut as large ones are; and nothing is joined over padding."""
    caches = cells.grid, needs._blocks, needs._parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "BLOCK", 64)
        patch.setattr(cells, "PART", 8)
        patch.setattr(needs, "ALIGNMENT", 1)
        try:
            for cache in caches:
                cache.cache_clear()
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def marked(need: Need | None, nbytes: int) -> Bytes:
    """How often each byte of a segment is in it."""
    found = np.zeros(nbytes, np.uint8)
    for start, end in need.ranges if need else ():
        found[start:end] += 1
    for strip in need.strips if need else ():
        run = strip.nbytes // strip.rows
        assert run * strip.rows == strip.nbytes
        assert run < strip.stride
        for row in range(strip.rows):
            found[strip.offset + row * strip.stride :][:run] += 1
    return found


def read(sources: Sequence[Manifest], reader: Manifest, summed: bool) -> list[Bytes]:
    """Which bytes of each segment are read by the reader's own plan, and by its comparison of checksums."""
    found = [np.zeros(segment_nbytes(source), bool) for source in sources]
    made = plan(sources, [reader], partial=True)
    for copy in (*made.copies, *made.checks):
        source = sources[copy.source]
        entry = source.entries[copy.source_entry]
        size = ITEMSIZE[entry.tensor.dtype]
        at = source.piece_offsets[entry.piece]
        part = found[copy.source][at : at + entry.nbytes].reshape(*(entry.box.shape or (1,)), size)
        low = tuple(a - b for a, b in zip(copy.box.offset, entry.box.offset, strict=True)) or (0,)
        high = tuple(a + n for a, n in zip(low, copy.box.shape or (1,), strict=True))
        boxes = [(low, high)]
        if summed:
            boxes = [(tile.low, tile.high) for tile in cells.grid(entry.box.shape, size).tiles(low, high)]
        for begin, end in boxes:
            part[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))] = True
    return found


def elements(source: Manifest) -> Bytes:
    """Which bytes of a segment are some element's."""
    found = np.zeros(segment_nbytes(source), bool)
    for at, nbytes in zip(source.piece_offsets, source.piece_nbytes.tolist(), strict=True):
        found[at : at + nbytes] = True
    return found


@settings(deadline=None)
@given(st.data())
def test_every_byte_that_is_read_is_there_and_no_other(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources = list(share(data.draw(meshes(tensors))))
    draws = st.one_of(meshes(tensors, data.draw(st.integers(1, 4))), ragged(tensors, data.draw(st.integers(1, 3))))
    readers = data.draw(draws)
    with small_cells():
        made = needs.needs(sources, readers, range(len(sources)))
        by_reader = [read(sources, reader, summed=True) for reader in readers]
        for rank, source in enumerate(sources):
            wanted = np.logical_or.reduce([found[rank] for found in by_reader])
            found = marked(made.ranks.get(rank), len(wanted))
            assert found.max(initial=0) <= 1
            assert not (wanted & (found == 0)).any()
            if made.ranks.get(rank) != Need(Ranges([(0, len(wanted))]), ()):
                assert not ((found == 1) & ~wanted).any()
            else:
                assert wanted[elements(source)].all()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_without_checksums_rows_are_whole(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources = list(share(data.draw(meshes(tensors))))
    readers = data.draw(ragged(tensors, 2))
    with small_cells():
        made = needs.needs(sources, readers, ())
        for reader in readers:
            for rank, wanted in enumerate(read(sources, reader, summed=False)):
                assert not (wanted & (marked(made.ranks.get(rank), len(wanted)) == 0)).any()
    assert not any(need.strips for need in made.ranks.values())


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_digest_is_of_what_is_read(data: st.DataObject) -> None:
    tensors = data.draw(specs())
    sources = list(share(data.draw(meshes(tensors))))
    readers = data.draw(ragged(tensors, 3))
    with small_cells():
        made = [needs.needs(sources, some, range(len(sources))) for some in (readers, readers[::-1], readers[:2])]
        total = sum(segment_nbytes(source) for source in sources)
    assert made[0] == made[1]
    assert (made[0].digest == made[2].digest) == (made[0].ranks == made[2].ranks)
    assert (made[0].digest is None) == (made[0].nbytes == total)


HIDDEN, INNER, KV = 4096, 14336, 1024
ROWS = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN)}
COLUMNS = {"o": (HIDDEN, HIDDEN), "down": (HIDDEN, INNER)}


def worker(rank: int, size: int) -> Manifest:
    """Layers of an 8B model on one rank of so many, cut by rows and by columns."""
    held = [one("norm", (HIDDEN,))]
    for layer in range(8):
        for name, (n, m) in ROWS.items():
            held.append(one(f"{layer}.{name}", (n, m), Box((rank * n // size, 0), (n // size, m))))
        for name, (n, m) in COLUMNS.items():
            held.append(one(f"{layer}.{name}", (n, m), Box((0, rank * m // size), (n, m // size))))
    return manifest(*held)


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize(("size", "nodes"), [(2, 2), (4, 4), (8, 2), (8, 4), (16, 2), (16, 4)])
def test_a_node_of_a_tp_engine_costs_no_more_than_its_workers_read(size: int, nodes: int, writers: int) -> None:
    sources = list(share([worker(0, 1)] * writers))  # replicas, which share the writing
    for node in range(nodes):
        mine = [worker(rank, size) for rank in range(size * node // nodes, size * (node + 1) // nodes)]
        made = needs.needs(sources, mine, range(writers))
        union = sum(m.nbytes for m in mine) - 2 * HIDDEN * (len(mine) - 1)
        assert made.digest is not None
        assert union <= made.nbytes <= 1.01 * union
        assert sum(len(need.strips) for need in made.ranks.values()) <= 8 * 64
    everything = [worker(rank, size) for rank in range(size)]
    assert needs.needs(sources, everything, range(writers)) == needs.whole(sources)


def test_reader_that_does_not_fit_reads_nothing_and_hinders_nobody() -> None:
    sources = [manifest(one("a", (8, 1024)), one("b", (8, 1024)))]
    fits, not_fits = manifest(one("a", (8, 1024))), manifest(one("b", (9, 1024)))
    assert needs.needs(sources, [not_fits], [0]).ranks == {}
    assert needs.needs(sources, [fits, not_fits], [0]) == needs.needs(sources, [fits], [0])
    assert needs.needs(sources, [], [0]).ranks == {}


def test_too_many_ranges_are_joined_over_the_smallest_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(f"t{at}", (64 * (1 + at % 3), 128)) for at in range(60)]
    sources = [manifest(*(one(name, shape) for name, shape in names))]
    reader = manifest(*(one(name, shape) for name, shape in names[::2]))
    exact = needs.needs(sources, [reader], [0]).ranks[0]
    assert len(list(exact.ranges)) == 30
    monkeypatch.setattr(needs, "MAX_RANGES", 11)
    joined = needs.needs(sources, [reader], [0]).ranks[0]
    assert len(list(joined.ranges)) <= 11
    assert all(joined.ranges.covers(*part) for part in exact.ranges)
    gaps = [b - a for (_, a), (b, _) in zip(list(exact.ranges)[:-1], list(exact.ranges)[1:], strict=True)]
    kept = [b - a for (_, a), (b, _) in zip(list(joined.ranges)[:-1], list(joined.ranges)[1:], strict=True)]
    assert min(kept) > sorted(gaps)[0]
    assert min(gaps) >= ALIGNMENT


def test_thousands_of_tensors_of_many_ranks_take_well_under_a_second() -> None:
    job = JOBS["local-1t"]()
    segments, engine = list(share(_manifests(job.trainer))), _manifests(job.engine)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        made = needs.needs(segments, engine[:8], range(len(segments)))
        seconds.append(time.perf_counter() - began)
    assert made.digest is not None
    assert min(seconds) < 2.0  # 0.3 where nothing else runs
