"""Copies of what is short, strided or cast out of host memory registered with CUDA to a device, by either of two ways.

A chunk of host memory, what nobody wants in it included, goes up by few large DMAs into one half of the device's ring,
out of which one launch takes what is wanted; meanwhile the other half is filled. Or one launch reads what is wanted out
of host memory itself: nearly as fast, and better where little of a chunk is wanted. How nearly is measured for each
plan, on chunks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from awexd_transports.cuda.gather import COARSE, Gather
from awexd_transports.cuda.ring import GRAIN, Half, Ring, Span, ring
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

    Sends = list[tuple[torch.Tensor, torch.Tensor]]

LEAST = 0.5
"""A chunk of which a smaller share is wanted never goes through the ring: reading in place was never half as fast."""
JOINED = 64 << 10
"""Bytes between two rows that a DMA brings along rather than being cut in two: it takes microseconds to begin one."""
SAMPLES, TIMES = 3, 3
"""How many chunks are measured, each so many times both ways."""


class Up(NamedTuple):
    """One copy: to a device's memory."""

    destination: View
    source: View


@dataclass(slots=True)
class Chunk:
    """What one half takes at once.

    Attributes:
        rows: with where in the half the source's first element comes to be.
        spans: host memory that goes into it.
        used: bytes of the half.
    """

    rows: list[tuple[Up, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    used: int = 0

    @property
    def wanted(self) -> float:
        """The share of what goes up that is."""
        return sum(row.source.nbytes for row, _ in self.rows) / sum(span.nbytes for span in self.spans)

    def pairs(self, half: View) -> list[tuple[View, View]]:
        """Destinations, and where in this half their sources are then."""
        return [(row.destination, mirror(row.source, half, at)) for row, at in self.rows]


def mirror(source: View, half: View, at: int) -> View:
    return View(half.address + at, source.shape, source.strides, source.dtype, half.owner, half.device)


def extent(view: View) -> int:
    """Bytes from a view's first to its last one. Strides must not be negative."""
    return view.itemsize + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))


def chunks(rows: Iterable[Up], room: int) -> list[Chunk]:
    """Rows in order of their sources' addresses, cut and packed.

    Args:
        room: bytes of a half.
    """
    found: list[Chunk] = []
    parts = (part for row in rows for part in _parts(row, room - GRAIN))
    for part in sorted(parts, key=lambda part: part.source.address):
        address, nbytes = part.source.address, extent(part.source)
        if not found or not _add(found[-1], part, address, nbytes, room):
            found.append(Chunk([(part, address % GRAIN)], [Span(address % GRAIN, address, nbytes)]))
            found[-1].used = address % GRAIN + nbytes
    return found


def _add(chunk: Chunk, part: Up, address: int, nbytes: int, room: int) -> bool:
    """Into the last span, or as one of its own; whether there was room."""
    last, owner = chunk.spans[-1], chunk.rows[-1][0].source.owner
    # Between two mappings there need not be memory, and no copy goes over two that were registered apart.
    if owner is part.source.owner and address <= last.address + last.nbytes + JOINED:
        at = last.at + address - last.address
        span = Span(last.at, last.address, max(last.nbytes, address - last.address + nbytes))
    else:
        at = chunk.used + (address - chunk.used) % GRAIN
        span = Span(at, address, nbytes)
    if span.at + span.nbytes > room:
        return False
    if span.at == last.at:
        chunk.spans.pop()
    chunk.spans.append(span)
    chunk.rows.append((part, at))
    chunk.used = span.at + span.nbytes
    return True


