"""Whether memory holds the same bits, found out where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from awexd_transports.cuda import driver as cuda
from awexd_transports.cuda import gather
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

CHUNK = 64 << 20
"""Bytes of a device's memory that a comparison there takes."""


def differs(live: View, held: View) -> bool:
    """Whether two views of one shape and dtype have any bit different; compared on the device where ``live`` is.

    ``held`` may be a peer's memory that only kernels of that device can address.
    """
    import torch

    if not live.numel:
        return False
    with torch.inference_mode(False):
        found = torch.zeros((), dtype=torch.bool, device=_name(live.device))
        extent = live.shape or (1,)
        rows = max(1, CHUNK * extent[0] // live.nbytes)
        for at in range(0, extent[0], rows):
            part = [slice(at, min(extent[0], at + rows)), *(slice(0, n) for n in extent[1:])] if live.shape else []
            one, other = live.sub(part) if part else live, held.sub(part) if part else held
            found |= (_bits(one.tensor()) != _bits(fetched(other, live.device))).any()
        return bool(found)


def fetched(view: View, device: int | None) -> torch.Tensor:
    """The same bits in a tensor of that device, which can address them."""
    import torch

    if view.device is None or not gather.available() or cuda.driver.lies_on(view) == view.device:
        return view.tensor().to(_name(device))
    copied = torch.empty(view.shape, dtype=getattr(torch, view.dtype), device=_name(device))
    gather.Gather([[(View.of(copied), view)]], _name(device)).launch()
    return copied


def _name(device: int | None) -> str:
    return "cpu" if device is None else f"cuda:{device}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers, with one dimension at least: NaN is not itself, and zeros have signs."""
    import torch

    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().view(integers[tensor.element_size()])
    return bits if bits.dim() else bits[None]
