"""Who a client of another node is here."""

from __future__ import annotations

import os
import pwd
from typing import Any

import pytest

from awexd.nodes.forwarding import introduced
from awexd_transports.errors import AccessDenied, ProtocolError

ME = pwd.getpwuid(os.getuid())
TOLD: dict[str, Any] = {"pid": 7, "user": ME.pw_name, "host": "node7"}


def test_a_user_is_the_one_of_that_name_here() -> None:
    peer, host = introduced(TOLD)
    assert (peer.pid, peer.uid, peer.gid, host) == (7, ME.pw_uid, ME.pw_gid, "node7")


def test_a_user_without_a_name_is_the_one_of_that_number() -> None:
    peer, _ = introduced(TOLD | {"user": "uid-54321"})
    assert (peer.uid, peer.gid) == (54321, 54321)


def test_a_user_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(AccessDenied, match="no user nobody-of-that-name on this node"):
        introduced(TOLD | {"user": "nobody-of-that-name"})


@pytest.mark.parametrize("wrong", [{"pid": "7"}, {"pid": True}, {"user": None}, {"host": 1}, {"host": "h" * 257}])
def test_what_describes_nobody_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        introduced(TOLD | wrong)