def _parts(row: Up, room: int) -> Iterator[Up]:
    """Of which no source is longer than that from end to end, in as few as may be along its widest dimension."""
    to, of = row
    if extent(of) <= room:
        yield row
        return
    dim = max((d for d, n in enumerate(of.shape) if n > 1), key=of.strides.__getitem__)
    inner = extent(of) - (of.shape[dim] - 1) * of.strides[dim]
    step = max(1, (room - inner) // of.strides[dim] + 1)
    for low in range(0, of.shape[dim], step):
        part = [slice(0, n) for n in of.shape]
        part[dim] = slice(low, min(of.shape[dim], low + step))
        yield from _parts(Up(to.sub(part), of.sub(part)), room)


class Intake:
    """Prepared copies into one device's memory, in groups that are launched each on its own.

    Args:
        groups: their rows, by group. Owners are the caller's to hold.

    Attributes:
        in_place: by group, what is to be read out of host memory itself: the caller's to do.
        pace: of reading in place over the ring's, both counted in bytes that go up; None where no chunk is worth it.
    """

    def __init__(self, groups: Mapping[int, Sequence[Up]], device: int) -> None:
        self._ring = ring(device)
        cut = {group: chunks(rows, self._ring.halves[0].memory.nbytes) for group, rows in groups.items()}
        worth = [chunk for found in cut.values() for chunk in found if chunk.wanted > LEAST]
        self.pace = _pace(self._ring, worth) if worth else None
        self.in_place: dict[int, list[tuple[View, View]]] = {}
        self._sends: list[Sends] = []
        self._groups: dict[int, range] = {}
        taken: list[list[tuple[View, View]]] = []
        for group, found in cut.items():
            for chunk in found:
                if self.pace is None or chunk.wanted <= max(LEAST, self.pace):
                    self.in_place.setdefault(group, []).extend((row.destination, row.source) for row, _ in chunk.rows)
                    continue
                half = self._half(len(taken)).memory
                taken.append(chunk.pairs(View.of(half)))
                self._sends.append(_sends(chunk, half))
            self._groups[group] = range(sum(map(len, self._groups.values())), len(taken))
        self._gather = Gather(taken, f"cuda:{device}", COARSE)

    def launch(self, group: int) -> Any:
        """Begins a group's copies through the ring. Returns the event of their end; None where there are none."""
        import torch

        numbers = self._groups.get(group, range(0))
        if not numbers:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._ring.device):
            for number in numbers:
                with self._ring.lock:
                    self._pass(number)
            done.record(self._ring.gathering)
        return done

    def _half(self, number: int) -> Half:
        return self._ring.halves[number % len(self._ring.halves)]

    def _pass(self, number: int) -> None:
        import torch

        half = self._half(number)
        with torch.cuda.stream(self._ring.sending):
            half.free.wait()
            _send(self._sends[number])
            half.full.record()
        with torch.cuda.stream(self._ring.gathering):
            half.full.wait()
            self._gather.launch(number)
            half.free.record()


def _sends(chunk: Chunk, half: torch.Tensor) -> Sends:
    return [
        (half[at : at + nbytes], View.packed(address, (nbytes,), "uint8", None).tensor())
        for at, address, nbytes in chunk.spans
    ]


def _pace(ring: Ring, worth: Sequence[Chunk]) -> float:
    """How fast some of these chunks are read in place, as a share of the ring's rate."""
    import torch

    found = []
    half = ring.halves[0]
    with torch.inference_mode(), ring.lock, torch.cuda.device(ring.device), torch.cuda.stream(ring.gathering):
        half.free.wait()
        for chunk in worth[:: -(-len(worth) // SAMPLES)]:
            read = [(mirror(row.source, View.of(half.memory), at), row.source) for row, at in chunk.rows]
            in_place = _milliseconds(Gather([read], f"cuda:{ring.device}").launch)
            by_ring = _milliseconds(partial(_send, _sends(chunk, half.memory)))
            found.append(chunk.wanted * by_ring / in_place)
        half.free.record()
    return median(found)


def _send(sends: Sends) -> None:
    for to, of in sends:
        to.copy_(of, non_blocking=True)


def _milliseconds(begin: Callable[[], object]) -> float:
    """What it takes a device, without what it takes to begin it: each time begun while it was under way already."""
    import torch

    times: list[float] = []
    for _ in range(TIMES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        begin()
        events[0].record()
        begin()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return max(1e-6, min(times))
