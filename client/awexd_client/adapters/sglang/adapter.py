"""SGLang's live models: a rule for each kind of module, sizes and ranks read from the module itself.

Rules were read from, and are tested against, SGLang 0.5.23; files are those under ``sglang/srt``. A kind is a class, or
one that inherits it together with how it loads weights. Anything else that holds weights is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import EngineWeights
from awexd_client.adapters.buffers import HostBuffers
from awexd_client.adapters.names import is_weight_buffer
from awexd_client.adapters.rules import Run, split, stacked, vocabulary
from awexd_client.adapters.sglang.experts import expert_parts, stacked_parts
from awexd_client.adapters.sglang.parts import Part, arrange
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""A fused module's name in the model, and those of its parts in a checkpoint (models' ``stacked_params_mapping``)."""

_FUSED_ON_DISK = {"Glm4ForCausalLM": {"gate_up_proj"}, "Phi3ForCausalLM": {"gate_up_proj", "qkv_proj"}}
"""Model classes whose checkpoints hold the fused tensor itself (models/glm4.py; models/phi.py)."""

_COMPUTED_BUFFERS = {"normalizer"}
"""models/gemma2.py saves it, and computes it from the configuration."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_Rule = Callable[["_Module"], Iterable[Part]]


class SGLangAdapter:
    """The model of a scheduler process, in place where memory is slices of the checkpoint as they are.

    Args:
        direct: False sends everything through the model's own ``load_weights``.
    """

    name = "sglang"

    def __init__(self, *, direct: bool = True) -> None:
        self._direct = direct
        self._buffers: HostBuffers | None = None

    def matches(self, target: object) -> bool:
        module = sys.modules.get("sglang.srt.layers.linear")
        return module is not None and any(isinstance(each, module.LinearBase) for each in _modules_of(target))

    def shards(self, target: object) -> Iterable[Shard]:
        """Raises InvalidArgument where something cannot be written in place: ``engine_weights`` can do those too."""
        weights = self.engine_weights(target)
        for name, reason in weights.reasons.items():
            raise InvalidArgument(f"{name}: cannot be written in place: {reason}")
        return weights.direct

    def engine_weights(self, target: Any) -> EngineWeights:
        """What is written in place, what is loaded by the model, and how.

        Raises:
            InvalidArgument: a module or parameter that no rule is known for, by name.
        """
        parts = list(_parts(target, None if self._direct else "the loader was asked for"))
        weights, self._buffers = arrange(parts, lambda tensors: target.load_weights(tensors), _refresh(target))
        return weights

    def clear(self) -> None:
        """Gives back the memory of what was staged for the model's loader."""
        if self._buffers is not None:
            self._buffers.clear()


class _Module:
    """A module with weights of its own, where it is in its model."""

    def __init__(self, model: torch.nn.Module, path: str, module: Any, reason: str | None) -> None:
        self.model, self.path, self.module, self.reason = model, path, module, reason
        self.leaf = path.rpartition(".")[2]
        self.own = dict(_own_weights(path, module))

    @property
    def parent(self) -> Any:
        return self.model.get_submodule(self.path.rpartition(".")[0])

    def sibling(self, leaf: str) -> str:
        """The path of a module beside this one."""
        return self.path.removesuffix(self.leaf) + leaf

    def part(self, key: str, shape: Sequence[int], runs: Sequence[Run], dim: int = 0) -> Part:
        return Part(f"{self.path}.{key}", self.own[key], tuple(shape), runs, dim, self.reason or _packed(self.module))

    def check(self, method: str) -> None:
        """Refuses what the rules do not know: how else weights may be stored, and parameters by other names."""
        found = type(self.module.quant_method).__name__
        if found != method:
            raise InvalidArgument(f"{self.path}: {found} stores weights in its own way; only {method} is known")
        if getattr(self.module, "use_presharded_weights", False):
            raise InvalidArgument(f"{self.path}: of a checkpoint that is sharded already; give the whole one")

    def only(self, *known: str) -> None:
        for key in self.own.keys() - set(known):
            raise InvalidArgument(f"{self.path}.{key}: no rule for it in a {type(self.module).__name__}")


def _parts(model: torch.nn.Module, reason: str | None) -> Iterator[Part]:
    tied = _is_tied(model)
    for path, module in model.named_modules():
        found = _Module(model, path, module, reason)
        if not found.own:
            continue
        for part in _rule_for(found)(found):
            yield part
            other = {_EMBEDDING: _HEAD, _HEAD: _EMBEDDING}.get(part.path)
            if tied and other:
                runs = [replace(run, name=run.name and other) for run in part.runs]
                yield replace(part, runs=runs, alias=True)


