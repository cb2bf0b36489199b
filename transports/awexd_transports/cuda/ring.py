"""Copies out of a device's memory that a device first gathers: into a ring there, which goes down by few large DMAs.

What is short or strided on the device, or is cast, would take a copy of its own each; a kernel that stores to host
memory is ten times slower than DMA. A chunk, which fills one half of the ring, mirrors host memory as it shall be: rows
that are neighbours there are one DMA, padding between them included, where that is nobody's. While one half goes down
the other is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from awexd_transports.cuda.gather import COARSE, Gather
from awexd_transports.cuda.streams import stream
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

HALF = 16 << 20
"""Bytes of a chunk; a process has two halves on each device that it copies from."""
GRAIN = 256
"""Bytes: host memory and its mirror are aligned alike to so many."""


class Down(NamedTuple):
    """One copy: to host memory that is packed; ``padding``: how many bytes after it are nobody's."""

    destination: View
    source: View
    padding: int = 0


class Span(NamedTuple):
    """One DMA: from so many bytes into a half, to that address."""

    at: int
    address: int
    nbytes: int


@dataclass(slots=True)
class Chunk:
    """What one half takes at once.

    Attributes:
        pairs: where in the half, and source.
        used: bytes of the half that are sent or lie before such. ``gaps``: some between rows are padding.
    """

    pairs: list[tuple[View, View]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    used: int = 0
    gaps: bool = False


def packed(view: View) -> bool:
    """Whether a view is row-major and without gaps."""
    return not view.numel or view.strides == View.packed(0, view.shape, view.dtype, None).strides


def chunks(rows: Iterable[Down], halves: Sequence[View]) -> list[Chunk]:
    """Rows in order of their destinations' addresses, cut and packed into chunks, which take turns with the halves.

    Args:
        halves: bytes on the device.
    """
    found: list[Chunk] = []
    free = 0
    """The first address after the last row that is not known to be nobody's."""
    for to, of, padding in sorted(rows, key=lambda row: row.destination.address):
        for part, source in _parts(to, of, halves[0].nbytes - GRAIN):
            at = _place(found, part, free, halves[0].nbytes)
            if at is None:
                found.append(Chunk())
                at = part.address % GRAIN
            chunk, half = found[-1], halves[(len(found) - 1) % len(halves)]
            _extend(chunk, at, part, free)
            mirror = View(half.address + at, part.shape, part.strides, part.dtype, half.owner, half.device)
            chunk.pairs.append((mirror, source))
            free = part.address + part.nbytes
        free += padding
    return found


def _place(found: Sequence[Chunk], part: View, free: int, room: int) -> int | None:
    """Where in the last chunk that part goes; None where it does not fit in."""
    if not found:
        return None
    chunk = found[-1]
    last = chunk.spans[-1]
    if last.address <= part.address <= free:
        at = last.at + part.address - last.address
    else:
        at = chunk.used + (part.address - chunk.used) % GRAIN
    return at if at + part.nbytes <= room else None


def _extend(chunk: Chunk, at: int, part: View, free: int) -> None:
    last = chunk.spans[-1] if chunk.spans else None
    if last and last.address <= part.address <= free:
        chunk.gaps |= at > chunk.used
        chunk.spans[-1] = Span(last.at, last.address, at + part.nbytes - last.at)
    else:
        chunk.spans.append(Span(at, part.address, part.nbytes))
    chunk.used = at + part.nbytes


def _parts(to: View, of: View, room: int, dim: int = 0) -> Iterator[tuple[View, View]]:
    """Of a packed destination, in order of addresses, each of at most so many bytes."""
    if to.nbytes <= room:
        yield to, of
        return
    step = max(1, room * to.shape[dim] // to.nbytes)
    for low in range(0, to.shape[dim], step):
        part = [slice(0, n) for n in to.shape]
        part[dim] = slice(low, min(to.shape[dim], low + step))
        yield from _parts(to.sub(part), of.sub(part), room, dim + 1)


@dataclass(slots=True)
class Half:
    """``full``: what it was filled with last is there; ``free``: it is no longer needed."""

    memory: torch.Tensor
    full: Any
    free: Any


class Ring:
    """Two halves on a device, and the streams that fill and empty them. Any thread may use it: chunk after chunk.

    What goes up (``intake``) uses it too: ``sending`` fills the halves then, ``gathering`` empties them.
    """

    def __init__(self, device: int) -> None:
        import torch

        self.device = device
        self.lock = threading.Lock()
        """Held while a chunk is begun: the next one to take its half, of whatever table, waits for it on the device."""
        with torch.inference_mode(False):
            self.halves = [
                Half(
                    torch.empty(HALF, dtype=torch.uint8, device=f"cuda:{device}"),
                    torch.cuda.Event(),  # type: ignore[no-untyped-call]
                    torch.cuda.Event(),  # type: ignore[no-untyped-call]
                )
                for _ in range(2)
            ]
        # What is gathered goes before what is summed meanwhile: the link must not wait.
        self.gathering = stream(device, -2)
        self.sending = stream(device, 0)


@cache
def ring(device: int) -> Ring:
    """This process's on that device; allocated once."""
    return Ring(device)


class Drain:
    """Prepared copies out of one device's memory, through its ring. The rows' owners are the caller's to hold."""

    def __init__(self, rows: Iterable[Down], device: int) -> None:
        self._ring = ring(device)
        halves = [View.of(half.memory) for half in self._ring.halves]
        self._chunks = chunks(rows, halves)
        self._gather = Gather((chunk.pairs for chunk in self._chunks), f"cuda:{device}", COARSE)
        self._sends = [
            [
                (View.packed(address, (nbytes,), "uint8", None).tensor(), self._half(number).memory[at : at + nbytes])
                for at, address, nbytes in chunk.spans
            ]
            for number, chunk in enumerate(self._chunks)
        ]

    def launch(self) -> Any:
        """Begins all copies: what they read must be there. Returns the event of their end."""
        import torch

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._ring.device):
            for number in range(len(self._chunks)):
                with self._ring.lock:
                    self._pass(number)
            done.record(self._ring.sending)
        return done

    def _half(self, number: int) -> Half:
        return self._ring.halves[number % len(self._ring.halves)]

    def _pass(self, number: int) -> None:
        import torch

        chunk, half = self._chunks[number], self._half(number)
        with torch.cuda.stream(self._ring.gathering):
            half.free.wait()
            if chunk.gaps:
                half.memory[: chunk.used].zero_()
            self._gather.launch(number)
            half.full.record()
        with torch.cuda.stream(self._ring.sending):
            half.full.wait()
            for to, of in self._sends[number]:
                to.copy_(of, non_blocking=True)
            half.free.record()
