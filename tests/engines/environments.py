"""Where engines' virtual environments are, and processes of several ranks in them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(engine: str) -> Path:
    """The engine's interpreter; fails the test, naming the make target, where there is none."""
    folder = ROOT / ".engines" / engine
    if not any(folder.glob(".package-*")):
        pytest.fail(f"the engine's environment is missing or not whole: run `make engine-{engine}`", pytrace=False)
    return folder / "bin" / "python"


def run_ranks(engine: str, script: Path, world: int, arguments: Sequence[object], seconds: float) -> None:
    """Runs ``script FOLDER RANK WORLD ...`` on every rank and waits; ``arguments`` are the folder, then the rest.

    Fails the test with what they printed if one of them fails or does not end; none is left.
    """
    folder, *rest = map(str, arguments)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    logs = [Path(folder, f"log.{rank}") for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        command = [str(python_of(engine)), str(script), folder, str(rank), str(world), *rest]
        with open(log, "wb") as output:
            processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
            )
    ends = time.monotonic() + seconds
    try:
        # In any order: the others of one that has failed wait for it.
        failed = any(process.wait(max(1.0, ends - time.monotonic())) for process in processes)
    except subprocess.TimeoutExpired:
        failed = True
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        pytest.fail(
            "\n".join(f"rank {rank}:\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs)), pytrace=False
        )
