"""awexd's two GPU processes, which also do what peers do: ``awexd.bench.gpu.sides`` with a link between the two.

Peers' tensors are shared as torch shares them (``torch.multiprocessing``, its pickler included): where a driver plays
the GPU, by that driver's handles. The link is a socket, whose descriptor is the argument after the device.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # gives the pickler its reductions of CUDA tensors

from awexd.bench.gpu.devices import Device, Played
from awexd.bench.gpu.sides import ReaderSide, WriterSide, main
from awexd.bench.link import Answer, nanoseconds
from awexd_transports.view import View

BUCKET = 512 << 20
"""Bytes of a flattened bucket, as SGLang's trainers make them."""
_LENGTH = struct.Struct("<Q")

Metadata = list[tuple[int, list[int]]]
"""Numbers of tensors and their shapes, one after another in a bucket."""


class Link:
    """Messages to the other side, and tensors shared with it."""

    def __init__(self, device: Device) -> None:
        self._driver = device.driver if isinstance(device, Played) else None
        self._device = device
        self._socket = socket.socket(fileno=int(sys.argv[3]))

    def send(self, tensors: Sequence[torch.Tensor], metadata: Metadata) -> None:
        """Shares tensors; they must be kept until the other side has ``acknowledge``-d."""
        body = (
            bytes(ForkingPickler.dumps((tensors, metadata)))
            if self._driver is None
            else self._played(tensors, metadata)
        )
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> tuple[list[torch.Tensor], Metadata]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        body = self._exactly(length)
        if self._driver is None:
            found: tuple[list[torch.Tensor], Metadata] = ForkingPickler.loads(body)
            return found
        tensors, metadata = json.loads(body)
        return [self._opened(*one) for one in tensors], metadata

    def acknowledge(self) -> None:
        self._socket.sendall(b"+")

    def acknowledged(self) -> None:
        self._exactly(1)

    def flattened(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._driver is None:
            return torch.cat([tensor.view(-1) for tensor in tensors])
        made = self._device.tensors({"bucket": (sum(tensor.numel() for tensor in tensors),)})["bucket"]
        return torch.cat([tensor.view(-1) for tensor in tensors], out=made)

    def _exactly(self, length: int) -> bytes:
        body = bytearray(length)
        view = memoryview(body)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("the other side has ended")
            view = view[count:]
        return bytes(body)

    def _played(self, tensors: Sequence[torch.Tensor], metadata: Metadata) -> bytes:
        found = []
        for tensor in tensors:
            base, _ = self._driver.allocation(View.of(tensor))
            found.append([self._driver.handle(0, base).hex(), tensor.data_ptr() - base, list(tensor.shape)])
        return json.dumps([found, metadata]).encode()

    def _opened(self, handle: str, offset: int, shape: list[int]) -> torch.Tensor:
        address = self._driver.open(0, bytes.fromhex(handle)) + offset
        return View.packed(address, tuple(shape), "bfloat16", self._driver).tensor()


class PeerWriter(WriterSide):
    names = (*WriterSide.names, "share", "send_buckets")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._link = Link(device)

    def share(self) -> Answer:
        """Every tensor, each under a handle of its own."""
        self._link.send([tensor for _, tensor in self.held], [])
        self._link.acknowledged()
        return {}

    def send_buckets(self) -> Answer:
        """Flattens tensors into buckets; sends each one's handle, and goes on when it has been copied out of."""
        started = nanoseconds()
        buckets = 0
        for numbers in self._buckets():
            bucket = self._link.flattened([self.held[number][1] for number in numbers])
            self._link.send([bucket], [(number, list(self.held[number][1].shape)) for number in numbers])
            self._link.acknowledged()
            buckets += 1
        self._link.send([], [])
        return {"started": started, "buckets": buckets}

    def _buckets(self) -> Iterator[list[int]]:
        found: list[int] = []
        room = BUCKET
        for number, (_, tensor) in enumerate(self.held):
            if found and tensor.nbytes > room:
                yield found
                found, room = [], BUCKET
            found.append(number)
            room -= tensor.nbytes
        if found:
            yield found


class PeerReader(ReaderSide):
    names = (*ReaderSide.names, "open_shared", "copy_shared", "close_shared", "receive_buckets")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._link = Link(device)
        self._shared: list[torch.Tensor] = []

    def open_shared(self) -> Answer:
        started = time.perf_counter()
        self._shared, _ = self._link.receive()
        self._link.acknowledge()
        return {"seconds": time.perf_counter() - started}

    def copy_shared(self, how: str) -> Answer:
        """Seconds of the copies alone."""
        ours = [tensor for _, tensor in self.held]
        self.device.synchronize()
        started = time.perf_counter()
        if how == "foreach":
            torch._foreach_copy_(ours, self._shared)
        else:
            for to, of in zip(ours, self._shared, strict=True):
                to.copy_(of)
        self.device.synchronize()
        return {"seconds": time.perf_counter() - started}

    def close_shared(self) -> Answer:
        self._shared = []
        return {}

    def receive_buckets(self) -> Iterator[Answer]:
        yield {}
        while True:
            found, metadata = self._link.receive()
            if not found:
                break
            at, bucket = 0, found[0]
            for number, shape in metadata:
                to = self.held[number][1]
                to.copy_(bucket[at : at + to.numel()].view(shape))
                at += to.numel()
            self.device.synchronize()
            del bucket, found
            self._link.acknowledge()
        yield {"ended": nanoseconds()}


if __name__ == "__main__":
    main({"writer": PeerWriter, "reader": PeerReader})
