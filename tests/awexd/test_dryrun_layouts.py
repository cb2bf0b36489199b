"""Boxes of trainers and engines, by hand; the real adapters are compared with these where their engines run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from awexd.dryrun.command import dry_pair
from awexd.dryrun.engines import engine
from awexd.dryrun.families import model_of
from awexd.dryrun.report import examine
from awexd.dryrun.spec import ENGINES, TRAINERS, parse
from awexd.dryrun.trainers import trainer
from awexd_transports.layout import Manifest
from tests.awexd.dryrun_models import TINY, tiny

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
MOE: dict[str, Any] = tiny("qwen3_moe") | {"decoder_sparse_step": 1}
LAYER = "model.layers.0."


def trained(values: dict[str, Any], spec: str) -> list[Manifest]:
    return trainer(model_of(values), parse(spec, TRAINERS))


def served(values: dict[str, Any], spec: str) -> list[Manifest]:
    return engine(model_of(values), parse(spec, ENGINES))


def boxes(manifest: Manifest, name: str) -> Boxes:
    return [(entry.box.offset, entry.box.shape) for entry in manifest.by_name.get(name, ())]


def layers(manifest: Manifest) -> list[int]:
    return sorted({int(name.split(".")[2]) for name in manifest.by_name if name.startswith("model.layers.")})


# Megatron-Core


def test_megatron_cuts_heads_by_group_and_keeps_each_groups_run() -> None:
    """4 heads in 2 groups of 12: of each group 2 query heads, a key head, a value head."""
    (one,) = trained(tiny("qwen3"), "megatron:")
    assert boxes(one, LAYER + "self_attn.q_proj.weight") == [((0, 0), (24, 32)), ((24, 0), (24, 32))]
    assert boxes(one, LAYER + "self_attn.k_proj.weight") == [((0, 0), (12, 32)), ((12, 0), (12, 32))]
    two = trained(tiny("qwen3"), "megatron:tp=2")
    assert [boxes(rank, LAYER + "self_attn.q_proj.weight") for rank in two] == [
        [((0, 0), (24, 32))],
        [((24, 0), (24, 32))],
    ]
    assert [boxes(rank, LAYER + "self_attn.o_proj.weight") for rank in two] == [
        [((0, 0), (32, 24))],
        [((0, 24), (32, 24))],
    ]
    # More ranks than groups: each has 24 of the 48 rows of a group, which are q q or k v.
    four = trained(tiny("qwen3"), "megatron:tp=4")
    assert [len(boxes(rank, LAYER + "self_attn.q_proj.weight")) for rank in four] == [1, 0, 1, 0]
    assert [boxes(rank, LAYER + "self_attn.v_proj.weight") for rank in four] == [
        [],
        [((0, 0), (12, 32))],
        [],
        [((12, 0), (12, 32))],
    ]


def test_megatron_pads_the_vocabulary() -> None:
    """70 rows padded to 128 (x tp), 64 (or 128) on each rank: real rows only."""
    one, two = trained(tiny("qwen3"), "megatron:tp=2,pad=64")
    assert boxes(one, "lm_head.weight") == [((0, 0), (64, 32))]
    assert boxes(two, "lm_head.weight") == [((64, 0), (6, 32))]
    one, two = trained(tiny("qwen3"), "megatron:tp=2")
    assert boxes(one, "model.embed_tokens.weight") == [((0, 0), (70, 32))]
    assert boxes(two, "model.embed_tokens.weight") == []


def test_megatron_stages() -> None:
    first, last = trained(tiny("qwen3"), "megatron:pp=2")
    assert (layers(first), layers(last)) == ([0, 1], [2, 3])
    assert boxes(first, "model.embed_tokens.weight")
    assert not boxes(first, "lm_head.weight")
    assert not boxes(first, "model.norm.weight")
    assert boxes(last, "lm_head.weight")
    assert boxes(last, "model.norm.weight") == [((0,), (32,))]
    assert [layers(rank) for rank in trained(tiny("qwen3"), "megatron:pp=2,vpp=2")] == [[0, 2], [1, 3]]
    assert [layers(rank) for rank in trained(tiny("qwen3"), "megatron:pp=2,first=1")] == [[0], [1, 2, 3]]
    assert [layers(rank) for rank in trained(tiny("qwen3"), "megatron:pp=3,first=1,last=1")] == [[0], [1, 2], [3]]
    assert [layers(rank) for rank in trained(tiny("qwen3"), "megatron:pp=2,first=3,last=1")] == [[0, 1, 2], [3]]


def test_megatron_tied_head_is_the_first_stages_embedding() -> None:
    first, last = trained(tiny("qwen3, biases, tied"), "megatron:pp=2")
    embedding, head = (first.by_name[f"{name}.weight"][0] for name in ("model.embed_tokens", "lm_head"))
    assert embedding.piece == head.piece
    assert "lm_head.weight" not in last.by_name


def test_megatron_deals_and_cuts_experts() -> None:
    """tp2 x ep2 x etp1 on four ranks: 0: tp0 ep0, 1: tp1 ep1, 2: tp0 ep0, 3: tp1 ep1 (seen in Megatron-Core)."""
    ranks = trained(MOE, "megatron:tp=2,dp=2,ep=2,etp=1")
    assert ranks[0] is ranks[2]
    assert ranks[1] is ranks[3]
    experts = [[e for e in range(4) if f"{LAYER}mlp.experts.{e}.up_proj.weight" in rank.by_name] for rank in ranks]
    assert experts == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert boxes(ranks[1], f"{LAYER}mlp.experts.2.up_proj.weight") == [((0, 0), (8, 32))]
    cut = trained(MOE, "megatron:tp=2,dp=2,ep=2")
    assert boxes(cut[1], f"{LAYER}mlp.experts.1.down_proj.weight") == [((0, 4), (32, 4))]
    assert boxes(cut[2], f"{LAYER}mlp.experts.3.gate_proj.weight") == [((0, 0), (4, 32))]


def test_megatron_latent_down_projections_are_whole_or_cut() -> None:
    name = LAYER + "self_attn.kv_a_proj_with_mqa.weight"
    assert boxes(trained(tiny("deepseek_v3"), "megatron:tp=2")[1], name) == [((0, 0), (12, 32))]
    assert boxes(trained(tiny("deepseek_v3"), "megatron:tp=2,mla=cut")[1], name) == [((6, 0), (6, 32))]


def test_glm_has_the_same_part_of_both_halves() -> None:
    expected = [((12, 0), (12, 32)), ((36, 0), (12, 32))]
    assert boxes(trained(tiny("glm4"), "megatron:tp=2")[1], LAYER + "mlp.gate_up_proj.weight") == expected
    assert boxes(served(tiny("glm4"), "vllm:tp=2")[1], LAYER + "mlp.gate_up_proj.weight") == expected


# FSDP2


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 64])
def test_fsdp_cuts_as_torch_chunk_does(shards: int) -> None:
    ranks = trained(MOE, f"fsdp:shards={shards},replicas=2")
    assert len(ranks) == 2 * shards
    assert ranks[0] is ranks[shards]
    pieces = torch.chunk(torch.arange(70), shards)
    for at, rank in enumerate(ranks[:shards]):
        rows = pieces[at].tolist() if at < len(pieces) else []
        start = rows[0] if rows else 70
        assert boxes(rank, "model.embed_tokens.weight") == [((start, 0), (len(rows), 32))]
    dealt = torch.chunk(torch.arange(4), shards)
    for at, rank in enumerate(ranks[:shards]):
        mine = dealt[at].tolist() if at < len(dealt) else []
        assert [e for e in range(4) if f"{LAYER}mlp.experts.{e}.up_proj.weight" in rank.by_name] == mine
        for expert in mine:
            assert boxes(rank, f"{LAYER}mlp.experts.{expert}.down_proj.weight") == [((0, 0), (32, 8))]


def test_fsdp_leaves_buffers_whole() -> None:
    for rank in trained(tiny("deepseek_v3"), "fsdp:shards=2"):
        assert boxes(rank, "model.layers.1.mlp.gate.e_score_correction_bias") == [((0,), (4,))]


def test_gpt_oss_of_fsdp_is_cut_between_experts_in_pairs() -> None:
    name = LAYER + "mlp.experts.gate_up_proj"
    assert [boxes(rank, name) for rank in trained(tiny("gpt_oss"), "fsdp:shards=2")] == [
        [((0, 0, 0, 0), (2, 32, 24, 2))],
        [((2, 0, 0, 0), (2, 32, 24, 2))],
    ]


# vLLM and SGLang


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_repeat_key_heads_beyond_their_number(kind: str) -> None:
    ranks = served(tiny("qwen3"), f"{kind}:tp=4")
    assert [boxes(rank, LAYER + "self_attn.q_proj.weight")[0][0][0] for rank in ranks] == [0, 12, 24, 36]
    assert [boxes(rank, LAYER + "self_attn.k_proj.weight") for rank in ranks] == [
        [((0, 0), (12, 32))],
        [((0, 0), (12, 32))],
        [((12, 0), (12, 32))],
        [((12, 0), (12, 32))],
    ]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_pad_the_vocabulary_to_64(kind: str) -> None:
    """70 rows are 128 with padding, 64 on each of two."""
    ranks = served(tiny("qwen3"), f"{kind}:tp=2")
    assert [boxes(rank, "lm_head.weight") for rank in ranks] == [[((0, 0), (64, 32))], [((64, 0), (6, 32))]]


def test_sglang_pads_more_where_that_does_not_divide() -> None:
    """12 heads of 3 ranks: 128 rows do not divide by 3, 192 do."""
    values = tiny("qwen3") | {"num_attention_heads": 12, "num_key_value_heads": 3}
    ranks = served(values, "sglang:tp=3")
    assert [boxes(rank, "lm_head.weight") for rank in ranks] == [[((0, 0), (64, 32))], [((64, 0), (6, 32))], []]


def test_stages_that_do_not_divide_differ_between_engines() -> None:
    values = tiny("qwen3") | {"num_hidden_layers": 5}
    assert [layers(rank) for rank in served(values, "vllm:pp=3")] == [[0, 1], [2, 3], [4]]
    assert [layers(rank) for rank in served(values, "sglang:pp=3")] == [[0], [1, 2], [3, 4]]


def test_vllm_experts_cut_dealt_and_in_turn() -> None:
    cut = served(MOE, "vllm:tp=2,dp=2")
    assert boxes(cut[3], f"{LAYER}mlp.experts.3.up_proj.weight") == [((6, 0), (2, 32))]
    assert boxes(cut[3], f"{LAYER}mlp.experts.3.down_proj.weight") == [((0, 6), (32, 2))]
    # Ranks of one tensor-parallel group have neighbouring parts.
    assert [boxes(rank, f"{LAYER}mlp.experts.0.up_proj.weight")[0][0][0] for rank in cut] == [0, 2, 4, 6]
    assert boxes(cut[3], LAYER + "self_attn.q_proj.weight") == [((24, 0), (24, 32))]
    assert _experts(served(MOE, "vllm:tp=2,ep=2")) == [[0, 1], [2, 3]]
    assert _experts(served(MOE, "vllm:tp=2,ep=2,placement=round_robin")) == [[0, 2], [1, 3]]
    assert _experts(
        served(MOE | {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 192}, "vllm:tp=3,ep=3")
    ) == [
        [0, 1],
        [2],
        [3],
    ]


def _experts(ranks: list[Manifest]) -> list[list[int]]:
    return [[e for e in range(4) if f"{LAYER}mlp.experts.{e}.up_proj.weight" in rank.by_name] for rank in ranks]


def test_sglang_data_parallel_attention() -> None:
    """tp4 in two groups: attention and embedding over two ranks, experts over all."""
    ranks = served(MOE, "sglang:tp=4,ep=2,dp_attention=2")
    assert [boxes(rank, LAYER + "self_attn.q_proj.weight")[0][0][0] for rank in ranks] == [0, 24, 0, 24]
    assert [boxes(rank, "model.embed_tokens.weight")[0][0][0] for rank in ranks] == [0, 64, 0, 64]
    assert [bool(boxes(rank, "lm_head.weight")) for rank in ranks] == [True, True, True, False]  # 64 rows on each of 4
    assert _experts(ranks) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert boxes(ranks[3], f"{LAYER}mlp.experts.3.gate_proj.weight") == [((4, 0), (4, 32))]
    headed = served(MOE, "sglang:tp=4,dp_attention=2,dp_lm_head=1")
    assert [boxes(rank, "lm_head.weight")[0][0][0] for rank in headed] == [0, 64, 0, 64]


@pytest.mark.parametrize(
    ("infer", "expected"),
    [
        ("sglang:tp=2,ep=2", ((4, 0), (4, 32))),
        ("sglang:tp=2,ep=2,shared=fused", ((0, 0), (8, 32))),
        ("sglang:tp=2,shared=fused", ((4, 0), (4, 32))),
        ("sglang:tp=2,shared=whole", ((0, 0), (8, 32))),
        ("vllm:tp=2,ep=2", ((4, 0), (4, 32))),
        ("vllm:tp=2,dp=2,ep=4", ((0, 0), (8, 32))),
    ],
)
def test_shared_experts_are_cut_unless_all_of_them_is_needed(infer: str, expected: Any) -> None:
    assert boxes(served(tiny("deepseek_v3"), infer)[1], "model.layers.1.mlp.shared_experts.up_proj.weight") == [
        expected
    ]


def test_shared_experts_of_other_families_are_cut_in_vllm() -> None:
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert boxes(served(tiny("glm4_moe"), "vllm:tp=2,dp=2,ep=4")[1], name) == [((4, 0), (4, 32))]


def test_tied_head_of_engines() -> None:
    tied = tiny("qwen3, biases, tied")
    (vllm,) = served(tied, "vllm:")
    (sglang,) = served(tied, "sglang:")
    assert "lm_head.weight" not in vllm.by_name
    assert sglang.by_name["lm_head.weight"][0].piece == sglang.by_name["model.embed_tokens.weight"][0].piece
    first, last = served(tied, "vllm:pp=2")
    assert "model.embed_tokens.weight" in first.by_name
    assert "model.embed_tokens.weight" in last.by_name


def test_gpt_oss_experts_in_engines() -> None:
    """Gate and up are pairs, [E, h, F, 2]: the same part of both is one box; the last bias is the first rank's."""
    ranks = served(tiny("gpt_oss"), "vllm:tp=2")
    assert boxes(ranks[1], LAYER + "mlp.experts.gate_up_proj") == [((0, 0, 12, 0), (4, 32, 12, 2))]
    assert boxes(ranks[1], LAYER + "mlp.experts.gate_up_proj_bias") == [((0, 12, 0), (4, 12, 2))]
    assert boxes(ranks[1], LAYER + "mlp.experts.down_proj") == [((0, 12, 0), (4, 12, 32))]
    assert [boxes(rank, LAYER + "mlp.experts.down_proj_bias") for rank in ranks] == [[((0, 0), (4, 32))], []]
    assert boxes(ranks[1], LAYER + "self_attn.sinks") == [((2,), (2,))]
    dealt = served(tiny("gpt_oss"), "vllm:tp=2,ep=2,placement=round_robin")
    assert boxes(dealt[1], LAYER + "mlp.experts.down_proj_bias") == [((1, 0), (1, 32)), ((3, 0), (1, 32))]


