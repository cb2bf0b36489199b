"""A daemon that stands still, or something else in its place: every call ends within a bound near its deadline."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from awexd_client import AwexdError, DeadlineExceeded, VersionUnavailable, WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon
from tests.e2e.clients import Background

TIMEOUT = 0.2
BOUND = 9.0
"""Seconds: far over the timeout, and under every constant of the client."""


@pytest.fixture
def pair(daemon: Daemon) -> Iterator[tuple[WeightWriter, WorkerWeightsReader]]:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register({"w": torch.zeros(10)})
        reader.register({"w": torch.zeros(10)})
        writer.publish(1)
        reader.update()
        yield writer, reader


def ends_in_time(call: Callable[[], object], then: Callable[[], None]) -> AwexdError:
    """The call's error, and that it came in time; ``then`` in any case."""
    started = time.monotonic()
    running = Background(call)
    running._thread.join(BOUND)
    ended = not running._thread.is_alive()
    then()
    with pytest.raises(AwexdError) as caught:
        running.result()
    assert ended, f"took more than {BOUND} s: {time.monotonic() - started:.1f} s"
    return caught.value


def test_every_call_while_the_daemon_stands_still(
    daemon: Daemon, pair: tuple[WeightWriter, WorkerWeightsReader]
) -> None:
    writer, reader = pair
    update = writer.begin(2)
    update.write({"w": torch.ones(10)})
    update._timeout = TIMEOUT
    os.kill(daemon.pid, signal.SIGSTOP)
    writing: list[Callable[[], object]] = [
        lambda: update.__exit__(None, None, None),
        lambda: writer.publish(2, timeout=TIMEOUT),
        lambda: writer.register({"w": torch.zeros(10)}, timeout=TIMEOUT),
    ]
    reading: list[Callable[[], object]] = [
        lambda: reader.update(timeout=TIMEOUT),
        lambda: reader.wait(5, timeout=TIMEOUT),
    ]
    late: list[str] = []

    def take_turns(calls: list[Callable[[], object]], side: str) -> None:
        for number, call in enumerate(calls):
            started = time.monotonic()
            with pytest.raises(AwexdError):
                call()
            if time.monotonic() - started > BOUND:
                late.append(f"{side} {number}")

    try:
        sides = [Background(lambda: take_turns(writing, "writer")), Background(lambda: take_turns(reading, "reader"))]
        for side in sides:
            side.result()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert late == []
    writer.publish(3, timeout=30).committed()
    assert reader.update().step == 3
    assert reader.state == "ready"


def test_update_that_was_staged_needs_no_word_from_the_daemon(folder: Path) -> None:
    """What the reader sends in time counts, however late the daemon takes it: here after the lease's own time."""
    with (
        Daemon(folder, "--lease-ttl", "2") as daemon,
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        source, into = torch.ones(1000), torch.zeros(1000)
        writer.register({"w": source})
        reader.register({"w": into})
        writer.publish(1)
        staged = reader.stage()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert reader.apply(staged).step == 1
            assert (reader.state, reader.version) == ("ready", (1, 1))
            with pytest.raises(DeadlineExceeded):
                reader.wait(9, timeout=0.5)
            assert time.monotonic() > staged.until
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        (worker,) = daemon.ask("status")["jobs"][0]["engines"][0]["workers"]
        assert (worker["state"], worker["version"]) == ("ready", [1, 1])
        source.fill_(2)
        writer.publish(2)
        assert reader.update().step == 2
        assert torch.equal(into, source)


def test_update_whose_lease_ran_out_while_everything_stood_still(folder: Path) -> None:
    """By its own clock the reader cannot take it for good, and the daemon does not either."""
    with (
        Daemon(folder, "--lease-ttl", "0.3") as daemon,
        WeightWriter("grpo", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register({"w": torch.ones(1000)})
        reader.register({"w": torch.zeros(1000)})
        writer.publish(1)
        staged = reader.stage()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                reader.wait(9, timeout=0.1)
            assert time.monotonic() > staged.until
            applying = Background(lambda: reader.apply(staged))
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        with pytest.raises(VersionUnavailable, match="lease of this update has run out"):
            applying.result()
        assert (reader.state, reader.version) == ("dirty", None)
        (worker,) = daemon.ask("status")["jobs"][0]["engines"][0]["workers"]
        assert (worker["state"], worker["version"]) == ("dirty", None)
        assert reader.update().step == 1


def test_something_that_never_greets_in_the_place_of_the_daemon(
    daemon: Daemon, pair: tuple[WeightWriter, WorkerWeightsReader]
) -> None:
    _, reader = pair
    daemon.kill()
    os.unlink(daemon.socket)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(daemon.socket)
        silent.listen()
        error = ends_in_time(lambda: reader.update(timeout=TIMEOUT), lambda: silent.shutdown(socket.SHUT_RDWR))
        assert isinstance(error, DeadlineExceeded | ConnectionError)
    os.unlink(daemon.socket)
    daemon.start()
    assert reader.update().step == 1
