"""The adapter ``sglang``: models of SGLang, as one scheduler process holds them."""

from __future__ import annotations

from awexd_client.adapters.sglang.adapter import SGLangAdapter

__all__ = ["SGLangAdapter"]
