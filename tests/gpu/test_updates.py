"""Weights of a device, through a real daemon and back into a device."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from awexd_client import IntegrityError, Shard, WeightWriter, WorkerWeightsReader
from awexd_transports import kernel, native
from awexd_transports.cuda import gather, pinning
from tests.daemons import Daemon
from tests.engines.vllm.workers.trainer import corrupt

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(params=["library", "python", "library without triton", "python without triton"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C library, and without; with Triton, and without."""
    if "triton" in request.param:
        monkeypatch.setattr(gather, "available", lambda: False)
    else:
        assert gather.available(), "pip install triton"
    if "python" in request.param:
        monkeypatch.setattr(kernel, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("the C library is not built here: python hatch_build.py")


def weights(seed: int, device: str = "cuda") -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (300, 257), "a.bias": (257,), "b.weight": (64, 8, 40), "scale": ()}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(device, torch.bfloat16 if "b." in name else None) for name, tensor in made.items()}


def publish(writer: WeightWriter, live: Tensors, step: int) -> Tensors:
    new = weights(step)
    for name, tensor in live.items():
        tensor.copy_(new[name])
    writer.publish(step).committed()
    return new


def equal(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(tensor.cpu(), other[name].cpu()) for name, tensor in one.items())


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("verify", ["checksum", "off"])
@pytest.mark.parametrize("way", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_updates_from_and_to_devices(daemon: Daemon, way: tuple[str, str], verify: str) -> None:
    live, target = weights(0, way[0]), {name: tensor.zero_() for name, tensor in weights(0, way[1]).items()}
    with (
        WeightWriter("gpu", 0, 1, daemon.socket, verify=verify) as writer,
        WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket, verify=verify) as reader,
    ):
        writer.register(live)
        reader.register(target)
        for step in range(1, 6):
            new = publish(writer, live, step)
            result = reader.update(step)
            assert result.bytes == sum(tensor.nbytes for tensor in target.values())
            assert equal(target, new)
            assert (reader.state, reader.version) == ("ready", (1, step))


