"""Updates of vLLM's models by a real daemon: every parameter and buffer as vLLM's own loader makes it, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.engines.matrix import line
from tests.engines.vllm.running import Report, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PACKED = ["llama", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"]
PLAIN = ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"]
QUANTIZED = ["llama", "qwen2", "qwen3_tied"]
STAGED = ["qwen2", "qwen3_tied", "gpt_oss"]
ROUNDS = ["new", "newer", "old"]


Updated = Callable[..., list[Report]]


@pytest.fixture(scope="module")
def updated(models: Path, place: Path, served: Daemon) -> Updated:
    """Has so many ranks go through the updates; what each reports."""

    def run_all(ranks: int, **task: Any) -> list[Report]:
        store = place / "-".join(["store", str(ranks), *task.get("options", {})])
        task |= {"models": str(models), "socket": served.socket, "store": str(store), "world_size": ranks}
        return run("updates.py", [{**task, "rank": rank} for rank in range(ranks)], place)

    return run_all


@pytest.fixture(scope="module")
def packed(updated: Updated) -> Report:
    """One rank, and linear layers packed by oneDNN, as vLLM does on CPUs."""
    return updated(1, families=PACKED)[0]


@pytest.fixture(scope="module")
def plain(updated: Updated) -> list[Report]:
    """Two ranks of trainer and engine, and linear layers as they are loaded, as on GPUs."""
    return updated(2, families=PLAIN, prepack=False)


@pytest.fixture(scope="module")
def quantized(updated: Updated) -> list[Report]:
    """Two ranks of an engine that quantizes what it loads: eight bits, a scale a row."""
    return updated(2, families=QUANTIZED, prepack=False, options={"quantization": "fp8_per_channel"})


@pytest.fixture(scope="module")
def staged(updated: Updated) -> list[Report]:
    """Two stages of pipeline parallelism, a rank each."""
    return updated(2, families=STAGED, prepack=False, options={"stages": 2})


OWN = "vLLM's own loader"


@pytest.mark.parametrize(
    "family", [line(f, model=f, trainer="hf", engine="vllm TP1, packed by oneDNN", checked=OWN) for f in PACKED]
)
def test_packed_weights_equal_what_vllm_loads_after_each_of_three_updates(packed: Report, family: str) -> None:
    report = packed[family]
    assert report["changed"] > 10
    assert report["rounds"] == {version: [] for version in ROUNDS}
    assert report["states"] == {version: f"ready 1.{step}" for step, version in enumerate(ROUNDS)}


@pytest.mark.parametrize(
    "family", [line(f, model=f, trainer="shards on 2 ranks", engine="vllm TP2", checked=OWN) for f in PLAIN]
)
def test_plain_weights_on_two_ranks_equal_what_vllm_loads_after_each_update(plain: list[Report], family: str) -> None:
    for rank in plain:
        assert rank[family]["changed"] > 10
        assert rank[family]["rounds"] == {version: [] for version in ROUNDS}


@pytest.mark.parametrize(
    "family", [line(f, model=f, trainer="shards on 2 ranks", engine="vllm TP2, FP8", checked=OWN) for f in QUANTIZED]
)
def test_quantized_weights_equal_what_vllm_makes_of_the_checkpoint(quantized: list[Report], family: str) -> None:
    for rank in quantized:
        assert rank[family]["changed"] > 10
        assert rank[family]["rounds"] == {version: [] for version in ROUNDS}
        aside = rank[family]["aside"]
        assert aside["model.layers.1.mlp.down_proj.weight"] == "quantized: Fp8PtpcOnlineLinearMethod"
        assert "model.layers.1.input_layernorm.weight" in rank[family]["direct"]


@pytest.mark.parametrize(
    "family", [line(f, model=f, trainer="shards on 2 ranks", engine="vllm PP2", checked=OWN) for f in STAGED]
)
def test_weights_of_each_stage_equal_what_vllm_loads_after_each_update(staged: list[Report], family: str) -> None:
    for rank in staged:
        assert rank[family]["changed"] > 10
        assert rank[family]["rounds"] == {version: [] for version in ROUNDS}
    first, last = ({*rank[family]["direct"], *rank[family]["aside"]} for rank in staged)
    assert {name for name in first | last if ".layers.0." in name}.isdisjoint(last)
    assert {name for name in first | last if ".layers.1." in name}.isdisjoint(first)


@pytest.mark.parametrize("family", PACKED)
def test_what_vllm_packs_goes_through_its_loader_and_says_why(packed: Report, family: str) -> None:
    aside, direct = packed[family]["aside"], packed[family]["direct"]
    said = aside["model.layers.0.self_attn.o_proj.weight"]
    assert re.fullmatch(r"weight was repacked after loading: \[0\] now, \[128, \d+\] when it was loaded", said)
    assert {"model.norm.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"} <= set(direct)
    assert set(direct).isdisjoint(aside)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_tied"])
def test_what_vllm_leaves_as_it_was_loaded_is_written_in_place(plain: list[Report], family: str) -> None:
    assert [rank[family]["aside"] for rank in plain] == [{}, {}]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_only_packed_experts_are_loaded_where_linear_layers_are_plain(plain: list[Report], family: str) -> None:
    for rank in plain:
        assert rank[family]["aside"]
        assert all(".mlp.experts." in name for name in rank[family]["aside"])


def test_latent_attention_is_derived_anew_from_weights_written_in_place(plain: list[Report]) -> None:
    for rank in plain:
        assert "model.layers.0.self_attn.kv_b_proj.weight" in rank["deepseek_v3"]["direct"]
        assert "model.layers.1.mlp.gate.e_score_correction_bias" in rank["deepseek_v3"]["direct"]


@pytest.mark.parametrize("family", PACKED)
def test_loader_that_breaks_off_leaves_a_model_that_runs(packed: Report, family: str) -> None:
    failed = packed[family]["failed"]
    assert failed["said"] == "the engine could not load the new weights: OSError: the loader broke off"
    assert failed["state"] == "dirty"
    assert [failed["meta"], failed["lost"], failed["shapes"]] == [[], [], []]
