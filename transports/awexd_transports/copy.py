"""Runs many strided copies, prepared once and run every step, on a few threads that leave the GIL alone.

Most rows are jobs of a small library (``kernel``). The others, and all where it is missing, are joined with their
predecessors where both sides continue, cut into tiles where large (``tiles``) and batched where small. Threads draw
from one queue. What a device has a part in goes by ``cuda.copies``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from awexd_transports.cuda.copies import DeviceCopies, on_device
from awexd_transports.errors import InvalidArgument
from awexd_transports.kernel import Jobs, Sums, takes
from awexd_transports.threads import MAX_THREADS, default_threads, shut_down_threads, spread
from awexd_transports.tiles import Step, cast_steps, copy_steps, flat_run, flat_steps, same
from awexd_transports.view import View, overlapping

if TYPE_CHECKING:
    import torch

__all__ = ["CopyTable", "Difference", "Row", "Sums", "View", "default_threads", "overlapping", "shut_down_threads"]

BATCH = 2 << 20
"""Bytes that a thread takes at once: large enough that the threads seldom meet at the GIL, and both sides of all
threads' batches still are in the shared cache when what comes ``after`` reads them."""
BATCH_ROWS = 256
WORTHWHILE = 512 << 10
"""Bytes that another thread should have to do: for less, waking it costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Row:
    """One copy: same shape on both sides.

    Attributes:
        destination, source: of the same dtype, unless ``cast``: then as torch's ``copy_`` casts.
        label: names it.
        after: called without arguments each time the row has been copied, on the same thread, while the bytes are in
            that core's cache. Such a row should have at most about BATCH bytes: it is not spread over threads.
        sums: checksums that are taken in the same pass; only where ``kernel.takes_summed`` or ``cuda.checks.item_of``.
        padding: bytes after the destination that are nobody's: they may be written too, as zeros.
    """

    destination: View
    source: View
    label: str = ""
    cast: bool = False
    after: Callable[[], object] | None = None
    sums: Sums | None = None
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element of a row, by its index in the row's box, whose bytes are not what was copied."""

    label: str
    index: tuple[int, ...]


Flat = tuple[int, int, int]
"""Destination, source and bytes of a copy without gaps, of one or more rows."""


@dataclass(slots=True)
class _Batch:
    """What one thread does at once: tiles for one call of torch, other steps, then what comes after them."""

    room: int = BATCH
    to: list[torch.Tensor] = field(default_factory=list)
    of: list[torch.Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.to) + len(self.steps)

    def add(self, nbytes: int, step: Step) -> None:
        copy, destination, source = step
        if copy is None:
            self.to.append(destination)
            self.of.append(source)
        else:
            self.steps.append(step)
        self.room -= nbytes

    def run(self) -> None:
        if self.to:
            _copy_all(self.to, self.of)
        for copy, destination, source in self.steps:
            if copy is not None:
                copy(destination, source)
        for call in self.after:
            call()

    def differs(self) -> bool:
        tiles: list[Step] = [(None, to, of) for to, of in zip(self.to, self.of, strict=True)]
        return not all(same(step) for step in (*tiles, *self.steps))


