"""Phases, park and offload of a device's memory: it is really given back, and every bit returns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from awexd_client import BudgetExceeded, DeadlineExceeded, WeightWriter, WorkerWeightsReader
from tests.daemons import Daemon

MIB = 1 << 20
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture
def writer(daemon: Daemon) -> Iterator[WeightWriter]:
    with WeightWriter("gpu", 0, 1, daemon.socket) as opened:
        yield opened


def made(seed: int) -> Tensors:
    """About 300 MiB: storages of many segments of the allocator, views, an alias."""
    generator = torch.Generator("cuda").manual_seed(seed)
    flat = torch.randn(32 * MIB, device="cuda", generator=generator)
    large = {f"w{n}": torch.randn(5 * MIB, device="cuda", generator=generator) for n in range(8)}
    small = {f"s{n}": torch.randn(7, 3, device="cuda", generator=generator).bfloat16() for n in range(50)}
    return {"left": flat[: 16 * MIB], "right": flat[16 * MIB :].view(-1, 64), "again": flat, **large, **small}


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def equal(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(tensor.cpu(), other[name].cpu()) for name, tensor in one.items())


def nbytes(tensors: Tensors) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}.values())


def reserved() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_park_gives_the_memory_back_and_restore_every_bit(writer: WeightWriter) -> None:
    writer.park("ring", {"short": torch.ones(3, device="cuda")})  # what copies of short tensors take once a process
    start = reserved()
    tensors = made(1)
    before, whole, held = copied(tensors), nbytes(tensors), reserved()
    for _ in range(3):
        writer.park("optimizer", tensors)
        assert torch.cuda.memory_reserved() <= held - whole + 8 * MIB  # without a call of ours to empty_cache
        writer.restore("optimizer")
        assert equal(tensors, before)
        assert torch.cuda.memory_reserved() >= start + whole - 2 * MIB  # short ones fit in what is reserved already
    tensors["again"][0] = 7.0
    assert tensors["left"][0] == 7.0


def test_free_memory_of_the_device_is_what_others_see(writer: WeightWriter) -> None:
    tensors = made(2)
    reserved()
    free = torch.cuda.mem_get_info()[0]
    writer.park("optimizer", tensors)
    assert torch.cuda.mem_get_info()[0] >= free + 0.9 * 4 * (32 + 8 * 5) * MIB
    writer.restore("optimizer")


def test_offload_into_the_version_just_published(daemon: Daemon, writer: WeightWriter) -> None:
    live, into = made(3), {name: torch.zeros_like(tensor) for name, tensor in made(3).items()}
    before, whole, held = copied(live), nbytes(live), reserved()
    with WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader:
        writer.register({name: tensor for name, tensor in live.items() if name != "again"})
        reader.register({name: tensor for name, tensor in into.items() if name != "again"})
        for step in (1, 2, 3):
            writer.publish(step)
            writer.offload()
            assert torch.cuda.memory_reserved() <= held - whole + 8 * MIB
            assert daemon.ask("status")["jobs"][0]["parked"] == []
            assert reader.update(step).step == step
            moved = torch.zeros(3 * MIB, device="cuda")
            writer.restore()
            del moved
            assert equal(live, before)
        live["w3"][5] += 1
        before = copied(live)
        writer.offload()  # notices that w3 was changed
        (parcel,) = daemon.ask("status")["jobs"][0]["parked"]
        assert 20 * MIB < parcel["bytes"] < 21 * MIB
        writer.restore()
        assert equal(live, before)
        writer.publish(4)
        reader.update(4)
        assert torch.equal(into["w3"], live["w3"])


def test_cast_weights_are_parked(writer: WeightWriter) -> None:
    live = made(4)
    before = copied(live)
    writer.register({name: live[name] for name in ("w0", "w1", "s0")}, dtype={"w0": torch.bfloat16})
    writer.publish(1)
    writer.offload()
    assert nbytes({name: live[name] for name in ("w0", "w1", "s0")}) == 0
    writer.restore()
    assert equal(live, before)


def test_restore_without_room_may_be_tried_again(writer: WeightWriter) -> None:
    tensors = {"a": torch.randn(64 * MIB, device="cuda")}
    before = copied(tensors)
    writer.park("optimizer", tensors)
    reserved()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - 128 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(BudgetExceeded, match="a: no room"):
        writer.restore("optimizer")
    del hog
    torch.cuda.empty_cache()
    writer.restore("optimizer")
    assert equal(tensors, before)


def test_restarted_rank_fills_other_tensors_of_a_device(daemon: Daemon, writer: WeightWriter) -> None:
    tensors = made(5)
    before = copied(tensors)
    writer.park("optimizer", tensors)
    writer.close()
    fresh = {name: torch.zeros_like(tensor, device="cpu").cuda() for name, tensor in before.items()}
    with WeightWriter("gpu", 0, 1, daemon.socket) as again:
        again.restore("optimizer", fresh)
    assert equal(fresh, before)


def test_phases_are_of_the_gpu_that_tensors_lie_on(daemon: Daemon, writer: WeightWriter) -> None:
    writer.register({"w": torch.ones(8, device="cuda")})
    with WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader:
        reader.register({"w": torch.zeros(8, device="cuda")})
        with writer.phase("train"):
            (gpu,) = daemon.ask("status")["phases"]
            assert gpu["gpu"] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            with pytest.raises(DeadlineExceeded, match="writer rank 0"), reader.phase("rollout", 0.1):
                pass
        with reader.phase("rollout"):
            pass


ENGINE = """
import json, select, sys
import torch
from awexd_client import WorkerWeightsReader
into = {f"w{n}": torch.zeros(5 << 20, device="cuda") for n in range(8)}
with WorkerWeightsReader("gpu", "e", 0, 1, sys.argv[1]) as reader:
    reader.register(into)
    reader.update(1)
    print("ready", flush=True)
    updates = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        reader.update(1)
        updates += 1
print(json.dumps([updates, {name: float(tensor.double().sum()) for name, tensor in into.items()}]), flush=True)
"""


def test_engine_updates_while_the_trainer_moves_out(daemon: Daemon, writer: WeightWriter) -> None:
    live = {name: tensor for name, tensor in made(6).items() if name.startswith("w")}
    state = made(7)
    sums = {name: float(tensor.double().sum()) for name, tensor in live.items()}
    writer.register(live)
    writer.publish(1)
    before = copied(state)
    command = [sys.executable, "-c", ENGINE, daemon.socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout
            assert engine.stdout.readline() == b"ready\n"
            for _ in range(3):
                writer.park("optimizer", state)
                writer.restore("optimizer")
            updates, loaded = json.loads(engine.communicate(timeout=60)[0])
        finally:
            engine.kill()
    assert updates >= 1
    assert loaded == sums
    assert equal(state, before)
