"""The GPU's benchmark at small sizes, on a GPU."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import gpu

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
