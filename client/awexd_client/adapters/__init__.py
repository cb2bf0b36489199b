"""From live modules to shards: which bytes of this process are which box of which checkpoint tensor."""

from __future__ import annotations

from awexd_client.adapters.base import Adapter
from awexd_client.adapters.registry import shards_of, watch
from awexd_client.adapters.watch import Watch

__all__ = ["Adapter", "Watch", "shards_of", "watch"]
