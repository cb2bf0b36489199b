"""A plug-in for tests: linear layers on CPUs keep their weights as loaded, as on GPUs, where oneDNN would pack them."""

from __future__ import annotations


def register() -> None:
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False
