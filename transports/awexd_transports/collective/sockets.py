"""A group over Unix sockets of one node, for tensors of which some lie in host memory.

gloo would do it too, but has no abort: what it is given to send over a connection that was just closed waits for ever,
in a thread that nothing frees. A socket that is shut down frees whoever waits in it, and one whose process is killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from awexd_transports.collective.base import Lost, Wait

if TYPE_CHECKING:
    import torch

_RANK = struct.Struct("<I")
_PEER = struct.Struct("3i")
BUFFER = 4 << 20
"""Bytes that the kernel is asked to take of one side before the other reads."""


class SocketGroup:
    """See ``base.Group``.

    Args:
        key: the group's, known to its members only. ``rank``, ``size``: this member's number, and how many they are.
    """

    def __init__(self, key: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._address = f"awexd-{key}-{rank}"
        """An abstract name: nothing in a file system that could be left there."""
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._peers: dict[int, socket.socket] = {}
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="awexd-sockets")
        self._aborted = False

    def bind(self) -> str:
        listener = self._kept(socket.socket(socket.AF_UNIX))
        listener.bind(f"\0{self._address}")
        listener.listen(self._size)
        return self._address

    def connect(self, addresses: Sequence[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        try:
            for rank in range(self._rank):
                one = self._kept(socket.socket(socket.AF_UNIX), rank)
                one.settimeout(_left(end))
                one.connect(f"\0{addresses[rank]}")
                one.sendall(_RANK.pack(self._rank))
                _check_peer(one)
            while len(self._peers) < self._size - 1:
                self._accept(end)
        except (OSError, struct.error) as error:
            raise self._lost("to connect", error) from error
        finally:
            if self._listener is not None:
                self._listener.close()

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
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.setblocking(False)
            knock.connect(f"\0{self._address}")  # wakes whoever accepts, which shutting a listener down does not

    def close(self) -> None:
        self.abort()
        self._mover.shutdown()
        if self._listener is not None:
            self._listener.close()
        for one in self._peers.values():
            one.close()

    def _accept(self, end: float) -> None:
        if self._listener is None:
            raise Lost("this member has not listened")
        self._listener.settimeout(_left(end))
        one, _ = self._listener.accept()
        try:
            _check_peer(one)
            one.settimeout(_left(end))
            (rank,) = _RANK.unpack(one.recv(_RANK.size, socket.MSG_WAITALL))
            if not self._rank < rank < self._size or rank in self._peers:
                raise Lost(f"a member that says that it is number {rank}")
            self._kept(one, rank)
        except BaseException:
            one.close()
            raise

    def _kept(self, one: socket.socket, rank: int | None = None) -> socket.socket:
        """From here on ``abort`` ends it."""
        with self._lock:
            if rank is None:
                self._listener = one
            else:
                self._peers[rank] = one
                for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    one.setsockopt(socket.SOL_SOCKET, side, BUFFER)
            if self._aborted:
                raise Lost("this exchange was given up")
        return one

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

    def _lost(self, doing: str, error: Exception) -> Lost:
        if self._aborted:
            return Lost("this exchange was given up")
        return Lost(f"sockets failed {doing}: {getattr(error, 'strerror', None) or error}")


def _send(one: socket.socket, data: memoryview, end: float) -> None:
    one.settimeout(_left(end))
    one.sendall(data)


def _receive(one: socket.socket, data: memoryview, end: float) -> None:
    while data:
        one.settimeout(_left(end))
        count = one.recv_into(data)
        if not count:
            raise ConnectionResetError("the connection was closed")
        data = data[count:]


def _left(end: float) -> float:
    """Zero would mean not to wait at all, and not to say that it was late."""
    return max(0.001, end - time.monotonic())


def _check_peer(one: socket.socket) -> None:
    """Raises Lost: the process at the other end is another user's."""
    _, uid, _ = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise Lost(f"a process of user {uid} at a member's address")
