"""The processes of ``nccl.py``: those of ``awexd.bench.gpu.sides``, which also move bytes as torch.distributed does.

``python -m benchmarks.nccl_sides writer|reader DEVICE LINK``; ``DEVICE`` is JSON, as there, or ``["host"]``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from awexd.bench.gpu.devices import Device, Shapes, device_of
from awexd.bench.gpu.sides import SECONDS, ReaderSide, WriterSide
from awexd.bench.link import Answer, nanoseconds, serve

if TYPE_CHECKING:
    import torch

AT_ONCE = 512
"""Operations of one batch."""


class Host:
    """In the place of a GPU: host memory."""

    def name(self) -> str:
        return "host memory"

    def tensors(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    private = tensors

    def flat(self, nbytes: int) -> float:
        import torch

        source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started

    down = up = peer = flat

    def synchronize(self) -> None: ...

    def free(self) -> None: ...

    def memory(self) -> dict[str, int]:
        return dict.fromkeys(("used", "total", "allocated", "reserved", "peak"), 0)

    def forget_peak(self) -> None: ...


class Bare:
    """The same bytes by torch.distributed, between these two processes alone."""

    names = ("bare_open", "bare", "bare_close")
    device: Device
    held: list[Any]

    def bare_open(self, address: str, rank: int) -> Answer:
        import torch.distributed as dist

        backend = "gloo" if isinstance(self.device, Host) else "nccl"
        timeout = timedelta(seconds=SECONDS)
        dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=2, timeout=timeout)
        self._rank = rank
        self._one: torch.Tensor | None = None
        return {}

    def bare(self, how: str) -> Answer:
        """``one``: one buffer; ``each``: an operation a tensor, so many at once; ``broadcast``: a tensor at a time."""
        import torch
        import torch.distributed as dist

        tensors = [tensor for _, tensor in self.held]
        if how == "one" and self._one is None:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._one = torch.empty(nbytes, dtype=torch.uint8, device=tensors[0].device)
        dist.barrier()
        self.device.synchronize()
        started = nanoseconds()
        if how == "one" and self._one is not None:
            dist.recv(self._one, 0) if self._rank else dist.send(self._one, 1)
        elif how == "each":
            operation, peer = (dist.irecv, 0) if self._rank else (dist.isend, 1)
            for at in range(0, len(tensors), AT_ONCE):
                batch = [dist.P2POp(operation, tensor, peer) for tensor in tensors[at : at + AT_ONCE]]
                for work in dist.batch_isend_irecv(batch):
                    work.wait()
        else:
            for tensor in tensors:
                dist.broadcast(tensor, 0)
        self.device.synchronize()
        return {"started": started, "ended": nanoseconds()}

    def bare_close(self) -> Answer:
        import torch.distributed as dist

        self._one = None
        dist.destroy_process_group()
        self.device.free()
        return {}


class BareWriter(Bare, WriterSide):
    names = (*WriterSide.names, *Bare.names)


class BareReader(Bare, ReaderSide):
    names = (*ReaderSide.names, *Bare.names)


def main() -> None:
    role, described, link = sys.argv[1:]
    kind = json.loads(described)
    side = (BareWriter if role == "writer" else BareReader)(Host() if kind == ["host"] else device_of(kind))
    try:
        serve(int(link), side.operations())
    finally:
        # The benchmark may have been killed: its jobs go all the same.
        with contextlib.suppress(Exception):
            side.close()


if __name__ == "__main__":
    main()
