"""The back end as verl makes and calls it, stopped in the middle of updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.verl.running import report_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    with report_of("alone.py") as found:
        yield found


def test_updates(report: Report) -> None:
    assert report["first"] == "InvalidArgument: init_process_group comes first"
    assert report["updates"] == [True, True]


def test_waiting_leaves_the_loop_alone(report: Report) -> None:
    assert (report["waits"], report["waited"]) == (True, True)


def test_closed_early(report: Report) -> None:
    assert report["halfway"] == "a"
    assert report["second_receiver"] == "InvalidArgument: this worker still receives another version"
    assert report["closed_early"] == ["dirty", None]
    assert report["after_closing"]
    assert report["state_after_closing"] == ["ready", [1, 5]]


def test_version_withdrawn_while_it_is_received(report: Report) -> None:
    assert report["withdrawn"].startswith("VersionUnavailable: ")
    assert "was withdrawn during this update" in report["withdrawn"]
    assert report["state_withdrawn"] == ["dirty", None]
    assert report["after_withdrawing"]


def test_cancelled_or_abandoned_while_it_waits(report: Report) -> None:
    assert report["cancelled"].startswith("CancelledError")
    assert report["after_cancelling"]
    assert report["after_abandoning"]
    assert report["abandoned"].startswith(("DaemonUnavailable", "InvalidArgument"))


def test_every_rank_exhausts_the_generator(report: Report) -> None:
    """Also a master that is refused, for the others are in the generator's collectives; and a rank that is none."""
    assert report["not_rising"].startswith("VersionConflict")
    assert report["exhausted"] == 4
    assert report["bystander"] == [{}, 8]


def test_another_node(report: Report) -> None:
    assert "rollout worker 0 runs on another node than the trainer's master" in report["elsewhere"]
    assert report["at_end"]
