"""The GPU's benchmark at small sizes, on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks import gpu, gpus

COMMAND = [sys.executable, gpu.__file__, "--quick", "--rounds", "1", "--peers"]
ELSEWHERE = "peer-checkpoint-engine"
"""It needs an environment of its own."""


def test_every_figure_can_be_measured() -> None:
    options = [part for name in gpu.KNOWN if name != ELSEWHERE for part in ("--only", name)]
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in told} == set(gpu.KNOWN) - {ELSEWHERE}
    assert [line for line in told if line.endswith("not measured")] == [], done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs: run `make test-gpu`")
def test_every_figure_of_two_gpus_can_be_measured() -> None:
    command = [sys.executable, gpus.__file__, "--quick", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("\n\n")[0].splitlines()
    wanted = {"peer-dense", "peer-dense-memory", "peer-moe", "peer-moe-memory", "two-by-two-direct", "two-by-two-host"}
    assert {line.split()[0] for line in told} == wanted, done.stdout