# Every family, every pair


@pytest.mark.parametrize("infer", ["hf", "vllm:tp=2", "vllm:tp=4,pp=2,engines=2", "sglang:tp=4", "sglang:tp=2,pp=3"])
@pytest.mark.parametrize("variant", TINY)
def test_every_pair_of_one_family_fits(variant: str, infer: str) -> None:
    values = tiny(variant)
    sparse = model_of(values).experts > 0
    for train in ("hf:ranks=3", "fsdp:shards=3,replicas=2", "megatron:tp=4,pp=4,cp=2,dp=2,ep=2"):
        if train.startswith("megatron"):
            train = train + ",etp=1" if variant == "gpt_oss" else train if sparse else train.replace(",ep=2", "")
        report = examine(dry_pair(values, train, infer))
        assert report.works, (train, report.problem)
        assert report.moved
        # Aliases are filled once.
        assert report.moved.receives.tolist() == [
            rank.nbytes for side in report.pair.engines for rank in side.manifests
        ]
        assert int(report.moved.writes.sum()) == model_of(values).nbytes


@pytest.mark.parametrize("infer", ["vllm:tp=2,dp=2,ep=4", "vllm:tp=4,ep=4,placement=round_robin", "sglang:tp=4,ep=2"])
@pytest.mark.parametrize("variant", [variant for variant in TINY if model_of(tiny(variant)).experts])
def test_every_pair_of_experts_fits(variant: str, infer: str) -> None:
    assert examine(dry_pair(tiny(variant), "megatron:tp=2,pp=2,dp=2,ep=4,etp=1", infer)).works
