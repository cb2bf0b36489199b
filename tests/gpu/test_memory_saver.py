"""Beside torch_memory_saver: an engine whose weights sleep by it, and a trainer whose weights it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import Daemon, daemon, folder
from tests.e2e.workers.processes import Nursery, Process

__all__ = ["daemon", "folder"]
torch_memory_saver = pytest.importorskip("torch_memory_saver", reason="pip install torch_memory_saver")

MIB = 1 << 20
SIDE = """
import torch
from awexd_client import WeightWriter, WorkerWeightsReader
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = {hook!r}
def tensors(value):
    return {{f"w{{n}}": torch.full((4 << 20,), value + n, device="cuda") for n in range(16)}}
def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
result = None
"""
ENGINE = """
with saver.region(tag="weights"):
    into = tensors(0.0)
with saver.region(tag="kv_cache"):
    cache = torch.ones(64 << 20, device="cuda")
reader = WorkerWeightsReader("grpo", "e", 0, 1, {socket!r})
reader.register(into)
places = [tensor.data_ptr() for tensor in into.values()]
def sleep():
    before = free()
    saver.pause("weights")
    saver.pause("kv_cache")
    return free() - before
def wake(step):
    saver.resume("weights")
    found = reader.update(step, timeout=20)
    saver.resume("kv_cache")
    assert [tensor.data_ptr() for tensor in into.values()] == places
    return [found.mode, [tensor.unique().tolist() for tensor in into.values()]]
"""
TRAINER = """
writer = WeightWriter("grpo", 0, 1, {socket!r}, mode={mode!r})
"""


@pytest.fixture(scope="module", params=["torch", "preload"])
def hook(request: pytest.FixtureRequest) -> Iterator[tuple[str, Nursery]]:
    """How it takes the allocator over, and what forks processes in which it may."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "preload":
            package = Path(torch_memory_saver.__file__).parent
            (library,) = package.parent.glob("torch_memory_saver_hook_mode_preload_cu13.*.so")
            patch.setenv("LD_PRELOAD", str(library))
        opened = Nursery()
        yield str(request.param), opened
        opened.close()


@pytest.fixture
def processes(hook: tuple[str, Nursery]) -> Iterator[list[Process]]:
    how, nursery = hook
    made = [nursery.fork() for _ in range(2)]
    for process in made:
        process.do(SIDE.format(hook=how))
    yield made
    for process in made:
        process.close()


@pytest.mark.parametrize("mode", ["host", "direct"])
def test_engine_sleeps_while_the_trainer_works(daemon: Daemon, processes: list[Process], mode: str) -> None:
    trainer, engine = processes
    trainer.do(TRAINER.format(socket=daemon.socket, mode=mode) + "live = tensors(1.0)\nwriter.register(live)")
    engine.do(ENGINE.format(socket=daemon.socket))
    for step in (1, 2, 3):
        assert engine.do("result = sleep()") > 500 * MIB
        trainer.do("state = tensors(9.0); writer.park('optimizer', state); writer.restore('optimizer')")
        trainer.do("for tensor in live.values(): tensor.add_(1)")
        trainer.do(f"publication = writer.publish({step}, timeout=20)")
        how, values = engine.do(f"result = wake({step})")
        assert how == mode
        assert values == [[1.0 + step + n] for n in range(16)]
        trainer.do("publication.captured(timeout=20)")


@pytest.mark.parametrize("mode", ["host", "auto"])
def test_trainer_whose_weights_may_pause(daemon: Daemon, processes: list[Process], mode: str) -> None:
    """Its memory was not made to be shared: it goes through host memory, and is there whatever pauses afterwards."""
    trainer, engine = processes
    trainer.do(TRAINER.format(socket=daemon.socket, mode=mode))
    trainer.do("with saver.region(tag='own'):\n    live = tensors(1.0)\nwriter.register(live)")
    engine.do(ENGINE.format(socket=daemon.socket))
    for step in (1, 2):
        engine.do("sleep()")
        engine.start(f"result = wake({step})")
        trainer.do(f"for n, tensor in enumerate(live.values()): tensor.fill_({step} + n)")
        trainer.do(f"publication = writer.publish({step}, timeout=20); publication.captured(timeout=20)")
        trainer.do("saver.pause('own')")
        how, values = engine.finish()
        assert how == "host"
        assert values == [[float(step + n)] for n in range(16)]
        trainer.do("saver.resume('own')")
