"""Bringing one version here from other nodes: into slots like a writer's, and committed once every byte is right."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from awexd.adoption import header_of
from awexd.nodes.announcing import Announcer
from awexd.nodes.landing import Landing
from awexd.nodes.mapped import Mapped
from awexd.nodes.metaclient import MetaClient
from awexd.nodes.needs import Planner, Published
from awexd.nodes.routes import Routes
from awexd.nodes.serving import Serving
from awexd.peers.cells import Cells
from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd.peers.threads import in_thread
from awexd.service import Service
from awexd.store import Segment, Version, Wait
from awexd.store.arriving import Arrival
from awexd.store.elsewhere import Listing, Mirror
from awexd.store.model import Job, Part, VersionKey
from awexd.tickets import decode
from awexd_transports.base import Memory, Piece, Source, Subject
from awexd_transports.errors import (
    AwexdError,
    DaemonUnavailable,
    IntegrityError,
    ProtocolError,
    VersionConflict,
    VersionUnavailable,
)
from awexd_transports.layout import Manifest
from awexd_transports.needs import Need, Needs
from awexd_transports.ranges import Ranges
from awexd_transports.segment import segment_nbytes

RUN_SECONDS = 3600.0
"""For one source; a silent one is given up long before, by the transport's own watchdogs."""
BACKOFF_SECONDS = (0.05, 2.0)
UNSERVED_SECONDS = 5.0
YET_SECONDS = 1.0
"""In which a node that has ranks of a version may hear, later than this one, that it is committed."""
ALLOCATION_SECONDS = 600.0
PEERS = PeerSettings(retries=0)
"""Another source, or another ticket, is what a failure is answered with here."""

_log = logging.getLogger(__name__)


class Known(NamedTuple):
    """What a manifest says: how long its segments are, and, where they are compared, what is in them."""

    nbytes: int
    cells: Cells | None


@dataclass(frozen=True, slots=True)
class Means:
    """What bringing a version here takes."""

    service: Service
    announcer: Announcer
    client: MetaClient
    transport: Routes
    mapped: Mapped
    serving: Serving | None
    known: dict[str, Known]
    """By manifest; kept for the next version."""
    planner: Planner


