"""What groups over stream sockets have in common, once their members are connected.

gloo would do it too, but has no abort: what it is given to send over a connection that was just closed waits for ever,
in a thread that nothing frees. A socket that is shut down frees whoever waits in it, and one whose process is killed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from awexd_transports.collective.base import Lost, Wait

if TYPE_CHECKING:
    import torch


class StreamGroup(ABC):
    """All of ``base.Group`` but how its members find each other.

    Args:
        rank, size: this member's number, and how many they are.
    """

    name: ClassVar[str]
    """What its errors say has failed."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._mover = ThreadPoolExecutor(1, thread_name_prefix=f"awexd-{self.name}")
        self._aborted = False

    def send(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin(peer, memory, seconds, _send)

    def receive(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin(peer, memory, seconds, _receive)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            peers = [*self._peers.values()]
        for one in peers:
            with contextlib.suppress(OSError):  # it is
                one.shutdown(socket.SHUT_RDWR)
        self._wake()

    def close(self) -> None:
        self.abort()
        self._mover.shutdown()
        if self._listener is not None:
            self._listener.close()
        for one in self._peers.values():
            one.close()

    @abstractmethod
    def _wake(self) -> None:
        """Frees whoever connects, beyond the connections that are kept; never raises."""

    def _kept(self, one: socket.socket, rank: int | None = None) -> socket.socket:
        """From here on ``abort`` ends it."""
        with self._lock:
            if rank is None:
                self._listener = one
            else:
                self._peers[rank] = one
            self._check()
        return one

    def _admits(self, rank: int) -> None:
        """Raises Lost: not a number that may connect to this one, or not again."""
        if not self._rank < rank < self._size or rank in self._peers:
            raise Lost(f"a member that says that it is number {rank}")

    def _begin(
        self,
        peer: int,
        memory: torch.Tensor,
        seconds: float,
        move: Callable[[socket.socket, memoryview, float], None],
    ) -> Wait:
        """In order, by a thread of the group's."""
        if self._aborted or peer not in self._peers:
            raise Lost("this exchange was given up")
        view = memory.numpy().data.cast("B")
        done: Future[None] = self._mover.submit(move, self._peers[peer], view, time.monotonic() + seconds)

        def wait() -> None:
            try:
                done.result()
            except OSError as error:
                raise self._lost(f"with member {peer}", error) from error

        return wait

    def _check(self) -> None:
        if self._aborted:
            raise Lost("this exchange was given up")

    def _lost(self, doing: str, error: object) -> Lost:
        if self._aborted:
            return Lost("this exchange was given up")
        return Lost(f"{self.name} failed {doing}: {getattr(error, 'strerror', None) or error}")


def left(end: float) -> float:
    """Seconds; zero would mean not to wait at all, and not to say that it was late."""
    return max(0.001, end - time.monotonic())


def _send(one: socket.socket, data: memoryview, end: float) -> None:
    one.settimeout(left(end))
    one.sendall(data)


def _receive(one: socket.socket, data: memoryview, end: float) -> None:
    while data:
        one.settimeout(left(end))
        count = one.recv_into(data)
        if not count:
            raise ConnectionResetError("the connection was closed")
        data = data[count:]
