"""Hosts of their own, as far as the network goes: namespaces joined by veth and a bridge; links cut and slowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.peers.hosts import Hosts, may
from tests.peers.nodes import Node, Segment

MiB = 1 << 20
pytestmark = pytest.mark.skipif(not may(), reason="needs root and network namespaces: run as root")


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
