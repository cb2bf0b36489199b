"""What both sides ask for who share a GPU: a phase, and to be let in again after a restart of the daemon.

Who is inside is kept on disk, not for good (nothing is synced: it matters while those processes live) but beyond this
daemon: the next one counts them as inside until they leave, end, or say that they still are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from awexd import access
from awexd.journal import Journal
from awexd.service import Call, Reply, Service
from awexd.store.phases import CHANGED, Claim, describe, row
from awexd_transports.errors import DeadlineExceeded, InvalidArgument

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Phasing:
    """The operations ``phase.*``. ``freeze`` when the daemon stops: those inside stay inside for the next one."""

    def __init__(self, service: Service, journal: Journal) -> None:
        self._service = service
        self._journal = journal
        self._phases = service.store.phases
        self._disk = asyncio.Lock()
        self._saved: list[dict[str, Any]] = []
        self._frozen = False
        self._exits: dict[str, int] = {}
        service.add({"phase.enter": self._enter, "phase.leave": self._leave})
        service.changes.call(CHANGED, self._changed)

    async def adopt(self) -> None:
        """Counts as inside whom the daemon before had let in, where that process still lives."""
        self._saved = await asyncio.to_thread(self._journal.load_phases)
        for record in self._saved:
            claim = _claim(record)
            pidfd = _alive(record) if claim else None
            if claim is None or pidfd is None:
                continue
            self._phases.remember(claim)
            self._exits[claim.token] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._gone, claim)
        self._settle()

    def freeze(self) -> None:
        """From here on nobody leaves for good."""
        self._frozen = True
        self._service.changes.forget(CHANGED, self._changed)
        for token in list(self._exits):
            self._forget_exit(token)

    async def _enter(self, call: Call) -> Reply:
        arguments = call.arguments
        job = access.qualify(arguments["job"], call.peer)
        claim = self._phases.claim(
            Claim(
                arguments["token"],
                call.session.id,
                job,
                arguments["who"],
                call.peer.pid,
                call.peer.uid,
                arguments["phase"],
                tuple(dict.fromkeys(arguments["gpus"])),
                time.time(),
            )
        )
        self._forget_exit(claim.token)  # it has a session now, whose end is seen
        if (claim.phase, set(claim.gpus)) != (arguments["phase"], set(arguments["gpus"])):
            raise InvalidArgument(f"{claim.label} is in phase {claim.phase} on {', '.join(claim.gpus)} already")
        self._settle()
        try:
            async with asyncio.timeout_at(call.deadline):
                while not claim.inside:
                    await self._service.changes.next(CHANGED)
                    self._check_wanted(call, claim)
        except TimeoutError:
            raise self._late(call, claim) from None
        finally:
            if not claim.inside:
                self._phases.leave(claim.session, claim.uid, claim.token)
                self._settle()
        await self._save()
        return Reply({"since": claim.since})

    async def _leave(self, call: Call) -> Reply:
        left = self._phases.leave(call.session.id, call.peer.uid, call.arguments["token"])
        if left:
            self._forget_exit(call.arguments["token"])
            self._settle()
        await self._save()
        return Reply({"left": left})

    def _check_wanted(self, call: Call, claim: Claim) -> None:
        if not self._phases.has(claim):
            raise InvalidArgument(f"{claim.label} has given its claim to phase {claim.phase} up")

    def _late(self, call: Call, claim: Claim) -> DeadlineExceeded:
        blocking = self._phases.blocking(claim)
        waited = asyncio.get_running_loop().time() - call.began
        text = f"waited {waited:.2f} s for phase {claim.phase}: {describe(blocking, time.time())}"
        return DeadlineExceeded(text, {"waited": waited, "holders": [row(other) for other in blocking]})

    def _changed(self) -> None:
        """Somebody came or left: whoever can now comes in. Called back while the service settles."""
        self._service.changes.call(CHANGED, self._changed)
        if self._phases.advance(time.time()):
            self._service.store.touched.add(CHANGED)
        self._service.background.task(self._write())

    def _settle(self) -> None:
        self._service.store.touched.add(CHANGED)
        self._service.settle()

    def _gone(self, claim: Claim) -> None:
        self._forget_exit(claim.token)
        if self._phases.leave("", claim.uid, claim.token):
            self._settle()

    def _forget_exit(self, token: str) -> None:
        pidfd = self._exits.pop(token, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    async def _save(self) -> None:
        """Returns once it is on disk who is inside. Goes on if its caller goes away."""
        await asyncio.shield(self._service.background.task(self._write()))

    async def _write(self) -> None:
        async with self._disk:
            records = [{**asdict(claim), **_identity(claim.pid)} for claim in self._phases.inside]
            if records != self._saved and not self._frozen:
                await asyncio.to_thread(self._journal.save_phases, records)
                self._saved = records


def _claim(record: dict[str, Any]) -> Claim | None:
    names = {field.name for field in fields(Claim)}
    try:
        claim = Claim(**{name: value for name, value in record.items() if name in names})
    except TypeError:
        return None  # of another version: it is soft state
    claim.gpus = tuple(claim.gpus)
    return claim


def _identity(pid: int) -> dict[str, Any]:
    """What tells this process from another one of the same number."""
    return {"boot": _BOOT.read_text().strip(), "started": _started(pid)}


def _started(pid: int) -> str | None:
    """When it began, in ticks since boot; None for one that cannot be seen (in another PID namespace, or gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _alive(record: dict[str, Any]) -> int | None:
    """A pidfd of the process of that record, if it is the very one and lives."""
    try:
        pidfd = os.pidfd_open(record["pid"])
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        if record.get("started") is not None and _identity(record["pid"]) == {
            "boot": record.get("boot"),
            "started": record["started"],
        }:
            return pidfd
    os.close(pidfd)
    return None
