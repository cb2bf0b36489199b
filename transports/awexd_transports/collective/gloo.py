"""A group over gloo, for tensors of which some lie in host memory: all its traffic goes over one node's loopback.

gloo has no abort: a thread that waits in it is freed when its connections are. So each group has a loopback address of
its own (all of 127/8 is the node's), by which its connections, and no others of this process, are known and shut down.
A member that is killed frees the others the same way: its kernel closes its connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from awexd_transports.collective.base import Lost, Wait

if TYPE_CHECKING:
    import torch

_LEAST = 0.001
"""Seconds: gloo takes zero for none."""


def address_of(key: str) -> str:
    """The loopback address of the group of that key."""
    digest = hashlib.sha256(key.encode()).digest()
    return ".".join(map(str, (127, *(1 + digest[at] % 254 for at in range(3)))))


class GlooGroup:
    """See ``base.Group``.

    Args:
        key: the group's, known to its members only. ``rank``, ``size``: this member's number, and how many they are.
    """

    def __init__(self, key: str, rank: int, size: int) -> None:
        self._key, self._rank, self._size = key, rank, size
        self._host = address_of(key)
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._group: Any = None
        self._aborted = False

    def bind(self) -> str:
        self._listener = socket.socket()
        self._listener.bind((self._host, 0))
        self._listener.listen(self._size)
        return str(self._listener.getsockname()[1])

    def connect(self, address: str, seconds: float) -> None:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

        timeout = timedelta(seconds=max(_LEAST, seconds))
        listener, self._listener = self._listener, None
        fd = None if listener is None else listener.detach()
        try:
            store = TCPStore(
                self._host, int(address), None, fd is not None, timeout, wait_for_workers=False, master_listen_fd=fd
            )
            self._store = PrefixStore(self._key, store)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = timeout
            options._threads = 1
            self._group = ProcessGroupGloo(self._store, self._rank, self._size, options)
        except (RuntimeError, ValueError) as error:
            raise self._lost("to connect", error) from error
        if self._aborted:
            raise Lost("this exchange was given up")

    def send(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin("send", peer, memory, seconds)

    def receive(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        return self._begin("recv", peer, memory, seconds)

    def abort(self) -> None:
        self._aborted = True
        for connection in _connections(self._host):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        if self._listener is not None:
            self._listener.close()
        self._group = self._store = self._listener = None

    def _begin(self, what: str, peer: int, memory: torch.Tensor, seconds: float) -> Wait:
        if self._aborted or self._group is None:
            raise Lost("this exchange was given up")
        try:
            work = getattr(self._group, what)([memory], peer, 0)
        except RuntimeError as error:
            raise self._lost(f"to {what}", error) from error

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=max(_LEAST, seconds)))
            except RuntimeError as error:
                raise self._lost(f"in a {what} with member {peer}", error) from error

        return wait

    def _lost(self, doing: str, error: Exception) -> Lost:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Lost(f"gloo failed {doing}: {text[-200:]}")


def _connections(host: str) -> Iterator[socket.socket]:
    """This process's connections from or to that address."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and host in _ends(one):
                yield one


def _ends(connection: socket.socket) -> list[str]:
    """Both addresses of a connection; none of what only listens."""
    try:
        return [str(end[0]).removeprefix("::ffff:") for end in (connection.getsockname(), connection.getpeername())]
    except OSError:
        return []
