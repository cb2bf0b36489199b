"""What a measured process has its weights on: a GPU that it sees, or, in tests, what a driver plays.

Both also give the machine's limits: the same bytes in one flat copy within the device, from a peer, from it, and to it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

PINNED = 4 << 30
"""Bytes of page-locked memory by which DMA is measured, at most: its rate is that of any larger piece."""

PEERED = 8 << 30
"""Bytes of what is copied between devices, likewise."""

Shapes = Mapping[str, tuple[int, ...]]


class Device(Protocol):
    """A device as the sides use it. Seconds are of the copy alone."""

    def name(self) -> str:
        """For people."""

    def tensors(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """New bfloat16 tensors of zeros."""

    def private(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """The same, in memory that can be parked."""

    def flat(self, nbytes: int) -> float:
        """Seconds of one copy of so many bytes within the device."""

    def peer(self, nbytes: int) -> float:
        """Seconds of one copy of so many bytes from the first other device to this one."""

    def down(self, nbytes: int) -> float:
        """Seconds of DMA of so many bytes to page-locked memory."""

    def up(self, nbytes: int) -> float:
        """Seconds of DMA of so many bytes from page-locked memory."""

    def synchronize(self) -> None:
        """Waits for all that this process has begun."""

    def free(self) -> None:
        """Gives back what no tensor needs, and the memory of ``flat``."""

    def memory(self) -> dict[str, int]:
        """Bytes: ``used`` of ``total`` on the device; of this process ``allocated``, ``reserved`` and ``peak``."""

    def forget_peak(self) -> None:
        """From now on ``peak`` is the most that was reserved since; unused memory is given back first."""


class Cuda:
    """A GPU by its ordinal; it is made the process's current one. Importing this touches neither it nor torch."""

    def __init__(self, ordinal: str = "0") -> None:
        self._ordinal = int(ordinal)
        self._flat: tuple[torch.Tensor, torch.Tensor] | None = None
        self._peer: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pinned: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._ordinal:
            import torch

            torch.cuda.set_device(self._ordinal)

    def name(self) -> str:
        import torch

        return f"{torch.cuda.get_device_name(self._ordinal)}, torch {torch.__version__}"

    def tensors(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}

    private = tensors

    def flat(self, nbytes: int) -> float:
        import torch

        if self._flat is None or self._flat[0].numel() < nbytes:
            self._flat = None
            source, target = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
            self._flat = source, target
        source, target = (one[:nbytes] for one in self._flat)
        target.copy_(source)  # so that the clocks are up
        return self._seconds(lambda: target.copy_(source))

    def peer(self, nbytes: int) -> float:
        import torch

        size = min(nbytes, PEERED)
        if self._peer is None or self._peer[0].numel() < size:
            source = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{0 if self._ordinal else 1}")
            self._peer = source, torch.zeros(size, dtype=torch.uint8, device="cuda")
        source, target = (one[:size] for one in self._peer)
        target.copy_(source)
        return nbytes / size * self._seconds(lambda: target.copy_(source))

    def down(self, nbytes: int) -> float:
        host, ours, scale = self._sides(nbytes)
        return scale * self._seconds(lambda: host.copy_(ours, non_blocking=True))

    def up(self, nbytes: int) -> float:
        host, ours, scale = self._sides(nbytes)
        return scale * self._seconds(lambda: ours.copy_(host, non_blocking=True))

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def free(self) -> None:
        import torch

        self._flat = self._peer = None
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what peers have shared
        torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "used": total - free,
            "total": total,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_reserved(),
        }

    def forget_peak(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def _sides(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        import torch

        size = min(nbytes, PINNED)
        if self._pinned is None or self._pinned[0].numel() < size:
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self._pinned = host, torch.zeros(size, dtype=torch.uint8, device="cuda")
        return self._pinned[0][:size], self._pinned[1][:size], nbytes / size

    def _seconds(self, call: Callable[[], object]) -> float:
        import torch

        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        started.record()
        call()
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3


class Played:
    """A device that a driver plays over files of a folder, as ``tests.devices.SharedMemoryDriver`` does.

    Args:
        driver: ``module:class``; made with the folder, ``install``-ed, and asked for ``tensors``.
    """

    def __init__(self, driver: str, folder: str) -> None:
        module, _, name = driver.partition(":")
        self.driver: Any = getattr(importlib.import_module(module), name)(folder).install()
        self._folder = Path(folder)

    def name(self) -> str:
        return type(self.driver).__name__

    def tensors(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        import torch

        found: dict[str, torch.Tensor] = self.driver.tensors(
            {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        )
        return found

    def private(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def flat(self, nbytes: int) -> float:
        import torch

        source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    down = up = peer = flat

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        held = sum(path.stat().st_size for path in self._folder.iterdir())
        return {"used": held, "total": 1 << 40, "allocated": held, "reserved": held, "peak": held}

    def forget_peak(self) -> None:
        pass


def device_of(described: Sequence[str]) -> Device:
    """``["cuda"]``, ``["cuda", ordinal]``, or ``["played", driver, folder]``."""
    kind, *arguments = described
    return Cuda(*arguments) if kind == "cuda" else Played(*arguments)


def devices() -> int:
    """GPUs that torch sees here; asks for no context."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mapped segments of this process, those that describe lent memory too."""
    return sum("awexd" in line for line in Path("/proc/self/maps").read_text().splitlines())
