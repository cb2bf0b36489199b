"""Rules of MLPs: dense (megatron/core/transformer/mlp.py), mixtures of experts and shared experts
(megatron/core/transformer/moe/), names of Transformer Engine's modules and of local ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from awexd_client.adapters.experts import ExpertNames, of_stack
from awexd_client.adapters.megatron.part import Part, Rule, check_cut, columns, of_family, rows, whole
from awexd_client.adapters.rules import Run, gated, shards_along, split
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

_INTERLEAVED_INSIDE = frozenset({"FusedSharedExpertMLP", "TEFusedMLPWithGroupedLinear"})
"""MLPs whose order of rows is up to Transformer Engine's fused operations."""


def _dense_up(part: Part) -> Iterator[Shard]:
    """A dense layer's ``linear_fc1``: gate, then up; of each this rank's part (``stride=2``, ``MLP.__init__``)."""
    f = _dense_size(part)
    base = f"{part.prefix}mlp."
    if part.names.fused_gate_up:
        name = f"{base}gate_up_proj.{part.leaf}"
        runs = gated(name, name, f=f, part=part.places.tensor.rank, parts=part.places.tensor.size)
        both = [Run(name, 2 * f, run.start + half * f, run.length) for half, run in enumerate(runs)]
        yield from rows(part, both)
        return
    yield from _gate_and_up(part, f"{base}gate_proj.{part.leaf}", f"{base}up_proj.{part.leaf}", f)


def _dense_down(part: Part) -> Iterator[Shard]:
    yield from columns(part, f"mlp.down_proj.{part.leaf}", _dense_size(part))


def _dense_size(part: Part) -> int:
    _check_mlp(part, part.layer.mlp)
    return int(part.layer.mlp.config.ffn_hidden_size)


def _gate_and_up(part: Part, gate: str, up: str, f: int) -> Iterator[Shard]:
    rank, size = part.places.tensor
    yield from rows(part, gated(gate, up, f=f, part=rank, parts=size))


def _check_mlp(part: Part, mlp: object) -> None:
    if type(mlp).__name__ in _INTERLEAVED_INSIDE:
        raise part.refuse(f"the order of rows in a {type(mlp).__name__} is not known")
    if not part.config.gated_linear_unit:
        raise part.refuse("not a gated linear unit: what a checkpoint calls it is not known")


def _expert(part: Part) -> Iterator[Shard]:
    """One expert's matrix or bias, of SequentialMLP or of TEGroupedMLP (``weight{i}``)."""
    yield from _of_expert(part, part.tensor, int(part.found["at"]))


def _stack(part: Part) -> Iterator[Shard]:
    """All experts of this rank in one parameter, where it is a plain tensor: a matrix or a bias of each."""
    if part.tensor.ndim != (2 if part.found["leaf"] == "bias" else 3):
        raise part.refuse(f"a {part.found['leaf']} of each expert was expected, in memory {list(part.tensor.shape)}")
    for at in range(len(part.tensor)):
        yield from _of_expert(part, part.tensor.detach()[at], at)


def _of_expert(part: Part, tensor: torch.Tensor, at: int) -> Iterator[Shard]:
    """Experts are dealt in consecutive blocks (``BaseMoELayer.local_expert_indices``); each is cut over expert-tensor
    ranks as a dense MLP over tensor ranks. Only grouped ones heed ``moe_mlp_glu_interleave_size`` (moe/experts.py)."""
    experts, block = part.layer.mlp.experts, part.layer.mlp.local_expert_indices
    expected = _block(part)
    if list(block) != expected or at >= len(block):
        raise part.refuse(f"expert {at} of {list(block)}, where this rank's are {expected}")
    _check_mlp(part, experts)
    bias, down = part.found["leaf"] == "bias", part.found["which"] == "2"
    check_cut(part, not (bias and down), part.places.expert_tensor)
    if part.names.stacked:
        yield from _in_stack(part, tensor, block[at])
        return
    if bias:
        raise part.refuse("checkpoints of this family have no biases of experts")
    names = _expert_names(part)
    base = f"{part.prefix}{names.block}.experts.{block[at]}."
    if down:
        yield from _down_of_expert(part, tensor, f"{base}{names.down}.weight")
    else:
        yield from _up_of_expert(part, tensor, f"{base}{names.gate}.weight", f"{base}{names.up}.weight")


def _in_stack(part: Part, tensor: torch.Tensor, expert: int) -> Iterator[Shard]:
    """gpt-oss: a part of the layer's tensor of all experts."""
    count, base = int(part.config.num_moe_experts), f"{part.prefix}mlp.experts."
    ending = "_bias" if part.found["leaf"] == "bias" else ""
    if part.found["which"] == "2":
        for shard in _down_of_expert(part, tensor, "down"):
            yield of_stack(f"{base}down_proj{ending}", shard, count, expert)
        return
    halves = ("gate", "up")
    for shard in _up_of_expert(part, tensor, *halves):
        yield of_stack(f"{base}gate_up_proj{ending}", shard, count, expert, halves.index(shard.name))


