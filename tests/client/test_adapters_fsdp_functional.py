"""Real FSDP2 and DTensors over gloo: what all ranks' shards say together, against the whole tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "workers" / "fsdp_shards.py"
LAYOUTS = [
    "moe_tied",
    "uneven",
    "hsdp",
    "fsdp_tp_10",
    "fsdp_tp_7",
    "fsdp_tp_3",
    "dim_1_and_ignored",
    "mapping",
    "strided",
]
EXPERTS = ["experts_dim_0", "experts_dim_1", "experts_dim_2", "experts_two_dims"]


def launch(folder: Path, world: int, which: str) -> Path:
    """Runs a world of workers to its end; any rank's failure is shown with what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(rank), str(world), which],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    failed = [text for rank, text in zip(ranks, printed, strict=True) if rank.returncode]
    if failed:
        pytest.fail("\n".join(failed))
    return folder


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("layouts"), 4, "layouts")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("train"), 2, "train")


def dumped(folder: Path, case: str, rank: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    with safe_open(folder / f"{case}.{rank}.safetensors", "pt") as file:
        boxes = json.loads(file.metadata()["shards"])
        return [(box, file.get_tensor(str(at))) for at, box in enumerate(boxes)]


def check_case(folder: Path, case: str, world: int) -> None:
    """Every element of every tensor is held by some rank, and equals the whole tensor's wherever it is held."""
    whole = load_file(folder / f"{case}.reference.safetensors")
    covered = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in whole.items()}
    for rank in range(world):
        for box, tensor in dumped(folder, case, rank):
            name = box["name"]
            assert box["live"] or not tensor.numel(), (rank, name)
            assert tuple(box["shape"]) == tuple(whole[name].shape), (rank, name)
            assert tensor.dtype == whole[name].dtype
            region = tuple(slice(at, at + n) for at, n in zip(box["offset"], tensor.shape, strict=True))
            assert torch.equal(tensor, whole[name][region]), (rank, name, box)
            covered[name][region] += 1
    missing = [name for name, times in covered.items() if not times.all()]
    assert not missing


@pytest.mark.parametrize("case", [*LAYOUTS, *EXPERTS])
def test_shards_of_every_layout_cover_the_whole_exactly(layouts: Path, case: str) -> None:
    check_case(layouts, case, 4)


@pytest.mark.parametrize("case", ["trained", "resharded"])
def test_shards_after_training_are_the_trained_weights(trained: Path, case: str) -> None:
    check_case(trained, case, 2)


def test_shards_of_fsdp_without_replication_are_disjoint(layouts: Path) -> None:
    whole = load_file(layouts / "fsdp_tp_7.reference.safetensors")
    weights = {"up.weight", "up.bias", "down.weight"}
    held = [t.numel() for rank in range(4) for box, t in dumped(layouts, "fsdp_tp_7", rank) if box["name"] in weights]
    assert sum(held) == sum(whole[name].numel() for name in weights)


def test_empty_shard_starts_at_the_end_of_its_dimension(layouts: Path) -> None:
    (found,) = [(box, t) for box, t in dumped(layouts, "uneven", 3) if box["name"] == "down.weight"]
    assert found[1].shape == (0, 10)
    assert found[0]["offset"] == [6, 0]


def test_lone_strided_shard_is_one_shard_a_run(layouts: Path) -> None:
    found = [(box["offset"], list(t.shape)) for box, t in dumped(layouts, "strided", 0) if box["name"] == "2"]
    assert found == [([0, 0], [2, 7]), ([7, 0], [2, 7])]


def test_tied_embedding_is_held_under_both_names_at_one_address(layouts: Path) -> None:
    found = {box["name"]: box["at"] for box, _ in dumped(layouts, "moe_tied", 0)}
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"]


def test_rank_outside_the_mesh_yields_nothing(trained: Path) -> None:
    assert [box["name"] for box, _ in dumped(trained, "outside", 0)] == ["w"]
    assert dumped(trained, "outside", 1) == []
