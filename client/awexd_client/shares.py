"""What a writer sends and a worker receives in an exchange, from their plans: boxes, where they lie, and checksums."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from awexd_client.checksums import OwnSums
from awexd_client.holding import Holding
from awexd_client.tables import Sources
from awexd_transports.collective.base import Group, Guard
from awexd_transports.collective.flow import Flow, Load
from awexd_transports.collective.rings import Bytes, Ring
from awexd_transports.errors import IntegrityError
from awexd_transports.layout import Entry, Manifest
from awexd_transports.moves import Moves
from awexd_transports.plan import Copy
from awexd_transports.segment import first_cells
from awexd_transports.view import View


class Boxes:
    """The boxes that go from one writer to one worker, where they lie on this side.

    Args:
        entries: of the worker's manifest.
        place: where a copy's box lies here.
    """

    def __init__(self, copies: Sequence[Copy], entries: Sequence[Entry], place: Callable[[Copy], View]) -> None:
        self.views = [place(copy) for copy in copies]
        named = [entries[copy.destination_entry] for copy in copies]
        self.labels = [entry.tensor.name for entry in named]
        self._entries = [
            Entry(entry.tensor, copy.box, number, entry.layout)
            for number, (copy, entry) in enumerate(zip(copies, named, strict=True))
        ]

    def sums(self) -> BoxSums:
        return BoxSums(Manifest.of(self._entries), self.views)


class BoxSums:
    """Checksums of boxes, each cell's, where they lie; and those of the other side.

    Raises:
        InvalidArgument: elements that no device sums.
    """

    def __init__(self, manifest: Manifest, views: Sequence[View]) -> None:
        self._manifest = manifest
        self._first = first_cells(manifest)
        own = np.zeros(self._first[-1], np.int64)
        self._own = own
        self._sums = OwnSums(manifest, views, own)
        self._sent = np.zeros_like(own)

    @property
    def to_send(self) -> Bytes:
        return self._own.view(np.uint8)

    @property
    def received(self) -> Bytes:
        return self._sent.view(np.uint8)

    def store(self) -> None:
        self._sums.store()

    def check(self, writer: int) -> None:
        """
        Raises:
            IntegrityError: what lies here is not what that writer's sums are of; names the first box.
        """
        self._sums.store()
        wrong = np.flatnonzero(self._own != self._sent)
        if len(wrong):
            entry = self._manifest.entries[bisect_right(self._first, int(wrong[0])) - 1]
            raise IntegrityError(
                f"{entry.tensor.name} {entry.box}: what has arrived is not what writer rank {writer} sent"
            )


class Sending:
    """A writer's share of an exchange.

    Args:
        loads: which boxes go to each member, by number: in the order in which they are met.
        checked: the further ones, that they only compare.
        summed: members that want checksums.
    """

    def __init__(
        self,
        ring: Ring,
        plans: dict[str, str],
        loads: Iterable[tuple[int, Boxes]],
        checked: Iterable[tuple[int, Boxes]],
        summed: frozenset[int],
    ) -> None:
        self.plans = plans
        self._sums: list[BoxSums] = []
        self._flow = Flow(ring, [*self._loads(loads, summed), *self._loads(checked, frozenset())], into=False)

    def move(self, group: Group, guard: Guard, left: Callable[[], float]) -> None:
        for sums in self._sums:
            with guard.touching():
                sums.store()
        self._flow.send(group, guard, left)

    def _loads(self, loads: Iterable[tuple[int, Boxes]], summed: frozenset[int]) -> Iterable[Load]:
        for peer, boxes in loads:
            if boxes.views and peer in summed:
                self._sums.append(boxes.sums())
                yield Load(peer, boxes.views, boxes.labels, self._sums[-1].to_send)
            else:
                yield Load(peer, boxes.views, boxes.labels)


class Receiving:
    """A worker's share of an exchange. Arguments as of ``Sending``, by writer rank.

    Attributes:
        nbytes: that are written into live tensors.
    """

    def __init__(
        self,
        ring: Ring,
        plans: dict[str, str],
        loads: Iterable[tuple[int, Boxes]],
        checked: Iterable[tuple[int, Boxes]],
        summed: frozenset[int],
    ) -> None:
        self.plans = plans
        self._sums: dict[int, BoxSums] = {}
        brought = list(self._loads(loads, summed))
        self._flow = Flow(ring, brought, into=True)
        self.nbytes = self._flow.nbytes
        same = [Load(peer, boxes.views, boxes.labels, same=True) for peer, boxes in checked]
        self._same = Flow(ring, same, into=True)

    def move(self, group: Group, guard: Guard, left: Callable[[], float]) -> None:
        self._flow.receive(group, guard, left)
        self._same.receive(group, guard, left)

    def check(self) -> None:
        """Raises IntegrityError: bytes are not what their writer sent."""
        for writer, sums in self._sums.items():
            sums.check(writer)

    def _loads(self, loads: Iterable[tuple[int, Boxes]], summed: frozenset[int]) -> Iterable[Load]:
        for peer, boxes in loads:
            if boxes.views and peer in summed:
                sums = self._sums[peer] = boxes.sums()
                yield Load(peer, boxes.views, boxes.labels, sums.received)
            else:
                yield Load(peer, boxes.views, boxes.labels)


def received(
    sources: Sources, holding: Holding, copies: Iterable[Copy], order: Iterable[int]
) -> list[tuple[int, Boxes]]:
    """The boxes that come from each writer, and where they belong."""
    entries = holding.manifest.entries

    def place(copy: Copy) -> View:
        entry = entries[copy.destination_entry]
        return holding.views[copy.destination_entry].sub(copy.box.relative_to(entry.box.offset))

    by_rank: dict[int, list[Copy]] = {rank: [] for rank in range(len(sources.manifests))}
    for copy in copies:
        by_rank[copy.source].append(copy)
    return [(rank, Boxes(by_rank[rank], entries, place)) for rank in order]


def sent(own: Sequence[Entry], rank: int, views: Sequence[View], entries: Sequence[Entry], moves: Moves) -> Boxes:
    """The boxes that this writer sends to one worker, and where they lie.

    Args:
        own: entries of this rank's segment manifest. ``views``: of its pieces.
        entries: of the worker's. ``moves``: all that fills it.
    """

    def place(copy: Copy) -> View:
        entry = own[copy.source_entry]
        return views[entry.piece].sub(copy.box.relative_to(entry.box.offset))

    return Boxes(list(moves[np.flatnonzero(moves.source == rank)].copies(0)), entries, place)