def _is_tied(model: Any) -> bool:
    """Checkpoints of tied models may have either name. With pipeline stages the last holds a copy of the embedding."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def _own_weights(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter.detach()
    for key, buffer in module._buffers.items():
        persistent = key not in module._non_persistent_buffers_set and key not in _COMPUTED_BUFFERS
        if buffer is not None and is_weight_buffer(f"{path}.{key}", persistent=persistent):
            yield key, buffer


def _packed(module: Any) -> str | None:
    """layers/amx_utils.py: on CPUs with AMX, weights are packed after loading."""
    return "packed for AMX after loading" if getattr(module, "use_intel_amx_backend", False) else None


def _rank(group: Any) -> tuple[int, int]:
    """``get_group_rank_size`` of distributed/utils.py: None is a layer that is not sharded."""
    return (0, 1) if group is None else (int(group.rank_in_group), int(group.world_size))


def _names(found: _Module) -> tuple[str, ...]:
    """Checkpoint modules of a fused one; only itself where the checkpoint has it fused too."""
    if found.leaf in _FUSED_ON_DISK.get(type(found.model).__name__, ()):
        return (found.path,)
    if found.leaf not in _FUSED:
        raise InvalidArgument(f"{found.path}: of which checkpoint tensors it is made is not known")
    return tuple(map(found.sibling, _FUSED[found.leaf]))


def _qkv(found: _Module) -> Iterator[Part]:
    """layers/linear.py, QKVParallelLinear: query heads, key heads, value heads; with more ranks than key/value heads,
    ``num_kv_head_replicas`` neighbours hold the same. Key/value heads may be sharded over a group of their own."""
    found.check("UnquantizedLinearMethod")
    found.only("weight", "bias")
    layer, names = found.module, _names(found)
    rank, size = _rank(layer.tp_group)
    kv_rank = _rank(layer.kv_tp_group)[0] // layer.num_kv_head_replicas
    kv_size = layer.total_num_kv_heads // layer.num_kv_heads
    totals = [
        layer.total_num_heads * layer.head_size,
        layer.total_num_kv_heads * layer.head_size,
        layer.total_num_kv_heads * layer.v_head_size,
    ]
    shares = [(rank, size), (kv_rank, kv_size), (kv_rank, kv_size)]
    yield from _rows(found, names, totals, shares)


def _merged(found: _Module) -> Iterator[Part]:
    """layers/linear.py, MergedColumnParallelLinear: of each matrix the same part."""
    found.check("UnquantizedLinearMethod")
    found.only("weight", "bias")
    share = _rank(found.module.tp_group)
    totals = list(found.module.output_sizes)
    yield from _rows(found, _names(found), totals, [share] * len(totals))


def _rows(
    found: _Module, names: Sequence[str], totals: Sequence[int], shares: Sequence[tuple[int, int]]
) -> Iterator[Part]:
    """Rows of several matrices one after another, of each its share; of one checkpoint tensor if it is fused there."""
    fused = len(names) == 1
    if not fused and len(names) != len(totals):
        raise InvalidArgument(f"{found.path}: {len(totals)} matrices, and names for {len(names)}")
    for key in found.own:
        runs, before = [], 0
        for at, (total, share) in enumerate(zip(totals, shares, strict=True)):
            (run,) = split(f"{names[0 if fused else at]}.{key}", total, *share)
            runs.append(Run(run.name, sum(totals), before + run.start, run.length) if fused else run)
            before += total
        rows = sum(run.length for run in runs)
        yield found.part(key, (rows, found.module.input_size) if key == "weight" else (rows,), runs)


def _column(found: _Module) -> Iterator[Part]:
    """layers/linear.py, ColumnParallelLinear: equal parts of rows, of the bias too."""
    found.check("UnquantizedLinearMethod")
    found.only("weight", "bias")
    yield from _rows(found, [found.path], [found.module.output_size], [_rank(found.module.tp_group)])


def _row(found: _Module) -> Iterator[Part]:
    """layers/linear.py, RowParallelLinear: equal parts of columns; the bias is whole on every rank."""
    found.check("UnquantizedLinearMethod")
    found.only("weight", "bias")
    layer = found.module
    runs = split(f"{found.path}.weight", layer.input_size, *_rank(layer.tp_group))
    yield found.part("weight", (layer.output_size, runs[0].length), runs, dim=1)
    if "bias" in found.own:
        yield found.part("bias", (layer.output_size,), split(f"{found.path}.bias", layer.output_size, 0, 1))


def _replicated(found: _Module) -> Iterator[Part]:
    """layers/linear.py, ReplicatedLinear. ``fused_qkv_a_proj_with_mqa`` of multi-head latent attention
    (models/deepseek_v2.py) is the query's down-projection, then that of keys and values."""
    found.check("UnquantizedLinearMethod")
    found.only("weight", "bias")
    layer = found.module
    names: tuple[str, ...] = (found.path,)
    sizes = [layer.output_size]
    if found.leaf == "fused_qkv_a_proj_with_mqa":
        attention = found.parent
        names, sizes = _names(found), [attention.q_lora_rank, attention.kv_lora_rank + attention.qk_rope_head_dim]
    for key in found.own:
        runs = stacked((f"{name}.{key}", size) for name, size in zip(names, sizes, strict=True))
        yield found.part(key, (sum(sizes), layer.input_size) if key == "weight" else (sum(sizes),), runs)


