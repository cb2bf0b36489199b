"""Batched decoding with a KV cache, for rollouts and for the greedy check: the same code in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from awexd.demo.model import cache_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Samples:
    """What one batch of prompts gave: for each its tokens, the end token included, and their log-probabilities."""

    tokens: list[list[int]]
    log_probabilities: list[list[float]]


@torch.inference_mode()
def decode(
    model: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    limit: int,
    end: int | None,
    generator: torch.Generator | None = None,
) -> Samples:
    """Decodes up to ``limit`` tokens for each prompt, at temperature 1, or greedily without a ``generator``.

    A row is done after the token ``end``; rows that are done leave the batch.
    """
    from transformers import DynamicCache

    tokens, positions, mask = left_pad(prompts)
    cache = DynamicCache(config=model.config)
    kept: dict[str, Any] = {cache_argument(model): cache}
    samples = Samples([[] for _ in prompts], [[] for _ in prompts])
    rows = torch.arange(len(prompts))
    for _ in range(limit):
        logits = model(
            tokens, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **kept
        ).logits[:, -1]
        scores = torch.log_softmax(logits.float(), dim=-1)
        chosen = _choose(scores, generator)
        _append(samples, rows, chosen, scores)
        alive = torch.ones_like(chosen, dtype=torch.bool) if end is None else chosen != end
        if not alive.all():
            if not alive.any():
                break
            going = alive.nonzero().squeeze(1)
            cache.batch_select_indices(going)
            rows, chosen, mask, positions = rows[going], chosen[going], mask[going], positions[going]
        tokens = chosen.unsqueeze(1)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
    return samples


def left_pad(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and mask of sequences aligned at their ends, each int64 of (sequences, longest)."""
    longest = max(len(sequence) for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, longest - len(sequence) :] = torch.tensor(sequence)
        mask[row, longest - len(sequence) :] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return tokens, positions, mask


def _choose(scores: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return scores.argmax(dim=-1)
    return torch.multinomial(scores.exp(), 1, generator=generator).squeeze(1)


def _append(samples: Samples, rows: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> None:
    values = scores.gather(1, chosen.unsqueeze(1)).squeeze(1)
    for row, token, value in zip(rows.tolist(), chosen.tolist(), values.tolist(), strict=True):
        samples.tokens[row].append(token)
        samples.log_probabilities[row].append(value)
