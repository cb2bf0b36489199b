"""A group over Unix sockets of one node, for tensors of which some lie in host memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence

from awexd_transports.collective.base import Lost
from awexd_transports.collective.streams import StreamGroup, left

_RANK = struct.Struct("<I")
_PEER = struct.Struct("3i")
BUFFER = 4 << 20
"""Bytes that the kernel is asked to take of one side before the other reads."""


class SocketGroup(StreamGroup):
    """See ``base.Group``.

    Args:
        key: the group's, known to its members only. ``rank``, ``size``: this member's number, and how many they are.
    """

    name = "sockets"

    def __init__(self, key: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._address = f"awexd-{key}-{rank}"
        """An abstract name: nothing in a file system that could be left there."""

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
                one.settimeout(left(end))
                one.connect(f"\0{addresses[rank]}")
                _prepare(one)
                one.sendall(_RANK.pack(self._rank))
            while len(self._peers) < self._size - 1:
                self._accept(end)
        except (OSError, struct.error) as error:
            raise self._lost("to connect", error) from error
        finally:
            if self._listener is not None:
                self._listener.close()

    def _wake(self) -> None:
        # Shutting a listener down does not wake whoever accepts.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as knock:
            knock.setblocking(False)
            knock.connect(f"\0{self._address}")

    def _accept(self, end: float) -> None:
        if self._listener is None:
            raise Lost("this member has not listened")
        self._listener.settimeout(left(end))
        one, _ = self._listener.accept()
        try:
            _prepare(one)
            one.settimeout(left(end))
            (rank,) = _RANK.unpack(one.recv(_RANK.size, socket.MSG_WAITALL))
            self._admits(rank)
            self._kept(one, rank)
        except BaseException:
            one.close()
            raise


def _prepare(one: socket.socket) -> None:
    """Raises Lost: the process at the other end is another user's."""
    _, uid, _ = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise Lost(f"a process of user {uid} at a member's address")
    for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        one.setsockopt(socket.SOL_SOCKET, side, BUFFER)
