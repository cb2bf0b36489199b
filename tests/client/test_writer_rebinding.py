"""Parameters that are rebound, moved or reshaped between publishes: the live ones are published, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from awexd_client import ManifestMismatch, WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.register_buffer("bias", torch.zeros(4))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def writer(daemon: Daemon, model: Model) -> Iterator[WeightWriter]:
    with WeightWriter("grpo", 0, 1, daemon.socket) as opened:
        opened.register(model)
        opened.publish(1).committed()
        yield opened


@pytest.fixture
def into() -> dict[str, torch.Tensor]:
    return {"first.weight": torch.zeros(4, 4), "second.weight": torch.zeros(4, 4), "bias": torch.ones(4)}


@pytest.fixture
def reader(daemon: Daemon, into: dict[str, torch.Tensor]) -> Iterator[WorkerWeightsReader]:
    with WorkerWeightsReader("grpo", "e", 0, 1, daemon.socket) as opened:
        opened.register(into)
        yield opened


def rebind_data(model: Model) -> None:
    model.first.weight.data = torch.randn(4, 4)


def rebind_parameter(model: Model) -> None:
    model.first.weight = nn.Parameter(torch.randn(4, 4))


def swap_module(model: Model) -> None:
    model.first = nn.Linear(4, 4, bias=False)


def exchange_modules(model: Model) -> None:
    model.first, model.second = model.second, model.first


def transpose_in_place(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.t()


def rebind_buffer(model: Model) -> None:
    model.bias = torch.full((4,), 3.0)


def tie(model: Model) -> None:
    model.second.weight.data = model.first.weight.data


def load_by_assignment(model: Model) -> None:
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}, assign=True)


CHANGES = [
    rebind_data,
    rebind_parameter,
    swap_module,
    exchange_modules,
    transpose_in_place,
    rebind_buffer,
    load_by_assignment,
]


@pytest.mark.parametrize("change", CHANGES)
def test_case_25_46_live_weights_are_published_after(
    writer: WeightWriter,
    reader: WorkerWeightsReader,
    model: Model,
    into: dict[str, torch.Tensor],
    change: Callable[[Model], None],
) -> None:
    for step in (2, 3):
        change(model)
        writer.publish(step).committed()
        reader.update(step)
        for name, tensor in model.state_dict().items():
            assert torch.equal(into[name], tensor), name


def test_tie_made_after_register_is_refused_or_right(
    writer: WeightWriter, reader: WorkerWeightsReader, model: Model, into: dict[str, torch.Tensor]
) -> None:
    tie(model)
    try:
        writer.publish(2).committed()
    except ManifestMismatch:
        return
    reader.update(2)
    assert torch.equal(into["first.weight"], model.first.weight)
    assert torch.equal(into["second.weight"], model.first.weight)


def grow(model: Model) -> None:
    model.first.weight.data = torch.zeros(5, 4)


def retype(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.to(torch.bfloat16)


def reinterpret(model: Model) -> None:
    bias: torch.Tensor = model.bias  # type: ignore[assignment]
    bias.data = bias.data.view(torch.int32)


def reshape(model: Model) -> None:
    model.first.weight.data = model.first.weight.data.view(2, 8)


def add_module(model: Model) -> None:
    model.third = nn.Linear(2, 2)


def remove_module(model: Model) -> None:
    del model.second


@pytest.mark.parametrize("change", [grow, retype, reinterpret, reshape, add_module, remove_module])
def test_case_26_change_of_shape_dtype_or_names_is_refused(
    writer: WeightWriter,
    reader: WorkerWeightsReader,
    model: Model,
    into: dict[str, torch.Tensor],
    change: Callable[[Model], None],
) -> None:
    before = model.first.weight.detach().clone()
    change(model)
    for _ in range(2):
        with pytest.raises(ManifestMismatch):
            writer.publish(2)
    assert reader.update().step == 1
    assert torch.equal(into["first.weight"], before)


def test_case_26_storage_freed_under_a_parameter(writer: WeightWriter, model: Model) -> None:
    model.first.weight.detach().untyped_storage().resize_(0)
    with pytest.raises((ManifestMismatch, ValueError)):
        writer.publish(2)


class TestDestination:
    """The same on the engine's side: never into stale memory."""

    @pytest.fixture
    def live(self, daemon: Daemon, writer: WeightWriter) -> Iterator[Any]:
        engine = Model()
        with WorkerWeightsReader("grpo", "live", 0, 1, daemon.socket) as opened:
            opened.register(engine)
            opened.update()
            yield opened, engine

    @pytest.mark.parametrize("change", CHANGES)
    def test_live_weights_are_written(
        self, writer: WeightWriter, model: Model, live: Any, change: Callable[[Model], None]
    ) -> None:
        reader, engine = live
        change(engine)
        addresses = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}
        model.first.weight.data.fill_(7)
        writer.publish(2).committed()
        reader.update(2)
        for name, tensor in engine.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
            assert tensor.data_ptr() == addresses[name]

    @pytest.mark.parametrize("change", [grow, retype, reshape, remove_module])
    def test_change_of_shape_dtype_or_names_is_refused_before_a_byte_is_touched(
        self, writer: WeightWriter, live: Any, change: Callable[[Model], None]
    ) -> None:
        reader, engine = live
        change(engine)
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        writer.publish(2).committed()
        with pytest.raises(ManifestMismatch):
            reader.update(2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
        assert (reader.state, reader.version) == ("ready", (1, 1))

    def test_two_parameters_that_were_made_to_share_memory(self, writer: WeightWriter, live: Any) -> None:
        reader, engine = live
        tie(engine)
        writer.publish(2).committed()
        with pytest.raises(ManifestMismatch):
            reader.update(2)
