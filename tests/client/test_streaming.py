"""Streams of whole tensors that nobody announced, published one after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from awexd_client import EpochChanged, InvalidArgument, Publication, VersionConflict, WorkerWeightsReader
from awexd_client.held import HeldReader
from awexd_client.streaming import StreamWriter
from tests.daemons import Daemon


@pytest.fixture
def stream(daemon: Daemon) -> Iterator[StreamWriter]:
    with StreamWriter("grpo", daemon.socket) as opened:
        yield opened


@pytest.fixture
def held(daemon: Daemon) -> Iterator[HeldReader]:
    with HeldReader("grpo", "e", daemon.socket) as opened:
        yield opened


def model(value: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(24.0).view(4, 6).T + value,
        "norm": torch.full((5,), value, dtype=torch.bfloat16),
        "scale": torch.tensor(float(value)),
        "none": torch.empty(0, 2),
        "flags": torch.tensor([True, False, value % 2 == 0]),
    }


def publish(stream: StreamWriter, step: int, tensors: dict[str, torch.Tensor]) -> Publication:
    """Each tensor is wiped once it was given."""
    version = stream.begin(step)
    for name, tensor in tensors.items():
        passing = tensor.clone()
        version.put(name, passing)
        passing.zero_()
    return version.finish()


def check(held: HeldReader, step: int, tensors: dict[str, torch.Tensor]) -> None:
    held.lease(step)
    found = dict(held.tensors())
    held.confirm()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_steps_one_after_another(stream: StreamWriter, held: HeldReader, each_way: str) -> None:
    for step in (3, 4, 9):
        done = publish(stream, step, model(step))
        assert (done.epoch, done.step, stream.last) == (1, step, step)
        assert done.nbytes == sum(tensor.nbytes for tensor in model(step).values())
        check(held, step, model(step))


def test_later_streams_are_not_kept(stream: StreamWriter) -> None:
    publish(stream, 1, model(1))
    version = stream.begin(2)
    version.put("w", model(2)["w"])
    assert not version._kept
    version.abort(ValueError("enough"))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"norm": torch.ones(7)},
        lambda tensors: tensors | {"norm": torch.ones(5)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "flags"},
        lambda tensors: tensors | {"more": torch.ones(2)},
        lambda tensors: {"other": torch.ones(1)},
    ],
    ids=["shape", "dtype", "fewer", "more", "others"],
)
def test_other_tensors_are_registered_anew(stream: StreamWriter, held: HeldReader, change: object) -> None:
    assert callable(change)
    publish(stream, 1, model(1))
    changed = change(model(2))
    publish(stream, 2, changed)
    check(held, 2, changed)
    publish(stream, 3, model(3))
    check(held, 3, model(3))


@pytest.mark.parametrize("first", [True, False])
def test_abort_leaves_the_version_before(stream: StreamWriter, held: HeldReader, first: bool) -> None:
    if not first:
        publish(stream, 1, model(1))
    version = stream.begin(2)
    version.put("w", model(2)["w"])
    version.abort(ValueError("enough"))
    version.abort(ValueError("again"))
    if not first:
        check(held, 1, model(1))
    publish(stream, 2, model(2))
    check(held, 2, model(2))


def test_stream_that_was_left_alone(stream: StreamWriter, held: HeldReader) -> None:
    publish(stream, 1, model(1))
    stream.begin(2).put("w", model(0)["w"])
    publish(stream, 2, model(2))
    check(held, 2, model(2))


def test_what_cannot_be_published(stream: StreamWriter) -> None:
    with pytest.raises(InvalidArgument, match="brought no tensor"):
        stream.begin(1).finish()
    version = stream.begin(1)
    version.put("w", torch.ones(2))
    with pytest.raises(InvalidArgument, match="w came twice"):
        version.put("w", torch.ones(2))
    version.abort(ValueError())


def test_step_that_does_not_rise(stream: StreamWriter) -> None:
    publish(stream, 4, model(1))
    with pytest.raises(VersionConflict):
        stream.begin(4)


def test_epochs_of_restarted_trainers(daemon: Daemon, held: HeldReader) -> None:
    with StreamWriter("grpo", daemon.socket) as first, StreamWriter("grpo", daemon.socket) as second:
        assert (first.epoch, second.epoch, second.last) == (1, 2, None)
        with pytest.raises(EpochChanged):
            publish(first, 5, model(5))
    with StreamWriter("grpo", daemon.socket) as first:
        publish(first, 5, model(5))
        check(held, 5, model(5))
    with StreamWriter("grpo", daemon.socket) as second:
        assert second.epoch == 4
        check(held, 5, model(5))
        held.join()
        publish(second, 5, model(6))
        check(held, 5, model(6))
        assert held.version == (4, 5)


def test_aliases_by_value_alone_are_two_tensors(stream: StreamWriter, daemon: Daemon) -> None:
    """What is registered stands over distinct elements, though nothing else distinguishes it."""
    tensors = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    publish(stream, 1, tensors)
    with WorkerWeightsReader("grpo", "live", 0, 1, daemon.socket) as reader:
        live = {name: torch.zeros(3) for name in tensors}
        reader.register(live)
        reader.update()
        assert all(torch.equal(live[name], tensor) for name, tensor in tensors.items())
