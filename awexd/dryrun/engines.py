"""What each worker of an engine declares: the layouts of the adapters ``vllm``, ``sglang`` and ``hf``, computed.

All is taken to be written in place. What an engine transforms after loading, its worker takes whole instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from awexd.dryrun import cuts
from awexd.dryrun.cuts import QKV, Cut, Rule
from awexd.dryrun.models import OUTSIDE, STACKS, Kind, Model, Tensors
from awexd.dryrun.parts import Part, along, manifest_of, part_of, tied, whole
from awexd.dryrun.spec import Spec, check_ranks, fitting
from awexd.dryrun.trainers import check_experts, whole_model
from awexd_client.adapters.rules import heads, share_of, vocabulary
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Box, Manifest

VOCABULARY_STEP = 64
"""Rows that both engines pad their tables to (``DEFAULT_VOCAB_PADDING_SIZE``, vocab_parallel_embedding.py)."""


def engine(model: Model, spec: Spec) -> list[Manifest]:
    """A manifest a worker of one instance; workers that hold the same share it.

    Raises:
        InvalidArgument: the model cannot be cut so, or the sizes do not multiply out.
    """
    with fitting(spec):
        workers = {"vllm": _vllm, "sglang": _sglang, "hf": _hf}[spec.kind](model, spec)
    check_ranks(spec, len(workers) * spec.size("engines"))
    return workers


def _hf(model: Model, spec: Spec) -> list[Manifest]:
    return [whole_model(model)] * check_ranks(spec, spec.size("ranks"))


@dataclass(frozen=True)
class _Place:
    """Where a worker stands.

    Attributes:
        attention, dense, shared, expert_tensor: its part of attention, dense MLPs, shared experts and each expert.
        experts: those that it has.
        embedding, head: rows of the padded tables: the first, and how many.
        layers: of its stage.
        both: whether a tied ``lm_head`` is declared under both of its names.
    """

    attention: Cut
    dense: Cut
    shared: Cut
    expert_tensor: Cut
    experts: tuple[int, ...]
    embedding: Cut
    head: Cut
    layers: tuple[int, ...]
    first: bool
    last: bool
    both: bool = False


def _manifests(model: Model, places: Sequence[_Place]) -> list[Manifest]:
    made = {place: manifest_of(_parts(model, place)) for place in dict.fromkeys(places)}
    return [made[place] for place in places]


# vLLM

_SEQUENCE_PARALLEL = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})


def _vllm(model: Model, spec: Spec) -> list[Manifest]:
    """Workers in the order of vLLM's ranks: data parallel outermost, then stages, then tensor parallel.

    Experts: over dp x tp ranks, either each cut (``FusedMoEParallelConfig.make``, fused_moe/config.py) or dealt out
    (``expert_map_manager.py``).
    """
    tp, pp, dp, ep = (spec.size(word) for word in ("tp", "pp", "dp", "ep"))
    check_ranks(spec, tp * pp * dp)
    if ep not in (1, dp * tp):
        raise InvalidArgument(
            f"{spec.text!r}: vLLM deals experts to all dp x tp ranks; say ep={dp * tp}, or leave it out"
        )
    if ep > 1 and not model.experts:
        raise InvalidArgument(f"{spec.text!r}: {model.family} has no experts; leave out ep")
    stages = _vllm_stages(model.layers, pp)
    _check_stages(model, spec, pp)
    rows = _padded(model, VOCABULARY_STEP)
    # use_sequence_parallel_moe (vllm/config/parallel.py), as models/deepseek_v2.py heeds it: shared experts are whole.
    sequence = min(ep, tp, dp) > 1 and model.family in _SEQUENCE_PARALLEL
    return _manifests(
        model,
        [
            _Place(
                attention=(rank, tp),
                dense=(rank, tp),
                shared=(0, 1) if sequence else (rank, tp),
                expert_tensor=(0, 1) if ep > 1 else (copy * tp + rank, dp * tp),
                experts=_dealt(model.experts, copy * tp + rank, ep, spec.choice("placement")),
                embedding=share_of("the padded vocabulary", rows, rank, tp),
                head=share_of("the padded vocabulary", rows, rank, tp),
                layers=stages[stage],
                first=stage == 0,
                last=stage == pp - 1,
            )
            for copy in range(dp)
            for stage in range(pp)
            for rank in range(tp)
        ],
    )


def _vllm_stages(layers: int, stages: int) -> list[tuple[int, ...]]:
    """``get_pp_indices`` (vllm/distributed/utils.py): what is left over goes to the last stages but one."""
    sizes = [layers // stages] * stages
    for at in range(2, layers % stages + 2):
        sizes[-at] += 1
    return _consecutive(sizes)


def _dealt(experts: int, rank: int, ranks: int, placement: str) -> tuple[int, ...]:
    """``determine_expert_map``: consecutive blocks, the first ones larger by one; or in turn."""
    if ranks == 1:
        return tuple(range(experts))
    if placement == "round_robin":
        return tuple(range(rank, experts, ranks))
    each, more = divmod(experts, ranks)
    start = rank * each + min(rank, more)
    return tuple(range(start, start + each + (rank < more)))


# SGLang

_DP_ATTENTION = frozenset(
    {"qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"}
)
"""Families whose models cut attention over a group of its own (``parallel_group="attn_tp"``, sglang/srt/models)."""


def _sglang(model: Model, spec: Spec) -> list[Manifest]:
    """Workers in the order of SGLang's ranks: stages, then tensor parallel (sglang/srt/runtime_context.py)."""
    tp, pp, ep, groups = (spec.size(word) for word in ("tp", "pp", "ep", "dp_attention"))
    check_ranks(spec, tp * pp)
    _check_sglang(model, spec, tp, ep, groups)
    attention_size, expert_size = tp // groups, tp // ep
    stages = _sglang_stages(model.layers, pp)
    _check_stages(model, spec, pp)

    def place(stage: int, rank: int) -> _Place:
        attention = (rank % attention_size, attention_size)
        expert_tensor = (rank % expert_size, expert_size)
        each = model.experts // ep
        first = rank // expert_size * each
        return _Place(
            attention=attention,
            dense=(0, 1) if spec.given("moe_dense_tp") else (rank, tp),
            shared={"cut": (rank, tp), "fused": expert_tensor, "whole": (0, 1)}[spec.choice("shared")],
            expert_tensor=expert_tensor,
            experts=tuple(range(first, first + each)),
            embedding=_sglang_rows(model, attention),
            head=_sglang_rows(model, attention if spec.size("dp_lm_head") else (rank, tp)),
            layers=stages[stage],
            first=stage == 0,
            last=stage == pp - 1,
            both=True,
        )

    return _manifests(model, [place(stage, rank) for stage in range(pp) for rank in range(tp)])


