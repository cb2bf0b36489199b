"""How exchanges cut, order and move: pure parts, and flows over a group within one process."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.collective.base import Guard, Lost, Wait
from awexd_transports.collective.chunks import TAIL, Chunk, chunks
from awexd_transports.collective.flow import Flow, Load
from awexd_transports.collective.rings import SLOTS, HostRing, room_of
from awexd_transports.collective.rounds import readers_of, writers_of
from awexd_transports.collective.sockets import SocketGroup
from awexd_transports.errors import InvalidArgument, ManifestMismatch
from awexd_transports.layout import ALIGNMENT
from awexd_transports.view import View

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
boxes = st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8, 16])), max_size=8)


@given(boxes, st.integers(1, 8))
def test_chunks_have_every_element_once_aligned_within_the_room(given: list[Any], units: int) -> None:
    room = units * ALIGNMENT
    marks = [np.zeros(shape, int) for shape, _ in given]
    found = list(chunks(given, room))
    for chunk in found:
        end = 0
        for part in chunk.parts:
            assert part.at % ALIGNMENT == 0
            assert part.at >= end
            where = tuple(slice(a, b) for a, b in zip(part.low, part.high, strict=True))
            marks[part.box][where] += 1
            end = part.at + given[part.box][1] * math.prod(b - a for a, b in zip(part.low, part.high, strict=True))
        assert end == chunk.nbytes <= room
        assert chunk.parts
    assert all((mark == 1).all() for mark in marks)


def test_large_boxes_fill_their_chunks() -> None:
    room, shape = 1 << 20, (1000, 1000)
    found: list[Chunk] = list(chunks([(shape, 4)] * 5, room))
    assert all(chunk.nbytes > room - room // TAIL - 4000 for chunk in found[:-1])
    assert len(found) <= 5 * math.prod(shape) * 4 / (room * (1 - 1 / TAIL)) + 1


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_pair_meets_once_and_nobody_waits_in_a_circle(writers: int, readers: int) -> None:
    orders = {("w", w): deque(("r", r) for r in readers_of(w, writers, readers)) for w in range(writers)}
    orders |= {("r", r): deque(("w", w) for w in writers_of(r, writers, readers)) for r in range(readers)}
    met = 0
    while any(orders.values()):
        ready = [one for one, order in orders.items() if order and one[0] == "w" and orders[order[0]][0] == one]
        assert ready, "everybody waits for somebody else"
        for one in ready:
            other = orders[one].popleft()
            assert orders[other].popleft() == one
            met += 1
    assert met == writers * readers


def test_ring_that_is_too_small_is_refused() -> None:
    assert room_of(SLOTS * ALIGNMENT) == ALIGNMENT
    with pytest.raises(InvalidArgument, match="ring_bytes"):
        room_of(SLOTS * ALIGNMENT - 1)


class Pipe:
    """A group of two, one of them this side: messages by a queue, each taken once and in order."""

    def __init__(self) -> None:
        self.messages: queue.Queue[torch.Tensor] = queue.Queue()
        self.sizes: list[int] = []

    def bind(self) -> str:
        return ""

    def connect(self, addresses: Sequence[str], seconds: float) -> None: ...

    def send(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        self.sizes.append(memory.numel())
        self.messages.put(memory.clone())
        return bool

    def receive(self, peer: int, memory: torch.Tensor, after: Any, seconds: float) -> Wait:
        def wait() -> None:
            memory.copy_(self.messages.get(timeout=seconds))

        return wait

    def abort(self) -> None: ...

    def close(self) -> None: ...


Side = list[torch.Tensor]


def _sides(ring_bytes: int) -> tuple[Side, Side, Flow, Flow, np.ndarray[Any, Any]]:
    """Tensors of several forms on both sides, and what follows them."""
    of = [torch.arange(600.0).view(20, 30).t(), torch.arange(7, dtype=torch.int8), torch.tensor(2.5)]
    to = [torch.zeros(30, 20), torch.zeros(7, dtype=torch.int8), torch.tensor(0.0)]
    tails = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    sending, receiving = (
        Flow(HostRing(ring_bytes), [Load(0, [*map(View.of, side)], ["a", "b", "c"], tail)], into=into)
        for side, tail, into in zip((of, to), tails, (False, True), strict=True)
    )
    assert sending.messages == receiving.messages
    return of, to, sending, receiving, tails[1]


@pytest.mark.parametrize("ring_bytes", [768, 2304, 1 << 20])
def test_flows_bring_every_element_and_what_follows(ring_bytes: int) -> None:
    of, to, sending, receiving, tail = _sides(ring_bytes)
    pipe, touched = Pipe(), list[int]()
    sending.send(pipe, Guard(), lambda: 5.0)
    receiving.receive(pipe, Guard(lambda: touched.append(1)), lambda: 5.0)
    assert all(torch.equal(a, b) for a, b in zip(of, to, strict=True))
    assert tail.tolist() == np.arange(1000, dtype=np.uint8).tolist()
    assert touched == [1]
    assert max(pipe.sizes) <= room_of(ring_bytes)


def test_stopped_guard_lets_nothing_be_touched() -> None:
    _, to, sending, receiving, _ = _sides(768)
    pipe, guard = Pipe(), Guard()
    sending.send(pipe, Guard(), lambda: 5.0)
    guard.stop()
    with pytest.raises(Lost, match="given up"):
        receiving.receive(pipe, guard, lambda: 5.0)
    assert not any(tensor.any() for tensor in to)
    assert not guard.touched


def test_what_is_only_compared_is_named_where_it_differs_and_not_changed() -> None:
    of, to = torch.arange(500.0), torch.arange(500.0)
    to[321] = -1
    pipe = Pipe()
    Flow(HostRing(1024), [Load(0, [View.of(of)], ["x"])], into=False).send(pipe, Guard(), lambda: 5.0)
    receiving = Flow(HostRing(1024), [Load(0, [View.of(to)], ["x"], same=True)], into=True)
    with pytest.raises(ManifestMismatch, match="x: they differ"):
        receiving.receive(pipe, Guard(), lambda: 5.0)
    assert to[321] == -1


def _connected(size: int) -> list[SocketGroup]:
    groups = [SocketGroup("a key", rank, size) for rank in range(size)]
    addresses = [group.bind() for group in groups]
    raised = _together([lambda group=group: group.connect(addresses, 20.0) for group in groups])
    assert raised == [None] * size
    return groups


def _together(calls: list[Any]) -> list[BaseException | None]:
    raised: list[BaseException | None] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            calls[at]()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            raised[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return raised


def test_group_of_sockets_sends_in_order_and_closes() -> None:
    groups = _connected(3)
    got = [torch.zeros(1000, dtype=torch.uint8) for _ in range(4)]
    waits = [groups[2].receive(1, memory, None, 10.0) for memory in got]
    sent = [groups[1].send(2, torch.full((1000,), n, dtype=torch.uint8), None, 10.0) for n in range(4)]
    for wait in [*sent, *waits]:
        wait()
    assert [int(memory[-1]) for memory in got] == [0, 1, 2, 3]
    for group in groups:
        group.close()
    with pytest.raises(Lost):
        groups[0].send(1, got[0], None, 1.0)


def test_abort_frees_whoever_waits_in_a_group_of_sockets() -> None:
    groups = _connected(3)
    memory = torch.zeros(8, dtype=torch.uint8)
    timers = [threading.Timer(0.2, groups[rank].abort) for rank in (0, 1)]
    for timer in timers:
        timer.start()
    raised = _together([groups[rank].receive(2, memory.clone(), None, 60.0) for rank in (0, 1)])
    assert [type(error) for error in raised] == [Lost, Lost]
    for timer in timers:
        timer.join()
    for group in groups:
        group.close()


def test_abort_frees_whoever_connects_a_group_of_sockets() -> None:
    group = SocketGroup("another key", 0, 2)
    addresses = [group.bind(), ""]
    timer = threading.Timer(0.2, group.abort)
    timer.start()
    (raised,) = _together([lambda: group.connect(addresses, 60.0)])
    assert isinstance(raised, Lost)
    timer.join()
    group.close()


def test_group_of_sockets_of_which_not_all_come_says_so_in_time() -> None:
    group = SocketGroup("a third key", 0, 2)
    addresses = [group.bind(), ""]
    with pytest.raises(Lost, match="to connect"):
        group.connect(addresses, 0.3)
    group.close()
