"""Versions read tensor by tensor, by what has no tensors of its own to fill."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from awexd_client import (
    DeadlineExceeded,
    EpochChanged,
    IntegrityError,
    ManifestMismatch,
    Shard,
    VersionUnavailable,
    WeightWriter,
)
from awexd_client.held import HeldReader, HeldVersion
from awexd_transports.shard import PAIRS
from tests.client.samples import weights
from tests.daemons import Daemon

LARGE = 3 << 20


def model(value: float) -> dict[str, torch.Tensor]:
    """Names of every shape, a tied one, and one of many tiles."""
    tensors = weights(value) | {"empty": torch.empty(0, 3), "one": torch.tensor(value, dtype=torch.float64)}
    tensors["large"] = (torch.arange(LARGE, dtype=torch.int32) + int(value)).view(3, -1)
    return tensors | {"tied": tensors["a"], "turned": torch.arange(12.0).view(3, 4).T}


@pytest.fixture
def held(daemon: Daemon) -> Iterator[HeldReader]:
    with HeldReader("grpo", "rollout-0", daemon.socket) as opened:
        yield opened


def flip(daemon: Daemon, writer: WeightWriter, name: str) -> None:
    """Changes a byte of that tensor's in every held segment."""
    manifest = writer._segment.manifest
    piece = next(number for number, entry in enumerate(manifest.pieces) if entry.tensor.name == name)
    for path in (Path("/dev/shm") / segment for segment in daemon.segments()):
        with open(path, "r+b") as file:
            if file.read(8) == b"AWEXDSEG":
                os.pwrite(file.fileno(), b"\xa5", 4096 + manifest.piece_offsets[piece] + 3)


def worker(daemon: Daemon) -> dict[str, object]:
    (job,) = daemon.ask("status")["jobs"]
    (engine,) = job["engines"]
    (found,) = engine["workers"]
    return {"engine": engine["engine"], "state": found["state"], "version": found["version"]}


@pytest.mark.parametrize("verify", ["checksum", "off"])
@pytest.mark.parametrize("stored", ["checksum", "off"])
def test_tensors_are_the_published_ones(daemon: Daemon, each_way: str, verify: str, stored: str) -> None:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket, verify=stored) as writer,
        HeldReader("grpo", "e", daemon.socket, verify=verify) as held,
    ):
        live = model(1)
        writer.register(live)
        for step in (1, 2, 3, 4):
            live["a"].fill_(step)
            live["large"].add_(step)
            writer.publish(step)
            assert held.lease(step) == (1, step)
            found = dict(held.tensors())
            assert list(found) == list(live)
            assert all(torch.equal(found[name], tensor) for name, tensor in live.items())
            assert [found[name].dtype for name in live] == [tensor.dtype for tensor in live.values()]
            assert all(tensor.is_contiguous() for tensor in found.values())
            held.confirm()
            assert held.version == (1, step)


def test_shows_as_the_worker_it_is(daemon: Daemon, writer: WeightWriter, held: HeldReader) -> None:
    writer.register(model(1))
    writer.publish(5)
    held.lease(5)
    assert worker(daemon) == {"engine": "rollout-0", "state": "empty", "version": None}
    list(held.tensors())
    held.confirm()
    assert worker(daemon) == {"engine": "rollout-0", "state": "ready", "version": [1, 5]}


@pytest.mark.parametrize("name", ["a", "large", "one"])
def test_corrupted_byte_is_never_yielded(
    daemon: Daemon, each_way: str, writer: WeightWriter, held: HeldReader, name: str
) -> None:
    writer.register(model(1))
    writer.publish(1)
    flip(daemon, writer, name)
    held.lease()
    seen: list[str] = []
    with pytest.raises(IntegrityError, match=rf"^{name} .*are not those that rank 0 wrote"):
        seen.extend(found for found, _ in held.tensors())
    assert seen == list(model(1))[: len(seen)]
    assert name not in seen
    assert ("b" in seen) == (name != "a")


def test_version_withdrawn_while_it_is_read(daemon: Daemon, writer: WeightWriter, held: HeldReader) -> None:
    writer.register(model(1))
    writer.publish(1)
    writer.publish(2)
    held.lease(2)
    tensors = held.tensors()
    next(tensors)
    daemon.ask("rollback", job="grpo", step=1)
    assert len(list(tensors)) == len(model(1)) - 1, "its memory stays, under the lease"
    with pytest.raises(VersionUnavailable, match="was withdrawn during this update"):
        held.confirm()
    assert held.version is None
    assert held.lease() == (1, 1)


