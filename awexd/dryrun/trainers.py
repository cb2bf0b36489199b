"""What each rank of a trainer holds: the layouts of the adapters ``megatron``, ``fsdp`` and ``hf``, computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from awexd.dryrun import cuts
from awexd.dryrun.cuts import QKV, Cut, Rule
from awexd.dryrun.models import OUTSIDE, STACKS, Kind, Model, Tensors
from awexd.dryrun.parts import Part, along, manifest_of, part_of, tied, whole
from awexd.dryrun.spec import Spec, check_ranks, fitting
from awexd_client.adapters.rules import grouped_heads, vocabulary
from awexd_client.adapters.runs import chunk
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Box, Manifest
from awexd_transports.shard import PAIRS


def trainer(model: Model, spec: Spec) -> list[Manifest]:
    """A manifest a rank; ranks that hold the same share it.

    Raises:
        InvalidArgument: the model cannot be cut so, or the sizes do not multiply out.
    """
    with fitting(spec):
        return {"megatron": _megatron, "fsdp": _fsdp, "hf": _hf}[spec.kind](model, spec)


def _hf(model: Model, spec: Spec) -> list[Manifest]:
    return [whole_model(model)] * check_ranks(spec, spec.size("ranks"))


def whole_model(model: Model) -> Manifest:
    """All tensors, the tied head under both of its names (``adapters/live.py``)."""
    return manifest_of(_with_tied(model, (_whole_part(model, each) for each in model.tensors)))


def _whole_part(model: Model, tensors: Tensors) -> Part:
    return part_of(tensors, whole(tensors.extent), range(model.layers))


def _with_tied(model: Model, parts: Iterator[Part]) -> Iterator[Part]:
    for part in parts:
        yield from tied(part, model.tied_head if part.tensors.kind is Kind.EMBEDDING else None)


# FSDP2


def _fsdp(model: Model, spec: Spec) -> list[Manifest]:
    """``Shard(0)`` of each parameter over ``shards`` ranks, by ``torch.chunk``'s rule; replicas outermost (HSDP)."""
    shards, replicas = spec.size("shards"), spec.size("replicas")
    check_ranks(spec, shards * replicas)
    every = [
        manifest_of(_with_tied(model, (_sharded(model, each, (at, shards)) for each in model.tensors)))
        for at in range(shards)
    ]
    return every * replicas


def _sharded(model: Model, tensors: Tensors, cut: Cut) -> Part:
    """Experts are one parameter a layer in memory (``adapters/experts.py``): they are dealt whole. So are buffers."""
    at, parts = cut
    if tensors.kind is Kind.ROUTER_BIAS:
        return _whole_part(model, tensors)
    if tensors.experts:
        start, length = chunk(tensors.experts, parts, at)
        return part_of(tensors, whole(tensors.shape), range(model.layers), range(start, start + length))
    start, length = chunk(tensors.extent[0], parts, at)
    box = Box((start, *[0] * (len(tensors.extent) - 1)), (length, *tensors.extent[1:]))
    return part_of(tensors, [box], range(model.layers))


# Megatron-Core


@dataclass(frozen=True)
class _Place:
    """Where a rank of Megatron-Core stands: its part of each group, and its stage."""

    tensor: Cut
    expert: Cut
    expert_tensor: Cut
    stage: int


