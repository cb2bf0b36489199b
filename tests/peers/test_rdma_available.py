"""Where rdma can be used, and what is said where it cannot."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from awexd.config import load
from awexd.nodes.routes import transports
from awexd.peers.settings import PeerSettings
from awexd.peers.tcp import Tcp
from awexd.rdma import available
from awexd.rdma.available import UCX_TLS, why_not
from awexd.rdma.transport import Rdma
from awexd_transports.errors import InvalidArgument
from tests.peers.certificates import made, needs_openssl
from tests.peers.rdma import needs_nixl
from tests.peers.serving import tls

TCP = {UCX_TLS: "tcp"}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the kernel's."""
    monkeypatch.setattr(available, "DEVICES", tmp_path / "infiniband")
    monkeypatch.delenv(UCX_TLS, raising=False)
    return tmp_path / "infiniband"


def test_without_nixl_it_is_said_how_to_get_it(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "MODULES", ("no_such_nixl",))
    assert why_not(TCP) == "rdma: NIXL is not installed; pip install 'awexd[rdma]'"
    with pytest.raises(InvalidArgument, match="NIXL is not installed"):
        Rdma()


@needs_nixl
def test_without_a_device_it_takes_somebody_who_insists(devices: Path) -> None:
    assert "no RDMA device" in (why_not({}) or "")
    assert why_not(TCP) is None
    assert "no RDMA device" in (why_not(TCP, forced=False) or "")
    with pytest.raises(InvalidArgument, match="no RDMA device"):
        Rdma()


@needs_nixl
@pytest.mark.parametrize(("choice", "names"), [("auto", ["rdma", "tcp"]), ("rdma", ["rdma"]), ("tcp", ["tcp"])])
def test_with_a_device_it_is_preferred(devices: Path, choice: str, names: list[str]) -> None:
    (devices / "mlx5_0").mkdir(parents=True)
    assert why_not({}, forced=False) is None
    found, _ = transports(load({"peer_transport": choice}, {}), PeerSettings())
    assert [one.name for one in found] == names


def test_without_one_tcp_is_used_and_why_is_known(devices: Path) -> None:
    (found,), why = transports(load({}, {}), PeerSettings())
    assert found.name == Tcp.name
    assert why.startswith("rdma: ")


@needs_nixl
@needs_openssl
def test_with_tls_it_is_not_used(devices: Path, tmp_path: Path) -> None:
    (devices / "mlx5_0").mkdir(parents=True)
    files = made(tmp_path, "good")
    settings = PeerSettings(client_tls=tls(files, ssl.Purpose.SERVER_AUTH))
    (found,), why = transports(load({}, {}), settings)
    assert (found.name, why) == (Tcp.name, "rdma: its bytes would not go by TLS")
    with pytest.raises(InvalidArgument, match="do not go by TLS"):
        transports(load({"peer_transport": "rdma"}, {}), settings)
