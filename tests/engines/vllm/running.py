"""Runs scripts of ``workers/`` in vLLM's own environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
WORKERS = Path(__file__).parent / "workers"
SECONDS = 500.0
_TAIL = 4000

Report = dict[str, Any]


def environ(**more: str) -> dict[str, str]:
    """Without this process's own paths: the environment has the package installed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("AWEXD_")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_CI_ENV": "1",  # no warm-up
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",  # without it vLLM wants a NUMA node for each worker
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "awexd",
        **more,
    }


def python() -> str:
    if not PYTHON.exists():
        pytest.fail("there is no environment for vLLM: run `make engine-vllm`", pytrace=False)
    return str(PYTHON)


def run(script: str, tasks: Sequence[dict[str, Any]], folder: Path) -> list[Report]:
    """Runs a script once for each task, all at the same time.

    Args:
        folder: for their output.

    Returns:
        The last line that each printed, which is JSON.
    """
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_started(script, task, folder / str(at))) for at, task in enumerate(tasks)]
        for at, process in enumerate(started):
            if process.wait(SECONDS):
                pytest.fail(f"{script} of {tasks[at]} failed:\n{_output(folder / str(at), 'err')[-_TAIL:]}")
    return [json.loads(_output(folder / str(at), "out").splitlines()[-1]) for at in range(len(tasks))]


@contextlib.contextmanager
def _started(script: str, task: dict[str, Any], name: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [python(), str(WORKERS / script), json.dumps(task)]
    with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _output(name: Path, which: str) -> str:
    return Path(f"{name}.{which}").read_text(errors="replace").strip()
