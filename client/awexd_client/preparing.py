"""What a reader does before an update: which sources fill its tensors, and the tables for the slots of a version."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from awexd.protocol import MAX_DEADLINE_MS, MAX_GPUS, MAX_KEEP
from awexd_client.endpoint import DEFAULT_TIMEOUT, Deadline, connect_again
from awexd_client.holding import Holding
from awexd_client.mappings import Segment
from awexd_client.phases import Phased
from awexd_client.session import CONNECT_SECONDS, Connection
from awexd_client.tables import NOTHING, Prepared, Sources, prepare
from awexd_client.taking import Taker
from awexd_client.waves import Wave, waves
from awexd_transports.cuda import driver as cuda
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    ManifestMismatch,
    VersionUnavailable,
)
from awexd_transports.layout import Manifest
from awexd_transports.plan import plan, unexpected

_Held = tuple[str, tuple[tuple[str, bool], ...]]
"""The digest of a set of manifests; the id of each rank's segment, and whether it has checksums."""

TABLES_KEPT = 2 * (MAX_KEEP + 1)
_log = logging.getLogger(__name__)


class Preparing(Phased):
    """The registered tensors of a reader, and what has been planned and mapped for them."""

    def __init__(
        self,
        job: str,
        engine: str,
        rank: int,
        world_size: int,
        socket: str | os.PathLike[str] | None,
        *,
        mode: str,
        transport: str,
        verify: str,
        timeout: float,
        ring_bytes: int,
    ) -> None:
        super().__init__(
            job,
            rank,
            world_size,
            socket,
            mode=mode,
            transport=transport,
            verify=verify,
            writable=False,
            timeout=timeout,
        )
        self.engine = engine
        self._holding_: Holding | None = None
        self._sources: OrderedDict[str, Sources] = OrderedDict()
        self._checked: set[str] = set()
        self._warned = False
        self._tables: OrderedDict[_Held, Prepared] = OrderedDict()
        self._watching: threading.Thread | None = None
        self._taker = Taker(ring_bytes, world_size)
        self._in_use = threading.RLock()  # an update that waits for its version reads nothing: others may unmap

    @property
    def _holding(self) -> Holding:
        if self._holding_ is None:
            raise InvalidArgument("register(...) comes first")
        return self._holding_

    @property
    def _who(self) -> str:
        return f"engine {self.engine} rank {self.rank}"

    def _registered(self) -> Holding | None:
        return self._holding_

    def _prepare(self, answer: dict[str, Any], deadline: Deadline) -> Prepared:
        """Everything that can fail before a byte is touched: plan, mappings, contradicting aliases."""
        if answer["exchanged"]:
            self._sources_of(answer["set"], deadline)
            return NOTHING
        prepared = self._planned(answer["set"], answer["segments"], answer["borrowed"], deadline)
        prepared.live.check()
        return prepared

    def _planned(
        self, set_digest: str, segments: Sequence[tuple[str, int, bool]], lent: bool, deadline: Deadline
    ) -> Prepared:
        """Of what is in these segments nothing is looked at yet."""
        key = (set_digest, tuple((segment_id, stored) for segment_id, _, stored in segments))
        prepared = self._tables.get(key)
        if prepared is None:
            prepared = self._tables[key] = self._build(set_digest, segments, lent, deadline)
            while len(self._tables) > TABLES_KEPT:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return prepared

    def _waves_of(
        self,
        prepared: Prepared,
        set_digest: str,
        segments: Sequence[tuple[str, int, bool]],
        pieces: Sequence[int],
        deadline: Deadline,
    ) -> Sequence[Wave]:
        """What is planned, in waves; made once. ``pieces``: in which each rank's bytes come."""
        if not prepared.waves:
            sources = self._sources_of(set_digest, deadline)
            mapped = dict(zip(sources.ranks, prepared.mappings, strict=True))
            prepared.waves.extend(waves(self._holding, sources, mapped, self._summed(sources, segments), pieces))
        return prepared.waves

    def _summed(self, sources: Sources, segments: Sequence[tuple[str, int, bool]]) -> tuple[int, ...] | None:
        """The ranks with checksums, if they are to be compared."""
        return tuple(rank for rank in sources.ranks if segments[rank][2]) if self.verify_mode == "checksum" else None

    def _build(
        self, set_digest: str, segments: Sequence[tuple[str, int, bool]], lent: bool, deadline: Deadline
    ) -> Prepared:
        sources = self._sources_of(set_digest, deadline)
        wanted = [(segments[rank][0], segments[rank][1]) for rank in sources.ranks]
        found: Sequence[Segment] = (
            self._open_lent(
                wanted, [sources.manifests[rank] for rank in sources.ranks], self._holding.reading_device, deadline
            )
            if lent
            else self._map(wanted, deadline)
        )
        if lent:
            self._watch_drops()
        mapped = dict(zip(sources.ranks, found, strict=True))
        summed = self._summed(sources, segments)
        if summed is not None and len(summed) < len(sources.ranks) and not self._warned and not lent:
            self._warned = True
            _log.warning(
                '%s is published without checksums: pass verify="checksum" to its WeightWriter too; '
                "until then only the copy is checked, not what is held",
                self.job,
            )
        return prepare(self._holding, sources, mapped, summed)

    def _let_go(self) -> None:
        super()._let_go()
        self._holding_ = None
        self._taker.close()

    def _devices(self, holding: Holding) -> list[str]:
        """UUIDs of the GPUs whose memory this process can open; none where it does not want to."""
        on_device = any(cuda.driver.device_of(view) is not None for view in holding.views)
        return cuda.driver.devices()[:MAX_GPUS] if self.mode != "host" and on_device and not self.exchanging else []

    def _watch_drops(self) -> None:
        """Closes what was lent as soon as its owner wants it back, also while nothing is asked for here.

        And comes back to a daemon that was restarted: a trainer waits there for what this worker runs on.
        """
        if self._watching is None or not self._watching.is_alive():
            self._watching = threading.Thread(target=self._close_dropped, name="awexd-drops", daemon=True)
            self._watching.start()

    def _close_dropped(self) -> None:
        watched = True
        while watched:
            self._registered_there.wait(DEFAULT_TIMEOUT)  # by a call that found the connection to be over
            used = self._connection
            try:
                used.call("segment.dropped", {}, timeout=MAX_DEADLINE_MS / 1000, patient=True)
            except DeadlineExceeded:
                continue
            except AwexdError as error:  # the connection is over, or this worker's job is
                self._close_lost(used)
                back = isinstance(error, DaemonUnavailable) and self._come_back()
                with self._in_use:
                    watched = back or (self._connection is not used and not self._connection.over)
                    self._watching = self._watching if watched else None
            else:
                with self._in_use:
                    self._unmap_dropped("segment.dropped")

    def _close_lost(self, used: Connection) -> None:
        """Whoever lent it cannot say any more that it goes."""
        with self._lock, self._in_use:
            if used is self._connection and not self._closed:
                self._forget_tables(None)
                self._maps.close()

    def _come_back(self) -> bool:
        """Registers again with a daemon that is there again, if no other call does."""
        try:
            connect_again(self._path, DEFAULT_TIMEOUT, lambda: not self._closed).goodbye()
            self._surviving(lambda _: None, Deadline(CONNECT_SECONDS))
        except AwexdError as error:  # the next call's business
            _log.debug("%s: not registered again yet: %s", self.job, error)
            return False
        return not self._closed

    def _sources_of(self, set_digest: str, deadline: Deadline) -> Sources:
        if set_digest not in self._sources:
            self._fetch_sources(self._holding, set_digest, deadline)
        if self.world_size > 1 and set_digest not in self._checked:
            self._check_unexpected(self._sources[set_digest].manifests, deadline)
            self._checked.add(set_digest)
        self._sources.move_to_end(set_digest)
        while len(self._sources) > TABLES_KEPT:
            self._sources.popitem(last=False)
        return self._sources[set_digest]

    def _fetch_sources(self, holding: Holding, set_digest: str | None, deadline: Deadline) -> None:
        """Asks what is published and plans how it fills ``holding``.

        Raises:
            ManifestMismatch: it does not.
        """
        answer = self._ask_for_manifests("read.sources", deadline.left(), job=self.job, set=set_digest)
        if answer["set"] is None:
            if set_digest is not None:
                raise VersionUnavailable(f"{self.job}: what this version's bytes mean is not known any more")
            return
        manifests = tuple(self._manifests[digest] for digest in answer["ranks"])
        # Where this worker is its whole engine, missing and unexpected names are told together.
        planned = plan(manifests, [holding.manifest], partial=self.world_size > 1)
        self._manifests.clear()
        self._sources[answer["set"]] = Sources(manifests, planned)

    def _check_unexpected(self, manifests: Sequence[Manifest], deadline: Deadline) -> None:
        """Refuses names that no worker of the engine declares; waits for its siblings where it cannot tell alone."""
        extra = unexpected(manifests, [self._holding.manifest])
        if extra:
            answer = self._ask_for_manifests("read.siblings", deadline.left())
            extra = unexpected(manifests, [self._manifests[digest] for digest in answer["ranks"]])
            self._manifests.clear()
        if extra:
            raise ManifestMismatch.between(
                f"{self.job} publishes what no worker of {self.engine} declares", unexpected=extra, mismatched={}
            )

    def _refresh(self) -> None:
        """Looks the target up again where its tensors were rebound or moved: stale memory must never be written."""
        holding = self._holding
        if not holding.watch.changed():
            return
        fresh = Holding.to_fill(holding.target, holding.adapter)
        fresh.check_disjoint()
        if fresh.manifest.digest != holding.manifest.digest:
            raise ManifestMismatch(
                f"{self.job}: the registered tensors changed in name, shape or dtype since register(); register again"
            )
        self._holding_ = fresh
        self._forget_tables(None)

    def _forget_sources(self) -> None:
        self._forget_tables(None)
        self._sources.clear()
        self._checked.clear()

    def _forget_tables(self, segments: Sequence[str] | None) -> None:
        gone = None if segments is None else set(segments)
        for key in [key for key in self._tables if gone is None or gone & {segment for segment, _ in key[1]}]:
            self._tables.pop(key, None)
