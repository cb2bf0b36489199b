"""The rdma transport between hosts of their own, over UCX's TCP."""

from __future__ import annotations

import pytest

from tests.peers import test_namespaces_functional as namespaces
from tests.peers.hosts import Hosts
from tests.peers.rdma import needs_nixl, sidecar
from tests.peers.test_namespaces_functional import Made

hosts = namespaces.hosts
__all__ = ["hosts", "sidecar"]
pytestmark = [needs_nixl, pytest.mark.usefixtures("sidecar"), namespaces.pytestmark]


class TestRdmaHosts(namespaces.TestHosts):
    transport = "rdma"
    test_slow_source_is_overtaken = None  # type: ignore[assignment]
    test_loss_and_delay = None  # type: ignore[assignment]
    test_only_link_that_is_cut_ends_by_the_watchdog = None  # type: ignore[assignment]

    @pytest.mark.parametrize(("hosts", "streams"), [(4, 1)], indirect=["hosts"])
    def test_bits_are_equal_from_any_to_any(
        self, hosts: Hosts, node: Made, segment: Made, fetching: Made, streams: int
    ) -> None:
        super().test_bits_are_equal_from_any_to_any(hosts, node, segment, fetching, streams)
