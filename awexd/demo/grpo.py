"""Group Relative Policy Optimization: the advantages and the loss.

Source: Shao et al., "DeepSeekMath" (2024), section 4.1, with the clipped ratio of PPO, no KL term, and the mean taken
over all tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from awexd.demo.sampling import left_pad

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIP = 0.2
SMALLEST_DEVIATION = 1e-4


@dataclass(frozen=True)
class Rollout:
    """One sampled answer: its prompt's and its own tokens, the sampler's log-probabilities, and its advantage."""

    prompt: list[int]
    tokens: list[int]
    log_probabilities: list[float]
    advantage: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward's distance from the mean of its group (the answers to one prompt), in standard deviations."""
    values = torch.tensor(rewards, dtype=torch.float64)
    deviation = values.std(correction=0)
    if deviation < SMALLEST_DEVIATION:
        return [0.0] * len(rewards)
    return [float(value) for value in (values - values.mean()) / deviation]


def token_losses(model: torch.nn.Module, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, float]:
    """The sum of the losses of all sampled tokens, and the mean absolute gap between both sides' log-probabilities.

    The gap is what bf16 and different batch shapes leave; it would be large if the sampler ran on other weights.
    """
    sequences = [rollout.prompt + rollout.tokens for rollout in rollouts]
    tokens, positions, mask = left_pad(sequences)
    longest = max(len(rollout.tokens) for rollout in rollouts)
    output: Any = model(
        tokens, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=longest + 1
    )
    scores = torch.log_softmax(output.logits[:, :-1].float(), dim=-1)
    new = scores.gather(2, tokens[:, -longest:].unsqueeze(2)).squeeze(2)
    old, sampled, advantage = _aligned(rollouts, longest)
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    losses = -torch.minimum(ratio * advantage, clipped * advantage) * sampled
    gap = ((new.detach() - old).abs() * sampled).sum() / sampled.sum()
    return losses.sum(), float(gap)


def _aligned(rollouts: Sequence[Rollout], longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, mask and advantages of the sampled tokens, aligned at their ends, each (rollouts, longest)."""
    old = torch.zeros(len(rollouts), longest)
    sampled = torch.zeros_like(old)
    advantage = torch.zeros_like(old)
    for row, rollout in enumerate(rollouts):
        first = longest - len(rollout.tokens)
        old[row, first:] = torch.tensor(rollout.log_probabilities)
        sampled[row, first:] = 1
        advantage[row] = rollout.advantage
    return old, sampled, advantage
