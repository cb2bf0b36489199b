"""A link that loses and delays what one host sends, in user space: for kernels without the netem queueing discipline.

``relay VETH TAP LOSS DELAY`` stands between a veth's end and a bridge's port that it makes, until it is killed;
``offload DEVICE 0|1`` sets whether a device takes packets that are still to be cut up and summed: a relay cannot pass
those on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
SIOCETHTOOL, SET_CHECKSUM, SET_SEGMENTATION = 0x8946, 0x17, 0x1F
EVERY_PROTOCOL, OUTGOING = 3, 4
LARGEST = 1 << 16


def offload(device: str, on: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in (SET_CHECKSUM, SET_SEGMENTATION):
            value = ctypes.create_string_buffer(struct.pack("II", command, on))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(value)).ljust(40, b"\0")
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def relay(veth: str, tap: str, loss: float, delay: float) -> None:
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP | IFF_NO_PI))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    wire.bind((veth, 0))
    os.write(sys.stdout.fileno(), b"+")
    late: list[tuple[float, int, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select([wire.fileno(), port], [], [], wait)
        if wire.fileno() in readable:
            data, (_, _, kind, *_) = wire.recvfrom(LARGEST)
            if kind != OUTGOING and random.random() >= loss:
                heapq.heappush(late, (time.monotonic() + delay, next(numbers), data))
        if port in readable:
            with contextlib.suppress(OSError):  # what a link cannot take is lost
                wire.send(os.read(port, LARGEST))
        while late and late[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):
                os.write(port, heapq.heappop(late)[2])


if __name__ == "__main__":
    if sys.argv[1] == "offload":
        offload(sys.argv[2], int(sys.argv[3]))
    else:
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