def _check_sglang(model: Model, spec: Spec, tp: int, ep: int, groups: int) -> None:
    for word, size in (("ep", ep), ("dp_attention", groups)):
        if tp % size:
            raise InvalidArgument(f"{spec.text!r}: {word}={size} does not divide tp={tp}; SGLang's ranks are all in tp")
    if groups > 1 and model.family not in _DP_ATTENTION:
        raise InvalidArgument(f"{spec.text!r}: SGLang has no data parallel attention for {model.family}; leave it out")
    if (spec.given("moe_dense_tp") or 1) > 1:
        raise InvalidArgument(f"{spec.text!r}: SGLang takes moe_dense_tp=1 only, or none")
    check_experts(model, spec, ep)


def _sglang_stages(layers: int, stages: int) -> list[tuple[int, ...]]:
    """``get_pp_indices`` (sglang/srt/distributed/utils.py): what is left over goes to the last stages."""
    each, more = divmod(layers, stages)
    return _consecutive([each + (stage >= stages - more) for stage in range(stages)])


def _sglang_rows(model: Model, cut: Cut) -> Cut:
    """Padded once more where that does not divide (layers/vocab_parallel_embedding.py)."""
    rank, size = cut
    rows = _padded(model, VOCABULARY_STEP)
    if rows % size:
        rows = _padded(model, VOCABULARY_STEP * size)
    return rank * rows // size, rows // size


