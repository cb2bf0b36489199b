"""The memory that an exchange goes through on each side: slots, of which some move while another is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from awexd_transports.copy import CopyTable, Row
from awexd_transports.cuda.gather import Gather
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import ALIGNMENT
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

RING_BYTES = 192 << 20
SLOTS = 3
"""While one is copied, one is on its way and one is ready to go: nothing waits for the host to notice."""
Pairs = Sequence[tuple[View, View]]
"""Destination and source of each copy."""
Bytes = npt.NDArray[np.uint8]


class Copies(Protocol):
    def run(self, number: int) -> Any:
        """The copies of that chunk; what has to come before its slot is used for anything else."""
        ...


class Ring(Protocol):
    """``room``: bytes of a slot."""

    room: int

    def memory(self, number: int, nbytes: int) -> torch.Tensor:
        """The beginning of the slot that takes the chunk of that number."""
        ...

    def view(self, number: int, at: int, like: View) -> View:
        """Where in that slot a part lies that has the shape of ``like``, packed."""
        ...

    def copies(self, chunks: Sequence[Pairs]) -> Copies:
        """Prepared copies between slots and tensors."""
        ...

    def write(self, number: int, data: Bytes) -> Any:
        """Fills a slot's beginning from host memory; returns as ``Copies.run``."""
        ...

    def read(self, number: int, into: Bytes) -> None:
        """Copies a slot's beginning to host memory."""
        ...

    def begin(self) -> None:
        """What is in flight on the devices is done."""
        ...

    def finish(self) -> None:
        """All copies are done."""
        ...


def room_of(ring_bytes: int) -> int:
    """
    Raises:
        InvalidArgument: too small for that many aligned slots.
    """
    room = ring_bytes // SLOTS // ALIGNMENT * ALIGNMENT
    if room <= 0:
        raise InvalidArgument(f"ring_bytes must be at least {SLOTS * ALIGNMENT}, not {ring_bytes}")
    return room


class HostRing:
    """In host memory; tensors may lie anywhere.

    Args:
        sharing: processes of this node that copy at the same time.
    """

    def __init__(self, ring_bytes: int, sharing: int = 1) -> None:
        import torch

        self.room = room_of(ring_bytes)
        self._sharing = sharing
        with torch.inference_mode(False):
            self._slots = [torch.empty(self.room, dtype=torch.uint8) for _ in range(SLOTS)]

    def memory(self, number: int, nbytes: int) -> torch.Tensor:
        return self._slots[number % SLOTS][:nbytes]

    def view(self, number: int, at: int, like: View) -> View:
        slot = self._slots[number % SLOTS]
        return View.packed(slot.data_ptr() + at, like.shape, like.dtype, slot)

    def copies(self, chunks: Sequence[Pairs]) -> Copies:
        return _Tables([CopyTable(chunk) for chunk in chunks], self._sharing)

    def write(self, number: int, data: Bytes) -> Any:
        self.memory(number, data.nbytes).numpy()[:] = data

    def read(self, number: int, into: Bytes) -> None:
        into[:] = self.memory(number, into.nbytes).numpy()

    def begin(self) -> None:
        """Each table waits for the devices that it copies from or to."""

    def finish(self) -> None:
        """Each run is done when it returns."""


class _Tables:
    def __init__(self, tables: Sequence[CopyTable], sharing: int) -> None:
        self._tables, self._sharing = tables, sharing

    def run(self, number: int) -> None:
        self._tables[number].run(sharing=self._sharing)


class DeviceRing:
    """In a device's memory, like all tensors, which one kernel launch a chunk copies; nothing waits on the host."""

    def __init__(self, ring_bytes: int, device: int) -> None:
        import torch

        self.room = room_of(ring_bytes)
        self._device = device
        with torch.inference_mode(False):
            where = f"cuda:{device}"
            self._slots = [torch.empty(self.room, dtype=torch.uint8, device=where) for _ in range(SLOTS)]
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def memory(self, number: int, nbytes: int) -> torch.Tensor:
        return self._slots[number % SLOTS][:nbytes]

    def view(self, number: int, at: int, like: View) -> View:
        slot = self._slots[number % SLOTS]
        return replace(View.packed(slot.data_ptr() + at, like.shape, like.dtype, slot), device=self._device)

    def copies(self, chunks: Sequence[Pairs]) -> Copies:
        return _Launches(Gather(chunks, f"cuda:{self._device}"), self._stream)

    def write(self, number: int, data: Bytes) -> Any:
        import torch

        with torch.cuda.stream(self._stream), torch.inference_mode(False):
            self.memory(number, data.nbytes).copy_(torch.from_numpy(data))
            return self._stream.record_event()

    def read(self, number: int, into: Bytes) -> None:
        import torch

        with torch.cuda.stream(self._stream), torch.inference_mode(False):
            into[:] = self.memory(number, into.nbytes).cpu().numpy()

    def begin(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def finish(self) -> None:
        self._stream.synchronize()


class _Launches:
    def __init__(self, gather: Gather, stream: Any) -> None:
        self._gather, self._stream = gather, stream

    def run(self, number: int) -> Any:
        import torch

        with torch.cuda.stream(self._stream):
            self._gather.launch(number)
            return self._stream.record_event()


def compared(pairs: Pairs, labels: Sequence[str]) -> CopyTable:
    """The same copies, to be compared only."""
    return CopyTable(Row(to, of, label) for (to, of), label in zip(pairs, labels, strict=True))
