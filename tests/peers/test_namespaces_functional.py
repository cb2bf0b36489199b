"""Hosts of their own, as far as the network goes: namespaces joined by veth and a bridge; links cut and slowed."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.peers.nodes import Node, Segment

MiB = 1 << 20
NETWORK = "10.77.31"
_numbers = itertools.count()


def _run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=20, check=False)


def _may() -> bool:
    name = f"awexd-{os.getpid()}-probe"
    made = os.geteuid() == 0 and _may_run("ip", "netns", "add", name)
    return made and _may_run("ip", "netns", "del", name)


def _may_run(*command: str) -> bool:
    try:
        return _run(*command).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _may(), reason="needs root and network namespaces: run as root")


class Hosts:
    """So many namespaces on one bridge, which is in one more."""

    def __init__(self, count: int) -> None:
        stem = f"awexd-{os.getpid()}-{next(_numbers)}"
        self._hub = f"{stem}-hub"
        self.names = [f"{stem}-{number}" for number in range(count)]
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in (self._hub, *self.names):
            self._do("ip", "netns", "add", name)
        self._in(self._hub, "ip link add name br0 type bridge")
        self._in(self._hub, "ip link set br0 up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            self._do(*f"ip link add eth netns {name} type veth peer name v{number} netns {self._hub}".split())
            self._in(self._hub, f"ip link set v{number} master br0 up")
            self._in(name, f"ip addr add {address}/24 dev eth")
            self._in(name, "ip link set eth up")
            self._in(name, "ip link set lo up")

    def __exit__(self, *failure: object) -> None:
        for name in (self._hub, *self.names):
            _run("ip", "netns", "del", name)

    def wrapper(self, number: int) -> Sequence[str]:
        return ("ip", "netns", "exec", self.names[number])

    def cut(self, number: int) -> None:
        self._in(self._hub, f"ip link set v{number} down")

    def join(self, number: int) -> None:
        self._in(self._hub, f"ip link set v{number} up")

    def queue(self, number: int, discipline: str) -> bool:
        """Whether what that host sends now goes by this queueing discipline."""
        command = f"tc qdisc replace dev eth root {discipline}"
        return _run(*self.wrapper(number), *command.split()).returncode == 0

    def _in(self, name: str, command: str) -> None:
        self._do("ip", "netns", "exec", name, *command.split())

    def _do(self, *command: str) -> None:
        done = _run(*command)
        assert done.returncode == 0, (command, done.stderr)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(request.param) as made:
        yield made


Made = Callable[..., Any]


class TestHosts:
    transport = "tcp"

    def _served(self, node: Made, hosts: Hosts, numbers: Sequence[int], segments: dict[int, Segment]) -> list[Node]:
        return [
            node(f"n{number}", segments, wrapper=hosts.wrapper(number), host=hosts.addresses[number])
            for number in numbers
        ]

    @pytest.mark.parametrize("hosts", [2, 4], indirect=True)
    @pytest.mark.parametrize("streams", [1, 3])
    def test_bits_are_equal_from_any_to_any(
        self, hosts: Hosts, node: Made, segment: Made, fetching: Made, streams: int
    ) -> None:
        count = len(hosts.names)
        held = [segment(20 * MiB + number, number) for number in range(count)]
        nodes = [self._served(node, hosts, [number], {number: held[number]})[0] for number in range(count)]
        into = [{n: segment(held[n].nbytes) for n in range(count) if n != number} for number in range(count)]
        running = [
            fetching(
                into[number],
                [(one.source(), [n]) for n, one in enumerate(nodes) if n != number],
                wrapper=hosts.wrapper(number),
                streams=streams,
                piece_bytes=3 * MiB,
            )
            for number in range(count)
        ]
        for number, one in enumerate(running):
            result = one.result()
            assert result.get("again") == 0, result
            for n, found in into[number].items():
                assert np.array_equal(found.copy(), held[n].copy())

    @pytest.mark.parametrize("hosts", [3], indirect=True)
    def test_link_that_is_cut_costs_a_retry_from_another_holder(
        self, hosts: Hosts, node: Made, segment: Made, fetching: Made
    ) -> None:
        held, into = segment(512 * MiB, 1), segment(512 * MiB)
        nodes = self._served(node, hosts, [0, 1], {0: held})
        one = fetching(
            {0: into}, [(n.source(), None) for n in nodes], wrapper=hosts.wrapper(2), stall=1.0, piece_bytes=2 * MiB
        )
        one.line()
        hosts.cut(0)
        result = one.result()
        assert "delivered" in result, result
        assert result["delivered"]["n1"] > result["delivered"].get("n0", 0)
        assert np.array_equal(into.copy(), held.copy())

    @pytest.mark.parametrize("hosts", [2], indirect=True)
    def test_only_link_that_is_cut_ends_by_the_watchdog(
        self, hosts: Hosts, node: Made, segment: Made, fetching: Made
    ) -> None:
        held, into = segment(512 * MiB, 1), segment(512 * MiB)
        (source,) = self._served(node, hosts, [0], {0: held})
        before = source.ask("status")
        limits = {"stall": 0.5, "first_byte": 0.5, "connect": 0.5, "handshake": 0.5, "retries": 1}
        one = fetching({0: into}, [(source.source(), None)], wrapper=hosts.wrapper(1), piece_bytes=2 * MiB, **limits)
        one.line()
        hosts.cut(0)
        result = one.result()
        assert result["error"] in ("deadline_exceeded", "daemon_unavailable"), result
        assert "me/grpo (3, 7) from n0" in result["message"]
        hosts.join(0)
        into.fill(1)
        again = fetching({0: into}, [(source.source(), None)], wrapper=hosts.wrapper(1))
        assert again.result().get("delivered") == {"n0": held.nbytes}
        assert np.array_equal(into.copy(), held.copy())
        assert source.ask("status")["fds"] <= before["fds"] + 1  # the cut one, until its own watchdog

    @pytest.mark.parametrize("hosts", [3], indirect=True)
    def test_slow_source_is_overtaken(self, hosts: Hosts, node: Made, segment: Made, fetching: Made) -> None:
        held, into = segment(128 * MiB, 1), segment(128 * MiB)
        nodes = self._served(node, hosts, [0, 1], {0: held})
        if not hosts.queue(0, "tbf rate 20mbit burst 100k latency 50ms"):
            pytest.skip("needs the kernel's tbf queueing discipline (sch_tbf)")
        one = fetching({0: into}, [(n.source(), None) for n in nodes], wrapper=hosts.wrapper(2), piece_bytes=16 * MiB)
        result = one.result()
        assert "delivered" in result, result
        assert np.array_equal(into.copy(), held.copy())
        assert result["delivered"]["n1"] >= 112 * MiB

    @pytest.mark.parametrize("hosts", [2], indirect=True)
    @pytest.mark.parametrize("fault", ["loss 30%", "delay 200ms", "loss 5% delay 50ms"])
    def test_loss_and_delay(self, hosts: Hosts, node: Made, segment: Made, fetching: Made, fault: str) -> None:
        held, into = segment(4 * MiB, 1), segment(4 * MiB)
        (source,) = self._served(node, hosts, [0], {0: held})
        if not hosts.queue(0, f"netem {fault}"):
            pytest.skip("needs the kernel's netem queueing discipline (sch_netem)")
        limits = {"stall": 20.0, "first_byte": 20.0, "connect": 20.0, "handshake": 20.0, "within": 100.0}
        one = fetching({0: into}, [(source.source(), None)], wrapper=hosts.wrapper(1), streams=2, **limits)
        result = one.result()
        assert "delivered" in result, result
        assert np.array_equal(into.copy(), held.copy())
