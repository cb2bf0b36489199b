"""How exchanges cut, order and move: pure parts, and flows over a group within one process."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from awexd_transports.collective.base import Group, Guard, Lost, Wait
from awexd_transports.collective.chunks import TAIL, Chunk, chunks
from awexd_transports.collective.flow import Flow, Load
from awexd_transports.collective.rings import SLOTS, HostRing, room_of
from awexd_transports.collective.rounds import readers_of, writers_of
from awexd_transports.collective.sockets import SocketGroup
from awexd_transports.collective.tcp import HELLO, NONCE_BYTES, UNPROVEN, TcpGroup
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


Make = Callable[[str, int, int], Group]
KEY = secrets.token_hex(32)


def _tcp(key: str, rank: int, size: int) -> TcpGroup:
    return TcpGroup(key, rank, size, "127.0.0.1")


both = pytest.mark.parametrize("make", [SocketGroup, _tcp])


def _bytes(count: int, value: int = 0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8)


@contextmanager
def _groups(make: Make, size: int) -> Iterator[tuple[list[Group], list[str]]]:
    """All listening; closed in the end."""
    groups = [make(KEY, rank, size) for rank in range(size)]
    try:
        yield groups, [group.bind() for group in groups]
    finally:
        for group in groups:
            group.close()


@contextmanager
def _connected(make: Make, size: int) -> Iterator[list[Group]]:
    with _groups(make, size) as (groups, addresses):
        assert _connect(groups, addresses) == [None] * size
        yield groups


def _connect(groups: Sequence[Group], addresses: Sequence[str], seconds: float = 20.0) -> list[BaseException | None]:
    return _together([lambda group=group: group.connect(addresses, seconds) for group in groups])


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


def _aborted(groups: Sequence[Group], calls: list[Any]) -> None:
    """Each of these calls waits until its group is aborted, and is told so at once."""
    timers = [threading.Timer(0.2, group.abort) for group in groups]
    started = time.monotonic()
    for timer in timers:
        timer.start()
    raised = _together(calls)
    assert time.monotonic() - started < 10
    assert [str(error) for error in raised] == ["this exchange was given up"] * len(calls)
    assert {type(error) for error in raised} == {Lost}
    for timer in timers:
        timer.join()


@both
def test_group_sends_in_order_and_closes(make: Make) -> None:
    got = [_bytes(1000) for _ in range(4)]
    with _connected(make, 3) as groups:
        waits = [groups[2].receive(1, memory, None, 10.0) for memory in got]
        sent = [groups[1].send(2, _bytes(1000, n), None, 10.0) for n in range(4)]
        for wait in [*sent, *waits]:
            wait()
    assert [int(memory[-1]) for memory in got] == [0, 1, 2, 3]
    with pytest.raises(Lost):
        groups[0].send(1, got[0], None, 1.0)


@both
def test_abort_frees_whoever_receives(make: Make) -> None:
    with _connected(make, 3) as groups:
        _aborted(groups[:2], [groups[rank].receive(2, _bytes(8), None, 60.0) for rank in (0, 1)])


@both
def test_abort_frees_whoever_sends(make: Make) -> None:
    with _connected(make, 2) as groups:
        _aborted(groups[:1], [groups[0].send(1, _bytes(256 << 20), None, 60.0)])


@both
def test_abort_frees_whoever_waits_for_higher_ranks(make: Make) -> None:
    with _groups(make, 2) as (groups, addresses):
        _aborted(groups[:1], [lambda: groups[0].connect(addresses, 60.0)])
        with pytest.raises(Lost, match="given up"):
            groups[0].connect(addresses, 60.0)


@both
def test_group_of_which_not_all_come_says_so_in_time(make: Make) -> None:
    with _groups(make, 2) as (groups, addresses), pytest.raises(Lost, match="to connect"):
        groups[0].connect(addresses, 0.3)


@both
def test_receiving_ends_in_time(make: Make) -> None:
    with _connected(make, 2) as groups, pytest.raises(Lost, match="with member 1: timed out"):
        groups[0].receive(1, _bytes(8), None, 0.3)()


MEMBER = """
import sys, torch
from awexd_transports.collective.sockets import SocketGroup
from awexd_transports.collective.tcp import TcpGroup
key, where, count = sys.argv[1:]
group = SocketGroup(key, 1, 2) if where == "unix" else TcpGroup(key, 1, 2, where)
address = group.bind()
print(address, flush=True)
group.connect([input(), address], 60.0)
memory = torch.zeros(int(count), dtype=torch.uint8)
group.receive(0, memory, None, 60.0)()
group.send(0, memory.bitwise_not(), None, 60.0)()
input()
"""


@both
def test_processes_exchange_every_bit_and_a_killed_one_is_noticed(make: Make) -> None:
    sent = torch.frombuffer(bytearray(os.urandom((8 << 20) + 3)), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    where = "unix" if make is SocketGroup else "127.0.0.1"
    command = [sys.executable, "-c", MEMBER, KEY, where, str(sent.numel())]
    group = make(KEY, 0, 2)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        address = group.bind()
        other.stdin.write(address + "\n")
        other.stdin.flush()
        group.connect([address, other.stdout.readline().strip()], 60.0)
        group.send(1, sent, None, 60.0)()
        group.receive(1, got, None, 60.0)()
        assert torch.equal(got, sent.bitwise_not())
        wait = group.receive(1, got, None, 60.0)
        other.kill()
        with pytest.raises(Lost, match="with member 1"):
            wait()
    group.close()


def _at(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@contextmanager
def _strangers(address: str, said: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """Connections that were made before any member's; each says this."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(_at(address), 10.0)) for _ in said]
        for one, words in zip(strangers, said, strict=True):
            one.sendall(words)
        yield strangers


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([b""] * (UNPROVEN + 2), id="silent"),
        pytest.param([b"GET / HTTP/1.1\r\n"], id="short"),
        pytest.param([HELLO.pack(1, bytes(NONCE_BYTES), bytes(32)), bytes(100_000)], id="wrong"),
    ],
)
def test_strangers_are_dropped_and_members_get_in(said: list[bytes]) -> None:
    with _groups(_tcp, 2) as (groups, addresses), _strangers(addresses[0], said) as strangers:
        assert _connect(groups, addresses) == [None, None]
        for one in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert len(one.recv(NONCE_BYTES, socket.MSG_WAITALL)) in (0, NONCE_BYTES)
                assert one.recv(1) == b""


