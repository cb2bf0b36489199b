"""A trainer of whole checkpoints, and bytes that are not what was published."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from awexd_client import WeightWriter


class Trainer:
    """Publishes checkpoints, folders of ``folder``, from tensors in fp32."""

    def __init__(self, writer: WeightWriter, folder: Path) -> None:
        self.writer, self.folder = writer, folder
        self.held = self._checkpoint("new")
        writer.register(self.held)

    def publish(self, step: int, version: str) -> int:
        for name, tensor in self._checkpoint(version).items():
            self.held[name].copy_(tensor)
        self.writer.publish(step)
        return step

    def corrupted(self, step: int, name: str) -> int:
        """Publishes random weights, of which one tensor differs by a bit from what was said of it."""
        for tensor in self.held.values():
            tensor.copy_(torch.randn(tensor.shape))
        self.writer.publish(step)
        corrupt(self.held[name])
        return step

    def _checkpoint(self, version: str) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / version).glob("*.safetensors")
        return {name: tensor.float() for name, tensor in load_file(file).items()}


def corrupt(tensor: torch.Tensor) -> None:
    """Flips a bit of that tensor in the shared memory that holds the version published last.

    Raises:
        LookupError: no shared memory holds it.
    """
    held = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    for name in os.listdir("/dev/shm"):
        if not name.startswith("awexd-"):
            continue
        with open(f"/dev/shm/{name}", "r+b") as file:
            at = file.read().find(held)
            if at >= 0:
                file.seek(at + 3)
                file.write(bytes([held[3] ^ 0x10]))
                return
    raise LookupError("no shared memory holds that tensor")
