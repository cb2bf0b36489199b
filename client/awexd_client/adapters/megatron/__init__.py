"""The adapter ``megatron``: models of Megatron-Core."""

from __future__ import annotations

from awexd_client.adapters.megatron.adapter import MegatronAdapter
from awexd_client.adapters.megatron.families import FAMILIES, Names

__all__ = ["FAMILIES", "MegatronAdapter", "Names"]
