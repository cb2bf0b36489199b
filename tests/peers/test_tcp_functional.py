"""The tcp transport is one: see ``conformance``."""

from __future__ import annotations

from tests.peers.conformance import Conformance


class TestTcp(Conformance):
    transport = "tcp"
