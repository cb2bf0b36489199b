"""What a model should generate, by transformers; and bytes that are not what was published."""

from __future__ import annotations

import os
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


def corrupt(tensor: torch.Tensor) -> None:
    """Flips a bit of that tensor in the shared memory that holds the version published last.

    Raises:
        LookupError: no shared memory holds it.
    """
    held = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    for name in os.listdir("/dev/shm"):
        if not name.startswith("awexd-"):
            continue
        with open(f"/dev/shm/{name}", "r+b") as file:
            at = file.read().find(held)
            if at >= 0:
                file.seek(at + 3)
                file.write(bytes([held[3] ^ 0x10]))
                return
    raise LookupError("no shared memory holds that tensor")
