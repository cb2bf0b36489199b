"""Copies between host memory and CUDA devices; checksums are taken of the host's side.

A long run without gaps out of host memory is one DMA. What is strided or short a device gathers itself, in one launch
for all, where Triton is there and the host's memory is registered with CUDA (``gather``), and so it pulls what another
device has, or another process on its own; else torch copies it.
Downwards a batch is summed once it has arrived, upwards while it travels: a device's own memory is never read for that.
Everything is done when ``run`` returns, on every stream of the devices: what a trainer or an engine has in flight there
comes before, what it does afterwards sees the new bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from awexd_transports.cuda import gather
from awexd_transports.cuda.gather import Gather
from awexd_transports.cuda.peers import reaches
from awexd_transports.threads import default_threads
from awexd_transports.tiles import flat_run
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

    from awexd_transports.copy import CopyTable, Row

BATCH = 64 << 20
BATCHES = 16
"""What comes down is summed in about so many parts, of BATCH bytes at least, while the next ones travel: starting the
threads for a part takes about a millisecond, and the last part is summed alone."""
LONG = 1 << 20
"""Bytes of a run from which on a DMA of its own pays."""
SUMMING = 32
"""Threads that only read and sum: more of them pay than of those that copy."""


def on_device(row: Row) -> bool:
    return row.destination.device is not None or row.source.device is not None


@dataclass(slots=True)
class _Batch:
    """Rows that travel one after another.

    Attributes:
        sums: the host's side of those that the library sums. ``after``: what sums others.
        down: they come from a device: summed when they have arrived.
    """

    rows: Sequence[Row]
    sums: CopyTable
    after: Sequence[Callable[[], object]]
    down: bool


class DeviceCopies:
    """Prepared copies of which at least one side is a device's memory.

    Args:
        table: makes a table of rows in host memory.
    """

    def __init__(self, rows: Iterable[Row], table: Callable[[Iterable[Row]], CopyTable]) -> None:
        self._batches = [
            _Batch(
                batch,
                table(_host_side(row) for row in batch if row.sums),
                [row.after for row in batch if row.after],
                _comes_down(batch[0]),
            )
            for batch in _batched(rows)
        ]
        self._pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        gathered: dict[int, list[tuple[View, View]]] = {}
        for batch in self._batches:
            self._pairs.append([])
            for row in batch.rows:
                device = _gathers(row)
                if device is None:
                    self._pairs[-1].append((row.destination.tensor(), row.source.tensor()))
                else:
                    gathered.setdefault(device, []).append((row.destination, row.source))
        self._gathers = [Gather([pairs], f"cuda:{device}") for device, pairs in gathered.items()]
        sides = [view for batch in self._batches for row in batch.rows for view in (row.destination, row.source)]
        self._devices = sorted({view.device for view in sides if view.device is not None})

    def run(self, threads: int | None, sharing: int) -> None:
        import torch

        self._synchronize()
        try:
            for each in self._gathers:
                each.launch()
            with torch.inference_mode():  # vLLM's weights were made in it, and may be written in it only
                arrived = [self._send(pairs) for pairs in self._pairs]
            for batch, events in zip(self._batches, arrived, strict=True):
                self._sum(batch, events, threads or default_threads(sharing, SUMMING), sharing)
        finally:
            self._synchronize()  # whatever went wrong, nothing is under way to memory that may go now

    def _sum(self, batch: _Batch, arrived: Sequence[Any], threads: int, sharing: int) -> None:
        if batch.down and (batch.sums.nbytes or batch.after):
            for event in arrived:
                event.synchronize()
        batch.sums.run(threads, sharing=sharing)
        for call in batch.after:
            call()

    def wrong(self) -> tuple[Row, int] | None:
        return next((found for batch in self._batches if (found := batch.sums.wrong())), None)

    def in_host(self) -> Iterator[Row]:
        """Each row, to be compared: both sides in host memory, and of one dtype."""
        self._synchronize()
        for batch in self._batches:
            for row in batch.rows:
                to, of = (_in_host(view) for view in (row.destination, row.source))
                if row.cast:
                    of = View.of(of.tensor().to(to.tensor().dtype))
                yield replace(row, destination=to, source=of, cast=False, after=None, sums=None)

    def _send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
        """Starts the copies; an event for each device that has its part."""
        import torch

        for to, of in pairs:
            to.copy_(of, non_blocking=True)
        events = []
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def _synchronize(self) -> None:
        import torch

        for device in self._devices:
            torch.cuda.synchronize(device)


def _batched(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """All rows that go to devices; then those that come down, in parts."""
    given = list(rows)
    up, down = ([row for row in given if _comes_down(row) is way] for way in (False, True))
    if up:
        yield up
    size = max(BATCH, sum(row.destination.nbytes for row in down) // BATCHES)
    batch: list[Row] = []
    room = size
    for row in down:
        if batch and room < row.destination.nbytes:
            yield batch
            batch, room = [], size
        batch.append(row)
        room -= row.destination.nbytes
    if batch:
        yield batch


def _gathers(row: Row) -> int | None:
    """The device that gathers this row itself, if one does."""
    destination, source = row.destination, row.source
    if destination.device is None or not gather.available() or not gather.castable(destination, source):
        return None
    if source.device is not None:
        return destination.device if reaches(destination.device, source.device) else None
    if flat_run(destination, source) >= LONG:
        return None
    return destination.device if source.tensor().is_pinned() else None


def _comes_down(row: Row) -> bool:
    return row.destination.device is None


def _host_side(row: Row) -> Row:
    """The row with its host side as both sides: the library only sums those, and writes nothing."""
    side = row.destination if _comes_down(row) else row.source
    return replace(row, destination=side, source=side, cast=False, after=None)


def _in_host(view: View) -> View:
    return view if view.device is None else View.of(view.tensor().cpu())
