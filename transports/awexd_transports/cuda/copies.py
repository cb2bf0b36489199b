"""Copies to, from and between CUDA devices, and their checksums.

A long run without gaps between a device and host memory is one DMA. Where Triton is there, and host memory is
registered with CUDA, what is strided, short or cast goes down through a ring on the device (``ring``) and up through it
or in one launch that reads it in place, whichever is faster (``intake``); whatever another device has, or another
process on its own, is one launch (``gather``), which sums it too where it has checksums (``sums``); and devices sum
what they send, and what has arrived (``checks``). All else torch copies, and the C library sums the host's side:
downwards a batch once it has arrived, upwards while it travels.
Everything is done when ``run`` returns, on every stream of the devices: what a trainer or an engine has in flight there
comes before, what it does afterwards sees the new bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from awexd_transports.cuda import gather
from awexd_transports.cuda.bits import differs, fetched
from awexd_transports.cuda.checks import DeviceChecks, item_of, moved_of
from awexd_transports.cuda.gather import Gather
from awexd_transports.cuda.intake import Intake, Up
from awexd_transports.cuda.peers import reaches
from awexd_transports.cuda.ring import Down, Drain, packed
from awexd_transports.cuda.sums import Summed
from awexd_transports.threads import default_threads
from awexd_transports.tiles import flat_run
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

    from awexd_transports.copy import CopyTable, Row

BATCH = 64 << 20
BATCHES = 16
"""What comes or goes is summed in about so many parts, of BATCH bytes at least, while the next ones travel: beginning a
part takes up to a millisecond, and the last part is summed alone."""
LONG = 8 << 20
"""Bytes of a run from which on a DMA of its own pays: half of what a ring's takes."""
_BEFORE = -1
"""The group of checksums that are summed from the beginning on: of what goes down. The others' are their batches."""
SUMMING = 32
"""Threads that only read and sum: more of them pay than of those that copy."""


def on_device(row: Row) -> bool:
    return row.destination.device is not None or row.source.device is not None


@dataclass(slots=True)
class _Batch:
    """Rows that travel one after another.

    Attributes:
        pairs: what torch copies. ``ringed``: devices whose rings bring the rest, all of it, down.
        sums: the host's side of those that the library sums. ``after``: what sums others.
        down: they come from a device: the host sums them when they have arrived.
    """

    rows: Sequence[Row]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ringed: bool
    sums: CopyTable
    after: Sequence[Callable[[], object]]
    down: bool

    @property
    def awaited(self) -> bool:
        return self.down and bool(self.sums.nbytes or self.after)


class DeviceCopies:
    """Prepared copies of which at least one side is a device's memory.

    Args:
        table: makes a table of rows in host memory.
    """

    def __init__(self, rows: Iterable[Row], table: Callable[[Iterable[Row]], CopyTable]) -> None:
        self._batches: list[_Batch] = []
        gathered: dict[int, list[list[tuple[View, View]]]] = defaultdict(list)
        checked: list[tuple[Row, Summed, int]] = []
        downs: dict[int, list[Down]] = defaultdict(list)
        ups: dict[int, dict[int, list[Up]]] = defaultdict(lambda: defaultdict(list))
        pinned = _Pinned()
        for batch, ringed in _batched(rows, pinned):
            number, down = len(self._batches), _comes_down(batch[0])
            pairs, summed = [], []
            for row in batch:
                device = None if down else _gathers(row, pinned)
                item = item_of(row, cast=ringed)
                if device is not None and row.source.device is not None and (moved := moved_of(row)):
                    item = moved
                elif ringed and row.source.device is not None:
                    downs[row.source.device].append(Down(row.destination, row.source, row.padding))
                elif device is None:
                    pairs.append((row.destination.tensor(), row.source.tensor()))
                elif row.source.device is None:
                    ups[device][number].append(Up(row.destination, row.source))
                else:
                    _group(gathered[device], number).append((row.destination, row.source))
                if item:
                    checked.append((row, item, _BEFORE if down else number))
                elif row.sums:
                    summed.append(_host_side(row))
            after = [row.after for row in batch if row.after]
            self._batches.append(_Batch(batch, pairs, ringed, table(summed), after, down))
        self._intakes = [Intake(groups, device) for device, groups in ups.items()]
        for device, intake in zip(ups, self._intakes, strict=True):
            for number, in_place in intake.in_place.items():
                _group(gathered[device], number).extend(in_place)
        self._gathers = {device: Gather(groups, f"cuda:{device}") for device, groups in gathered.items()}
        self._drains = [Drain(each, device) for device, each in downs.items()]
        self._checks = DeviceChecks(checked) if checked else None
        sides = [view for batch in self._batches for row in batch.rows for view in (row.destination, row.source)]
        self._devices = sorted({view.device for view in sides if view.device is not None})

    def run(self, threads: int | None, sharing: int, meanwhile: Callable[[], object]) -> None:
        """``meanwhile``: called once, while devices copy."""
        import torch

        threads = threads or default_threads(sharing, SUMMING)
        rest: Sequence[int] = ()
        self._synchronize()
        try:
            if self._checks:
                self._checks.begin()
                self._checks.launch(_BEFORE)
            with torch.inference_mode():  # vLLM's weights were made in it, and may be written in it only
                arrived = [self._send(number, batch) for number, batch in enumerate(self._batches)]
            meanwhile()
            for batch, events in zip(self._batches, arrived, strict=True):
                self._sum(batch, events, threads, sharing)
            if self._checks:
                rest = self._checks.rest(threads)
        finally:
            self._synchronize()  # whatever went wrong, nothing is under way to memory that may go now
        if self._checks:
            self._checks.finish(rest)

    @property
    def plain(self) -> bool:
        """Nothing is summed, and nothing comes after a batch."""
        return not self._checks and not any(batch.awaited for batch in self._batches)

    @staticmethod
    def run_all(copies: Sequence[DeviceCopies]) -> None:
        """All that is ``plain``, one after the other, and no launch waits for the end of the one before."""
        import torch

        for each in copies:
            each._synchronize()
        try:
            with torch.inference_mode():
                for each in copies:
                    for number, batch in enumerate(each._batches):
                        each._send(number, batch)
        finally:
            for each in copies:
                each._synchronize()

    def _sum(self, batch: _Batch, arrived: Sequence[Any], threads: int, sharing: int) -> None:
        if batch.awaited:
            for event in arrived:
                event.synchronize()
        batch.sums.run(threads, sharing=sharing)
        for call in batch.after:
            call()

    def wrong(self) -> tuple[Row, int] | None:
        if self._checks and (away := self._checks.wrong()):
            return away
        return next((found for batch in self._batches if (found := batch.sums.wrong())), None)

    def in_host(self) -> Iterator[Row]:
        """Each row, to be compared, both sides in host memory; but for those that their device finds to be equal."""
        self._synchronize()
        for batch in self._batches:
            for row in batch.rows:
                if _equal(row):
                    continue
                to, of = (_in_host(view) for view in (row.destination, row.source))
                yield replace(row, destination=to, source=of, after=None, sums=None)

    def _send(self, number: int, batch: _Batch) -> Sequence[Any]:
        """Starts a batch's copies; events of their end, if somebody waits for that."""
        taken = [event for intake in self._intakes if (event := intake.launch(number))]
        for each in self._gathers.values():
            each.launch(number)
        for to, of in batch.pairs:
            to.copy_(of, non_blocking=True)
        if batch.ringed:
            return [drain.launch() for drain in self._drains]
        if batch.down:
            return self._events() if batch.awaited else ()
        if self._checks:
            self._checks.launch(number, [*taken, *self._events()])
        return ()

    def _events(self) -> list[Any]:
        """Of what has been started on the devices' current streams."""
        import torch

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


