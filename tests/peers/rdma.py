"""What tests of the rdma transport share: it goes over UCX's TCP, and its sidecars are found and hurt."""

from __future__ import annotations

import time
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
    monkeypatch.setenv(UCX_TLS, "tcp")
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
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False