class CopyTable:
    """Prepared copies. Keeps the owners of all its views alive; destinations must not overlap (see ``overlapping``).

    Args:
        rows: copies in any order; those without elements vanish.

    Raises:
        InvalidArgument: a row whose sides differ in shape, or in dtype without ``cast``, or whose destination has a
            dimension of stride zero. Nothing is ever broadcast.
    """

    def __init__(self, rows: Iterable[Row | tuple[View, View]]) -> None:
        given = [row if isinstance(row, Row) else Row(*row) for row in rows]
        for row in given:
            _check(row)
        kept = [row for row in given if row.destination.numel]
        self.nbytes = sum(row.destination.nbytes for row in kept)
        self._rows = [row for row in kept if not on_device(row)]
        away = [row for row in kept if on_device(row)]
        self._away = DeviceCopies(away, CopyTable) if away else None
        rest: list[Row | Flat] = []
        self._taken: list[Row] = []
        for item in _joined(self._rows):
            row = item if isinstance(item, Row) else _flat_row(*item)
            if row.sums or (not row.after and _same_dtype(row) and takes(row.destination, row.source)):
                self._taken.append(row)
            else:
                rest.append(item)
        self._jobs = Jobs([(row.destination, row.source, row.sums) for row in self._taken])
        with _plain_tensors():
            self._batches = _batches(rest)

    def run(self, threads: int | None = None, *, sharing: int = 1, meanwhile: Callable[[], object] = bool) -> None:
        """All copies, in place; returns when every byte is there.

        Args:
            threads: this one included; at most MAX_THREADS. None: ``default_threads(sharing)``.
            sharing: processes of this node that copy at the same time.
            meanwhile: called once, while devices copy, or before anything is copied where none does.
        """
        wanted = self._threads(threads, sharing)
        if self._away:
            self._away.run(threads, sharing, meanwhile)
        else:
            meanwhile()
        if not self._rows:
            return
        work = self._jobs.start()
        if wanted == 1:
            work()
            for batch in self._batches:
                batch.run()
            return
        jobs = [work] * min(wanted, MAX_THREADS, self._jobs.tiles)
        spread([*jobs, *(batch.run for batch in self._batches)], _call, wanted)

    @staticmethod
    def run_all(tables: Sequence[CopyTable], *, sharing: int = 1) -> None:
        """As ``run`` of each. Of those that only have a device copy, all are launched before the first is awaited."""
        away = [table._away for table in tables if table._away and table._away.plain and not table._rows]
        if len(away) == len(tables):
            DeviceCopies.run_all(away)
            return
        for table in tables:
            table.run(sharing=sharing)

    @property
    def on_device(self) -> bool:
        """Whether devices have a part in it."""
        return self._away is not None

    def wrong(self) -> tuple[Row, int] | None:
        """After a run: the first row with ``sums`` that did not add up to what is stored, and which of its tiles."""
        if self._away and (away := self._away.wrong()):
            return away
        found = self._jobs.wrong()
        return (self._taken[found[0]], found[1]) if found else None

    def first_difference(self, threads: int | None = None) -> Difference | None:
        """Compare destinations with sources bit by bit (cast rows: with the cast of their source)."""
        for row in self._away.in_host() if self._away else ():
            index = _first_index(row)
            if index is not None:
                return Difference(row.label, index)
        if not self._rows:
            return None
        found: list[bool] = []
        spread(self._compared, partial(_compare, found), self._threads(threads))
        if not found:
            return None
        places = ((row.label, _first_index(row)) for row in self._rows)
        return next((Difference(label, place) for label, place in places if place is not None), None)

    @cached_property
    def _compared(self) -> Sequence[_Batch]:
        """All rows, to be compared."""
        with _plain_tensors():
            return _batches(_joined(self._rows))

    def _threads(self, threads: int | None, sharing: int = 1) -> int:
        useful = max(1, self.nbytes // WORTHWHILE)
        if threads is None:
            return min(default_threads(sharing), useful) if useful > 1 else 1
        return min(threads, useful)


def _same_dtype(row: Row) -> bool:
    return row.destination.dtype == row.source.dtype


def _flat_row(destination: int, source: int, nbytes: int) -> Row:
    return Row(View.packed(destination, (nbytes,), "uint8", None), View.packed(source, (nbytes,), "uint8", None))


def _call(work: Callable[[], None]) -> None:
    work()


def _copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    import torch

    torch._foreach_copy_(destinations, sources)


def _compare(found: list[bool], batch: _Batch) -> None:
    if not found and batch.differs():
        found.append(True)


def _plain_tensors() -> AbstractContextManager[object]:
    """vLLM's workers run in inference mode; tensors made there could not be written by the other threads."""
    torch = sys.modules.get("torch")
    return torch.inference_mode(False) if torch else nullcontext()


def _check(row: Row) -> None:
    destination, source = row.destination, row.source
    name = row.label or "a row"
    if destination.shape != source.shape:
        raise InvalidArgument(
            f"{name}: shape {list(source.shape)} cannot go to shape {list(destination.shape)}; nothing is broadcast"
        )
    if destination.dtype != source.dtype and not row.cast:
        raise InvalidArgument(f"{name}: {source.dtype} cannot go to {destination.dtype}: no cast was asked for")
    repeats = any(n > 1 and not step for n, step in zip(destination.shape, destination.strides, strict=True))
    if destination.numel and repeats:
        raise InvalidArgument(f"{name}: several elements of the destination share memory (a stride of zero)")


def _first_index(row: Row) -> tuple[int, ...] | None:
    destination, source = row.destination, row.source
    if row.cast and source.dtype != destination.dtype:
        into = destination.tensor()
        expected = source.tensor().to(into.dtype)
        differs = (destination.bytes_array() != View.of(expected).bytes_array()).any(axis=-1)
        differs &= ~(_is_nan(into) & _is_nan(expected))
    else:
        differs = (destination.bytes_array() != source.bytes_array()).any(axis=-1)
    if not differs.any():
        return None
    return tuple(int(at) for at in np.unravel_index(int(differs.argmax()), differs.shape))


def _is_nan(tensor: torch.Tensor) -> Any:
    import torch

    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide).isnan().numpy()


def _batches(items: Iterable[Row | Flat]) -> Sequence[_Batch]:
    batches: list[_Batch] = []

    def batch_for(nbytes: int) -> _Batch:
        if not batches or batches[-1].room < nbytes or len(batches[-1]) >= BATCH_ROWS:
            batches.append(_Batch())
        return batches[-1]

    for joined in items:
        if isinstance(joined, Row) and joined.after:  # its tiles stay together: they are read again afterwards
            batch = batch_for(joined.destination.nbytes)
            for nbytes, step in _steps(joined):
                batch.add(nbytes, step)
            batch.after.append(joined.after)
            continue
        for nbytes, step in _steps(joined):
            batch_for(nbytes).add(nbytes, step)
    return batches


def _steps(joined: Row | Flat) -> Iterator[tuple[int, Step]]:
    if isinstance(joined, tuple):
        return flat_steps(*joined)
    return (copy_steps if _same_dtype(joined) else cast_steps)(joined.destination, joined.source)


def _joined(rows: Iterable[Row]) -> Iterator[Row | Flat]:
    """Rows without gaps that continue their predecessors on both sides, made one."""
    waiting: Flat | None = None
    for row in rows:
        alone = row.after or row.sums or not _same_dtype(row)
        nbytes = 0 if alone else flat_run(row.destination, row.source)
        if not nbytes:
            yield row
            continue
        flat = (row.destination.address, row.source.address, nbytes)
        if waiting and flat[:2] == (waiting[0] + waiting[2], waiting[1] + waiting[2]):
            waiting = (*waiting[:2], waiting[2] + nbytes)
            continue
        if waiting:
            yield waiting
        waiting = flat
    if waiting:
        yield waiting
