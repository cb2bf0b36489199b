"""Which adapter is taken, whom it is refused, and what a watch notices."""

from __future__ import annotations

import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from awexd_client.adapters import Adapter, shards_of, watch
from awexd_client.adapters.fsdp import FSDPAdapter
from awexd_client.adapters.hf import HFAdapter
from awexd_client.adapters.registry import BUILT_IN
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

PLUG_IN = """
from awexd_transports.layout import Shard
class Toy:
    name = "toy"
    def matches(self, target): return type(target).__name__ == "Trainer"
    def shards(self, target): return [Shard("toy", target.tensor)]
"""


class Trainer:
    tensor = torch.ones(3)


class Own:
    name = "own"

    def matches(self, target: object) -> bool:
        return False

    def shards(self, target: object) -> Iterator[Shard]:
        yield Shard("own", torch.ones(1))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *entries: str) -> None:
    """A distribution on sys.path, with these lines in the entry-point group."""
    (folder / "toy_adapter.py").write_text(PLUG_IN)
    info = folder / "toy_adapter-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-adapter\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[awexd.adapters]\n" + "\n".join(entries) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_adapter", raising=False)


def test_built_in_adapters_are_adapters() -> None:
    for adapter in (HFAdapter(), FSDPAdapter(), Own()):
        assert isinstance(adapter, Adapter)


def test_plain_module_is_taken_by_hf() -> None:
    assert not FSDPAdapter().matches(nn.Linear(1, 1))
    assert HFAdapter().matches(nn.Linear(1, 1))


@pytest.mark.parametrize("adapter", [None, "hf", "fsdp", HFAdapter()])
def test_every_way_to_name_an_adapter_gives_the_same(adapter: Any) -> None:
    assert [shard.name for shard in shards_of(nn.Linear(2, 3), adapter)] == ["weight", "bias"]


def test_adapter_object_is_used_as_it_is() -> None:
    assert [shard.name for shard in shards_of(nn.Linear(2, 3), Own())] == ["own"]


@pytest.mark.parametrize("wrap", [list, tuple, iter, lambda shards: (shard for shard in shards)])
def test_shards_are_given_back(wrap: Any) -> None:
    shards = [Shard("a", torch.ones(2)), Shard("b", torch.ones(2))]
    assert all(a is b for a, b in zip(shards_of(wrap(shards)), shards, strict=True))
    assert shards_of(iter(())) == []


@pytest.mark.parametrize(
    "target", [torch.ones(2), 3, "model.safetensors", None, {"a": 1}, {1: torch.ones(1)}, [torch.ones(2)], Trainer()]
)
def test_strange_target_is_refused_with_its_type(target: object) -> None:
    with pytest.raises(InvalidArgument, match=type(target).__name__):
        shards_of(target)


def test_shards_among_other_things_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="it has a Linear"):
        shards_of([Shard("a", torch.ones(2)), nn.Linear(1, 1)])


def test_named_adapter_refuses_what_it_cannot_read() -> None:
    with pytest.raises(InvalidArgument, match="a int is no module"):
        shards_of(3, "hf")


def test_unknown_name_lists_the_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "toy = toy_adapter:Toy")
    with pytest.raises(InvalidArgument, match=r"'nope'; known: (.*, )?fsdp, hf, (.*, )?toy"):
        shards_of(nn.Linear(1, 1), "nope")
    assert "toy_adapter" not in sys.modules


def test_plug_in_is_found_by_name_and_by_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "toy = toy_adapter:Toy")
    for adapter in ("toy", None):
        assert [shard.name for shard in shards_of(Trainer(), adapter)] == ["toy"]
    assert [shard.name for shard in shards_of(nn.Linear(1, 1, bias=False))] == ["weight"]


def test_entry_points_of_the_project_are_where_the_adapters_are() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["awexd.adapters"]
    places = {name: f"{cls.__module__}:{cls.__qualname__}" for name, cls in BUILT_IN.items()}
    assert [name for name in points.keys() & places if points[name] != places[name]] == []


def test_our_own_entry_points_are_no_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this project, as it is installed; some name a package that an adapter's module is in."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["awexd.adapters"]
    install(tmp_path, monkeypatch, *(f"{name} = {value}" for name, value in points.items()))
    assert len(shards_of(nn.Linear(1, 1), "hf")) == 2


@pytest.mark.parametrize("entries", [["hf = toy_adapter:Toy"], ["toy = toy_adapter:Toy", "toy = toy_adapter:Other"]])
def test_name_that_is_taken_is_refused(entries: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, *entries)
    with pytest.raises(InvalidArgument, match="two adapters are called"):
        shards_of(nn.Linear(1, 1), "hf")


@pytest.mark.parametrize("entry", ["toy = toy_adapter:Missing", "toy = no_such_module:Toy"])
def test_plug_in_that_cannot_be_loaded_is_named(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, entry)
    with pytest.raises(InvalidArgument, match="adapter 'toy'"):
        shards_of(Trainer(), "toy")


@pytest.mark.parametrize("adapter", [object(), HFAdapter])
def test_thing_that_is_no_adapter_is_refused(adapter: Any) -> None:
    with pytest.raises(InvalidArgument, match="has no name"):
        shards_of(nn.Linear(1, 1), adapter)


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    module.register_buffer("inv_freq", torch.ones(1), persistent=False)
    return module


def move_data(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.clone()


def free_storage(module: Any) -> None:
    module[2].weight.untyped_storage().resize_(0)


CHANGES: dict[str, Any] = {
    "parameter rebound": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "data moved": move_data,
    "storage freed": free_storage,
    "buffer rebound": lambda m: setattr(m[1], "running_mean", torch.ones(2)),
    "parameter added": lambda m: m[2].register_parameter("extra", nn.Parameter(torch.ones(1))),
    "parameter removed": lambda m: m[0].register_parameter("bias", None),
    "buffer added": lambda m: m[2].register_buffer("extra", torch.ones(1)),
    "module replaced": lambda m: m.__setitem__(2, nn.Linear(2, 2, bias=False)),
    "module added": lambda m: m.append(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_watch_notices(change: str) -> None:
    module = model()
    watched = watch([module])
    assert not watched.changed()
    CHANGES[change](module)
    assert watched.changed()


def test_watch_is_calm_while_values_change() -> None:
    module = model()
    watched = watch(module)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    module.inv_freq = torch.zeros(4)  # a rotary table that grows is no weight
    assert not watched.changed()


def test_watch_of_mapping_and_shards() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    shards = shards_of(tensors)
    by_name, by_shard = watch(tensors), watch(shards)
    tensors["a"] = torch.zeros(2)
    assert (by_name.changed(), by_shard.changed()) == (True, False)
    shards[1].tensor.untyped_storage().resize_(0)
    assert by_shard.changed()


def test_watch_costs_little() -> None:
    watched = watch({str(at): torch.empty(1) for at in range(5000)})

    def once() -> float:
        begin = time.perf_counter()
        watched.changed()
        return time.perf_counter() - begin

    assert min(once() for _ in range(10)) < 0.01  # 1 ms on an idle machine
