"""The kernels of devices themselves, where there is none: in Triton's interpreter, on host memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("what", ["copies", "casts", "sums", "cast-sums", "checks"])
def test_kernels_do_what_torch_does(what: str) -> None:
    command = [sys.executable, "-m", "tests.transports.interpreted", what]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as torch\n"
