"""Who is told of bytes that have come, and are right: other nodes, which fetch them from here, and readers here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from awexd.background import Signals
from awexd.peers.offers import Offered
from awexd.store.arriving import Arrival, Landed
from awexd_transports.base import Piece
from awexd_transports.ranges import Ranges

PATIENCE_SECONDS = 0.25
"""For a reader that copies what it was told of."""


class Landing:
    """Tells of one version that is being brought here.

    Args:
        offer: of it to other nodes; None: there are none.
        arrival: that readers follow; None: none can.
        signals: by which they are told.
    """

    def __init__(self, offer: Offered | None, arrival: Arrival | None, signals: Signals) -> None:
        self._offer, self._arrival, self._signals = offer, arrival, signals

    def promise(self, ranges: Mapping[int, Ranges], rows: Iterable[Piece]) -> None:
        """What will come, by rank, and what is of this node already."""
        if self._offer is not None:
            self._offer.promise(ranges, rows)

    def ranges(self, rank: int, start: int, end: int) -> None:
        """As ``peers.arrivals.Arrived``."""
        if self._offer is not None:
            self._offer.extend(rank, start, end)
        self._land(Landed(rank, start, end - start, 1, 0))

    def rows(self, piece: Piece) -> None:
        """As ``peers.arrivals.RowsArrived``."""
        if self._offer is not None:
            self._offer.extend_rows(piece)
        self._land(Landed(piece.rank, piece.offset, piece.nbytes, piece.rows, piece.stride))

    def came(self, piece: Piece) -> None:
        """As ``peers.arrivals.Came``: only other nodes are told, which compare it themselves."""
        if self._offer is not None:
            self._offer.pass_on(piece)

    async def room(self) -> None:
        """Returns once no more has landed than readers that follow can be expected to have copied soon.

        What they copy out of host memory, and what lands in it, take turns at it: what they are not up to can wait.
        Nobody is waited for where other nodes are served from here, nor a reader that does not ask for more at all.
        """
        arrival = self._arrival
        while arrival is not None and arrival.ahead and not (self._offer is not None and self._offer.in_use):
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._signals.next(arrival.heard)
            except TimeoutError:
                arrival.paced = False

    def _land(self, landed: Landed) -> None:
        if self._arrival is not None and self._arrival.land(landed):
            self._signals.fire(self._arrival.signal)
