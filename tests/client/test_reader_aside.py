"""Tensors that an engine loads itself: filled and checked while staging, taken over in the update, never in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from awexd_client import AwexdError, IntegrityError, InvalidArgument, VersionUnavailable, WeightWriter
from awexd_client import WorkerWeightsReader as Reader
from tests.client.samples import Negating, weights
from tests.daemons import Daemon


def values(model: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of ``a``, and of ``b`` as the engine means it."""
    (a,), (b,) = (set(model[name].flatten().tolist()) for name in ("a", "b"))
    return a, 0.0 - b


def publish(writer: WeightWriter, source: dict[str, torch.Tensor], step: int) -> None:
    for tensor in source.values():
        tensor.fill_(step)
    writer.publish(step)


@pytest.fixture
def source(writer: WeightWriter) -> dict[str, torch.Tensor]:
    held = weights(0)
    writer.register(held)
    return held


def failures(daemon: Daemon) -> list[object]:
    (engine,) = daemon.ask("status")["jobs"][0]["engines"]
    return [worker["failure"] for worker in engine["workers"]]


def test_engine_loads_what_was_set_aside(
    daemon: Daemon, writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    model, adapter = weights(0), Negating()
    reader.register(model, adapter)
    for step in (1, 2, 3):
        publish(writer, source, step)
        result = reader.update()
        assert (result.step, result.bytes) == (step, 12 * 4 + 5 * 2)
        assert values(model) == (step, step)
        assert adapter.loaded == step
    (worker,) = daemon.ask("status")["jobs"][0]["engines"][0]["workers"]
    assert worker["aside"] == [["it is kept negated", 1, "b"]]
    assert worker["result"]["nbytes"] == 12 * 4 + 5 * 2


def test_staging_touches_nothing_that_is_live(
    writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    model, adapter = weights(0), Negating()
    reader.register(model, adapter)
    publish(writer, source, 1)
    staged = reader.stage()
    assert (values(model), adapter.loaded) == ((0, 0), 0)
    reader.apply(staged)
    assert values(model) == (1, 1)


def test_case_13_exception_in_the_loader_is_told_and_its_update_does_not_count(
    daemon: Daemon, writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    model, adapter = weights(0), Negating()
    reader.register(model, adapter)
    publish(writer, source, 1)
    reader.update()
    publish(writer, source, 2)
    adapter.failures = 1
    with pytest.raises(AwexdError, match="could not load the new weights: KeyError: 'no such layer'") as caught:
        reader.update()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (reader.state, reader.version) == ("dirty", None)
    reader.fail(caught.value)  # known already
    (failure,) = failures(daemon)
    assert failure == {"code": "error", "message": str(caught.value)}
    (event,) = [event for event in daemon.ask("events", job=None, after=None)["events"] if event["kind"] == "failed"]
    assert "rank 0, which is dirty now: the engine could not load" in event["text"]
    assert reader.update(1).step == 1, "back at the last good version"
    assert values(model) == (1, 1)
    assert failures(daemon) == [None]
    assert reader.update().step == 2
    assert values(model) == (2, 2)


def test_corrupted_byte_of_what_is_set_aside_is_found_before_anything_is_touched(
    daemon: Daemon, writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    model = weights(0)
    reader.register(model, Negating())
    publish(writer, source, 1)
    reader.update()
    publish(writer, source, 2)
    manifest = writer._segment.manifest
    piece = next(number for number, entry in enumerate(manifest.pieces) if entry.tensor.name == "b")
    for name in daemon.segments():
        with open(Path("/dev/shm") / name, "r+b") as file:
            if file.read(8) == b"AWEXDSEG":
                file.seek(4096 + manifest.piece_offsets[piece])
                (byte,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match=r"^b "):
        reader.update()
    assert (reader.state, reader.version) == ("ready", (1, 1))
    assert values(model) == (1, 1)
    assert failures(daemon)[0] is not None
    publish(writer, source, 3)
    assert reader.update().step == 3
    assert values(model) == (3, 3)


def test_what_was_staged_before_something_else_was_is_not_applied(
    writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    # The buffers have the other version's bytes, and the first lease has ended.
    model = weights(0)
    reader.register(model, Negating())
    publish(writer, source, 1)
    first = reader.stage()
    reader.release(first)
    publish(writer, source, 2)
    second = reader.stage()
    with pytest.raises(VersionUnavailable, match="given up since"):
        reader.apply(first)
    assert (reader.state, values(model)) == ("empty", (0, 0))
    assert reader.apply(second).step == 2
    assert values(model) == (2, 2)
    with pytest.raises(VersionUnavailable, match="given up since"):
        reader.apply(second)


def test_failure_that_the_worker_tells_itself_stands_until_it_is_given_a_version(
    daemon: Daemon, writer: WeightWriter, reader: Reader, source: dict[str, torch.Tensor]
) -> None:
    reader.register(weights(0), Negating())
    reader.fail(ValueError("the engine is upside down"))
    assert failures(daemon) == [{"code": "error", "message": "ValueError: the engine is upside down"}]
    publish(writer, source, 1)
    reader.update()
    assert failures(daemon) == [None]


def test_writer_of_such_an_engine_is_refused_by_name(writer: WeightWriter) -> None:
    with pytest.raises(InvalidArgument, match="b: kept negated"):
        writer.register(weights(0), Negating())
