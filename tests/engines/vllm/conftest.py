"""Tiny checkpoints, made once, and a daemon for each module of tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.engines.vllm.running import SECONDS, WORKERS, environ, python


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by family and version."""
    folder = tmp_path_factory.mktemp("vllm-models")
    command = [python(), str(WORKERS / "models.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environ(), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """An empty folder with a short path."""
    path = Path(tempfile.mkdtemp(prefix="awexd-v"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Daemon]:
    with Daemon(place) as running:
        yield running
