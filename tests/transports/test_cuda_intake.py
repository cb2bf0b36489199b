"""What goes up through a device's ring, carried out here by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from awexd_transports.cuda.intake import Chunk, Up, chunks, extent
from awexd_transports.cuda.ring import GRAIN
from awexd_transports.view import View

HALF = 8192


def carried_out(found: list[Chunk], half: torch.Tensor, held: list[torch.Tensor]) -> None:
    """Fills the half chunk by chunk, as the device does. No span may be in two mappings, or outside of one."""
    bounds = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in held]
    for chunk in found:
        half.fill_(255)
        free = 0
        for at, address, nbytes in chunk.spans:
            base = next(low for low, high in bounds if low <= address and address + nbytes <= high)
            one = held[[low for low, _ in bounds].index(base)]
            assert free <= at
            assert at + nbytes <= len(half)
            assert (at - address) % GRAIN == 0, "aligned alike"
            half[at : at + nbytes] = one[address - base : address - base + nbytes]
            free = at + nbytes
        assert free == chunk.used
        for to, of in chunk.pairs(View.of(half)):
            assert half.data_ptr() <= of.address <= of.address + extent(of) <= half.data_ptr() + free
            to.bytes_array()[...] = of.bytes_array()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_row_arrives(data: st.DataObject) -> None:
    """Boxes of pieces in several mappings, near and far from each other, some longer than a half."""
    held: list[torch.Tensor] = []
    rows: list[Up] = []
    expected: list[tuple[torch.Tensor, View]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        memory = torch.from_numpy(np.random.default_rng(len(held)).integers(0, 255, 200_000, np.uint8))
        owner = object()
        held.append(memory)
        at = 0
        for _ in range(data.draw(st.integers(1, 6))):
            shape = tuple(data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
            piece = View.packed(memory.data_ptr() + at, shape, "int32", owner)
            if at + piece.nbytes > memory.nbytes:
                break
            ends = [sorted((data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n)))) for n in shape]
            part = [slice(low, max(low + 1, high)) for low, high in ends] if data.draw(st.booleans()) else ()
            source = piece.sub(part) if part else piece
            target = torch.zeros(source.shape, dtype=torch.int32)
            rows.append(Up(View.of(target), source))
            expected.append((target, source))
            at += piece.nbytes + 4 * data.draw(st.sampled_from([0, 3, 1000]))
    half = torch.zeros(HALF, dtype=torch.uint8)
    found = chunks(data.draw(st.permutations(rows)), HALF)
    carried_out(found, half, held)
    for target, source in expected:
        assert (View.of(target).bytes_array() == source.bytes_array()).all()
    assert all(0 < chunk.wanted <= 1 for chunk in found)


def test_neighbours_are_one_copy_and_half_of_each_row_is_half_wanted() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    piece = View.packed(memory.data_ptr(), (16, 64), "int32", memory)
    rows = [piece.sub([slice(low, low + 4), slice(0, 64)]) for low in (0, 8, 4, 12)]
    (one,) = chunks([Up(row, row) for row in rows], HALF)
    assert [span.nbytes for span in one.spans] == [4096]
    assert one.wanted == 1
    half = piece.sub([slice(0, 16), slice(0, 32)])
    (one,) = chunks([Up(half, half)], HALF)
    assert one.wanted == pytest.approx(0.5, abs=0.02)


def test_two_mappings_are_never_one_copy() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    rows = [View.packed(memory.data_ptr() + at, (512,), "int32", object()) for at in (0, 2048)]
    (one,) = chunks([Up(row, row) for row in rows], HALF)
    assert [span.nbytes for span in one.spans] == [2048, 2048]
