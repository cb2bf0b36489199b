"""Scripts of ``workers/`` in verl's environment, each with a daemon of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.engines.environments import ROOT, python_of

WORKERS = Path(__file__).parent / "workers"
SECONDS = 500.0


@contextmanager
def report_of(script: str, *, ray: bool = False) -> Iterator[Any]:
    """What ``script REPORT SOCKET`` (and a folder for ray) reports; fails the test with what it said instead."""
    folder = Path(tempfile.mkdtemp(prefix="verl-", dir="/tmp"))  # short: ray's sockets lie in it
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("AWEXD_", "RAY_"))}
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    (folder / "d").mkdir()
    try:
        with Daemon(folder / "d") as daemon:
            report = folder / "report"
            command = [str(python_of("verl")), str(WORKERS / script), str(report), daemon.socket]
            command += [str(folder / "ray")] if ray else []
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=folder
            )
            if done.returncode:
                pytest.fail(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}\n{daemon.log()[-2000:]}", pytrace=False)
            yield json.loads(report.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
