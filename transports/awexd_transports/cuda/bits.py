"""Whether memory holds the same bits, found out where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

CHUNK = 64 << 20
"""Bytes of a device's memory that a comparison there takes."""


def differs(live: View, held: View) -> bool:
    """Whether two views of one shape and dtype have any bit different; compared where ``live`` is."""
    import torch

    with torch.inference_mode(False):
        one, other = _bits(live.tensor()), _bits(held.tensor())
        rows = max(1, CHUNK * one.shape[0] // max(1, live.nbytes))
        found = torch.zeros((), dtype=torch.bool, device=one.device)
        for at in range(0, one.shape[0], rows):
            found |= (one[at : at + rows] != other[at : at + rows].to(one.device)).any()
        return bool(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers, with one dimension at least: NaN is not itself, and zeros have signs."""
    import torch

    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integers[tensor.element_size()])
    return bits if bits.dim() else bits[None]