def _up_of_expert(part: Part, tensor: torch.Tensor, gate: str, up: str) -> Iterator[Shard]:
    grouped = not hasattr(part.layer.mlp.experts, "local_experts")
    interleave = getattr(part.config, "moe_mlp_glu_interleave_size", None) if grouped else None
    f, (rank, size) = int(part.config.moe_ffn_hidden_size), part.places.expert_tensor
    yield from shards_along(tensor, gated(gate, up, f=f, part=rank, parts=size, interleave=interleave))


def _down_of_expert(part: Part, tensor: torch.Tensor, name: str) -> Iterator[Shard]:
    if part.found["leaf"] == "bias":
        yield from shards_along(tensor, split(name, len(tensor), 0, 1))
        return
    f = int(part.config.moe_ffn_hidden_size)
    yield from shards_along(tensor, split(name, f, *part.places.expert_tensor), dim=1)


def _block(part: Part) -> list[int]:
    """Global numbers of this rank's experts."""
    rank, size = part.places.expert
    count = int(part.config.num_moe_experts) // size
    return list(range(rank * count, (rank + 1) * count))


def _shared(part: Part) -> Iterator[Shard]:
    """Shared experts: one dense MLP, cut over tensor ranks, not over expert-tensor ranks (moe/shared_experts.py)."""
    shared = part.layer.mlp.shared_experts
    _check_mlp(part, shared)
    block, f = _shared_block(part), int(part.config.moe_shared_expert_intermediate_size)
    if part.found["which"] == "2":
        yield from columns(part, f"{block}.down_proj.{part.leaf}", f)
        return
    base = f"{part.prefix}{block}."
    yield from _gate_and_up(part, f"{base}gate_proj.{part.leaf}", f"{base}up_proj.{part.leaf}", f)


def _shared_gate(part: Part) -> Iterator[Shard]:
    yield from whole(part, f"{_shared_block(part)}_gate.weight")


def _shared_block(part: Part) -> str:
    if not part.names.shared:
        raise part.refuse("checkpoints of this family have no shared experts")
    return f"{_expert_names(part).block}.{part.names.shared}"


def _router(part: Part) -> Iterator[Shard]:
    """``TopKRouter`` (moe/router.py): replicated; a bias it has with ``add_bias_linear``."""
    if part.names.stacked:
        yield from whole(part, f"mlp.router.{part.leaf}")
    elif part.leaf == "bias":
        raise part.refuse("checkpoints of this family have no such tensor")
    else:
        yield from whole(part, f"{_expert_names(part).block}.gate.weight")


def _expert_bias(part: Part) -> Iterator[Shard]:
    """The buffer that balancing without an auxiliary loss moves every step: float32, and so in the checkpoint."""
    if not part.names.expert_bias:
        raise part.refuse("checkpoints of this family have no e_score_correction_bias")
    yield from whole(part, f"{_expert_names(part).block}.gate.e_score_correction_bias")


def _expert_names(part: Part) -> ExpertNames:
    if part.names.experts is None:
        raise part.refuse("experts; give the model's configuration to MegatronAdapter(config), so that they have names")
    return part.names.experts


RULES: list[tuple[str, Rule]] = [
    (r"(pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(weight|bias)", of_family("mlp_norm", "{}.{leaf}")),
    (
        # Megatron-Bridge's norm in linear_fc2 (Gemma), and two places where GLM-4's is kept.
        r"(mlp\.)?(linear_fc2\.post_layernorm|post_mlp_layernorm)\.(weight|bias)",
        of_family("after_mlp", "{}.{leaf}"),
    ),
    (r"mlp\.linear_fc1\.(weight|bias)", _dense_up),
    (r"mlp\.linear_fc2\.(weight|bias)", _dense_down),
    (r"mlp\.router\.(weight|bias)", _router),
    (r"mlp\.router\.expert_bias", _expert_bias),
    (r"mlp\.experts\.linear_fc(?P<which>[12])\.(?P<leaf>weight|bias)(?P<at>\d+)", _expert),
    (r"mlp\.experts\.local_experts\.(?P<at>\d+)\.linear_fc(?P<which>[12])\.(?P<leaf>weight|bias)", _expert),
    (r"mlp\.experts\.linear_fc(?P<which>[12])\.(?P<leaf>weight|bias)", _stack),
    (r"mlp\.shared_experts\.linear_fc(?P<which>[12])\.(weight|bias)", _shared),
    (r"mlp\.shared_experts\.gate_weight", _shared_gate),
]
"""Patterns of names inside a layer, and their rules."""
