"""A process that has a set of weights on a device, and what it does whoever moves them: awexd, or a peer.

Needs torch and nothing of awexd's client: peers' environments have no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from awexd.bench.gpu.devices import Device, descriptors, mappings
from awexd.bench.gpu.weights import Cut, Marks, Part, Weights, fill, holds, parts_of
from awexd.bench.link import Answer, Operation

if TYPE_CHECKING:
    import torch


class GpuSide:
    """What both sides have: a device, tensors on it, and the machine's limits."""

    names: Sequence[str] = (
        "describe",
        "prepare",
        "flat",
        "peer",
        "down",
        "up",
        "memory",
        "forget_peak",
        "free",
        "close",
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self.held: list[tuple[Part, torch.Tensor]] = []
        self._has: tuple[Weights, Cut] | None = None

    @property
    def moving(self) -> bool:
        return self._has is not None and self._has[0].moving

    def describe(self) -> Answer:
        return {"device": self.device.name()}

    def prepare(self, weights: Mapping[str, Any], cut: Mapping[str, Any]) -> Answer:
        """Tensors of a set, cut as this side holds them. No job may be open."""
        wanted = Weights(**weights), Cut(**cut)
        if wanted != self._has:
            self._drop()
            parts = parts_of(*wanted)
            made = self.device.tensors({part.key: part.shape for part in parts})
            self.held, self._has = [(part, made[part.key]) for part in parts], wanted
            self._made()
        return {"bytes": sum(tensor.nbytes for _, tensor in self.held)}

    def flat(self, nbytes: int) -> Answer:
        return {"seconds": self.device.flat(nbytes)}

    def peer(self, nbytes: int) -> Answer:
        return {"seconds": self.device.peer(nbytes)}

    def down(self, nbytes: int) -> Answer:
        return {"seconds": self.device.down(nbytes)}

    def up(self, nbytes: int) -> Answer:
        return {"seconds": self.device.up(nbytes)}

    def memory(self) -> Answer:
        self.device.synchronize()
        return {**self.device.memory(), "descriptors": descriptors(), "mappings": mappings()}

    def forget_peak(self) -> Answer:
        self.device.forget_peak()
        return {}

    def free(self) -> Answer:
        """Gives all of the device's memory back but the context's."""
        self._drop()
        return {}

    def close(self) -> Answer:
        return {}

    def operations(self) -> dict[str, Operation]:
        return {name: getattr(self, name) for name in self.names}

    def _made(self) -> None:
        """The tensors are new."""

    def _drop(self) -> None:
        self.held, self._has = [], None
        self.device.free()


class Source(GpuSide):
    """A trainer's: its weights are what each step makes them."""

    names = (*GpuSide.names, "change")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._marks = Marks([])

    def change(self, step: int) -> Answer:
        """What an optimizer would do: other weights, complete on the device when it returns."""
        if self.moving:
            for part, tensor in self.held:
                fill(part, tensor, step, moving=True)
        else:
            self._marks.set(step)
        self.device.synchronize()
        return {}

    def _made(self) -> None:
        for part, tensor in self.held:
            fill(part, tensor, 0, moving=False)
        self._marks = Marks(self.held)
        self.change(0)  # so that its kernels are loaded

    def _drop(self) -> None:
        self._marks = Marks([])
        super()._drop()


class Target(GpuSide):
    """An engine's: it looks whether it has them."""

    names = (*GpuSide.names, "check")

    def check(self, step: int) -> Answer:
        """Names of tensors that do not hold what the trainer's held at that step."""
        wrong = [part.key for part, tensor in self.held if not holds(part, tensor, step, moving=self.moving)]
        return {"wrong": wrong[:5], "count": len(wrong)}
