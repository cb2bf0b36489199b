"""``sgl.Engine`` in a process of its own, updated from Python; what it must come to is what SGLang loads itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.engines.sglang.conftest import run_worker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def report(module_daemon: Daemon, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("engine") / "report.json"
    run_worker("engine.py", checkpoints / "qwen3_moe", module_daemon.socket, "grpo", path, timeout=190)
    said: dict[str, Any] = json.loads(path.read_text())
    return said


@pytest.mark.parametrize("number", ["1", "2"])
def test_update_is_what_sglang_loads_itself(report: dict[str, Any], number: str) -> None:
    assert report[f"updated {number}"] == report[f"loaded {number}"]
    assert report[f"version {number}"] == f"1.{number}"


def test_checkpoints_give_other_tokens(report: dict[str, Any]) -> None:
    states = ("before", "loaded 1", "loaded 2")
    assert len({tuple(report[state]["tokens"]) for state in states}) == len(states)


def test_step_that_does_not_come_leaves_the_engine_as_it_was(report: dict[str, Any]) -> None:
    assert "DeadlineExceeded" in report["too early"] or "VersionUnavailable" in report["too early"]
    assert report["still before"] == report["before"]
