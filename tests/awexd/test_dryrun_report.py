from __future__ import annotations

import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awexd.dryrun.bounds import Holdings, lower_bound
from awexd.dryrun.command import dry_pair
from awexd.dryrun.engines import engine
from awexd.dryrun.families import model_of
from awexd.dryrun.report import PUBLISH_RATE, UPDATE_RATE, Load, Pair, Side, as_json, examine
from awexd.dryrun.spec import ENGINES, parse
from awexd.dryrun.table import lines
from awexd.dryrun.trainers import whole_model
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from benchmarks.jobs import moe_1t, moe_30b
from tests.awexd.dryrun_models import tiny


def held(*entries: tuple[str, int, int, int]) -> Manifest:
    """Entries (name, total, start, length) of one dimension, bytes."""
    return Manifest.of(
        Entry(TensorSpec(name, (total,), "uint8"), Box((start,), (length,)), piece)
        for piece, (name, total, start, length) in enumerate(entries)
    )


def small() -> Pair:
    """Two ranks: a is cut, b is on both. Engine e has two workers that each have half of a and all of b; f has one."""
    trainer = [held(("a", 10, 0, 6), ("b", 4, 0, 4)), held(("a", 10, 6, 4), ("b", 4, 0, 4))]
    e = [held(("a", 10, 0, 5), ("b", 4, 0, 4)), held(("a", 10, 5, 5), ("b", 4, 0, 4))]
    return Pair(Side("t", trainer), [Side("e", e), Side("f", [held(("a", 10, 0, 10), ("b", 4, 0, 4))])])


def test_small_pair_by_hand() -> None:
    """Of b, rank 0 writes one byte and rank 1 three, so that each writes seven."""
    report = examine(small())
    told = as_json(report)
    assert told["works"]
    assert told["trainer"] == [
        {"rank": 0, "holds": 10, "writes": 7, "sends": (5 + 1) + (1 + 1) + (6 + 1)},
        {"rank": 1, "holds": 8, "writes": 7, "sends": (0 + 3) + (4 + 3) + (4 + 3)},
    ]
    assert told["workers"] == [
        {"engine": "e", "rank": 0, "receives": 9},
        {"engine": "e", "rank": 1, "receives": 9},
        {"engine": "f", "rank": 0, "receives": 14},
    ]
    links = {(link["source"], link["engine"], link["rank"]): (link["copies"], link["bytes"]) for link in told["links"]}
    assert links == {
        (0, "e", 0): (2, 6),
        (1, "e", 0): (1, 3),
        (0, "e", 1): (2, 2),
        (1, "e", 1): (2, 7),
        (0, "f", 0): (2, 7),
        (1, "f", 0): (2, 7),
    }
    assert told["totals"] == {"copies": 11, "bytes": 32, "links": 6}
    assert told["balance"]["written"] == {"largest": 7, "lower_bound": 7.0, "ratio": 1.0}
    assert told["balance"]["sent"] == {"largest": 17, "lower_bound": 16.0, "ratio": 17 / 16}
    assert told["balance"]["received"]["largest"] == 14


def test_missing_unexpected_and_mismatched_are_named() -> None:
    trainer = [held(("a", 10, 0, 10), ("b", 4, 0, 4), ("c", 3, 0, 3))]
    engine = [held(("a", 11, 0, 11), ("b", 4, 0, 4), ("d", 3, 0, 3))]
    report = examine(Pair(Side("t", trainer), [Side("e", engine)]))
    told = as_json(report)
    assert not told["works"]
    assert (told["missing"], told["unexpected"]) == (["d"], ["c"])
    assert told["mismatched"] == {"a": "published as uint8[10], declared by reader rank 0 as uint8[11]"}
    assert "links" not in told
    text = "\n".join(lines(report))
    assert "does not work" in text
    for line in ("missing (no trainer rank has it, or not all of it): 1", "    d", "    c", "    a: published as"):
        assert line in text


def test_part_that_no_rank_has_is_missing() -> None:
    report = examine(Pair(Side("t", [held(("a", 10, 0, 9))]), [Side("e", [held(("a", 10, 0, 10))])]))
    assert report.problem
    assert report.problem.missing == ["a"]


