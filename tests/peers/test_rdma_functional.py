"""The rdma transport is one, over UCX's TCP where there is no device: see ``conformance``."""

from __future__ import annotations

import pytest

from tests.peers.conformance import Conformance
from tests.peers.rdma import needs_nixl, sidecar

__all__ = ["sidecar"]
pytestmark = [needs_nixl, pytest.mark.usefixtures("sidecar")]


class TestRdma(Conformance):
    transport = "rdma"