class Bringing:
    """What the readers here need of one version, on its way here. ``run`` once.

    Args:
        readers: the manifests of those that count.

    Attributes:
        sources: the nodes that it comes from now.
        phase: what is waited for, for people.
        early: it is still written.
    """

    early = False

    def __init__(
        self,
        means: Means,
        job: Job,
        mirror: Mirror,
        key: VersionKey,
        listing: Listing,
        readers: frozenset[str],
    ) -> None:
        self._means = means
        self._store = means.service.store
        self._job, self._mirror = job, mirror
        self._key, self._listed = key, listing
        self._subject = Subject(job.name, *key, listing.attempt)
        self._readers = readers
        self._published = Published(
            tuple(listing.pieces[rank][0] for rank in sorted(listing.pieces)),
            frozenset(rank for rank, (_, _, summed) in listing.pieces.items() if summed),
        )
        self._segments: dict[int, Segment] = {}
        self._needs: Needs | None = None
        self._wanted = listing.nbytes
        own = job.versions.get(key)
        self._own = own if own is not None and own.partial else None
        """Where ranks of this node are among the writers: what is here of it already."""
        held = [job.segments[segment_id] for segment_id in self._own.segments] if self._own else []
        self._here = {segment.rank: segment for segment in held}
        self._fetcher: Fetcher | None = None
        self._arrival: Arrival | None = None
        self._began = time.monotonic()
        self._told: set[str] = set()
        self._introduced = False
        self.sources: tuple[str, ...] = ()
        self.phase = "its manifests"

    @property
    def here(self) -> int:
        """Bytes that are here and right."""
        return self._wanted - self._fetcher.left if self._fetcher else 0

    def doing(self) -> str:
        """For a waiter's error."""
        amount = f"{self.here} of {self._amount()} of step {self._key[1]} are here"
        return f"{amount}; waiting for {self.phase}"

    def _amount(self) -> str:
        """What is wanted, for people."""
        part = self._wanted < self._listed.nbytes
        return f"{self._wanted} bytes" + (f" (of {self._listed.nbytes}) that are needed" if part else "")

    def status(self) -> dict[str, Any]:
        seconds = max(1e-6, time.monotonic() - self._began)
        return {
            "version": list(self._key),
            "bytes": self._wanted,
            "version_bytes": self._listed.nbytes,
            "here_bytes": self.here,
            "received_bytes": sum(self._fetcher.delivered.values()) if self._fetcher else 0,
            "bytes_per_second": int(self.here / seconds),
            "sources": list(self.sources),
            "route": self._means.transport.name,
            "waits_for": self.phase,
        }

    async def run(self) -> None:
        """Returns once the version is committed here, or is not to be had or wanted any more.

        Raises:
            BudgetExceeded: there is no room for it.
            AwexdError: it cannot be brought here.
        """
        with contextlib.ExitStack() as manifests:
            for digest, _, _ in self._listed.pieces.values():  # nothing may name them before all is here
                manifests.enter_context(self._means.service.shelf.arriving(digest))
            await self._get_manifests()
            self.phase = "a plan of what is read here"
            self._readers = self._means.planner.known(self._readers)
            self._needs = await self._means.planner.needs(self._published, self._readers)
            await self._bring(self._needs)

    async def _bring(self, needs: Needs) -> None:
        memories: dict[int, Memory] = {}
        try:
            self.phase = "shared memory on this node"
            for rank in sorted(self._listed.pieces.keys() - self._here.keys()):
                self._segments[rank] = segment = await self._slot(rank)
                memories[rank] = self._means.mapped.use(segment)
            await self._fetch(needs, memories)
        finally:
            for segment in self._segments.values():
                if segment.rank in memories:
                    self._means.mapped.drop(segment.id)
            self._store.give_back(self._job, self._segments.values())
            self._means.service.settle()

    async def _get_manifests(self) -> None:
        shelf = self._means.service.shelf
        for unused in [digest for digest in self._means.known if shelf.body(digest) is None]:
            del self._means.known[unused]
        for rank, (digest, nbytes, checksums) in sorted(self._listed.pieces.items()):
            body = shelf.body(digest)
            if body is None:
                self.phase = f"the MetaServer to give rank {rank}'s manifest"
                body = await self._means.client.call("GET", f"/v1/manifests/{digest}")
                if not isinstance(body, bytes):
                    raise ProtocolError(f"the MetaServer gives no manifest {digest[:12]}")
                await shelf.add(digest, body)
            known = self._means.known.get(digest)
            if known is None or (checksums and known.cells is None):
                known = self._means.known[digest] = await in_thread(_known, body, checksums)
            if known.nbytes != nbytes:
                raise IntegrityError(f"{self._job.name}: rank {rank} has {nbytes} bytes, not those of its manifest")

    async def _slot(self, rank: int) -> Segment:
        """A slot that this version alone uses until it is given back."""
        digest, nbytes, checksums = self._listed.pieces[rank]
        while True:
            found = self._store.mirror_slot(self._job, rank, nbytes)
            self._means.service.settle()
            if isinstance(found, Wait):
                wait = found
                self.phase = wait.what()
                await self._means.service.changes.next(self._job.name)
                self._check_wanted()
                continue
            if found is None:
                found = await self._made(rank, nbytes)
            found.digest, found.checksums = digest, checksums
            return found

    async def _made(self, rank: int, nbytes: int) -> Segment:
        made: list[Segment] = []

        def take(segment_id: str, locked: bool) -> None:
            self._check_wanted()
            segment = Segment(segment_id, rank, nbytes, locked=locked, mirrored=True)
            self._store.add_segment(self._job, segment)
            made.append(segment)

        deadline = asyncio.get_running_loop().time() + ALLOCATION_SECONDS
        await self._means.service.allocator.single(nbytes, take, deadline)
        (segment,) = made
        segment.state = segment.state.WRITING
        return segment

    @property
    def good(self) -> bool:
        """It still is what readers here may have."""
        job = self._job
        known = self._store.jobs.get(job.name) is job and job.mirror is self._mirror
        if not known or self._listed.attempt in job.withdrawn:
            return False
        here = job.versions.get(self._key)
        return here is self._own and (here is None or (here.partial and not here.leaving))

    def _check_wanted(self, *, whole: bool = False) -> None:
        """Raises VersionConflict where it is not to be had any more, or is good for nobody."""
        if not (self.good and (whole or self._key in self._mirror.listed)):
            why = "it is held nowhere else any more" if self.good else "it is good for nobody here any more"
            raise VersionConflict(f"{_named(self._key)}, {self.here} of {self._listed.nbytes} bytes of it here: {why}")

    async def _fetch(self, needs: Needs, memories: dict[int, Memory]) -> None:
        means, offer = self._means, None
        ranks = self._segments
        if means.serving is not None:
            offer = means.serving.begin(self._job, self._subject, ranks)
        version: Version | None = None
        self._arrival = arrival = self._arrive(needs)
        try:
            wanted = {rank: need for rank, need in needs.ranks.items() if rank in self._segments}
            await self._all(wanted, memories, {}, Landing(offer, self._arrival, means.service.changes))
            await self._settled()
            self._check_wanted(whole=True)
            version = self._commit(self._part(needs))
            if offer is not None and means.serving is not None:
                means.serving.keep(self._job, version, offer)
            means.service.settle()
        finally:
            if arrival is not None:
                until = time.monotonic() + means.service.settings.lease_ttl
                self._store.arrived(self._job, arrival, version, until)
                means.service.settle()
            if version is None and offer is not None and means.serving is not None:
                await means.serving.give_up(offer, ranks)

    async def _settled(self) -> None:
        """Returns once what is here may be committed here."""

    def _arrive(self, needs: Needs) -> Arrival | None:
        """Lets readers copy what comes as it does; not beside writers of this node, whose slots are theirs."""
        if self._here:
            return None
        segments = [self._segments[rank] for rank in range(len(self._segments))]
        covers = None if needs.digest is None else self._readers
        wanted = [needs.ranks[rank].nbytes if rank in needs.ranks else 0 for rank in range(len(segments))]
        pieces = [-(-nbytes // PEERS.piece_bytes) for nbytes in wanted]
        arrival = self._store.arrive(self._job, self._key, self._listed.attempt, segments, covers, pieces, needs.nbytes)
        arrival.committed = not self.early
        self._means.service.settle()
        return arrival

    def _part(self, needs: Needs) -> Part | None:
        """What will be here."""
        own = sum(segment.nbytes for segment in self._here.values())
        return None if needs.digest is None else Part(needs.digest, self._readers, self._wanted + own)

    async def _all(
        self,
        wanted: Mapping[int, Need],
        memories: dict[int, Memory],
        here: Mapping[int, Ranges],
        landing: Landing,
    ) -> None:
        """Every byte that is wanted, and not here, from one source after the other until it is there."""
        pieces = self._listed.pieces
        rows = {rank: rows_of(rank, need) for rank, need in wanted.items()}
        self._fetcher = fetcher = Fetcher(
            self._means.transport,
            self._subject,
            {rank: need.ranges for rank, need in wanted.items()},
            memories,
            cells={
                rank: cells
                for rank, (digest, _, summed) in pieces.items()
                if summed and (cells := self._means.known[digest].cells) is not None
            },
            arrived=landing.ranges,
            rows=rows,
            rows_arrived=landing.rows,
            room=landing.room,
            here=here,
            settings=PEERS,
            came=landing.came if self.early else None,
        )
        self._wanted = fetcher.left
        ranges = {rank: Ranges([(0, segment.nbytes)]) for rank, segment in self._here.items()}
        ranges |= {rank: fetcher.wanted(rank) for rank in wanted}
        landing.promise(ranges, [piece for some in rows.values() for piece in some])
        avoid: set[str] = set()
        pause, before = BACKOFF_SECONDS[0], fetcher.left
        while fetcher.left:
            try:
                sources = await self._sources([rank for rank in wanted if fetcher.left_of(rank)], avoid)
                self._announce(sources)
                await fetcher.run(sources, RUN_SECONDS)
            except AwexdError as error:
                if fetcher.left < before:
                    pause, before = BACKOFF_SECONDS[0], fetcher.left
                self._check_wanted()
                unknown = "announce" in error.details  # this node itself, to a MetaServer that was started anew
                unserved = isinstance(error, VersionUnavailable) and not self.sources and not unknown
                if unserved and not avoid:
                    self.phase = "nodes that serve it to come"
                    # Told by a change, which may have come before this: so it is asked again, too, now and then.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(UNSERVED_SECONDS):
                            await self._means.service.changes.next(self._job.name)
                    continue
                self._failed(error)
                if self.sources:
                    avoid.update(fetcher.failed or self.sources)
                else:
                    avoid.clear()  # whoever failed before may be back
                self.sources = ()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def _sources(self, ranks: list[int], avoid: set[str]) -> list[Source]:
        """Nodes that together have what is left of these ranks."""
        announcer, (epoch, step) = self._means.announcer, self._key
        self.sources, self.phase = (), "the MetaServer to name nodes that serve it"
        body = {
            "node": announcer.node,
            "run": announcer.run,
            "epoch": epoch,
            "step": step,
            "source": None,
            "avoid": sorted(avoid)[:64],
            "ranks": ranks,
            "parts": self._needs.digest if self._needs else None,
        }
        answer = await self._means.client.call("POST", f"/v1/jobs/{self._job.name}/tickets", body)
        try:
            sources = [self._source(row) for row in answer["sources"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DaemonUnavailable("the MetaServer answers otherwise than this version expects") from error
        self.sources = tuple(source.node for source in sources)
        return sources

    def _source(self, row: dict[str, Any]) -> Source:
        host, _, port = row["address"].rpartition(":")
        holds = {int(rank): Ranges([(0, self._listed.pieces[rank][1])]) for rank in row["ranks"]}
        where = (row["source"], host.strip("[]"), int(port))
        if decode(row["ticket"].encode()).attempt != self._listed.attempt:  # the step is being written anew
            raise VersionUnavailable(f"{self._job.name}: {_named(self._key)} is of another attempt now")
        return Source(*where, row["ticket"].encode(), bytes.fromhex(row["key"]), holds)

    def _announce(self, sources: list[Source]) -> None:
        named = ", ".join(f"node {one.node} ({one.host} port {one.port})" for one in sources)
        self.phase = f"bytes from {named} by {self._means.transport.name}"
        if not self._introduced:
            self._introduced = True
            text = f"{_named(self._key)}: {self._amount()} from {named}"
            self._means.service.note("fetching", self._job.name, text, logging.DEBUG)
            self._means.service.settle()

    def _failed(self, error: AwexdError) -> None:
        """Tells once of each source that failed."""
        failed = self._fetcher.failed if self._fetcher else {}
        names = [name for name in self.sources if name in failed] or list(self.sources)
        where = f"node {', '.join(names)}" if names else "nodes that serve it"
        self.phase = f"{where}, after a failure: {error}"
        yet = isinstance(error, VersionUnavailable) and time.monotonic() - self._began < YET_SECONDS
        if names and where not in self._told and not yet:
            self._told.add(where)
            text = f"{_named(self._key)} from {where}: {error}"
            self._means.service.note("failed", self._job.name, text, logging.WARNING)
            self._means.service.settle()

    def _commit(self, part: Part | None) -> Version:
        """Headers, then the store: one that dies in between adopts it if all were sealed, and nothing of it if not."""
        job, listed = self._job, self._listed
        every = self._segments | self._here
        segments = [every[rank] for rank in range(len(every))]
        self._seal(self._segments.values(), len(every), part)
        version = self._store.commit_mirrored(job, self._key, listed.attempt, segments, part)
        self._means.service.records.save_soon(job)
        self._fetched(f"{version} fetched")
        return version

    def _seal(self, segments: Iterable[Segment], size: int, part: Part | None) -> None:
        where = self._key, self._listed.attempt
        for one in segments:
            header = header_of(self._job, one, *where, world_size=size, checksums=one.checksums, part=part)
            self._means.service.memory.seal(one.id, header)

    def _fetched(self, what: str) -> None:
        seconds = time.monotonic() - self._began
        delivered = self._fetcher.delivered if self._fetcher else {}
        sources = ", ".join(f"{nbytes} from {node}" for node, nbytes in sorted(delivered.items()))
        text = f"{what}: {self._amount()} in {seconds:.3f} s ({sources})"
        self._means.service.note("fetched", self._job.name, text, logging.DEBUG)


def _known(body: bytes, checksums: bool) -> Known:
    manifest = Manifest.decode(body)
    return Known(segment_nbytes(manifest), Cells(manifest) if checksums else None)


def _named(key: VersionKey) -> str:
    return f"epoch {key[0]} step {key[1]}"


def rows_of(rank: int, need: Need) -> list[Piece]:
    """The strips, as a transport moves them."""
    return [Piece(rank, *strip) for strip in need.strips]
