"""Small weights whose values say which step they are of."""

from __future__ import annotations

import torch

from awexd_client import InvalidArgument, Shard
from awexd_client.adapters.base import EngineWeights

PATIENCE = 30.0
"""Seconds that something certain to happen may take on a busy machine."""


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((6, 2), float(value)), "b": torch.full((5,), value, dtype=torch.bfloat16)}


class Negating:
    """An adapter of an engine that keeps ``b`` negated, and fails to load when told to."""

    name = "negating"

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.loaded = 0
        self._aside: dict[int, torch.Tensor] = {}

    def matches(self, target: object) -> bool:
        return False

    def shards(self, target: object) -> list[Shard]:
        weights = self.engine_weights(target)
        if weights.aside:
            raise InvalidArgument("b: kept negated")
        return list(weights.direct)

    def engine_weights(self, target: object) -> EngineWeights:
        assert isinstance(target, dict)
        direct = [Shard(name, tensor) for name, tensor in target.items() if name != "b"]
        if "b" not in target:
            return EngineWeights(direct, load=lambda: self._load(None, None))
        live = target["b"]
        buffer = self._aside.setdefault(id(live), torch.zeros_like(live))
        reasons = {"b": "it is kept negated"}
        return EngineWeights(direct, [Shard("b", buffer)], lambda: self._load(live, buffer), reasons)

    def _load(self, live: torch.Tensor | None, buffer: torch.Tensor | None) -> None:
        if self.failures:
            self.failures -= 1
            raise KeyError("no such layer")
        self.loaded += 1
        if live is not None and buffer is not None:
            live.copy_(-buffer)
