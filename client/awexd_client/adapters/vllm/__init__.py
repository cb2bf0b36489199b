"""The adapter ``vllm``: models of vLLM, as one worker holds them."""

from __future__ import annotations

from awexd_client.adapters.vllm.adapter import VLLMAdapter

__all__ = ["VLLMAdapter"]
