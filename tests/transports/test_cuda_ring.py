"""What goes down through a device's ring, carried out here by NumPy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.cuda.ring import GRAIN, Chunk, Down, chunks, packed
from awexd_transports.view import View

HALF = 4096


def carried_out(rows: list[Down], halves: list[torch.Tensor], host: torch.Tensor) -> list[Chunk]:
    """Fills the host's memory chunk by chunk, as the device does."""
    found = chunks(rows, [View.of(half) for half in halves])
    base = host.data_ptr()
    for number, chunk in enumerate(found):
        half = halves[number % len(halves)]
        if chunk.gaps:
            half[: chunk.used] = 0
        for to, of in chunk.pairs:
            low = to.address - half.data_ptr()
            assert 0 <= low <= low + to.nbytes <= chunk.used <= len(half)
            to.bytes_array()[...] = of.bytes_array()
        for at, address, nbytes in chunk.spans:
            assert (at - address) % GRAIN == 0
            host[address - base : address - base + nbytes] = half[at : at + nbytes]
    return found


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_row_arrives_and_nothing_else_is_written(data: st.DataObject) -> None:
    """Rows longer than a half too; only padding that is nobody's may be written: as zeros."""
    host = torch.full((60_000,), 255, dtype=torch.uint8)
    halves = [torch.full((HALF,), 99, dtype=torch.uint8) for _ in range(2)]
    rows: list[Down] = []
    held, expected = [], host.clone()
    free = host.clone().zero_().bool()
    at = data.draw(st.integers(0, 40)) * 4
    while len(rows) < data.draw(st.integers(1, 12)):
        shape = tuple(data.draw(st.lists(st.integers(1, 40), max_size=3)))
        nbytes = 4 * torch.Size(shape).numel()
        apart = data.draw(st.sampled_from([0, 0, 4, 100, 1000]))
        padding = data.draw(st.integers(0, apart // 4)) * 4
        if at + nbytes + apart > len(host):
            break
        order = data.draw(st.permutations(range(len(shape))))
        source = torch.randint(1, 1 << 30, [shape[axis] for axis in order], dtype=torch.int32)
        source = source.permute([order.index(axis) for axis in range(len(shape))])
        expected[at : at + nbytes] = source.contiguous().flatten().view(torch.uint8)
        free[at + nbytes : at + nbytes + padding] = True
        rows.append(Down(View.packed(host.data_ptr() + at, shape, "int32", host), View.of(source), padding))
        held.append(source)
        at += nbytes + apart
    carried_out(data.draw(st.permutations(rows)), halves, host)
    touched = host != expected
    assert not bool((touched & ~free).any())
    assert not bool(host[touched].any())


@pytest.mark.parametrize(("padding", "spans"), [(0, 8), (156, 1)])
def test_padding_that_is_nobodys_makes_one_dma_of_many_rows(padding: int, spans: int) -> None:
    host = torch.full((8 * 256,), 255, dtype=torch.uint8)
    sources = torch.randint(1, 100, (8, 100), dtype=torch.uint8)
    rows = [
        Down(View.packed(host.data_ptr() + 256 * at, (100,), "uint8", host), View.of(source), padding)
        for at, source in enumerate(sources)
    ]
    found = carried_out(rows, [torch.full((HALF,), 99, dtype=torch.uint8) for _ in range(2)], host)
    assert [len(chunk.spans) for chunk in found] == [spans]
    assert torch.equal(host.view(8, 256)[:, :100], sources)
    assert set(host.view(8, 256)[:-1, 100:].flatten().tolist()) == {0 if padding else 255}


def test_packed_is_row_major_without_gaps() -> None:
    base = torch.zeros(4, 6)
    assert [packed(View.of(tensor)) for tensor in (base, base[1:3], base[2, 3], base[:0, :2])] == [True] * 4
    assert [packed(View.of(tensor)) for tensor in (base.t(), base[:, :3], base[::2])] == [False] * 3
