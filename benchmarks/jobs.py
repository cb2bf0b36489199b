"""The jobs that planners are measured on: what each rank of a trainer and of an engine holds.

A row is one tensor's part on one rank: checkpoint name, dtype, global shape, offset and extent of its box. Nothing here
needs awexd, so that peers plan the same jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

DTYPE = "bfloat16"

Row = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Rank = list[Row]


@dataclass(frozen=True)
class Job:
    """Rows by rank; ranks that hold the same are the same list.

    Attributes:
        trainer: its ranks.
        engine: the ranks of one of the ``engines``, which are alike.
        copies: boxes that must move where no replica is cut.
    """

    trainer: list[Rank]
    engine: list[Rank]
    engines: int
    copies: int | None = None


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer as in its ``config.json``; ``experts`` 0: a dense one."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    experts: int = 0
    head_norms: bool = True


def moe_30b() -> Model:
    """As Qwen3-30B-A3B: 18,867 checkpoint names."""
    return Model(2048, 48, 768, 32, 4, 128, 151_936, experts=128)


def moe_1t() -> Model:
    """A trillion parameters: 80 layers of 256 experts with a hidden size of 7,168 and an intermediate one of 2,048."""
    return Model(7168, 80, 2048, 64, 8, 128, 129_280, experts=256)


def dense_8b() -> Model:
    """As Qwen3-8B: 399 checkpoint names."""
    return Model(4096, 36, 12_288, 32, 8, 128, 151_936)


@dataclass(frozen=True)
class Place:
    """Where a rank stands (rank, ranks): dense parts are cut in ``tp``, experts dealt to ``ep`` and cut in ``etp``."""

    tp: tuple[int, int]
    ep: tuple[int, int] = (0, 1)
    etp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)


def rows(model: Model, place: Place) -> Rank:
    """What one rank holds, in the order of a checkpoint."""
    stage, stages = place.pp
    each = model.layers // stages
    found: Rank = []
    if stage == 0:
        found.append(_cut("model.embed_tokens.weight", (model.vocabulary, model.hidden), 0, place.tp))
    for layer in range(stage * each, (stage + 1) * each):
        found += _layer(model, place, f"model.layers.{layer}.")
    if stage == stages - 1:
        found.append(_whole("model.norm.weight", (model.hidden,)))
        found.append(_cut("lm_head.weight", (model.vocabulary, model.hidden), 0, place.tp))
    return found


def _layer(model: Model, place: Place, prefix: str) -> Iterator[Row]:
    hidden, attention = model.hidden, model.heads * model.head
    yield _cut(f"{prefix}self_attn.q_proj.weight", (attention, hidden), 0, place.tp)
    for name in ("k_proj", "v_proj"):
        yield _cut(f"{prefix}self_attn.{name}.weight", (model.kv_heads * model.head, hidden), 0, _kv(model, place.tp))
    yield _cut(f"{prefix}self_attn.o_proj.weight", (hidden, attention), 1, place.tp)
    for name in ("q_norm", "k_norm"):
        yield _whole(f"{prefix}self_attn.{name}.weight", (model.head,))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield _whole(f"{prefix}{name}.weight", (hidden,))
    if not model.experts:
        yield from _mlp(model, f"{prefix}mlp.", place.tp)
        return
    yield _whole(f"{prefix}mlp.gate.weight", (model.experts, hidden))
    mine = model.experts // place.ep[1]
    for expert in range(place.ep[0] * mine, (place.ep[0] + 1) * mine):
        yield from _mlp(model, f"{prefix}mlp.experts.{expert}.", place.etp)


def _mlp(model: Model, prefix: str, tp: tuple[int, int]) -> Iterator[Row]:
    for name in ("gate_proj", "up_proj"):
        yield _cut(f"{prefix}{name}.weight", (model.intermediate, model.hidden), 0, tp)
    yield _cut(f"{prefix}down_proj.weight", (model.hidden, model.intermediate), 1, tp)


def _kv(model: Model, tp: tuple[int, int]) -> tuple[int, int]:
    """Fewer heads than ranks: each head is on several of them."""
    rank, ranks = tp
    return (rank * model.kv_heads // ranks, model.kv_heads) if ranks > model.kv_heads else tp


def _cut(name: str, shape: tuple[int, ...], dim: int, tp: tuple[int, int]) -> Row:
    rank, ranks = tp
    extent = shape[dim] // ranks
    offset = tuple(rank * extent if d == dim else 0 for d in range(len(shape)))
    return name, DTYPE, shape, offset, tuple(extent if d == dim else n for d, n in enumerate(shape))


def _whole(name: str, shape: tuple[int, ...]) -> Row:
    return name, DTYPE, shape, (0,) * len(shape), shape


def _ranks(model: Model, places: list[Place]) -> list[Rank]:
    made = {place: rows(model, place) for place in dict.fromkeys(places)}
    return [made[place] for place in places]


def global_moe() -> Job:
    """64 trainers (TP4 PP2 EP8, 32 a stage) to eight engines of TP8, experts cut along their intermediate dimension."""
    trainer = [
        Place(tp=(rank % 4, 4), ep=(rank % 8, 8), pp=(stage, 2)) for stage in range(2) for rank in range(32)
    ]  # fmt: skip
    engine = [Place(tp=(rank, 8), etp=(rank, 8)) for rank in range(8)]
    model = moe_30b()
    return Job(_ranks(model, trainer), _ranks(model, engine), 8, copies=1_207_488)


def local_1t() -> Job:
    """256 trainers (TP4 PP8 EP32, 32 a stage) to eight engines of EP32 whose workers each hold the whole dense part."""
    trainer = [
        Place(tp=(rank % 4, 4), ep=(rank % 32, 32), pp=(stage, 8)) for stage in range(8) for rank in range(32)
    ]  # fmt: skip
    engine = [Place(tp=(0, 1), ep=(rank, 32)) for rank in range(32)]
    model = moe_1t()
    return Job(_ranks(model, trainer), _ranks(model, engine), 8)


def sixty_four_to_one_tp8() -> Job:
    """64 trainers (TP8, eight replicas) to one engine of TP8."""
    trainer = [Place(tp=(rank % 8, 8)) for rank in range(64)]
    engine = [Place(tp=(rank, 8)) for rank in range(8)]
    return Job(_ranks(dense_8b(), trainer), _ranks(dense_8b(), engine), 1)


def dp8_to_2() -> Job:
    """Eight trainers with the whole model each to two engines of one worker."""
    return _replicas(8, 2)


def four_replicas_to_5() -> Job:
    """Four trainers with the whole model each to five engines of one worker."""
    return _replicas(4, 5)


def _replicas(trainers: int, engines: int) -> Job:
    whole = rows(dense_8b(), Place(tp=(0, 1)))
    return Job([whole] * trainers, [whole], engines)


def tiny_moe() -> Job:
    """As ``global_moe`` with two layers of eight experts: for tests."""
    model = Model(64, 2, 32, 8, 4, 16, 128, experts=8)
    trainer = [
        Place(tp=(rank % 4, 4), ep=(rank % 8, 8), pp=(stage, 2)) for stage in range(2) for rank in range(32)
    ]  # fmt: skip
    engine = [Place(tp=(rank, 8), etp=(rank, 8)) for rank in range(8)]
    return Job(_ranks(model, trainer), _ranks(model, engine), 2)


JOBS: dict[str, Callable[[], Job]] = {
    "global-moe": global_moe,
    "local-1t": local_1t,
    "64-to-one-tp8": sixty_four_to_one_tp8,
    "dp8-to-2": dp8_to_2,
    "4-replicas-to-5": four_replicas_to_5,
    "tiny-moe": tiny_moe,
}
