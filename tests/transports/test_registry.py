from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from awexd.peers.tcp import Tcp
from awexd_transports import registry
from awexd_transports.errors import InvalidArgument


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points of packages that are installed, for a test to add to."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    return points


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.GROUP)


def test_own_transport_is_found_with_and_without_its_entry_point(installed: list[EntryPoint]) -> None:
    assert registry.find("tcp") is Tcp
    installed.append(point("tcp", registry.BUILT_IN["tcp"]))
    assert registry.find("tcp") is Tcp


def test_transport_of_another_package_is_found(installed: list[EntryPoint]) -> None:
    installed.append(point("pigeon", "collections:OrderedDict"))
    found: Any = registry.find("pigeon")
    assert found.__name__ == "OrderedDict"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tcp", "other:Tcp", "two transports are called 'tcp': awexd.peers.tcp:Tcp and other:Tcp; uninstall one"),
        ("pigeon", "no_such_module:Pigeon", r"transport 'pigeon' \(no_such_module:Pigeon\) cannot be loaded"),
        ("pigeon", "collections:Pigeon", "cannot be loaded"),
    ],
)
def test_wrong_transport_is_refused(installed: list[EntryPoint], name: str, value: str, said: str) -> None:
    installed.append(point(name, value))
    with pytest.raises(InvalidArgument, match=said):
        registry.find(name)


def test_unknown_transport_is_refused_with_those_that_are_known(installed: list[EntryPoint]) -> None:
    installed.append(point("pigeon", "collections:Pigeon"))
    with pytest.raises(InvalidArgument, match="no transport is called 'carrier'; known: pigeon, rdma, tcp"):
        registry.find("carrier")
