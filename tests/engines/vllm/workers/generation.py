"""What a model should generate, by transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

PROMPT = [10, 20, 30, 40, 50]
TOKENS = 12


@cache
def generated(checkpoint: Path) -> list[int]:
    """The tokens that transformers continues the prompt with, greedily and in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]
