"""Real SGLang, in its own environment: what its tests share."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from awexd_client import WeightWriter
from tests.daemons import Daemon

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PYTHON = ROOT / ".engines" / "sglang" / "bin" / "python"
_LEFT = ("sglang_", "sgl_shm_", "psm_", "sem.mp-")
"""What SGLang leaves in /dev/shm where its processes are ended."""


def environment() -> dict[str, str]:
    """Of a process that runs SGLang without a GPU, on one core a rank."""
    paths = [str(HERE / "stubs"), str(HERE / "workers")]
    return {key: value for key, value in os.environ.items() if not key.startswith("AWEXD_")} | {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def check_environment() -> None:
    """Fails where there is no SGLang to run."""
    if not PYTHON.exists():
        pytest.fail("SGLang's environment is missing: make engine-sglang", pytrace=False)


def run_worker(script: str, *arguments: object, timeout: float) -> None:
    """Runs a script of ``workers/`` in SGLang's environment; fails with what it said."""
    check_environment()
    command = [str(PYTHON), str(HERE / "workers" / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        pytest.fail(
            f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", pytrace=False
        )


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for part in checkpoint.glob("*.safetensors") for name, tensor in load_file(part).items()}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<family>/<number>, see workers/checkpoints.py."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_worker("checkpoints.py", folder, timeout=110)
    return folder


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests of a module."""
    with Daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def removes_what_sglang_leaves() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(_LEFT)}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # a process that has ended, or another user's
            mapped = maps.read_text(errors="replace")
            left -= {name for name in left if f"/dev/shm/{name}" in mapped}
    for name in left:
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def publish(job: str, socket: str, weights: dict[str, torch.Tensor], **options: object) -> WeightWriter:
    """A trainer of one rank, with its first version committed."""
    writer = WeightWriter(job, 0, 1, socket)
    writer.register(weights, **options)  # type: ignore[arg-type]
    writer.publish(1).committed()
    return writer