def _megatron(model: Model, spec: Spec) -> list[Manifest]:
    """Ranks in the order ``tp-cp-ep-dp-pp`` (megatron/core/parallel_state.py, RankGenerator), experts' alike."""
    tp, ep = spec.size("tp"), spec.size("ep")
    etp = spec.size("etp", tp)
    if etp > 1 and any(each.kind in STACKS for each in model.tensors):
        raise InvalidArgument(
            f"{spec.text!r}: Megatron-Core takes experts with biases, as {model.family} has them, with etp=1 only; add"
            " etp=1"
        )
    each = tp * spec.size("cp") * spec.size("dp")
    check_ranks(spec, each * spec.size("pp"))
    if each % (ep * etp):
        raise InvalidArgument(
            f"{spec.text!r}: ep x etp = {ep * etp} does not divide the tp x cp x dp = {each} ranks of a stage;"
            f" raise dp, or lower ep or etp"
        )
    check_experts(model, spec, ep)
    if model.heads % tp:
        raise InvalidArgument(f"{spec.text!r}: {model.heads} query heads do not divide by tp={tp}")
    stages = _stages(model.layers, spec)
    places = [
        _Place((rank % tp, tp), (rank // etp % ep, ep), (rank % etp, etp), stage)
        for stage in range(len(stages))
        for rank in range(each)
    ]
    made = {place: manifest_of(_megatron_parts(model, spec, place, stages)) for place in dict.fromkeys(places)}
    return [made[place] for place in places]


def check_experts(model: Model, spec: Spec, ep: int) -> None:
    """Refuses to deal experts where there are none, or not as many to each.

    Raises:
        InvalidArgument: says what to change.
    """
    if ep > 1 and not model.experts:
        raise InvalidArgument(f"{spec.text!r}: {model.family} has no experts; leave out ep")
    if model.experts % ep:
        raise InvalidArgument(f"{spec.text!r}: {model.experts} experts do not divide by ep={ep}; change ep")


def _stages(layers: int, spec: Spec) -> list[list[int]]:
    """Each stage's layers (``get_transformer_layer_offset``, megatron/core/transformer/transformer_layer.py)."""
    stages, chunks = spec.size("pp"), spec.size("vpp")
    first, last = spec.given("first"), spec.given("last")
    if first or last:
        return _uneven_stages(layers, spec, first, last)
    if layers % (stages * chunks):
        raise InvalidArgument(
            f"{spec.text!r}: {layers} layers do not divide into pp x vpp = {stages * chunks} parts;"
            " change pp or vpp, or say how many the first or last stage has: first=N, last=N"
        )
    each = layers // (stages * chunks)
    return [
        [at * each * stages + stage * each + layer for at in range(chunks) for layer in range(each)]
        for stage in range(stages)
    ]


def _uneven_stages(layers: int, spec: Spec, first: int | None, last: int | None) -> list[list[int]]:
    stages = spec.size("pp")
    inner = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if spec.size("vpp") > 1:
        raise InvalidArgument(f"{spec.text!r}: vpp with uneven stages is not known; leave out first, last or vpp")
    if inner < 0 or left < 0 or (left % inner if inner else left):
        raise InvalidArgument(
            f"{spec.text!r}: {left} layers are left for {max(inner, 0)} stages, which they do not divide into;"
            " change first, last or pp"
        )
    each = left // inner if inner else 0
    sizes = [*([first] if first else []), *[each] * inner, *([last] if last else [])]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def _megatron_parts(model: Model, spec: Spec, place: _Place, stages: Sequence[Sequence[int]]) -> Iterator[Part]:
    layers = stages[place.stage]
    at, parts = place.expert
    experts = range(at * model.experts // parts, (at + 1) * model.experts // parts)
    for tensors in model.tensors:
        if tensors.kind in OUTSIDE:
            if place.stage == (0 if tensors.kind is Kind.EMBEDDING else len(stages) - 1):
                yield from _with_tied(model, iter([part_of(tensors, _outside(tensors, spec, place), layers)]))
        elif tensors.kind in STACKS:
            yield part_of(tensors, _stack(tensors, experts), layers)
        else:
            yield part_of(tensors, _in_layer(model, tensors, spec, place), layers, experts)


def _stack(tensors: Tensors, experts: Iterable[int]) -> list[Box]:
    """gpt-oss: each expert's own matrix in memory; of the first, gate's rows and up's are every other element."""
    *inner, last = tensors.extent[1:]
    lasts = [(half, 1) for half in range(last)] if tensors.layout == PAIRS else [(0, last)]
    return [
        Box((expert, *[0] * len(inner), start), (1, *inner, length)) for expert in experts for start, length in lasts
    ]


def _outside(tensors: Tensors, spec: Spec, place: _Place) -> list[Box]:
    """Tables are padded to a multiple of ``make_vocab_size_divisible_by`` x tp (megatron/training/vocab_utils.py).

    A tied last stage has a copy of the embedding, which the adapter leaves out.
    """
    if tensors.kind is Kind.FINAL_NORM:
        return whole(tensors.shape)
    rank, size = place.tensor
    step = spec.size("pad") * size
    rows = -(-tensors.shape[0] // step) * step // size
    return along(tensors.shape, 0, vocabulary(tensors.name, tensors.shape[0], rank * rows, rows))


def _in_layer(model: Model, tensors: Tensors, spec: Spec, place: _Place) -> list[Box]:
    rule = _RULES.get(tensors.kind)
    if tensors.kind is Kind.LATENT and spec.choice("mla") == "cut":
        rule = cuts.rows
    if tensors.kind in (Kind.EXPERT_UP, Kind.EXPERT_DOWN):
        rule = cuts.rows if tensors.kind is Kind.EXPERT_UP else cuts.columns
        return rule(model, tensors, place.expert_tensor)
    return rule(model, tensors, place.tensor) if rule else whole(tensors.shape)


_RULES: dict[Kind, Rule] = {
    Kind.QUERY: cuts.of_qkv(grouped_heads, QKV[0]),
    Kind.KEY: cuts.of_qkv(grouped_heads, QKV[1]),
    Kind.VALUE: cuts.of_qkv(grouped_heads, QKV[2]),
    Kind.OUTPUT: cuts.columns,
    Kind.HEADED: cuts.rows,
    Kind.UP: cuts.rows,
    Kind.DOWN: cuts.columns,
    Kind.GATE_UP: cuts.gate_up,
    Kind.SHARED_UP: cuts.rows,
    Kind.SHARED_DOWN: cuts.columns,
}
"""Of what is cut over tensor-parallel ranks. What is not here, every rank has all of."""