def test_engine_of_another_model_does_not_fit() -> None:
    """A tied trainer and an engine of an untied one fit; qwen3's norms of heads are missing from a llama."""
    tied = model_of(tiny("qwen3, biases, tied"))
    separate = tiny("qwen3, biases, tied") | {"tie_word_embeddings": False}
    workers = engine(model_of(separate), parse("vllm:", ENGINES))
    assert examine(Pair(Side("t", [whole_model(tied)]), [Side("e", workers)])).works
    llama = whole_model(model_of(tiny("llama") | {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True}))
    problem = examine(Pair(Side("t", [llama]), [Side("e", workers)])).problem
    assert problem
    assert {name.rpartition("self_attn.")[2] for name in problem.missing} == {"q_norm.weight", "k_norm.weight"}


@given(
    st.dictionaries(
        st.frozensets(st.integers(0, 3), min_size=1).map(lambda found: tuple(sorted(found))),
        st.integers(1, 50),
        min_size=1,
    )
)
def test_lower_bound_is_the_largest_mean_of_a_group(sets: dict[tuple[int, ...], int]) -> None:
    every = [set(group) for count in range(1, 5) for group in combinations(range(4), count)]
    means = [sum(nbytes for ranks, nbytes in sets.items() if group >= set(ranks)) / len(group) for group in every]
    assert 0.97 * max(means) <= lower_bound(sets, 4) <= max(means) + 1e-9


def test_bytes_are_counted_by_who_holds_them() -> None:
    ranks = small().trainer.manifests
    assert Holdings(ranks).held() == {(0,): 6, (1,): 4, (0, 1): 4}
    tied = whole_model(model_of(tiny("qwen3, biases, tied")))
    assert Holdings([tied, tied]).held() == {(0, 1): tied.nbytes}


def test_bound_of_what_is_read_knows_what_is_read_more_than_once() -> None:
    """Rank 0 alone has a, which each worker takes whole; both have b, of which a worker takes half."""
    trainer = [held(("a", 6, 0, 6), ("b", 8, 0, 8)), held(("b", 8, 0, 8))]
    workers = [held(("a", 6, 0, 6), ("b", 8, start, 4)) for start in (0, 4)]
    report = examine(Pair(Side("t", trainer), [Side("e", workers), Side("f", workers)]))
    assert report.moved
    assert report.moved.written == Load(7, 7.0)
    assert report.moved.sent == Load(26, 24.0)  # a four times; of b the byte that rank 0 writes twice


def test_estimate_says_what_it_assumes() -> None:
    pair = small()
    memory = examine(pair).estimate
    assert memory
    assert memory.publish == pytest.approx(14 / PUBLISH_RATE / 1e9)
    assert memory.update == pytest.approx(32 / UPDATE_RATE / 1e9)
    assert "cpu.json" in memory.assumption
    link = examine(pair, 2.0).estimate
    assert link
    assert link.publish == pytest.approx(7 / 2e9)
    assert link.update == pytest.approx(17 / 2e9)
    assert "link of 2 GB/s" in link.assumption
    text = "\n".join(lines(examine(pair)))
    assert "estimate, not a measurement" in text
    assert memory.assumption in text


def test_default_rates_are_those_that_were_measured() -> None:
    figures = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.json").read_text())
    (one,) = (figure for figure in figures if figure["name"] == "host-400-reshard-checksum")
    assert round(one["bytes"] / one["publish"] / 1e9, 1) == PUBLISH_RATE
    assert round(one["bytes"] / one["pause"] / 1e9, 1) == UPDATE_RATE


def _values(model: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head,
        "intermediate_size": model.intermediate,
        "moe_intermediate_size": model.intermediate,
        "num_experts": model.experts,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": False,
    }


@pytest.mark.parametrize(
    ("values", "train", "infer", "ranks", "seconds"),
    [
        (_values(moe_30b()), "megatron:tp=4,pp=2,ep=8,etp=1,dp=8", "vllm:tp=8,engines=8", 64, 10.0),
        (_values(moe_1t()), "megatron:tp=4,pp=8,ep=32,etp=1,dp=8", "vllm:tp=8,dp=4,ep=32,engines=8", 256, 30.0),
    ],
)
def test_large_jobs_are_planned_soon_and_evenly(
    values: dict[str, Any], train: str, infer: str, ranks: int, seconds: float
) -> None:
    """A second or two on a quiet machine."""
    started = time.monotonic()
    report = examine(dry_pair(values, train, infer))
    assert time.monotonic() - started < seconds
    assert report.moved
    assert len(report.moved.writes) == ranks
    assert report.moved.written.ratio < 1.05
    assert sum(1 for _ in lines(report)) < 80