def _embedding(found: _Module) -> Iterator[Part]:
    """layers/vocab_parallel_embedding.py: equal parts of the padded vocabulary; rows beyond it stay as they are."""
    found.check("UnquantizedEmbeddingMethod")
    found.only("weight", "bias")
    layer = found.module
    if layer.num_embeddings != layer.org_vocab_size:
        raise InvalidArgument(f"{found.path}: {layer.num_embeddings - layer.org_vocab_size} rows of adapters in it")
    rows, first = layer.num_embeddings_per_partition, layer.shard_indices.padded_org_vocab_start_index
    for key in found.own:
        runs = vocabulary(f"{found.path}.{key}", layer.org_vocab_size, first, rows)
        yield found.part(key, (rows, layer.embedding_dim) if key == "weight" else (rows,), runs)


def _whole(found: _Module) -> Iterator[Part]:
    """Small things: every rank has all of them, under their own names."""
    for key, tensor in found.own.items():
        yield found.part(key, tensor.shape, split(f"{found.path}.{key}", int(tensor.shape[0]), 0, 1))


def _widened(found: _Module) -> Iterator[Part]:
    """The same for norms and routers, whose weight may be kept in fp32 (``weight_dtype`` in layers/layernorm.py,
    ``router_fp32`` in models/deepseek_v2.py, Glm4MoeGate) where checkpoints have the model's dtype. A router's
    ``e_score_correction_bias`` is fp32 in both."""
    for part in _whole(found):
        yield replace(part, dtype=_dtype(found.model)) if part.path.endswith(".weight") else part


def _dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The model's own: that of its linear layers."""
    layers: Iterator[Any] = _modules_of(model)
    return next((layer.params_dtype for layer in layers if hasattr(layer, "params_dtype")), None)


def _experts(found: _Module) -> Iterator[Part]:
    found.check("UnquantizedFusedMoEMethod")
    if found.module.with_bias:
        found.only("w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias")
        yield from stacked_parts(found.path, found.module, _dtype(found.model))
        return
    found.only("w13_weight", "w2_weight")
    yield from expert_parts(found.path, found.module, found.reason or _packed(found.module))


def _sinks(found: _Module) -> Iterator[Part]:
    """models/gpt_oss.py, GptOssAttention: one for each query head."""
    found.only("sinks")
    runs = split(f"{found.path}.sinks", found.module.total_num_heads, *_rank(found.module.qkv_proj.tp_group))
    yield replace(found.part("sinks", (runs[0].length,), runs), dtype=_dtype(found.model))


_RULES: dict[str, _Rule] = {
    "sglang.srt.layers.linear.QKVParallelLinear": _qkv,
    "sglang.srt.layers.linear.MergedColumnParallelLinear": _merged,
    "sglang.srt.layers.linear.ColumnParallelLinear": _column,
    "sglang.srt.layers.linear.RowParallelLinear": _row,
    "sglang.srt.layers.linear.ReplicatedLinear": _replicated,
    "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding": _embedding,
    "sglang.srt.layers.vocab_parallel_embedding.ParallelLMHead": _embedding,
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE": _experts,
    "sglang.srt.layers.layernorm.RMSNorm": _widened,
    "sglang.srt.layers.layernorm.LayerNorm": _whole,
    "sglang.srt.layers.layernorm.GemmaRMSNorm": _widened,
    "sglang.srt.layers.layernorm.Gemma3RMSNorm": _widened,
    "sglang.srt.models.deepseek_v2.MoEGate": _widened,
    "sglang.srt.models.glm4_moe.Glm4MoeGate": _widened,
    "sglang.srt.models.gpt_oss.GptOssAttention": _sinks,
    "torch.nn.modules.linear.Linear": _whole,
    "torch.nn.modules.sparse.Embedding": _whole,
}
_LOADERS = ("weight_loader", "weight_loader_v2", "_weight_loader", "_load_w13", "_load_w2")


def _rule_for(found: _Module) -> _Rule:
    kind = type(found.module)
    for base in kind.__mro__:
        rule = _RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            if any(getattr(kind, each, None) is not getattr(base, each, None) for each in _LOADERS):
                break
            return rule
    tensors = ", ".join(f"{found.path}.{key}" for key in found.own)
    raise InvalidArgument(f"{tensors}: how a {kind.__module__}.{kind.__qualname__} lays out weights is not known")


def _modules_of(target: object) -> Iterator[torch.nn.Module]:
    from torch.nn import Module

    if isinstance(target, Module):
        yield from target.modules()


def _refresh(model: Any) -> Callable[[], None] | None:
    """What models derive from their weights: layers/layernorm.py, GemmaRMSNorm.refresh_gemma_weight (1 + weight);
    ``post_load_weights`` (models/deepseek_common/deepseek_weight_loader.py: w_kc and w_vc of kv_b_proj), which SGLang
    itself calls after weights were written into parameters (model_loader/loader.py)."""
    derived = [each.refresh_gemma_weight for each in model.modules() if hasattr(each, "refresh_gemma_weight")]
    if hasattr(model, "post_load_weights"):
        derived.append(model.post_load_weights)
    if not derived:
        return None

    def refresh() -> None:
        import torch

        with torch.no_grad():
            for each in derived:
                each()

    return refresh
