from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import torch

from awexd_client import DeadlineExceeded, WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon


def test_life_of_a_job_in_events(daemon: Daemon) -> None:
    with WeightWriter("j", 0, 1, daemon.socket) as writer, WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader:
        writer.register({"a": torch.ones(10)})
        reader.register({"a": torch.zeros(10)})
        for step in (1, 2):
            writer.publish(step)
        reader.update()
        daemon.ask("rollback", job="j", step=1)
        reader.close()
        writer.close_job()
    events = daemon.ask("events", job="j", after=None)["events"]
    assert [event["kind"] for event in events] == [
        *("epoch", "joined", "joined", "committed", "committed", "withdrawn", "left", "closed")
    ]
    assert events[3]["text"].startswith("epoch 1 step 1 committed, ")
    assert daemon.ask("events", job="k", after=None)["events"] == []


def test_wait_for_the_next_event_has_a_deadline(daemon: Daemon) -> None:
    last = daemon.ask("events", job=None, after=None)["last"]
    with pytest.raises(DeadlineExceeded, match="something to happen"):
        daemon.ask("events", job=None, after=last, timeout=0.1)
    # A number of an earlier daemon, which had got further: what happens from now on is told.
    with pytest.raises(DeadlineExceeded):
        daemon.ask("events", job=None, after=last + 1000, timeout=0.1)


def test_more_events_than_one_answer_takes_come_in_pages(daemon: Daemon) -> None:
    with WorkerWeightsReader("j", "e", 0, 1, daemon.socket) as reader:
        reader.register({"a": torch.zeros(10)})
        for number in range(400):
            reader.fail(ValueError(f"{number:03} " + "x" * 980))
        pages, after = [], None
        while after is None or pages[-1]["more"]:
            pages.append(daemon.ask("events", job="j", after=after))
            after = pages[-1]["last"]
        command = [sys.executable, "-m", "awexd.ctl", "events", "--socket", daemon.socket, "--json"]
        told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    events = [event for page in pages for event in page["events"]]
    assert len(pages) > 1
    assert [event["number"] for event in events] == list(range(1, 402))
    assert told["events"][: len(events)] == events


def test_awexctl_follows_events_until_it_is_stopped(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "awexd.ctl", "events", "--socket", daemon.socket, "--job", "j", "--json"]
    with WeightWriter("j", 0, 1, daemon.socket) as writer:
        writer.register({"a": torch.ones(10)})
        with subprocess.Popen([*command, "--follow"], stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            kinds = [json.loads(following.stdout.readline())["kind"] for _ in range(2)]
            assert kinds == ["epoch", "joined"]
            writer.publish(1)
            event = json.loads(following.stdout.readline())
            assert (event["kind"], event["number"]) == ("committed", 3)
            following.send_signal(signal.SIGTERM)  # what starts in the background may ignore SIGINT
            assert following.wait(30) == 0
        whole = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert [event["kind"] for event in json.loads(whole.stdout)["events"]] == ["epoch", "joined", "committed"]
        lines = subprocess.run(command[:-1], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        assert lines[-1].endswith("epoch 1 step 1 committed, " + event["text"].split(", ")[1])
