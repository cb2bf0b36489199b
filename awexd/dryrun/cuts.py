"""How one tensor of a layer is cut over ranks, by trainers and by engines: the rules as boxes of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable

from awexd.dryrun.models import Model, Tensors
from awexd.dryrun.parts import along
from awexd_client.adapters.rules import Run, share_of, split
from awexd_transports.layout import Box

Cut = tuple[int, int]
"""This part of how many."""
Rule = Callable[[Model, Tensors, Cut], list[Box]]
QKV: tuple[str, str, str] = ("query heads", "key heads", "value heads")


def rows(model: Model, tensors: Tensors, cut: Cut) -> list[Box]:
    """Column-parallel: rows in equal parts; of gate and up each the same part (``rules.gated``), two tensors here."""
    return along(tensors.shape, 0, split(tensors.name, tensors.shape[0], *cut))


def columns(model: Model, tensors: Tensors, cut: Cut) -> list[Box]:
    """Row-parallel: columns in equal parts."""
    return along(tensors.shape, 1, split(tensors.name, tensors.shape[1], *cut))


def gate_up(model: Model, tensors: Tensors, cut: Cut) -> list[Box]:
    """GLM-4's, one tensor on disk: of the rows of gate and of up the same part."""
    half = tensors.shape[0] // 2
    start, length = share_of(tensors.name, half, *cut)
    return along(tensors.shape, 0, [Run(tensors.name, 2 * half, at + start, length) for at in (0, half)])


def of_qkv(heads: Callable[..., list[Run]], which: str) -> Rule:
    """One tensor of a packed qkv, of the runs of ``heads``: ``rules.heads`` or ``rules.grouped_heads``."""

    def rule(model: Model, tensors: Tensors, cut: Cut) -> list[Box]:
        part, parts = cut
        runs = heads(*QKV, h=model.heads, g=model.groups, d=model.head, part=part, parts=parts)
        return along(tensors.shape, 0, [run for run in runs if run.name == which])

    return rule
