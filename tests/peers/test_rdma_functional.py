"""The rdma transport is one, over UCX's TCP where there is no device: see ``conformance``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from awexd.rdma.available import UCX_TLS, module
from awexd.rdma.transport import TARGET
from tests.peers.conformance import Conformance

pytestmark = pytest.mark.skipif(module() is None, reason="needs NIXL: pip install 'awexd[rdma]'")


@pytest.fixture(autouse=True)
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One for all lanes of a test."""
    monkeypatch.setenv(UCX_TLS, "tcp")
    with TARGET.held():
        TARGET.child()  # while nodes start
        yield


class TestRdma(Conformance):
    transport = "rdma"
