"""What tests of the rdma transport share: it goes over UCX's TCP, and its sidecars are found and hurt."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from awexd.rdma.available import UCX_TLS, module
from awexd.rdma.transport import TARGET

needs_nixl = pytest.mark.skipif(module() is None, reason="needs NIXL: pip install 'awexd[rdma]'")
GRACE = 20.0


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One for all lanes of a test."""
    monkeypatch.setenv(UCX_TLS, os.environ.get("AWEXD_TEST_UCX_TLS", "tcp"))
    with TARGET.held():
        TARGET.child()  # while nodes start
        yield


def sidecars(pid: int) -> list[int]:
    """Of the daemon, or node, with that process id."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if "awexd.rdma.sidecar" in Path(f"/proc/{child}/cmdline").read_text():
            found.append(child)
    return found


def ends(pid: int) -> bool:
    """Whether that process, which is nobody's child here, ends."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], GRACE)[0])
    finally:
        os.close(handle)
