"""Experts whose memory and checkpoint are arranged differently.

Fused ones of transformers >= 5 are one parameter in memory, a tensor an expert and projection in the checkpoint. In
memory (verified against what ``save_pretrained`` of 5.24 writes, see the tests; ``E`` experts, ``F`` intermediate
size of an expert, ``h`` hidden size): ``...mlp.experts.gate_up_proj [E, 2F, h]``, rows ``[gate F; up F]``, and
``...mlp.experts.down_proj [E, h, F]``. Which model types do that is a table: a guess could give right shapes to wrong
bytes.

Checkpoints of gpt-oss hold all experts of a layer in one tensor, the other way round than a linear layer's matrix:
``gate_up_proj [E, h, 2F]`` and ``gate_up_proj_bias [E, 2F]``, gate and up of one feature after another,
``down_proj [E, F, h]`` and ``down_proj_bias [E, h]`` (transformers/models/gpt_oss/modeling_gpt_oss.py,
GptOssExperts). Engines and Megatron-Core have other orders of those rows; in the layout ``pairs`` each is a slice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Box, Shard
from awexd_transports.shard import PAIRS


@dataclass(frozen=True)
class ExpertNames:
    """How a family's checkpoint names an expert's three matrices, and the block that holds the experts."""

    gate: str
    up: str
    down: str
    block: str


_PROJ = ExpertNames("gate_proj", "up_proj", "down_proj", "mlp")
_W123 = ExpertNames("w1", "w3", "w2", "block_sparse_moe")

SPLIT: dict[str, ExpertNames] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo"), _PROJ),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker"), _PROJ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), _PROJ),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa"), _PROJ),
    **dict.fromkeys(("afmoe", "cohere2_moe", "dots1", "hunyuan_v1_moe", "longcat_flash", "solar_open"), _PROJ),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _W123),
}
"""``config.model_type`` to names: families whose fused experts a checkpoint holds one by one."""

FUSED_ON_DISK = frozenset({"gpt_oss", "llama4", "llama4_text"})
"""Families whose checkpoints hold the experts fused, under the names and in the layout that memory has."""

_PAIRED = re.compile(r"(?:.*\.)?mlp\.experts\.gate_up_proj(?:_bias)?")
_FUSED = re.compile(r"(?P<base>(?:.*\.)?experts)\.(?P<part>gate_up_proj|down_proj)")
_MLP = re.compile(r"(^|\.)mlp\.")


def checkpoint_shards(shard: Shard, family: str | None) -> Iterator[Shard]:
    """The checkpoint's shards of one shard in memory: itself, renamed if need be, or one an expert and projection.

    Only boxes with elements are yielded of fused experts: an empty part names no expert.

    Args:
        shard: under its name in memory, wrappers stripped.
        family: ``config.model_type`` of the model it belongs to; None when unknown, then names stay as they are.

    Raises:
        InvalidArgument: fused experts of a family whose checkpoint layout is not known.
    """
    names = SPLIT.get(family or "")
    fused = _FUSED.fullmatch(shard.name) if len(shard.global_shape) == 3 else None
    if fused and family and not names and family not in FUSED_ON_DISK:
        raise InvalidArgument(
            f"{shard.name}: how checkpoints of model type {family!r} lay out fused experts is not known; give Shards,"
            f" or an adapter of your own (known: {', '.join(sorted({*SPLIT, *FUSED_ON_DISK}))})"
        )
    if names is None:
        yield shard
        return
    name = _MLP.sub(rf"\g<1>{names.block}.", shard.name) if names.block != "mlp" else shard.name
    if fused is None:
        yield _part(shard, name, shard.box, shard.box, shard.global_shape)
        return
    base, part = name.rpartition(".")[0], fused["part"]
    _, rows, columns = shard.global_shape
    if part == "down_proj":
        matrices = {names.down: Box((0, 0), (rows, columns))}
    else:
        if rows % 2:
            raise InvalidArgument(f"{shard.name}: {rows} rows do not halve into gate and up")
        half = rows // 2
        matrices = {names.gate: Box((0, 0), (half, columns)), names.up: Box((half, 0), (half, columns))}
    for expert in range(shard.offset[0], shard.box.end[0]):
        for leaf, matrix in matrices.items():
            whole = Box((expert, *matrix.offset), (1, *matrix.shape))
            held = shard.box.intersect(whole)
            if held:
                yield _part(shard, f"{base}.{expert}.{leaf}.weight", held, whole, matrix.shape)


def in_pairs(shard: Shard) -> Shard:
    """A tensor of a name that gpt-oss's checkpoints have for gate and up, in the layout ``pairs``; any other as it is.

    By the name alone, so that all who give it agree: in a plain mapping nothing tells the family, and of any other
    family it is but another shape of the same elements. A part that cuts a pair stays as it is.
    """
    if shard.layout is not None or not shard.box.shape or not _PAIRED.fullmatch(shard.name):
        return shard
    *before, last = shard.global_shape
    first, length = shard.offset[-1], shard.tensor.shape[-1]
    if last % 2 or first % 2 or length % 2:
        return shard
    view = shard.tensor.view(*shard.tensor.shape[:-1], length // 2, 2)
    offset = (*shard.offset[:-1], first // 2, 0)
    return Shard(shard.name, view, (*before, last // 2, 2), offset, layout=PAIRS)


def of_stack(name: str, shard: Shard, experts: int, expert: int, half: int | None = None) -> Shard:
    """One expert's matrix ``[out, in]``, or its bias, as the part that it is of gpt-oss's tensor of all experts.

    Args:
        name: of that tensor.
        shard: of the matrix alone; its own name does not matter.
        half: 0 where it is gate, 1 where it is up: every other element of the tensor's last dimension.
    """
    view = shard.tensor.permute(*reversed(range(shard.tensor.ndim)))[None]
    shape, offset = (experts, *reversed(shard.global_shape)), (expert, *reversed(shard.offset))
    if half is None:
        return Shard(name, view, shape, offset)
    return Shard(name, view[..., None], (*shape, 2), (*offset, half), layout=PAIRS)


def _part(shard: Shard, name: str, held: Box, whole: Box, global_shape: tuple[int, ...]) -> Shard:
    """The box ``held`` of a shard, as a shard of the tensor that occupies ``whole``; drops a leading expert axis."""
    if held is whole is shard.box:
        return Shard(name, shard.tensor, global_shape, shard.offset, layout=shard.layout)
    view = shard.tensor[held.relative_to(shard.offset)][0]
    offset = tuple(at - origin for at, origin in zip(held.offset[1:], whole.offset[1:], strict=True))
    return Shard(name, view, global_shape, offset)
