"""The rules of the vLLM adapter, element by element, against what vLLM's own loader has made of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.matrix import line
from tests.engines.vllm.running import Report, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DENSE = ["gemma2", "gemma3", "glm4"]
EXPERTS = ["deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"]
CASES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"families": [*DENSE, *EXPERTS], "options": {}},
    "expert parallel": {"families": EXPERTS, "options": {"enable_expert_parallel": True}},
    "round robin": {
        "families": ["deepseek_v3"],
        "options": {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
    },
}
EACH = [(case, family) for case, task in CASES.items() for family in task["families"]]


@pytest.fixture(scope="module")
def ranks(models: Path, place: Path) -> list[Report]:
    store = str(place / "store")
    shared = {"models": str(models), "store": store, "world_size": 2, "cases": CASES}
    return run("layouts.py", [{**shared, "rank": rank} for rank in range(2)], place)


@pytest.mark.parametrize(
    ("case", "family"),
    [
        line(c, f, model=f, trainer="layout only", engine=f"vllm 2 ranks, {c}", checked="vLLM's own loader")
        for c, f in EACH
    ],
)
def test_each_part_is_what_vllm_loaded_and_the_rest_is_padding(ranks: list[Report], case: str, family: str) -> None:
    for rank in ranks:
        found = rank[case][family]
        assert found["wrong"] == []
        assert found["uncovered"] == 0, "elements that no rule accounts for"
        assert found["forgotten"] == 0, "parameters that no rule accounts for"


@pytest.mark.parametrize(("case", "family"), EACH)
def test_ranks_together_name_the_whole_checkpoint(ranks: list[Report], case: str, family: str) -> None:
    one, other = (rank[case][family] for rank in ranks)
    assert set(one["missing"]).isdisjoint(other["missing"])
    assert set(one["names"]) | set(other["names"]) == set(one["names"]) | set(one["missing"])


def test_experts_are_divided_among_ranks_as_they_are_placed(ranks: list[Report]) -> None:
    def experts(rank: Report, case: str) -> set[int]:
        names = rank[case]["deepseek_v3"]["names"]
        return {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".mlp.experts." in name}

    assert [experts(rank, "tensor parallel") for rank in ranks] == [set(range(8)), set(range(8))]
    assert [experts(rank, "expert parallel") for rank in ranks] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [experts(rank, "round robin") for rank in ranks] == [{0, 2, 4, 6}, {1, 3, 5, 7}]


@pytest.fixture(scope="module")
def refused(models: Path, place: Path) -> Report:
    return run("refused.py", [{"models": str(models), "store": str(place / "refused")}], place)[0]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("mamba", "backbone.layers.0.mixer.A: a MambaMixer has no rule for it"),
        ("gptq", "layers.0.self_attn.qkv_proj: quantized in the checkpoint that the engine was started from (AutoGPTQ"),
        ("compressed-tensors", "qkv_proj: quantized in the checkpoint that the engine was started from (Compressed"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(refused: Report, model: str, says: str) -> None:
    assert says in refused[model]
