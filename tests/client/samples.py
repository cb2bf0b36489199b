"""Small weights whose values say which step they are of."""

from __future__ import annotations

import torch

PATIENCE = 30.0
"""Seconds that something certain to happen may take on a busy machine."""


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((6, 2), float(value)), "b": torch.full((5,), value, dtype=torch.bfloat16)}
