"""Layouts of vLLM's modules by their kind, from their own attributes: sizes, ranks and placements are never assumed.

Sources, in vllm/model_executor/layers (0.32 and 0.33): ``linear.py`` (``weight_loader_v2`` of each class),
``vocab_parallel_embedding.py`` (``_get_indices``), ``fused_moe/routed_experts.py`` (``weight_loader``, ``_load_w13``,
``_load_w2``), ``fused_moe/expert_map_manager.py``, ``layernorm.py``. Classes are told by name: nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.rules import Run, heads, share_of, split, stacked, vocabulary
from awexd_client.adapters.vllm.layout import Layout, Part, own_tensors, parts_of, whole
from awexd_client.adapters.vllm.names import Names
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

Rows = list[Run]
Created = dict[str, "torch.Tensor"]
"""A module's tensors as its class created them (on the meta device, as vLLM recorded them for reloading)."""


def layouts_of(path: str, module: Any, created: Created, names: Names) -> list[Layout]:
    """The layouts of all parameters that a module itself owns.

    Args:
        created: those of its parameters that are to be laid out, of the shapes and dtypes that they had before
            anything was loaded.

    Raises:
        InvalidArgument: a kind of module or parameter that has no rule.
    """
    kind = type(module).__name__
    if kind in DERIVED:
        return []
    rule = KINDS.get(kind)
    found = {key: tuple(parts) for key, parts in rule(path, module, names)} if rule else {}
    return [_layout(path, module, key, created, found, names) for key in created]


def _layout(
    path: str, module: Any, key: str, created: Created, found: dict[str, tuple[Part, ...]], names: Names
) -> Layout:
    tensor, full = created[key], f"{path}.{key}"
    parts = found.get(key)
    if parts is None:
        if not _loads_whole(module, key):
            raise InvalidArgument(
                f"{full}: a {type(module).__name__} has no rule for it, and it is not loaded as it is"
                f" ({_loader_name(module, key)}); give Shards of your own"
            )
        parts = (whole(names.checkpoint_name(full), tuple(tensor.shape)),)
    layout = Layout(full, tuple(tensor.shape), parts, tensor.dtype)
    if layout.filled > tensor.numel():
        raise InvalidArgument(f"{full}: its rule fills {layout.filled} elements, vLLM made {list(tensor.shape)}")
    return layout


def _loads_whole(module: Any, key: str) -> bool:
    """Whether vLLM copies the checkpoint's tensor as it is: the default loader, and no dimension that is cut."""
    return _loader_name(module, key) == "default_weight_loader" and getattr(module, "tp_size", 1) == 1


def _loader_name(module: Any, key: str) -> str:
    loader = getattr(module._parameters.get(key), "weight_loader", None)
    while getattr(loader, "__name__", "") == "online_process_loader":  # left by a reload, vllm/.../reload/layerwise.py
        loader = loader.__wrapped__  # type: ignore[union-attr]
    return "default_weight_loader" if loader is None else getattr(loader, "__qualname__", repr(loader))


Found = Iterator[tuple[str, Iterable[Part]]]
Rule = Callable[[str, Any, Names], Found]


def _linear(rows: Callable[[str, Any, Names, str], Rows]) -> Rule:
    """A matrix cut along its rows, and a bias that is cut alike."""

    def rule(path: str, module: Any, names: Names) -> Found:
        yield "weight", parts_of(rows(path, module, names, "weight"), (0, module.input_size, module.input_size))
        if module._parameters.get("bias") is not None:
            yield "bias", parts_of(rows(path, module, names, "bias"))

    return rule


def _member_names(path: str, names: Names, key: str) -> list[str]:
    return [names.checkpoint_name(f"{member}.{key}") for member in names.members(path)]


def _qkv(path: str, module: Any, names: Names, key: str) -> Rows:
    """QKVParallelLinear: query, key and value heads of this rank; key and value heads repeated beyond their number."""
    members = _member_names(path, names, key)
    h, g, d, dv = module.total_num_heads, module.total_num_kv_heads, module.head_size, module.v_head_size
    part, parts = module.tp_rank, module.tp_size
    if len(members) == 1:
        return _joined(members[0], heads("q", "k", "v", h=h, g=g, d=d, dv=dv, part=part, parts=parts))
    if len(members) != 3:
        raise InvalidArgument(f"{path}: query, key and value are expected in it, not {members}")
    return heads(*members, h=h, g=g, d=d, dv=dv, part=part, parts=parts)


