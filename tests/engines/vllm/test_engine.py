"""A whole vLLM in one process: what it generates after updates and after failures, in fp32, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.engines.vllm.running import Report, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module", params=[{}, LORA], ids=["plain", "LoRA"])
def report(models: Path, place: Path, served: Daemon, request: pytest.FixtureRequest) -> Report:
    """Of an engine as it is, and of one whose modules are wrapped for adapters."""
    task = {"models": str(models), "family": "qwen3", "socket": served.socket, "options": request.param}
    return run("engine.py", [{**task, "job": "lora" if request.param else "grpo"}], place)[0]


@pytest.mark.parametrize(
    "step", ["start", "update", "loader", "aside", "direct", "again", "unknown", "late", "by hand"]
)
def test_tokens_are_those_of_the_version_that_should_be_live(report: Report, step: str) -> None:
    assert report["steps"][step]["tokens"] == report["steps"][step]["expected"]


def test_tokens_tell_versions_apart(report: Report) -> None:
    expected = {tuple(report["steps"][step]["expected"]) for step in ("start", "update", "again")}
    assert len(expected) == 3


def test_version_is_said_as_epoch_and_step_and_only_after_success(report: Report) -> None:
    said = {step: noted["version"] for step, noted in report["steps"].items()}
    assert said["start"] == "default"
    assert [said[step] for step in ("update", "loader", "aside", "direct")] == ["1.1"] * 4
    assert said["again"] == said["unknown"] == said["late"] == "1.5"
    assert said["by hand"] == "by hand 6"


def test_loader_that_breaks_off_is_told_and_the_version_before_is_live_again(report: Report) -> None:
    kind, message, note = report["steps"]["loader"]["error"]
    assert (kind, message) == ("AwexdError", "the engine could not load the new weights: OSError: the loader broke off")
    assert note == "rollout runs on epoch 1 step 1 again"


def test_corrupted_byte_that_the_loader_would_take_is_found_before_anything_is_touched(report: Report) -> None:
    kind, message, *notes = report["steps"]["aside"]["error"]
    assert kind == "IntegrityError"
    assert "self_attn.q_proj.weight" in message
    assert notes == []


def test_corrupted_byte_written_in_place_is_found_and_the_version_before_is_live_again(report: Report) -> None:
    kind, message, note = report["steps"]["direct"]["error"]
    assert kind == "IntegrityError"
    assert "input_layernorm.weight" in message
    assert note == "rollout runs on epoch 1 step 1 again"


def test_update_by_vllms_own_calls_fails_with_the_cause_and_works_afterwards(report: Report) -> None:
    assert "unexpected keyword argument 'steps'" in report["steps"]["unknown"]["error"][1]
    assert "step 6 of epoch 1 to be committed" in report["steps"]["late"]["error"][1]
    assert report["steps"]["by hand"]["error"] is None


def test_nothing_is_left_without_memory(report: Report) -> None:
    assert report["meta"] == []
    assert report["state"] == "ready"


def test_stages_are_updated_together_or_not_at_all(models: Path, place: Path, served: Daemon) -> None:
    (steps,) = run("stages.py", [{"models": str(models), "socket": served.socket}], place)
    assert all(step["right"] for step in steps.values()), steps
    first, last = steps["update"]["split"]
    assert (len(first), len(last)) == (2, 2)
    assert [steps[name]["version"] for name in ("start", "update", "corrupted", "again")] == [
        *("default", "1.1", "1.1", "1.3")
    ]
    message, note = steps["corrupted"]["error"]
    assert "layers.1.input_layernorm.weight" in message, "of the second stage only"
    assert note == "rollout runs on epoch 1 step 1 again"