def test_member_with_another_key_is_a_stranger() -> None:
    other = _tcp("another key", 1, 2)
    with _groups(_tcp, 2) as (groups, addresses):
        other.bind()
        raised = _connect([groups[0], other], addresses, 1.0)
        assert "member 1" in str(raised[0])
        assert f"member 0 at '{addresses[0]}'" in str(raised[1])
        assert {type(error) for error in raised} == {Lost}
    other.close()


def test_whoever_accepts_without_the_key_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, _groups(_tcp, 2) as (groups, _):

        def answer() -> None:
            one, _ = listener.accept()
            with one:
                one.sendall(bytes(NONCE_BYTES))
                one.recv(HELLO.size, socket.MSG_WAITALL)
                one.sendall(bytes(32))

        address = f"127.0.0.1:{listener.getsockname()[1]}"
        raised = _together([lambda: groups[1].connect([address, ""], 10.0), answer])
    assert isinstance(raised[0], Lost)
    assert "does not know the group's key" in str(raised[0])


class Wire:
    """Between a member that connects here and the one at ``address``: what they say, each way."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = address
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.said = [b"", b""]

    def carry(self) -> None:
        """Until the connecting side and the other have closed."""
        one, _ = self._listener.accept()
        self._listener.close()
        with one, socket.create_connection(_at(self._target)) as other:
            assert _together([lambda: self._pass(0, one, other), lambda: self._pass(1, other, one)]) == [None, None]

    def _pass(self, way: int, of: socket.socket, to: socket.socket) -> None:
        while data := of.recv(1 << 16):
            self.said[way] += data
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


def test_key_is_not_on_the_wire_and_what_is_there_does_not_let_in_again() -> None:
    def meet() -> None:
        assert _connect(groups, [wire.address, ""]) == [None, None]
        for group in groups:
            group.close()

    with _groups(_tcp, 2) as (groups, addresses):
        wire = Wire(addresses[0])
        assert _together([wire.carry, meet]) == [None, None]
    assert [len(said) for said in wire.said] == [HELLO.size, NONCE_BYTES + 32]
    for said in wire.said:
        assert KEY.encode() not in said
        assert bytes.fromhex(KEY) not in said
    with _groups(_tcp, 2) as (groups, addresses), _strangers(addresses[0], wire.said[:1]) as (again,):
        assert _connect(groups, addresses) == [None, None]
        assert again.recv(NONCE_BYTES, socket.MSG_WAITALL) != wire.said[1][:NONCE_BYTES]
        assert again.recv(1) == b""


def test_member_whose_number_is_not_of_the_group_ends_it() -> None:
    other = _tcp(KEY, 2, 3)
    with _groups(_tcp, 2) as (groups, addresses):
        other.bind()
        raised = _connect([groups[0], other], [addresses[0], addresses[0]])
        assert str(raised[0]) == "a member that says that it is number 2"
        assert isinstance(raised[1], Lost)
    other.close()


@pytest.mark.parametrize("waits", ["for a proof", "for the kernel", "for a name"])
def test_abort_frees_whoever_connects(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    if waits == "for a name":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [freed.wait(30)][1:])
    with _groups(_tcp, 2) as (groups, _), contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2 if waits == "for the kernel" else 0):  # a full queue: the next SYN gets no answer
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        _aborted(groups[1:], [lambda: groups[1].connect([f"127.0.0.1:{listener.getsockname()[1]}", ""], 60.0)])
    freed.set()


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with _groups(_tcp, 2) as (groups, addresses), socket.create_server(("127.0.0.1", 0)) as silent:
        found = [silent.getsockname(), ("127.0.0.1", 1), _at(addresses[0])]
        family = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*family, where) for where in found])
        assert _connect(groups, ["several:1", ""], 3.0) == [None, None]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("127.0.0.1:70000", "no such port"),
        ("127.0.0.1", "invalid literal"),
        ("a..b:1", "encoding"),
    ],
)
def test_address_at_which_nobody_is_named(address: str, why: str) -> None:
    with _groups(_tcp, 2) as (groups, _), pytest.raises(Lost, match=f"member 0 at '{address}': .*{why}"):
        groups[1].connect([address, ""], 10.0)


def test_group_by_addresses_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"needs IPv6 on the loopback interface: {error}")
    with _groups(lambda key, rank, size: TcpGroup(key, rank, size, "::1"), 2) as (groups, addresses):
        assert all(address.startswith("[::1]:") for address in addresses)
        assert _connect(groups, addresses) == [None, None]


def test_group_without_a_key_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="key"):
        _tcp("", 0, 2)