def _merged(path: str, module: Any, names: Names, key: str) -> Rows:
    """MergedColumnParallelLinear: of each stacked matrix the rank's part, one after another."""
    members, sizes = _member_names(path, names, key), list(module.output_sizes)
    part, parts = module.tp_rank, module.tp_size
    if len(members) == 1:
        return _joined(members[0], stacked([(str(at), size) for at, size in enumerate(sizes)], part, parts))
    if len(members) != len(sizes):
        raise InvalidArgument(f"{path}: {len(sizes)} matrices are stacked in it, its names are {members}")
    return stacked(zip(members, sizes, strict=True), part, parts)


def _joined(name: str, runs: Rows) -> Rows:
    """Runs of matrices that the checkpoint, too, holds one after another in a single tensor."""
    starts: dict[str | None, int] = {}
    total = 0
    for run in runs:
        starts[run.name], total = total, total + run.total
    return [Run(name, total, starts[run.name] + run.start, run.length) for run in runs]


def _column(path: str, module: Any, names: Names, key: str) -> Rows:
    return split(names.checkpoint_name(f"{path}.{key}"), module.output_size, module.tp_rank, module.tp_size)


def _replicated(path: str, module: Any, names: Names, key: str) -> Rows:
    return split(names.checkpoint_name(f"{path}.{key}"), module.output_size, 0, 1)


def _router(path: str, module: Any, names: Names) -> Found:
    """GateLinear: replicated; its e_score_correction_bias is in fp32 whatever the model's dtype."""
    yield from _linear(_replicated)(path, module, names)
    bias = module._parameters.get("e_score_correction_bias")
    if bias is not None:
        yield "e_score_correction_bias", [whole(names.checkpoint_name(f"{path}.e_score_correction_bias"), bias.shape)]


def _row(path: str, module: Any, names: Names) -> Found:
    """RowParallelLinear: cut along its columns; its bias is whole on every rank."""
    name, size = names.checkpoint_name(f"{path}.weight"), module.output_size
    start, length = share_of(name, module.input_size, module.tp_rank, module.tp_size)
    yield "weight", parts_of(split(name, size, 0, 1), (start, length, module.input_size))
    if module._parameters.get("bias") is not None:
        yield "bias", parts_of(_replicated(path, module, names, "bias"))


def _vocabulary(path: str, module: Any, names: Names) -> Found:
    """VocabParallelEmbedding: an equal part of the padded table; the padding stays as vLLM filled it, with zeros."""
    if module.num_added_embeddings:
        raise InvalidArgument(f"{path}: {module.num_added_embeddings} rows of added vocabulary have no rule")
    first, length = module.shard_indices.padded_org_vocab_start_index, module.num_embeddings_per_partition
    for key in own_tensors(module):
        rows = vocabulary(names.checkpoint_name(f"{path}.{key}"), module.org_vocab_size, first, length)
        size = module.embedding_dim
        yield key, parts_of(rows, (0, size, size)) if key == "weight" else parts_of(rows)


def _experts(path: str, module: Any, names: Names) -> Found:
    """RoutedExperts: w13 is [slots, gate then up, hidden], w2 [slots, hidden, intermediate]; padding follows each part.

    A slot's expert comes from the module's own map (linear or round-robin placement under expert parallelism), its
    names from the module's own table. Under tensor parallelism the intermediate dimension is cut.
    """
    config = module.moe_config
    _check_experts(path, module)
    part, parts = config.tp_rank, config.moe_parallel_config.tp_size
    hidden, size = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    padded, total = config.intermediate_size_per_partition, size * parts
    base = path.removesuffix(".routed_experts").rpartition(".")[0]
    found: dict[str, list[Part]] = {"w13_weight": [], "w2_weight": []}
    for target, member, expert, shard in module.get_expert_mapping():
        slot = module._map_global_expert_id_to_local_expert_id(expert)
        if slot < 0:
            continue
        name = names.checkpoint_name(f"{base}.{member}weight", stated=True)
        key = target.rpartition("experts.")[2] + "weight"
        if shard == "w2":
            columns = (part * size, size, total)
            found[key] += parts_of([Run(name, hidden, 0, hidden)], columns, slot=slot)
        else:
            rows = [Run(name, total, part * size, size)]
            found[key] += parts_of(rows, (0, hidden, hidden), slot=slot, first=0 if shard == "w1" else padded)
    yield from found.items()


