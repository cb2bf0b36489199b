"""Weights and optimizer of a real FSDP2 trainer, of which no rank has as much as another, put aside and had back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from awexd_client import WorkerWeightsReader
from tests.daemons import Daemon

WORKER = Path(__file__).parent / "workers" / "fsdp_offload.py"


def test_uneven_shards_come_back_and_training_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(tmp_path), str(rank), "2", daemon.socket],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        printed = [one.communicate(timeout=100) for one in running]
    finally:
        for one in running:
            one.kill()
            one.communicate()
    assert [one.returncode for one in running] == [0, 0], printed
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"left": 0, "same": True}
    shapes = {
        "0.weight": (7, 8),
        "0.bias": (7,),
        "1.weight": (1, 7),
        "1.bias": (1,),
        "2.weight": (8, 1),
        "2.bias": (8,),
    }
    with WorkerWeightsReader("fsdp", "e", 0, 1, daemon.socket) as reader:
        reader.register({name: torch.zeros(shape) for name, shape in shapes.items()})
        assert reader.update().step == 2
