"""Models as SGLang builds them, each brought from one checkpoint to another through a real daemon.

The other side of every comparison is SGLang's own loader: a model that was built from the second checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.daemons import Daemon
from tests.engines.sglang.conftest import publish, run_worker, tensors
from tests.engines.sglang.workers.checkpoints import FAMILIES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


class Layout(NamedTuple):
    """Ranks that hold a model together, and SGLang's arguments for that.

    Attributes:
        as_on_gpus: with what SGLang does there only: key/value heads are replicated rather than padded, and DeepSeek's
            shared expert is one more of the routed ones.
    """

    ranks: int
    arguments: dict[str, Any]
    as_on_gpus: bool = False


TP2 = Layout(2, {"tp_size": 2})
LAYOUTS = {
    "tp1": Layout(1, {}),
    "tp2": TP2,
    "tp4": Layout(4, {"tp_size": 4}, as_on_gpus=True),
    "tp4_padded": Layout(4, {"tp_size": 4}),
    "pp2": Layout(2, {"pp_size": 2}),
    "ep2": Layout(2, {"tp_size": 2, "ep_size": 2}),
    "ep2_fused": Layout(2, {"tp_size": 2, "ep_size": 2}, as_on_gpus=True),
    "dp2": Layout(2, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
}
CASES = [
    *((family, "tp2") for family in FAMILIES),
    ("qwen3", "tp1"),
    ("qwen3", "tp4"),  # more ranks than key/value heads
    ("qwen3_tied", "pp2"),  # the last stage has a copy of the embedding
    ("qwen3_moe", "ep2"),
    ("deepseek_v3", "ep2_fused"),
    ("deepseek_v3", "dp2"),
]
PADDED = ("qwen3", "tp4_padded")
NEVER_CHANGE = ("rotary_emb", "model.normalizer", "inv_freq")
"""Tensors that models compute from their configuration."""

Reports = dict[tuple[str, str, int], tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(module_daemon: Daemon, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """(of the model updated from checkpoint 0 to 1, of the one built from 1) by family, layout and rank."""
    socket = module_daemon.socket
    writers = [publish(family, socket, tensors(checkpoints / family / "1")) for family in FAMILIES]
    folder = tmp_path_factory.mktemp("reports")
    cases = []
    for family, layout in [*CASES, PADDED]:
        ranks, arguments, as_on_gpus = LAYOUTS[layout]
        common = {"ranks": ranks, "arguments": {"dtype": "bfloat16"} | arguments, "as_on_gpus": as_on_gpus}
        old, new = (str(checkpoints / family / number) for number in "01")
        cases.append(common | {"name": f"{family}-{layout}-fresh", "model": new})
        cases.append(common | {"name": f"{family}-{layout}", "model": old, "job": family, "socket": socket})
    (folder / "cases.json").write_text(json.dumps(cases))
    run_worker("layouts.py", folder / "cases.json", folder, timeout=390)
    yield {
        (family, layout, rank): (
            json.loads((folder / f"{family}-{layout}.{rank}.json").read_text()),
            json.loads((folder / f"{family}-{layout}-fresh.{rank}.json").read_text()),
        )
        for family, layout in [*CASES, PADDED]
        for rank in range(LAYOUTS[layout].ranks)
    }
    for writer in writers:
        writer.close()


RANKS = [(family, layout, rank) for family, layout in CASES for rank in range(LAYOUTS[layout].ranks)]


@pytest.mark.parametrize("path", ["direct", "loader"])
@pytest.mark.parametrize(("family", "layout", "rank"), RANKS)
def test_every_tensor_is_what_sglang_loads_itself(
    reports: Reports, family: str, layout: str, rank: int, path: str
) -> None:
    updated, fresh = reports[family, layout, rank]
    assert "error" not in updated | fresh, updated.get("error") or fresh.get("error")
    assert updated[path]["after"] == fresh["loaded"]


@pytest.mark.parametrize(("family", "layout", "rank"), RANKS)
def test_every_tensor_differs_between_the_checkpoints(reports: Reports, family: str, layout: str, rank: int) -> None:
    updated, fresh = reports[family, layout, rank]
    same = [name for name, digest in updated["loaded"].items() if fresh["loaded"][name] == digest]
    assert [name for name in same if not any(part in name for part in NEVER_CHANGE)] == []


@pytest.mark.parametrize(("family", "layout", "rank"), RANKS)
def test_everything_is_written_in_place_but_a_router_that_is_kept_wider(
    reports: Reports, family: str, layout: str, rank: int
) -> None:
    reasons = reports[family, layout, rank][0]["direct"]["reasons"]
    router = "model.layers.1.mlp.gate.weight"
    wider = {router: "torch.float32 in memory, torch.bfloat16 in checkpoints"}
    assert reasons == (wider if family == "glm4_moe" else {})


@pytest.mark.parametrize(("family", "layout", "rank"), RANKS)
def test_loader_takes_all_when_asked_to(reports: Reports, family: str, layout: str, rank: int) -> None:
    asked = reports[family, layout, rank][0]["loader"]
    assert asked["direct"] == []
    assert set(asked["reasons"].values()) == {"the loader was asked for"}


def test_shared_expert_is_one_of_the_slots_where_it_is_fused(reports: Reports) -> None:
    loaded = reports["deepseek_v3", "ep2_fused", 0][0]["loaded"]
    assert loaded["model.layers.1.mlp.experts.w13_weight"].startswith("[5, 128, 128] ")  # 8 routed by 2, and it
    assert not any("shared_experts" in name for name in loaded)


def test_key_and_value_heads_are_replicated_with_more_ranks(reports: Reports) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert reports["qwen3", "tp4", 0][0]["loaded"][name].startswith("[128, 128] ")  # 2 of 8 query heads, 1 of 2, 1 of 2


def test_heads_that_sglang_pads_are_refused_by_name(reports: Reports) -> None:
    for rank in range(4):
        error = reports[*PADDED, rank][0]["error"]
        assert "ManifestMismatch" in error
        assert "model.layers.0.self_attn.q_proj.weight: published as bfloat16[256, 128], declared by reader" in error
