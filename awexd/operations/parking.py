"""What training processes ask for who put memory aside: parcels of host memory, and versions that are pinned."""

from __future__ import annotations

import time
from typing import Any

from awexd import access
from awexd.service import Call, Outcome, Reply, Service
from awexd.store import Segment, parking
from awexd.store.model import Job, Parcel, ParcelState
from awexd_transports.errors import BudgetExceeded, VersionUnavailable
from awexd_transports.segment import HEADER_BYTES


class Parking:
    """The operations ``park.*``. Only a job's owner parks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.store
        self._memory = service.memory
        service.add(
            {
                "park.begin": self._begin,
                "park.open": self._open,
                "park.seal": self._seal,
                "park.drop": self._drop,
                "park.pin": self._pin,
                "park.unpin": self._unpin,
            }
        )

    def _begin(self, call: Call) -> Outcome:
        rank, name = self._named(call)
        job = self._job(call)
        parcel = parking.begin(self._store, job, call.session, rank, name, call.arguments["nbytes"])
        if parcel is not None:
            return Reply({"segment": parcel.segment.id})
        self._service.settle()  # what it replaces is given back first
        return self._make(call, job, rank, name)

    async def _make(self, call: Call, job: Job, rank: int, name: str) -> Reply:
        nbytes = call.arguments["nbytes"]
        made: list[Parcel] = []

        def take(segment_id: str, locked: bool) -> None:
            segment = Segment(segment_id, rank, nbytes, locked=locked)
            made.append(parking.add(self._store, job, call.session, rank, name, segment))

        try:
            await self._service.allocator.single(nbytes, take, call.deadline)
        except BudgetExceeded as error:
            mib = parking.parked_nbytes(self._store) / (1 << 20)
            raise BudgetExceeded(
                f"rank {rank} cannot park {name!r}: {error.message}; {mib:,.1f} MiB are parked", error.details
            ) from error
        return Reply({"segment": made[0].segment.id})

    def _open(self, call: Call) -> Reply:
        rank, name = self._named(call)
        parcel = parking.find(self._store.jobs.get(self._job_name(call)), call.session, rank, name)
        self._job(call)
        fd = self._memory.descriptor(parcel.segment.id, writable=True)
        self._store.opened(call.session, parcel.segment)
        return Reply({"segment": parcel.segment.id, "nbytes": HEADER_BYTES + parcel.segment.nbytes}, [fd])

    def _seal(self, call: Call) -> Reply:
        rank, name = self._named(call)
        job = self._store.jobs.get(self._job_name(call))
        parcel = parking.to_seal(job, call.session, rank, name, call.arguments["segment"])
        if job is not None and parcel.state is not ParcelState.PINNED:
            self._memory.seal(parcel.segment.id, _header(job, parcel))
            parcel.state = ParcelState.PINNED
        return Reply({})

    async def _drop(self, call: Call) -> Reply:
        rank, name = self._named(call)
        job = self._store.jobs.get(self._job_name(call))
        if job is None:
            return Reply({"kept": False})
        segment, keep = call.arguments["segment"], call.arguments["keep"]
        kept = parking.drop(self._store, job, call.session, rank, name, segment, keep)
        self._service.settle()
        if not kept:
            await self._service.background.threads_done()  # answered when the memory is gone
        return Reply({"kept": kept})

    async def _pin(self, call: Call) -> Reply:
        job, writer = self._store.writer_of(call.session)
        if call.arguments["version"] is None:
            version = parking.pinned_by(job, writer.rank)
            if version is None:
                raise VersionUnavailable(f"{job.name}: rank {writer.rank} has offloaded nothing")
        else:
            version = parking.pin(job, writer, tuple(call.arguments["version"]))
            await self._service.records.save(job)  # before anything is let go because of it
        segments = [job.segments[segment_id] for segment_id in version.segments]
        return Reply(
            {
                "version": list(version.key),
                "set": version.set_digest,
                "segments": [[s.id, HEADER_BYTES + s.nbytes, s.checksums] for s in segments],
            }
        )

    async def _unpin(self, call: Call) -> Reply:
        job, writer = self._store.writer_of(call.session)
        unpinned = parking.unpin(self._store, job, writer.rank)
        self._service.settle()
        await self._service.records.save(job)
        return Reply({"unpinned": unpinned})

    def _job(self, call: Call) -> Job:
        """The job, which this session is of from now on: it is not idle while the session lasts."""
        job = self._store.job_for(self._job_name(call), call.peer.uid, time.monotonic())
        job.idle_since = None
        call.session.parks.add(job.name)
        return job

    def _job_name(self, call: Call) -> str:
        name = access.qualify(call.arguments["job"], call.peer)
        access.check_write(name, call.peer)
        return name

    def _named(self, call: Call) -> tuple[int, str]:
        return call.arguments["rank"], access.check_name("what is parked as", call.arguments["name"])


def _header(job: Job, parcel: Parcel) -> dict[str, Any]:
    return {
        "job": job.name,
        "owner_uid": job.owner_uid,
        "rank": parcel.rank,
        "name": parcel.name,
        "size": HEADER_BYTES + parcel.segment.nbytes,
        "state": str(ParcelState.PINNED),
    }
