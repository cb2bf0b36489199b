"""One side's NIXL agent: a sidecar that is started when it is needed, and anew after its death, by another name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from awexd.rdma.child import CALL_SECONDS, Child, TransferFailed
from awexd_transports.base import Memory

MAP_RATE = 1 << 30
"""Bytes a second at which a segment is registered at least: devices pin all of it."""


@dataclass(frozen=True, slots=True)
class Region:
    """A memory as one sidecar has it: ``address`` of its data there, ``metadata`` for who may write to it."""

    child: Child
    key: int
    address: int
    metadata: bytes


class Agent:
    """Not tied to an event loop, as long as one at a time uses it.

    Attributes:
        role: ``"source"`` or ``"target"``.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._stem = f"awexd-{role}-{secrets.token_hex(8)}"
        self._generations, self._keys = itertools.count(1), itertools.count(1)
        self._child: Child | None = None
        self._regions: dict[Memory, tuple[Child, asyncio.Task[Region]]] = {}
        self._held = 0

    def child(self) -> Child:
        """The living sidecar.

        Raises:
            TransferFailed: none can be started.
        """
        if self._child is None or not self._child.alive:
            if self._child is not None:
                self._child.close()  # dead already, or will be at once: reaped
            self._child = Child(f"{self._stem}-g{next(self._generations)}")
        return self._child

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Its sidecar lives on while anybody holds it."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        self._held += 1

    def release(self) -> None:
        """The last one ends the sidecar."""
        self._held -= 1
        if not self._held:
            self.close()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        for memory in list(self._regions):
            self._forget(memory)

    async def region(self, memory: Memory) -> Region:
        """The memory, mapped and registered there; kept until the memory is closed.

        Raises:
            TransferFailed: it cannot be.
        """
        child = self.child()
        known = self._regions.get(memory)
        if known is None or known[0] is not child:
            if known is None:
                memory.closing.append(self._forget)
            known = self._regions[memory] = child, asyncio.create_task(self._map(child, memory))
        _, mapping = known
        try:
            return await asyncio.shield(mapping)
        except (TransferFailed, OSError) as error:
            if self._regions.get(memory) == known:
                self._forget(memory)
            raise TransferFailed(str(error)) from error

    async def _map(self, child: Child, memory: Memory) -> Region:
        key = next(self._keys)
        target = self.role == "target"
        # Devices register only what may be written, whoever does not.
        fd, writable = _reopened(memory)
        try:
            asked: dict[str, Any] = {"key": key, "nbytes": memory.nbytes, "base": memory.base, "writable": writable}
            address = await child.map(fd, CALL_SECONDS + memory.nbytes / MAP_RATE, asked)
        finally:
            os.close(fd)
        metadata = (await child.call("describe", key=key))["metadata"] if target else ""
        return Region(child, key, address, bytes.fromhex(metadata))

    def _forget(self, memory: Memory) -> None:
        if self._forget in memory.closing:
            memory.closing.remove(self._forget)
        _, mapping = self._regions.pop(memory, (None, None))
        if mapping is None:
            return
        if mapping.done():
            _unmap(mapping)
        else:
            mapping.add_done_callback(_unmap)


def _unmap(mapping: asyncio.Task[Region]) -> None:
    if not mapping.cancelled() and mapping.exception() is None:
        region = mapping.result()
        region.child.tell("unmap", key=region.key)


def _reopened(memory: Memory) -> tuple[int, bool]:
    """A descriptor of the same object, and whether it may be written through."""
    path = f"/proc/self/fd/{memory.fd}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), True
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