def _stacked_experts(path: str, module: Any, names: Names) -> Found:
    """GptOssRoutedExperts (models/gpt_oss.py): w13 is [slots, gate and up in turn, hidden], w2 as RoutedExperts' is.

    Checkpoints hold all experts in one tensor, each matrix turned round (``adapters/experts.py``). The bias of w2 is
    the first tensor-parallel rank's to add.
    """
    config = module.moe_config
    _check_experts(path, module)
    part, parts = config.tp_rank, config.moe_parallel_config.tp_size
    hidden, size = config.hidden_dim_unpadded, config.intermediate_size_per_partition_unpadded
    count, start = config.num_logical_experts, part * size
    base = names.checkpoint_name(path.removesuffix(".routed_experts"))
    rows, columns, features = slice(0, 2 * size), slice(0, size), slice(0, hidden)
    up, down = f"{base}.gate_up_proj", f"{base}.down_proj"
    up_shape, down_shape = (count, hidden, 2 * size * parts), (count, size * parts, hidden)
    found: dict[str, list[Part]] = {key: [] for key in own_tensors(module)}
    for expert in range(count):
        slot = module._map_global_expert_id_to_local_expert_id(expert)
        if slot < 0:
            continue
        at = slice(slot, slot + 1)
        found["w13_weight"].append(Part(up, up_shape, (expert, 0, 2 * start), (at, rows, features), turned=True))
        found["w13_bias"].append(Part(f"{up}_bias", up_shape[::2], (expert, 2 * start), (at, rows)))
        found["w2_weight"].append(Part(down, down_shape, (expert, start, 0), (at, features, columns), turned=True))
        found["w2_bias"].append(Part(f"{down}_bias", down_shape[::2], (expert, 0), (at, features), zeros=part > 0))
    yield from found.items()


def _sinks(path: str, module: Any, names: Names) -> Found:
    """OAIAttention (models/gpt_oss.py): a logit for each query head."""
    linear = module.qkv_proj
    name = names.checkpoint_name(f"{path}.sinks")
    yield "sinks", parts_of(split(name, module.num_attention_heads, linear.tp_rank, linear.tp_size))


def _check_experts(path: str, module: Any) -> None:
    config, manager = module.moe_config, module.expert_map_manager
    for wrong, what in (
        (config.moe_parallel_config.enable_eplb, "experts are moved between ranks while it runs (EPLB)"),
        (config.num_experts != config.num_logical_experts, "it has redundant experts"),
        (manager.num_fused_shared_experts, "shared experts are fused into the routed ones"),
        (not config.is_act_and_mul, "its first matrix is not a gated one"),
        (config.tp_shard_with_padding, "its tensor-parallel parts are unequal"),
    ):
        if wrong:
            raise InvalidArgument(f"{path}: {what}; there is no rule for that")


KINDS: dict[str, Rule] = {
    "QKVParallelLinear": _linear(_qkv),
    "MergedColumnParallelLinear": _linear(_merged),
    "DeepSeekV2FusedQkvAProjLinear": _linear(_merged),
    "ColumnParallelLinear": _linear(_column),
    "DCPGroupColumnParallelLinear": _linear(_column),
    "RowParallelLinear": _row,
    "ReplicatedLinear": _linear(_replicated),
    "GateLinear": _router,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
    "RoutedExperts": _experts,
    "GptOssRoutedExperts": _stacked_experts,
    "OAIAttention": _sinks,
}
"""Class name to rule. A class that is not here has parameters that are loaded as they are, or is refused."""

PLAIN = frozenset({"RMSNorm", "GemmaRMSNorm", "LayerNorm"})
"""Modules without a rule whose parameters are whole, and that keep no second copy of them."""

DERIVED = frozenset({"MLAAttention", "Attention"})
"""Modules whose parameters vLLM computes from others: they are computed again, not received."""
