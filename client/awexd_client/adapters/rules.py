"""Layout rules: of which parts of checkpoint tensors a live tensor is made, as runs along one of its dimensions.

Pure numbers, no torch: rows of a fused or sharded parameter are described by :class:`Run` lists, and
:func:`shards_along` turns such a list into views of the live tensor. Names: H query heads, G key/value groups,
R = H / G, D = head size, F = intermediate size, T = number of parallel ranks, t = this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from awexd_client.adapters.base import live_view
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive indices of a live dimension that are those of one checkpoint tensor.

    Attributes:
        name: of the checkpoint tensor; None for padding, which no checkpoint has.
        total: the checkpoint tensor's extent along this dimension.
        start, length: which of its indices these are.
    """

    name: str | None
    total: int
    start: int
    length: int


def shards_along(
    tensor: torch.Tensor, runs: Sequence[Run], dim: int = 0, *, cross: dict[int, tuple[int, int]] | None = None
) -> Iterator[Shard]:
    """Views of ``tensor``, a run each; empty ones and padding are left out.

    Args:
        runs: what its indices along ``dim`` are, from the first to the last.
        cross: other dimensions that hold a part only, as ``{dimension: (start, total)}``.

    Raises:
        InvalidArgument: the runs are not as long as the tensor; or it cannot be handed out.
    """
    first = next((run.name for run in runs if run.name), "a tensor")
    live = live_view(first, tensor)
    length = sum(run.length for run in runs)
    if live.ndim <= dim or live.shape[dim] != length:
        raise InvalidArgument(
            f"{first}: {length} indices expected along dimension {dim}, in memory it is {list(live.shape)}"
        )
    shape, offset = list(live.shape), [0] * live.ndim
    for other, (start, total) in (cross or {}).items():
        offset[other], shape[other] = start, total
    for at, run in zip(accumulate((run.length for run in runs), initial=0), runs, strict=False):
        if run.name and run.length:
            offset[dim], shape[dim] = run.start, run.total
            yield Shard(run.name, live.narrow(dim, at, run.length), shape, offset)


def share_of(name: str, extent: int, part: int, parts: int) -> tuple[int, int]:
    """Start and length of one of ``parts`` equal parts.

    Raises:
        InvalidArgument: it does not divide.
    """
    if extent % parts:
        raise InvalidArgument(f"{name}: {extent} do not divide by {parts}")
    length = extent // parts
    return part * length, length


def split(name: str, total: int, part: int, parts: int) -> list[Run]:
    """Column- and row-parallel parameters: one of ``parts`` equal parts."""
    return [Run(name, total, *share_of(name, total, part, parts))]


def stacked(tensors: Iterable[tuple[str, int]], part: int = 0, parts: int = 1) -> list[Run]:
    """Checkpoint tensors one after another, of each the same one of ``parts`` equal parts: gate_up_proj, qkv_a_proj.

    Args:
        tensors: (name, total) in the order in memory.
    """
    return [run for name, total in tensors for run in split(name, total, part, parts)]


def vocabulary(name: str, rows: int, first: int, length: int) -> list[Run]:
    """Rows ``[first, first + length)`` of a table padded beyond its ``rows``: those that are tokens, then padding."""
    real = max(0, min(rows, first + length) - first)
    return [Run(name, rows, min(first, rows), real), Run(None, 0, 0, length - real)]


def heads(
    queries: str, keys: str, values: str, *, h: int, g: int, d: int, part: int, parts: int, dv: int | None = None
) -> list[Run]:
    """vLLM's and SGLang's ``qkv_proj``: a rank's query heads, then its key heads, then its value heads.

    With more ranks than groups every ``parts / g`` neighbours hold the same group (QKVParallelLinear in
    vllm/model_executor/layers/linear.py; the same in sglang/srt/layers/linear.py).

    Args:
        queries, keys, values: names of the checkpoint tensors. ``h``, ``g``, ``d``, ``dv``: H, G, D and the head size
            of values, where it is another.
    """
    copies = max(1, parts // g)
    group_part, group_parts = (part // copies, g) if copies > 1 else (part, parts)
    if copies > 1 and parts % g:
        raise InvalidArgument(f"{keys}: {g} key/value heads cannot be shared by {parts} ranks")
    return [
        *_of_heads(queries, h, d, part, parts),
        *_of_heads(keys, g, d, group_part, group_parts),
        *_of_heads(values, g, dv or d, group_part, group_parts),
    ]


def _of_heads(name: str, count: int, size: int, part: int, parts: int) -> list[Run]:
    first, length = share_of(name, count, part, parts)
    return [Run(name, count * size, first * size, length * size)]


def grouped_heads(queries: str, keys: str, values: str, *, h: int, g: int, d: int, part: int, parts: int) -> list[Run]:
    """Megatron-Core's ``linear_qkv``: for each group its R query heads, its key head, its value head.

    A rank holds an equal part of all rows, wherever it is cut: with more ranks than groups, a fragment of one
    (megatron/core/transformer/attention.py, SelfAttention).
    """
    r = h // g
    if h % g:
        raise InvalidArgument(f"{queries}: {h} query heads do not divide into {g} groups")
    runs: list[Run] = []
    for group in range(g):
        runs += [
            Run(queries, h * d, group * r * d, r * d),
            Run(keys, g * d, group * d, d),
            Run(values, g * d, group * d, d),
        ]
    return within(runs, *share_of(queries, g * (r + 2) * d, part, parts))


def gated(gate: str, up: str, *, f: int, part: int, parts: int, interleave: int | None = None) -> list[Run]:
    """A gated linear unit's first matrix: a rank's part of gate, then the same part of up.

    Args:
        interleave: blocks of so many rows of gate and up in turn instead (Megatron-Core's
            ``moe_mlp_glu_interleave_size``, megatron/core/transformer/transformer_config.py).
    """
    first, length = share_of(gate, f, part, parts)
    block = interleave or length
    if length and length % block:
        raise InvalidArgument(f"{gate}: {length} rows do not divide into interleaved blocks of {block}")
    return [Run(name, f, start, block) for start in range(first, first + length, block or 1) for name in (gate, up)]


def within(runs: Iterable[Run], start: int, length: int) -> list[Run]:
    """What of ``runs`` lies in ``[start, start + length)`` of their own dimension."""
    found: list[Run] = []
    at = 0
    for run in runs:
        low, high = max(start, at), min(start + length, at + run.length)
        if low < high:
            found.append(Run(run.name, run.total, run.start + low - at, high - low))
        at += run.length
    return found