def test_version_is_held_for_longer_than_it_was_waited_for(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(model(1))
    writer.publish(1)
    with HeldVersion("grpo", None, daemon.socket, timeout=1.0) as held:
        with HeldReader("grpo", "other", daemon.socket) as other, pytest.raises(DeadlineExceeded):
            other.lease(2, timeout=1.5)
        held.confirm()


def test_lease_that_has_run_out(daemon: Daemon, writer: WeightWriter, held: HeldReader) -> None:
    writer.register(model(1))
    writer.publish(1)
    held.lease(1, timeout=1.0)
    tensors = held.tensors()
    next(tensors)
    with HeldReader("grpo", "other", daemon.socket) as other, pytest.raises(DeadlineExceeded):
        other.lease(2, timeout=1.5)
    list(tensors)
    with pytest.raises(VersionUnavailable, match="lease of this update has run out"):
        held.confirm()


def test_closing_early_gives_the_slot_back(daemon: Daemon) -> None:
    with (
        WeightWriter("grpo", 0, 1, daemon.socket, keep=1) as writer,
        HeldReader("grpo", "e", daemon.socket) as held,
    ):
        writer.register(model(1))
        writer.publish(1)
        held.lease(1)
        tensors = held.tensors()
        next(tensors)
        writer.publish(2)
        with pytest.raises(DeadlineExceeded):  # both slots are in use: one is leased
            writer.publish(3, timeout=0.3)
        held.release(ValueError("enough"), dirty=True)
        writer.publish(3)
        with pytest.raises(VersionUnavailable, match="given up"):
            next(tensors)
        with pytest.raises(VersionUnavailable, match="no version is leased"):
            held.confirm()
        (event,) = [event for event in daemon.ask("events", job="grpo", after=0)["events"] if event["kind"] == "failed"]
        assert "engine e rank 0, which is dirty now: ValueError: enough" in event["text"]


def test_parts_of_several_ranks_are_assembled(daemon: Daemon, each_way: str) -> None:
    whole = torch.arange(64 * 600.0).view(64, 600)
    parts = [
        [Shard("w", whole[:40], (64, 600), (0, 0)), Shard("n", torch.ones(5))],
        [Shard("w", whole[40:], (64, 600), (40, 0)), Shard("n", torch.ones(5))],
    ]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(WeightWriter("grpo", rank, 2, daemon.socket)) for rank in (0, 1)]
        held = stack.enter_context(HeldReader("grpo", "e", daemon.socket))
        for writer, shards in zip(writers, parts, strict=True):
            writer.register(shards)
        for writer in writers:
            writer.publish(1)
        held.lease(1)
        found = dict(held.tensors())
        assert torch.equal(found.pop("w"), whole)
        assert torch.equal(found.pop("n"), torch.ones(5))
        assert not found
        held.confirm()


def test_layout_of_its_own_and_holes_are_refused_by_name(
    daemon: Daemon, writer: WeightWriter, held: HeldReader
) -> None:
    writer.register([Shard("w", torch.ones(4, 3, 2), (4, 3, 2), (0, 0, 0), layout=PAIRS)])
    writer.publish(1)
    held.lease(1)
    with pytest.raises(ManifestMismatch, match=r"w.* published in the layout pairs"):
        next(held.tensors())
    writer.register([Shard("half", torch.ones(2), (4,), (0,))])
    writer.publish(2)
    held.lease(2)
    with pytest.raises(ManifestMismatch, match="half"):
        next(held.tensors())


def test_step_of_the_new_epoch_is_not_mistaken_for_the_old(daemon: Daemon, held: HeldReader) -> None:
    with WeightWriter("grpo", 0, 1, daemon.socket) as first:
        first.register(model(1))
        first.publish(7)
        assert held.lease(7) == (1, 7)
    with WeightWriter("grpo", 0, 1, daemon.socket, epoch="new") as second:
        second.register(model(2))
        assert held.lease(7) == (1, 7), "held from the epoch that it joined in"
        with pytest.raises(EpochChanged):
            held.lease(8, timeout=0.5)
        assert held.join() == 2
        with pytest.raises(DeadlineExceeded, match="step 7 of epoch 2"):
            held.lease(7, timeout=0.3)
        second.publish(7)
        assert held.lease(7) == (2, 7)
        assert torch.equal(dict(held.tensors())["a"], model(2)["a"])


def test_daemon_that_restarts_meanwhile(daemon: Daemon, writer: WeightWriter, held: HeldReader) -> None:
    writer.register(model(1))
    writer.publish(1)
    held.lease()
    tensors = held.tensors()
    next(tensors)
    daemon.restart()
    assert held.lease() == (1, 1)
    with pytest.raises(VersionUnavailable, match="went with its connection"):
        next(tensors)
    assert len(list(held.tensors())) == len(model(1))
    held.confirm()


def test_held_version_under_a_name(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register(model(1))
    writer.publish(1)
    with HeldVersion("grpo", 1, daemon.socket, engine="look") as held:
        assert worker(daemon)["engine"] == "look"
        assert [name for name, _ in held.tensors()] == list(model(1))
