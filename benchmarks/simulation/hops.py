"""How long an update must take at least: each hop's bytes over its rate, whoever fetches from whom, and when."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulation.hardware import GPUS, Hardware
from benchmarks.simulation.needs import Needs


def bounds(hardware: Hardware, segments: Sequence[int], nodes: Sequence[Needs]) -> dict[str, float]:
    """Seconds by hop, of the busiest of each kind.

    A segment is copied out of its GPU once, into and out of its node's host memory once, and leaves the node once. A
    node's union of needs arrives once, and each worker's part is read out of host memory and into its GPU once.

    Args:
        segments: bytes of each writer rank's.
        nodes: of one engine.
    """
    published = [sum(segments[at : at + GPUS]) for at in range(0, len(segments), GPUS)]
    return {
        "d2h": max(segments) / hardware.down,
        "trainer_memory": 2 * max(published) / hardware.memory,
        "trainer_nic": max(published) / hardware.nic,
        "engine_nic": max(each.total for each in nodes) / hardware.nic,
        "engine_memory": max(each.total + float(each.of_workers.sum()) for each in nodes) / hardware.memory,
        "h2d": max(float(each.of_workers.max()) for each in nodes) / hardware.up,
    }
