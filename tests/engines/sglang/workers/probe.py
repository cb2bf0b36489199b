"""A loader for tests, ``--custom-weight-loader probe.load``: looks into a scheduler, or breaks its next load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from digests import digests
from sglang.srt.runtime_context import get_parallel


def load(model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The tensor holds JSON: ``digests``: a folder for <rank>.json; ``breaks``: the rank whose next load raises."""
    ((_, tensor),) = named_tensors
    asked, rank = json.loads(bytes(tensor.tolist())), get_parallel().tp_rank
    if "digests" in asked:
        Path(asked["digests"], f"{rank}.json").write_text(json.dumps(digests(model)))
    if asked.get("breaks") == rank:
        model.load_weights = _Once(model)


class _Once:
    """Raises after some weights are loaded, and is gone."""

    def __init__(self, model: Any) -> None:
        self._model, self._load_weights = model, model.load_weights

    def __call__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        del self._model.load_weights
        self._load_weights([pair for pair in weights if "layers.0" in pair[0]])
        raise KeyError("no such layer")
