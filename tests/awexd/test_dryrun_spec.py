from __future__ import annotations

import re
from typing import Any

import pytest

from awexd.dryrun.command import dry_pair
from awexd.dryrun.spec import ENGINES, TRAINERS, parse
from awexd_transports.errors import InvalidArgument
from tests.awexd.dryrun_models import tiny


def test_words_have_values_and_defaults() -> None:
    spec = parse(" megatron:tp=4, pp=2,ep=8,etp=1 ", TRAINERS)
    assert (spec.kind, spec.size("tp"), spec.size("pp"), spec.size("dp"), spec.size("pad")) == (
        "megatron",
        4,
        2,
        1,
        128,
    )
    assert (spec.given("etp"), spec.given("first"), spec.choice("mla")) == (1, None, "whole")
    assert parse("hf", ENGINES).size("ranks") == 1
    assert parse("vllm:placement=round_robin", ENGINES).choice("placement") == "round_robin"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no kind ''"),
        ("deepspeed:tp=2", "no kind 'deepspeed' here; known: fsdp, hf, megatron"),
        ("vllm:tp=2", "no kind 'vllm' here"),
        ("megatron:tpp=2", "megatron has no word 'tpp'; known: tp, pp"),
        ("megatron:tp=2,tp=4", "tp is said twice"),
        ("megatron:tp", "tp needs a value, as in tp=1"),
        ("megatron:tp=0", "tp is a whole number from 1, not '0'"),
        ("megatron:tp=-1", "not '-1'"),
        ("megatron:tp=1e3", "not '1e3'"),
        ("megatron:tp=12345678", "not '12345678'"),
        ("megatron:mla=half", "mla is one of whole, cut, not 'half'"),
    ],
)
def test_spec_that_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        parse(text, TRAINERS)


# Heads 4, groups 2, intermediate 24, 4 layers; 4 experts of 8 in every layer.
MOE: dict[str, Any] = tiny("qwen3_moe") | {"decoder_sparse_step": 1}


@pytest.mark.parametrize(
    ("values", "train", "said"),
    [
        (tiny("qwen3"), "megatron:tp=3", "4 query heads do not divide by tp=3"),
        (tiny("qwen3"), "megatron:ep=2,dp=2", "qwen3 has no experts; leave out ep"),
        (tiny("qwen3"), "megatron:pp=3", "4 layers do not divide into pp x vpp = 3 parts"),
        (tiny("qwen3"), "megatron:pp=2,vpp=3", "pp x vpp = 6 parts"),
        (tiny("qwen3"), "megatron:pp=2,first=1,vpp=2", "vpp with uneven stages"),
        (tiny("qwen3"), "megatron:pp=3,first=1", "3 layers are left for 2 stages"),
        (tiny("qwen3"), "megatron:pp=2,first=3,last=2", "are left for 0 stages"),
        (MOE, "megatron:tp=2,ep=2", "ep x etp = 4 does not divide the tp x cp x dp = 2 ranks of a stage; raise dp"),
        (MOE, "megatron:dp=3,ep=3", "4 experts do not divide by ep=3"),
        (MOE, "megatron:dp=16,etp=16", "8 do not divide by 16"),
        (MOE, "megatron:dp=9999,cp=9", "89991 ranks; at most 65536"),
        (tiny("gpt_oss"), "megatron:tp=2", "experts with biases, as gpt_oss has them, with etp=1 only; add etp=1"),
        (tiny("qwen3"), "fsdp:shards=70000", "70000 ranks"),
    ],
)
def test_trainer_that_cannot_be_is_refused(values: dict[str, Any], train: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        dry_pair(values, train, "hf")


@pytest.mark.parametrize(
    ("values", "infer", "said"),
    [
        (tiny("qwen3"), "vllm:tp=3", "'vllm:tp=3': the padded vocabulary: 128 do not divide by 3; choose sizes that"),
        (tiny("qwen3"), "vllm:tp=2,ep=2", "qwen3 has no experts; leave out ep"),
        (MOE, "vllm:tp=2,ep=4", "say ep=2, or leave it out"),
        (MOE, "vllm:tp=4,dp=4", "8 do not divide by 16"),
        (tiny("qwen3"), "vllm:pp=5", "4 layers are fewer than pp=5 stages"),
        (
            tiny("qwen3") | {"num_key_value_heads": 3, "num_attention_heads": 12},
            "vllm:tp=4",
            "key heads: 3 do not divide by 4",
        ),
        (MOE, "sglang:tp=4,ep=3", "ep=3 does not divide tp=4"),
        (MOE, "sglang:tp=4,dp_attention=3", "dp_attention=3 does not divide tp=4"),
        (tiny("llama"), "sglang:tp=2,dp_attention=2", "no data parallel attention for llama"),
        (MOE, "sglang:tp=8,ep=8", "4 experts do not divide by ep=8"),
        (MOE, "sglang:tp=2,moe_dense_tp=2", "moe_dense_tp=1 only"),
        (MOE, "sglang:dp_lm_head=2", "dp_lm_head is 0 or 1"),
        (MOE, "hf:ranks=2,engines=65536", "131072 ranks"),
        (MOE, "megatron:tp=2", "no kind 'megatron' here; known: hf, sglang, vllm"),
    ],
)
def test_engine_that_cannot_be_is_refused(values: dict[str, Any], infer: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        dry_pair(values, "hf", infer)
