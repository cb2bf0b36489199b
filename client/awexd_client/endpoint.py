"""What writers and readers share: a connection that is made again after the daemon has restarted, and mappings."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from awexd.manifests import sealed_memfd, unbundle
from awexd.protocol import MAX_DEADLINE_MS, MAX_FDS, MAX_WORLD_SIZE, MODES
from awexd_client.mappings import Mapping, Mappings
from awexd_client.session import Connection, socket_path
from awexd_transports.cuda.lent import Opened
from awexd_transports.errors import AwexdError, DaemonUnavailable, DeadlineExceeded, InvalidArgument
from awexd_transports.layout import Manifest

DEFAULT_TIMEOUT = 60.0
"""Seconds; the default of every call that can wait."""
TELL_SECONDS = 1.0
_RETRY_SECONDS = 0.05
_log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "cuda_ipc", "nccl", "rdma", "tcp")
VERIFY = ("off", "checksum")

T = TypeVar("T")

_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()
_graveyard: list[Mappings] = []
"""In a forked child: kept for good, since unmapping them would hit whatever the child has mapped there since."""


class Endpoint(ABC):
    """A client of one daemon. A context manager; ``close`` ends its session, and the daemon releases all it held."""

    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        socket: str | os.PathLike[str] | None,
        *,
        mode: str,
        transport: str,
        verify: str,
        writable: bool,
        timeout: float,
    ) -> None:
        check_whole("world_size", world_size, 1, MAX_WORLD_SIZE)
        check_whole("rank", rank, 0, world_size - 1)
        _check_choice("mode", mode, MODES, available=MODES)
        _check_choice("transport", transport, TRANSPORTS, available=("auto", "shm", "cuda_ipc", "nccl"))
        needed = {"shm": "host", "cuda_ipc": "direct", "nccl": "direct"}.get(transport, mode)
        if mode not in ("auto", needed):
            raise InvalidArgument(f'transport="{transport}" is mode="{needed}", not mode="{mode}"')
        _check_choice("verify", verify, VERIFY, available=VERIFY)
        self.job = job
        self.rank = rank
        self.world_size = world_size
        self.verify_mode = verify
        self.exchanging = transport == "nccl"
        self.mode = needed
        self._path = socket_path(socket)
        self._lock = self._in_use = threading.RLock()
        """One call at a time; and (the same, where a subclass has none for it) while mappings are made or read."""
        self._registered_there = threading.Event()
        """Not while a new connection is not known to the daemon as this client's yet."""
        self._registered_there.set()
        self._maps = Mappings(writable=writable)
        self._closed = False
        self._forked = False
        self._manifests: dict[str, Manifest] = {}
        deadline = Deadline(timeout)
        self._connection = Connection(self._path, deadline.seconds)
        try:
            self._go_home(deadline.left())
        except BaseException:
            self._connection.close()
            raise
        _endpoints.add(self)

    def close(self) -> None:
        """Ends the session. Held versions stay; what was not sealed is discarded. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._forked:
            return
        if not self._lock.acquire(blocking=False):
            self._connection.close()  # wakes a call that waits; a copy that runs ends first
            if not self._lock.acquire(timeout=DEFAULT_TIMEOUT):
                return  # it still copies: its mappings end with the process
        try:
            self._forget_tables(None)
            self._close_maps()
            self._connection.goodbye()
            self._let_go()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go(self) -> None:  # noqa: B027 - most have nothing
        """It is closed: the caller's tensors are not kept, however long what is left of this is."""

    @contextlib.contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        """One registration, publication or update at a time; waits for versions and commits run beside it."""
        if not self._lock.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(
                f"{self.job}: another thread's call on this client is not over in {deadline.seconds:g} s"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check_usable(self) -> None:
        if self._closed:
            raise InvalidArgument(f"this {type(self).__name__} is closed")
        if self._forked:
            raise DaemonUnavailable("this client belongs to the parent process; make a new one after fork")

    def _after_fork(self) -> None:
        """In a forked child: the session is the parent's, and the mappings were not inherited (MADV_DONTFORK)."""
        self._forked = True
        self._lock = self._in_use = threading.RLock()
        bury(self._maps)
        self._maps = Mappings(writable=False)
        self._forget_tables(None)

    @abstractmethod
    def _register_again(self, timeout: float) -> None:
        """Restores this endpoint's registration on a new connection."""

    def _close_maps(self) -> None:
        """With the client; of a connection that is lost only ``_maps`` go."""
        self._maps.close()

    def _resume(self, timeout: float) -> None:  # noqa: B027 - most have nothing
        """Claims again what else this endpoint has, once it is registered."""

    @abstractmethod
    def _forget_tables(self, segments: Sequence[str] | None) -> None:
        """Lets go of copies over these segments' mappings (None: of all)."""

    def _call(
        self, operation: str, arguments: dict[str, Any], timeout: float, fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        self._check_usable()
        try:
            return self._connection.call(operation, arguments, timeout=timeout, fds=fds)
        finally:
            self._unmap_dropped(operation)

    def _unmap_dropped(self, operation: str) -> None:
        """Gives back mappings of segments that the daemon has replaced; only then is their memory free."""
        # Not while another thread may copy through these mappings, nor while one is being made: the next call will do.
        making = operation in ("segment.open", "segment.chunks")
        if self._connection.dropped and not making and self._in_use.acquire(blocking=False):
            try:
                ids = self._connection.take_dropped()
                self._forget_tables(ids)
                self._maps.discard(ids)
                self._tell("segment.closed", ids=ids)
            finally:
                self._in_use.release()

    def _ask(self, operation: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """A call whose answer has no descriptors."""
        return self._call(operation, arguments, timeout)[0]

    def _tell(self, operation: str, **arguments: Any) -> None:
        """A call whose failure is not the caller's: the end of the session, or of a lease, does the same later."""
        try:
            self._connection.call(operation, arguments, timeout=TELL_SECONDS, grace=0.0)
        except AwexdError as error:
            _log.debug("%s was not heard: %s", operation, error)

    def _ask_with_body(self, operation: str, timeout: float, body: bytes, **arguments: Any) -> dict[str, Any]:
        """A call that carries a manifest."""
        fd = sealed_memfd("awexd-manifest", [body])
        try:
            return self._call(operation, arguments, timeout, [fd])[0]
        finally:
            os.close(fd)

    def _ask_for_manifests(self, operation: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        """A call whose answer brings manifests; they are decoded into ``self._manifests``."""
        result, fds = self._call(operation, arguments, timeout)
        try:
            if fds:
                new = {d: body for d, body in unbundle(result["bodies"], fds[0]).items() if d not in self._manifests}
                self._manifests.update((digest, Manifest.decode(body, digest)) for digest, body in new.items())
        finally:
            for fd in fds:
                os.close(fd)
        return result

    def _open_segments(self, ids: Sequence[str], deadline: Deadline) -> list[int]:
        return self._call("segment.open", {"ids": list(ids)}, deadline.left())[1]

    def _map(self, wanted: Sequence[tuple[str, int]], deadline: Deadline) -> list[Mapping]:
        """Mappings of these segments, given as (id, bytes of the object)."""
        return self._maps.get(wanted, lambda ids: self._open_segments(ids, deadline))

    def _open_lent(
        self, wanted: Sequence[tuple[str, int]], manifests: Sequence[Manifest], device: int | None, deadline: Deadline
    ) -> list[Opened]:
        """The same of borrowed segments, with the manifest of each, for that device to read."""

        def fetch(segment: str, first: int, count: int) -> list[int]:
            found: list[int] = []
            while len(found) < count:
                more = {"id": segment, "first": first + len(found), "count": min(MAX_FDS, count - len(found))}
                found += self._call("segment.chunks", more, deadline.left())[1]
            return found

        return self._maps.open(wanted, manifests, lambda ids: self._open_segments(ids, deadline), fetch, device)

    def _surviving(self, action: Callable[[Deadline], T], deadline: Deadline) -> T:
        """Runs ``action``; where the daemon goes away, again on a connection to the next one."""
        self._check_usable()
        while True:
            used = self._connection
            if not used.over:
                try:
                    return action(deadline)
                except DaemonUnavailable:
                    if self._closed or deadline.left() <= 0:
                        raise
            # Under the lock: no other thread may be copying into mappings that go with the old connection.
            with self._turn(deadline):
                if self._connection is used:
                    self._reconnect(deadline)

    def _reconnect(self, deadline: Deadline) -> None:
        self._registered_there.clear()
        try:
            self._connection.close()
            self._forget_tables(None)
            self._maps.close()
            while not self._registered_on_new(deadline):
                pass
        finally:
            self._registered_there.set()

    def _go_home(self, timeout: float) -> None:
        """What is exchanged is decided by one daemon: the session goes there."""
        if self.exchanging:
            self._connection.call("session.home", {"job": self.job, "join": True}, timeout=timeout)

    def _registered_on_new(self, deadline: Deadline) -> bool:
        """Connects and registers; False: that connection was lost too, and there is time for another."""
        self._connection = connect_again(self._path, deadline.left())
        try:
            self._go_home(deadline.left())
            self._register_again(deadline.left())
            self._resume(deadline.left())
        except BaseException as error:
            self._connection.close()  # half a client would be refused for ever: the next call connects anew
            if not isinstance(error, DaemonUnavailable) or deadline.left() <= 0:
                raise
            return False
        return True


def bury(mappings: Mappings) -> None:
    """In a forked child, which has not inherited them."""
    _graveyard.append(mappings)


class Deadline:
    """A moment by which a call must have answered."""

    def __init__(self, seconds: float) -> None:
        self.seconds = min(_seconds(seconds), MAX_DEADLINE_MS / 1000)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgument(f"timeout must be seconds >= 0, not {value!r}")
    return float(value)


def connect_again(path: str, seconds: float, wanted: Callable[[], bool] = lambda: True) -> Connection:
    """The kernel tells nobody when a socket begins to listen: this is the one place that has to try again and again.

    Args:
        wanted: tells whether anybody still wants that.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return Connection(path, timeout=max(_RETRY_SECONDS, end - time.monotonic()))
        except (DaemonUnavailable, DeadlineExceeded):
            if time.monotonic() >= end or not wanted():
                raise
            time.sleep(_RETRY_SECONDS)


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuses what is no whole number from ``low`` to ``high``.

    Raises:
        InvalidArgument: naming the argument.
    """
    bounds = f"from {low} to {high}" if high is not None else f">= {low}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise InvalidArgument(f"{name} must be a whole number {bounds}, not {value!r}")


def _check_choice(name: str, value: str, known: Sequence[str], available: Sequence[str]) -> None:
    if value not in known:
        raise InvalidArgument(f"{name}={value!r}; known: {', '.join(known)}")
    if value not in available:
        raise InvalidArgument(f"{name}={value!r} is not in this version yet; available: {', '.join(available)}")


def failed(error: BaseException) -> str:
    """A reason short enough to send."""
    text = str(error) if isinstance(error, AwexdError) else f"{type(error).__name__}: {error}"
    return text[:1000]


def told(error: BaseException | None) -> list[str] | None:
    """An error as it is told: its code and its message."""
    return None if error is None else [error.code if isinstance(error, AwexdError) else "error", failed(error)]


def _after_fork() -> None:
    for endpoint in list(_endpoints):
        endpoint._after_fork()


os.register_at_fork(after_in_child=_after_fork)