def _group(groups: list[list[tuple[View, View]]], number: int) -> list[tuple[View, View]]:
    """The one of that number; those before it are made, too."""
    groups += ([] for _ in range(number + 1 - len(groups)))
    return groups[number]


class _Pinned:
    """Whether host memory is registered with CUDA; asked once an owner, all of whose memory is, or none."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, view: View) -> bool:
        if view.owner is None:
            return view.tensor().is_pinned()
        known = self._known.get(id(view.owner))
        if known is None:
            known = self._known[id(view.owner)] = view.tensor().is_pinned()
        return known


def _batched(rows: Iterable[Row], pinned: _Pinned) -> Iterator[tuple[list[Row], bool]]:
    """What is between devices, at once; what goes to them, in parts; what comes down, in parts; at last all that goes
    through rings, which is told."""
    across: list[Row] = []
    up: list[Row] = []
    down: list[Row] = []
    ringed: list[Row] = []
    for row in rows:
        if _comes_down(row):
            (ringed if _goes_by_ring(row, pinned) else down).append(row)
        else:
            (up if row.source.device is None else across).append(row)
    if across:
        yield across, False
    yield from ((batch, False) for batch in (_parts(up) if gather.available() else [up] if up else []))
    yield from ((batch, False) for batch in _parts(down))
    if ringed:
        yield ringed, True


def _parts(rows: Sequence[Row]) -> Iterator[list[Row]]:
    size = max(BATCH, sum(row.destination.nbytes for row in rows) // BATCHES)
    batch: list[Row] = []
    room = size
    for row in rows:
        if batch and room < row.destination.nbytes:
            yield batch
            batch, room = [], size
        batch.append(row)
        room -= row.destination.nbytes
    if batch:
        yield batch


def _gathers(row: Row, pinned: _Pinned) -> int | None:
    """The device that gathers this row, which goes up or is between devices, itself, if one does."""
    destination, source = row.destination, row.source
    if destination.device is None or not gather.available() or not gather.castable(destination, source):
        return None
    if source.device is not None:
        return destination.device if reaches(destination.device, source.device) else None
    if destination.dtype == source.dtype and flat_run(destination, source) >= LONG:
        return None
    return destination.device if pinned(source) else None


def _goes_by_ring(row: Row, pinned: _Pinned) -> bool:
    """Whether this row, which comes down, is gathered first."""
    destination, source = row.destination, row.source
    if not gather.available() or not gather.castable(destination, source) or not packed(destination):
        return False
    if destination.dtype == source.dtype and flat_run(destination, source) >= LONG:
        return False
    return pinned(destination)


def _comes_down(row: Row) -> bool:
    return row.destination.device is None


def _host_side(row: Row) -> Row:
    """The row with its host side as both sides: the library only sums those, and writes nothing."""
    side = row.destination if _comes_down(row) else row.source
    return replace(row, destination=side, source=side, cast=False, after=None)


def _equal(row: Row) -> bool:
    """Whether one device has both sides, and they are the same bits."""
    to, of = row.destination, row.source
    return to.device is not None and to.device == of.device and to.dtype == of.dtype and not differs(to, of)


def _in_host(view: View) -> View:
    return view if view.device is None else View.of(fetched(view, view.device).cpu())
