"""The rdma transport is one, over UCX's TCP where there is no device: see ``conformance``.

A node and its sidecars take a while to start: what is not the transport's own, but shared with tcp or the fetcher's, is
left to the tests of tcp.
"""

from __future__ import annotations

import pytest

from awexd_transports.base import Piece
from tests.peers.conformance import Conformance, MiB, NodeMaker, SegmentMaker
from tests.peers.rdma import needs_nixl, sidecar

__all__ = ["sidecar"]
pytestmark = [needs_nixl, pytest.mark.usefixtures("sidecar")]


class TestRdma(Conformance):
    transport = "rdma"
    test_wrong_ticket_is_refused = None
    test_ticket_opens_its_own_version_only = None
    test_call_itself_is_checked = None  # type: ignore[assignment]
    test_sources_that_hold_parts_are_asked_for_those = None  # type: ignore[assignment]
    test_bytes_that_nobody_holds_are_said = None  # type: ignore[assignment]
    test_pieces_are_told_once_and_when_they_are_there = None  # type: ignore[assignment]

    @pytest.mark.parametrize(("nbytes", "verify"), [(1, True), (MiB + 1, False), (256 * MiB, True)])
    async def test_bits_are_equal(self, node: NodeMaker, segment: SegmentMaker, nbytes: int, verify: bool) -> None:
        await super().test_bits_are_equal(node, segment, nbytes, verify)

    @pytest.mark.parametrize("milliseconds", [3, 60])
    async def test_after_a_cancel_nothing_is_written(
        self, node: NodeMaker, segment: SegmentMaker, milliseconds: int
    ) -> None:
        await super().test_after_a_cancel_nothing_is_written(node, segment, milliseconds)

    @pytest.mark.parametrize("piece", [Piece(0, MiB - 1, 2), Piece(1, 0, 1)])
    async def test_bytes_out_of_range_end_the_connection(
        self, node: NodeMaker, segment: SegmentMaker, piece: Piece
    ) -> None:
        await super().test_bytes_out_of_range_end_the_connection(node, segment, piece)
