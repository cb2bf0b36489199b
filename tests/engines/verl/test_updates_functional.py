"""verl itself, in its own environment: its manager, actor and rollout workers, in ray actors, over a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.verl.running import report_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    with report_of("updates.py", ray=True) as found:
        yield found


def digests(update: Report) -> list[dict[str, str]]:
    return [rollout["digests"] for rollout in update["rollouts"]]


def versions(status: Report) -> dict[str, list[Any]]:
    """State and version of each rollout worker, by its name without the process id."""
    workers = {engine["engine"]: engine["workers"] for engine in status["engines"]}
    return {name.rsplit("-", 1)[0]: [found["state"], found["version"]] for name, (found,) in workers.items()}


def test_three_updates_bit_for_bit(report: Report) -> None:
    for number, update in enumerate(report["updates"], start=1):
        assert digests(update) == [update["weights"]] * 2
        assert all(rollout["updated"] == list(range(1, number + 1)) for rollout in update["rollouts"])
        assert update["metrics"]["awexd/step"] == number
        assert update["metrics"]["awexd/bytes"] > 1 << 20
    assert len({json.dumps(update["weights"]) for update in report["updates"]}) == 3, "they change each time"


def test_rollout_workers_show_as_what_they_are(report: Report) -> None:
    assert versions(report["status"]) == {"verl-0": ["ready", [1, 3]], "verl-1": ["ready", [1, 3]]}


@pytest.mark.parametrize(
    ("failure", "step", "message"),
    [("raised", 4, "the gathering failed"), ("refused", 5, "up.bias came twice in one stream")],
)
def test_failure_in_the_middle(report: Report, failure: str, step: int, message: str) -> None:
    """The rollout workers keep what they had, and answer meanwhile; the same step succeeds afterwards."""
    failed, after = report[failure], report[f"after_{failure}"]
    before = report["updates"][2] if step == 4 else report["after_raised"]
    assert message in failed["error"]
    assert digests(failed) == digests(before)
    assert digests(after) == [after["weights"]] * 2
    assert after["weights"] != before["weights"]
    assert all(rollout["updated"][-1] == step for rollout in after["rollouts"])
    assert after["metrics"]["awexd/step"] == step


@pytest.mark.parametrize(("update", "step"), [("same_step", 6), ("no_step", 7)])
def test_steps_that_do_not_rise(report: Report, update: str, step: int) -> None:
    assert digests(report[update]) == [report[update]["weights"]] * 2
    assert report[update]["metrics"]["awexd/step"] == step


def test_restarted_trainer_is_not_mistaken_for_the_one_before(report: Report) -> None:
    restarted = report["restarted"]
    assert digests(restarted) == [restarted["weights"]] * 2
    assert digests(restarted) != digests(report["no_step"])
    assert restarted["metrics"]["awexd/step"] == 7


def test_fewer_replicas(report: Report) -> None:
    gone, there = digests(report["fewer"])
    assert there == report["fewer"]["weights"]
    assert [gone] * 2 == digests(report["restarted"])
    found = report["status_at_end"]["engines"]
    assert sorted(worker["version"] for engine in found for worker in engine["workers"]) == [[2, 7], [2, 8]]


def test_arguments_that_are_wrong(report: Report) -> None:
    assert "engine_kwargs.awexd has unknown names: jobb; known: job (needed), socket" in report["unknown"]
    assert "engine_kwargs.awexd.job is missing" in report["missing"]
