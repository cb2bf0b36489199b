"""Jobs, versions, leases and rounds: a state machine without I/O. The daemon carries out its effects."""

from __future__ import annotations

from awexd.store.model import Segment, Version, Wait
from awexd.store.store import Store

__all__ = ["Segment", "Store", "Version", "Wait"]