# What both engines do alike


def _padded(model: Model, step: int) -> int:
    return -(-model.vocabulary // step) * step


def _consecutive(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def _check_stages(model: Model, spec: Spec, stages: int) -> None:
    if stages > model.layers:
        raise InvalidArgument(f"{spec.text!r}: {model.layers} layers are fewer than pp={stages} stages; lower pp")


def _parts(model: Model, place: _Place) -> Iterator[Part]:
    for tensors in model.tensors:
        if tensors.kind in OUTSIDE:
            yield from _outside(model, tensors, place)
        elif tensors.kind in STACKS:
            yield part_of(tensors, _stack(tensors, place), place.layers)
        else:
            yield part_of(tensors, _in_layer(model, tensors, place), place.layers, place.experts)


def _outside(model: Model, tensors: Tensors, place: _Place) -> Iterator[Part]:
    """Embedding on the first stage, head and last norm on the last; a tied last stage has the embedding again."""
    if tensors.kind is Kind.FINAL_NORM:
        if place.last:
            yield part_of(tensors, whole(tensors.shape), place.layers)
        return
    here = place.last if tensors.kind is Kind.HEAD else place.first or (model.tied and place.last)
    if here:
        window = place.head if tensors.kind is Kind.HEAD else place.embedding
        part = part_of(
            tensors, along(tensors.shape, 0, vocabulary(tensors.name, tensors.shape[0], *window)), place.layers
        )
        both = place.both and tensors.kind is Kind.EMBEDDING
        yield from tied(part, model.tied_head if both else None)


def _in_layer(model: Model, tensors: Tensors, place: _Place) -> list[Box]:
    found = _RULES.get(tensors.kind)
    if found is None:
        return whole(tensors.shape)
    rule, group = found
    return rule(model, tensors, getattr(place, group))


def _headed(model: Model, tensors: Tensors, cut: Cut) -> list[Box]:
    share_of(f"{tensors.name}: heads", model.heads, *cut)
    return cuts.rows(model, tensors, cut)


_RULES: dict[Kind, tuple[Rule, str]] = {
    Kind.QUERY: (cuts.of_qkv(heads, QKV[0]), "attention"),
    Kind.KEY: (cuts.of_qkv(heads, QKV[1]), "attention"),
    Kind.VALUE: (cuts.of_qkv(heads, QKV[2]), "attention"),
    Kind.OUTPUT: (cuts.columns, "attention"),
    Kind.HEADED: (_headed, "attention"),
    Kind.UP: (cuts.rows, "dense"),
    Kind.DOWN: (cuts.columns, "dense"),
    Kind.GATE_UP: (cuts.gate_up, "dense"),
    Kind.SHARED_UP: (cuts.rows, "shared"),
    Kind.SHARED_DOWN: (cuts.columns, "shared"),
    Kind.EXPERT_UP: (cuts.rows, "expert_tensor"),
    Kind.EXPERT_DOWN: (cuts.columns, "expert_tensor"),
}
"""Rule and group of what is cut. What is not here, every worker has all of."""


def _stack(tensors: Tensors, place: _Place) -> list[Box]:
    """gpt-oss (models/gpt_oss.py of both engines): the worker's experts, of each its part of the intermediate size.

    Gate and up are pairs of a dimension of their own, so the same part of both is one box. The second bias is kept by
    the first expert-tensor rank alone; the others have zeros there.
    """
    rank, size = place.expert_tensor
    extent = tensors.extent
    if tensors.kind is Kind.STACK_DOWN_BIAS:
        dim, start, length = 1, 0, extent[1] if rank == 0 else 0
    else:
        dim = 2 if tensors.kind is Kind.STACK_UP else 1
        start, length = share_of(tensors.name, extent[dim], rank, size)
    found: list[Box] = []
    for first, count in _ranges(place.experts) if length else ():
        box = [first, *[0] * (len(extent) - 1)], [count, *extent[1:]]
        box[0][dim], box[1][dim] = start, length
        found.append(Box(tuple(box[0]), tuple(box[1])))
    return found


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, how many)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
