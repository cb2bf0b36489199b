"""Whether views cover every byte of a storage: compared with counting elements one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.view import View, covers


@st.composite
def cuts(draw: st.DrawFn) -> list[torch.Tensor]:
    base = torch.zeros(4, 6, 8, dtype=draw(st.sampled_from([torch.int8, torch.int16, torch.float64])))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        part = base
        for dim, extent in enumerate(base.shape):
            low = draw(st.integers(0, extent - 1))
            high = draw(st.integers(low, extent))
            wide = draw(st.booleans())
            if not wide:
                part = part[(slice(None),) * dim + (slice(low, high, draw(st.integers(1, 2))),)]
        if draw(st.booleans()):
            part = part.permute(*draw(st.permutations(range(3))))
        if draw(st.booleans()):
            part = part[None].expand(2, *part.shape)
        found.append(part)
    return found


@given(cuts())
def test_covers_says_what_marking_says(parts: list[torch.Tensor]) -> None:
    storage = parts[0].untyped_storage()
    for part in parts:
        part.fill_(1)
    whole = torch.empty(0, dtype=parts[0].dtype).set_(storage)
    assert covers(map(View.of, parts), storage.data_ptr(), storage.nbytes()) == bool((whole == 1).all())


def test_nothing_covers_nothing() -> None:
    assert covers([], 0, 0)
    assert not covers([], 4096, 8)
