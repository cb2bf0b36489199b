"""A worker's part in exchanges: what its trainer's processes send, straight into its live tensors."""

from __future__ import annotations

from collections.abc import Callable

from awexd_client.endpoint import Deadline
from awexd_client.exchanges import Exchanges, Joined, device_name, device_of
from awexd_client.holding import Holding
from awexd_client.session import Connection
from awexd_client.shares import Receiving, received
from awexd_client.tables import Sources
from awexd_transports.collective.base import Guard, Lost
from awexd_transports.collective.rings import Ring
from awexd_transports.collective.rounds import writers_of
from awexd_transports.errors import VersionUnavailable


class Taker:
    """Keeps what is needed for further exchanges with the same processes."""

    def __init__(self, ring_bytes: int, sharing: int) -> None:
        self._exchanges = Exchanges(ring_bytes, sharing)
        self._shares: dict[str, tuple[Holding, Sources, Receiving]] = {}

    @property
    def groups_made(self) -> int:
        return self._exchanges.made

    def take(
        self,
        connection: Connection,
        lease: str,
        holding: Holding,
        sources: Sources,
        *,
        sums: bool,
        touched: Callable[[], object],
        deadline: Deadline,
    ) -> int:
        """Takes part in the next exchange of the leased version; the bytes that were written.

        Args:
            sums: what arrives is compared with its writers' checksums.
            touched: called before the first byte of a live tensor is.

        Raises:
            VersionUnavailable: with ``exchange`` in its details: somebody else has gone; the next one may do.
            IntegrityError, ManifestMismatch, InvalidArgument, DeadlineExceeded
        """
        device = device_of(holding)
        arguments = {"attempt": None, "lease": lease, "device": device_name(device), "sums": sums}
        joined = Joined.of(connection.call("group.join", arguments, timeout=deadline.left())[0])
        if joined is None:
            raise VersionUnavailable("this version was taken back by its trainer", {"exchange": 0})
        shares: list[Receiving] = []

        def prepare(ring: Ring, joined: Joined) -> Receiving:
            shares.append(self._share(ring, joined, holding, sources))
            return shares[-1]

        try:
            self._exchanges.run(connection, joined, device, prepare, Guard(touched), deadline)
        except Lost as error:
            raise VersionUnavailable(error.message, {"exchange": joined.exchange}) from error
        (share,) = shares
        share.check()
        return share.nbytes

    def close(self) -> None:
        self._shares.clear()
        self._exchanges.close()

    def _share(self, ring: Ring, joined: Joined, holding: Holding, sources: Sources) -> Receiving:
        """What this worker receives; made once for each group."""
        known = self._shares.get(joined.group)
        if known is not None and known[0] is holding and known[1] is sources and not joined.fresh:
            return known[2]
        order = writers_of(joined.index - joined.writers, joined.writers, len(joined.workers))
        brought, checked = (
            received(sources, holding, copies, order) for copies in (sources.plan.copies, sources.plan.checks)
        )
        wanted = joined.sums[joined.index]
        summed = frozenset(rank for rank in range(joined.writers) if wanted and joined.sums[rank])
        share = Receiving(ring, {str(joined.index): sources.plan.digest}, brought, checked, summed)
        self._shares = {key: kept for key, kept in self._shares.items() if key in joined.kept}
        self._shares[joined.group] = holding, sources, share
        return share