@pytest.mark.usefixtures("each_way")
def test_other_shardings(daemon: Daemon) -> None:
    """Columns to rows, turned, and a tied name."""
    whole = torch.arange(96 * 64, dtype=torch.float32, device="cuda").view(96, 64)
    columns = [whole[:, :32].contiguous(), whole[:, 32:].contiguous()]
    upper, lower = torch.zeros(48, 64, device="cuda"), torch.zeros(64, 48, device="cuda")
    tied = torch.zeros(96, 64, device="cuda")
    with (
        WeightWriter("cut", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("cut", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register([Shard("w", part, (96, 64), (0, 32 * at)) for at, part in enumerate(columns)])
        writer.publish(1)
        reader.register([Shard("w", upper, (96, 64), (0, 0)), Shard("w", lower.t(), (96, 64), (48, 0))])
        reader.update()
    assert torch.equal(torch.cat([upper, lower.t()]), whole)
    with (
        WeightWriter("tied", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("tied", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register({"w": whole, "head": whole})
        writer.publish(1)
        reader.register({"w": tied, "head": tied})
        reader.update()
        assert torch.equal(tied, whole)


@pytest.mark.usefixtures("each_way")
def test_parts_of_cells_are_compared(daemon: Daemon) -> None:
    """Readers' shares end anywhere in what is summed together."""
    whole = {"w": torch.randn(777, 1024, device="cuda"), "e": torch.randn(5, 33, 640, device="cuda")}
    parts = []
    for name, tensor in whole.items():
        for low, high in ((0, 211), (211, 604), (604, tensor.shape[-1])):
            held = torch.zeros_like(tensor[..., low:high]).contiguous()
            parts.append(Shard(name, held, tuple(tensor.shape), (*(0 for _ in tensor.shape[1:]), low)))
    with (
        WeightWriter("parts", 0, 1, daemon.socket, verify="checksum") as writer,
        WorkerWeightsReader("parts", "e", 0, 1, daemon.socket, verify="checksum") as reader,
    ):
        writer.register(whole)
        reader.register(parts)
        for step in (1, 2):
            writer.publish(step)
            reader.update(step)
            assert all(torch.equal(part.tensor, part_of(whole[part.name], part)) for part in parts)
            whole["w"].mul_(2)


def part_of(tensor: torch.Tensor, part: Shard) -> torch.Tensor:
    assert part.offset is not None
    return tensor[tuple(slice(a, a + n) for a, n in zip(part.offset, part.tensor.shape, strict=True))]


@pytest.mark.usefixtures("each_way")
def test_cast_by_the_writer(daemon: Daemon) -> None:
    live, target = (
        {"w": torch.randn(1000, device="cuda")},
        {"w": torch.zeros(1000, dtype=torch.bfloat16, device="cuda")},
    )
    with (
        WeightWriter("cast", 0, 1, daemon.socket, verify="checksum") as writer,
        WorkerWeightsReader("cast", "e", 0, 1, daemon.socket, verify="checksum") as reader,
    ):
        writer.register(live, dtype=torch.bfloat16)
        writer.publish(1)
        reader.register(target)
        reader.update()
    assert torch.equal(target["w"], live["w"].bfloat16())


def test_parts_written_one_at_a_time(daemon: Daemon) -> None:
    live, target = weights(1), {name: tensor.zero_() for name, tensor in weights(1).items()}
    with (
        WeightWriter("parts", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("parts", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        with writer.begin(1) as update:
            for name, tensor in live.items():
                update.write({name: tensor.clone()})
        reader.register(target)
        reader.update()
    assert equal(target, live)


@pytest.mark.usefixtures("each_way")
def test_corrupted_byte_is_found(daemon: Daemon) -> None:
    live, target = weights(0), {name: tensor.zero_() for name, tensor in weights(0).items()}
    with (
        WeightWriter("gpu", 0, 1, daemon.socket, keep=4) as writer,
        WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        reader.register(target)
        good = publish(writer, live, 1)
        reader.update()
        corrupt(publish(writer, live, 2)["b.weight"].cpu())
        with pytest.raises(IntegrityError, match=r"b\.weight"):
            reader.update()
        assert reader.state == "dirty"
        reader.update(1)
        assert equal(target, good)


def test_live_weights_of_a_device_against_a_checkpoint(daemon: Daemon, tmp_path: Path) -> None:
    live, target = weights(3), {name: tensor.zero_() for name, tensor in weights(3).items()}
    save_file({name: tensor.cpu() for name, tensor in live.items()}, tmp_path / "model.safetensors")
    with (
        WeightWriter("gpu", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        writer.publish(1)
        reader.register(target)
        reader.update()
        assert reader.verify(tmp_path).tensors == len(live)
        target["a.weight"][7, 9] = 99
        with pytest.raises(IntegrityError, match=r"a\.weight\[7, 9\] is 99.0"):
            reader.verify(tmp_path)


def test_host_memory_that_cuda_does_not_register(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a limit forbids it: the driver stages the copies."""
    refuse = pinning._call
    monkeypatch.setattr(pinning, "_call", lambda name, *given: refuse("cudaHostRegister", 0, 0, 0))
    live, target = weights(0), {name: tensor.zero_() for name, tensor in weights(0).items()}
    with (
        WeightWriter("gpu", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        reader.register(target)
        for step in (1, 2):
            with writer.begin(step) as update:
                new = weights(step)
                for name, tensor in new.items():
                    update.write({name: tensor})
            reader.update(step)
            assert equal(target, new)
    told = [record.message for record in caplog.records if "cannot be registered with CUDA" in record.message]
    assert 2 <= len(told) <= 4, "once for each mapping"


def test_module_on_a_device(daemon: Daemon) -> None:
    trainer = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    engine = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)).cuda()
    given = torch.randn(16, 64, device="cuda")
    optimizer = torch.optim.SGD(trainer.parameters(), 0.1)
    with (
        WeightWriter("module", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("module", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(trainer)
        reader.register(engine)
        for step in range(1, 4):
            optimizer.zero_grad()
            trainer(given).square().sum().backward()
            optimizer.step()
            writer.publish(step)
            reader.update(step)
            with torch.no_grad():
                assert torch.equal(engine(given), trainer(given))


def test_updates_leave_no_memory_behind(daemon: Daemon) -> None:
    live = {"w": torch.randn(4 << 20, device="cuda")}
    target = {"w": torch.zeros(4 << 20, device="cuda")}
    with (
        WeightWriter("gpu", 0, 1, daemon.socket) as writer,
        WorkerWeightsReader("gpu", "e", 0, 1, daemon.socket) as reader,
    ):
        writer.register(live)
        reader.register(target)
        for step in range(1, 4):
            writer.publish(step)
            reader.update(step)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before, fds = torch.cuda.memory_allocated(), len(os.listdir("/proc/self/fd"))
        for step in range(4, 200):
            writer.publish(step)
            reader.update(step)
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before, "a device is copied from and to without memory of its own"
        assert len(os.listdir("/proc/self/fd")) == fds
