"""Taking part in exchanges: connected groups that are kept, agreement before the first byte, and being freed in time.

What waits for other processes runs in a thread of its own, while the caller waits for the daemon's word of the whole
exchange: whoever dies or gives up, the daemon tells all others, and the group is aborted here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from awexd_client.endpoint import Deadline, failed
from awexd_client.holding import Holding
from awexd_client.session import Connection
from awexd_transports.collective import nccl
from awexd_transports.collective.base import Group, Guard, Lost
from awexd_transports.collective.chunks import FORMAT
from awexd_transports.collective.rings import DeviceRing, HostRing, Ring
from awexd_transports.collective.sockets import SocketGroup
from awexd_transports.collective.tcp import TcpGroup
from awexd_transports.cuda import driver as cuda
from awexd_transports.errors import AwexdError

REASON_SECONDS = 1.0
"""How long a lost connection waits for the daemon to say who has gone, before it is told as it is."""
ABORT_SECONDS = 2.0
AGAIN_SECONDS = 0.2
TELL_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """An exchange that this process takes part in, as the daemon told it (``group.join`` in docs/protocol.md)."""

    exchange: int
    group: str
    fresh: bool
    kept: list[str]
    backend: str
    host: str
    index: int
    writers: int
    workers: list[tuple[str, int, str]]
    sums: list[bool]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Joined | None:
        """None: there is none, and none to come."""
        if answer["over"]:
            return None
        given = {name: answer[name] for name in cls.__slots__}
        return cls(**given | {"workers": [(engine, rank, digest) for engine, rank, digest in answer["workers"]]})

    @property
    def size(self) -> int:
        return self.writers + len(self.workers)


class Share(Protocol):
    """What this process does in an exchange."""

    @property
    def plans(self) -> dict[str, str]:
        """Digests of plans, by number of the worker."""
        ...

    def move(self, group: Group, guard: Guard, left: Callable[[], float]) -> None:
        """Raises Lost, or what is wrong here."""
        ...


Prepare = Callable[[Ring, Joined], Share]


class Exchanges:
    """What one client keeps for its exchanges: groups and rings.

    Args:
        device: ordinal of the one that has all of the client's tensors, where NCCL can be used.
        sharing: processes of this node that copy at the same time.

    Attributes:
        made: groups connected so far.
    """

    def __init__(self, ring_bytes: int, sharing: int) -> None:
        self._ring_bytes, self._sharing = ring_bytes, sharing
        self._groups: dict[str, Group] = {}
        self._rings: dict[int | None, Ring] = {}
        self.made = 0

    def run(
        self,
        connection: Connection,
        joined: Joined,
        device: int | None,
        prepare: Prepare,
        guard: Guard,
        deadline: Deadline,
    ) -> None:
        """Returns once this process's part is done.

        Raises:
            AwexdError: why it came to nothing: what was wrong here, or what the daemon says of others.
            DeadlineExceeded: names who was waited for.
        """
        for gone in [key for key in self._groups if key not in joined.kept]:
            self._groups.pop(gone).close()
        if joined.fresh:
            self._groups[joined.group] = _group_of(joined, device)
        group, ring = self._groups.get(joined.group), self._ring(device if joined.backend == "nccl" else None)
        mover = _Mover(connection, joined, group, ring, self._ring_bytes, prepare, guard, deadline)
        self.made += joined.fresh
        try:
            connection.call("group.watch", {"exchange": joined.exchange}, timeout=deadline.left())
        except BaseException as error:
            if not mover.abort():
                _log.warning("a process that takes part in an exchange hangs; its thread is left: %s", error)
                self._rings = {key: kept for key, kept in self._rings.items() if kept is not ring}
            self._groups.pop(joined.group, None)
            _tell(connection, joined, failed(error))
            if mover.error is not None and not isinstance(mover.error, Lost):
                raise mover.error from None
            raise
        mover.join()

    def close(self) -> None:
        """Nothing is under way."""
        while self._groups:
            self._groups.popitem()[1].close()
        self._rings.clear()

    def _ring(self, device: int | None) -> Ring:
        if device not in self._rings:
            self._rings[device] = (
                HostRing(self._ring_bytes, self._sharing) if device is None else DeviceRing(self._ring_bytes, device)
            )
        return self._rings[device]


class _Mover(threading.Thread):
    """Connects, agrees and moves. ``error``: how that ended, if not well."""

    def __init__(
        self,
        connection: Connection,
        joined: Joined,
        group: Group | None,
        ring: Ring,
        ring_bytes: int,
        prepare: Prepare,
        guard: Guard,
        deadline: Deadline,
    ) -> None:
        super().__init__(name="awexd-exchange", daemon=True)
        self.error: BaseException | None = None
        self._connection, self._joined = connection, joined
        self._ring, self._ring_bytes = ring, ring_bytes
        self._group, self._prepare, self._guard, self._deadline = group, prepare, guard, deadline
        self.start()

    def run(self) -> None:
        try:
            self._take_part()
        except Lost as error:
            self.error = error
            self._await_reason()
            _tell(self._connection, self._joined, failed(error))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this
            self.error = error
            _tell(self._connection, self._joined, failed(error))

    def abort(self) -> bool:
        """Nothing is touched any more once this returns, and nobody waits; False: the thread could not be freed."""
        self._guard.stop()
        end = time.monotonic() + ABORT_SECONDS
        while self.is_alive() and time.monotonic() < end:
            if self._group is not None:
                self._group.abort()
            self.join(AGAIN_SECONDS)  # then again: it may just have been connecting
        if self._group is not None and not self.is_alive():
            self._group.close()
        return not self.is_alive()

    def _take_part(self) -> None:
        group, joined = self._group, self._joined
        if group is None:
            raise Lost("this process is not connected to the group any more")
        if joined.fresh:
            self._ask("group.publish", address=group.bind())
            group.connect(self._ask("group.address")["addresses"], self._deadline.left())
        share = self._prepare(self._ring, joined)
        terms = {"format": FORMAT, "ring": self._ring_bytes, "plans": share.plans}
        self._ask("group.agree", **terms)
        try:
            self._ring.begin()
            share.move(group, self._guard, self._deadline.left)
        finally:
            self._ring.finish()
        self._ask("group.done", error=None)

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        arguments = {"exchange": self._joined.exchange, **arguments}
        return self._connection.call(operation, arguments, timeout=self._deadline.left())[0]

    def _await_reason(self) -> None:
        seconds = min(REASON_SECONDS, self._deadline.left())
        with contextlib.suppress(AwexdError):
            self._connection.call("group.watch", {"exchange": self._joined.exchange}, timeout=seconds)


def _group_of(joined: Joined, device: int | None) -> Group:
    if joined.backend == "nccl" and device is not None:
        return nccl.NcclGroup(device, joined.index, joined.size)
    if joined.backend == "tcp":
        return TcpGroup(joined.group, joined.index, joined.size, joined.host)
    return SocketGroup(joined.group, joined.index, joined.size)


def _tell(connection: Connection, joined: Joined, why: str) -> None:
    """Ends the exchange for the others, too, if it has not ended yet."""
    with contextlib.suppress(AwexdError):
        connection.call("group.done", {"exchange": joined.exchange, "error": why}, timeout=TELL_SECONDS, grace=0.0)


def device_of(holding: Holding) -> int | None:
    """The device whose NCCL the client of these tensors would use; None: some are elsewhere, or it has none."""
    device = holding.reading_device
    return device if device is not None and nccl.available() else None


def device_name(device: int | None) -> str | None:
    """What tells it from all others, of whatever node: NCCL lets ranks of two hosts (NCCL_HOSTID) be on one."""
    if device is None:
        return None
    uuid, host = cuda.driver.devices()[device], os.environ.get("NCCL_HOSTID")
    return f"{uuid} {host[:64]}" if host else uuid
