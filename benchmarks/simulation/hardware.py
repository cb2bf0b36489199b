"""What a node is made of, and how fast its parts are: measured where there is a result, else the maker's figure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
GPUS = 8
"""Of a node; as many ranks, or workers, as NICs."""
NIC_BYTES_PER_SECOND = 8 * 400e9 / 8
"""Eight of 400 Gb/s, each way, at the rate of the line; over RDMA, which takes no processor's time for a byte."""
MEMORY_BYTES_PER_SECOND = 16 * 4800e6 * 8
"""DDR5-4800 in eight channels on each of two sockets, reads and writes together, at the rate of the pins."""
NETWORK_SECONDS = 10e-6
"""There and back, between two nodes."""
DURABLE_SECONDS = 1e-3
"""Until a commit is on the MetaServer's disk."""
ASSUMED_LAUNCH = 2e-4
"""Seconds, where h200.json does not say."""
ASSUMED_REQUESTS, ASSUMED_LATENESS = 10_000.0, 5e-3
"""The MetaServer's, requests a second and seconds, where nodes.json does not say."""


@dataclass(frozen=True)
class Hardware:
    """Rates in bytes a second, times in seconds.

    Attributes:
        down, up: of each GPU: from its memory into host memory, and back.
        nic: of a node, each way.
        memory: of a node's host memory, reads and writes together.
        control: a step's words between client and daemon, publish to update.
        network: there and back between nodes.
        request: the MetaServer's time for one.
        lateness: from a change at the MetaServer to the last daemon that is told.
        durable: of a commit.
        piece: a daemon's own time for a piece.
        launch: of waves of copies into a GPU, beside the copies' own time.
        sources: where each was read, or that it was assumed.
    """

    down: float
    up: float
    control: float
    piece: float
    nic: float = NIC_BYTES_PER_SECOND
    memory: float = MEMORY_BYTES_PER_SECOND
    network: float = NETWORK_SECONDS
    request: float = 1 / ASSUMED_REQUESTS
    lateness: float = ASSUMED_LATENESS
    durable: float = DURABLE_SECONDS
    launch: float = ASSUMED_LAUNCH
    sources: tuple[str, ...] = ()


def measured(piece: float, folder: Path = RESULTS) -> Hardware:
    """Of the committed results, and a daemon's time for a piece as it was measured just now."""
    nodes = _values(folder / "nodes.json")
    requests = nodes.get("metaserver-requests") or ASSUMED_REQUESTS
    late = nodes.get("metaserver-lateness-p99")
    launch = _values(folder / "h200.json").get("overlap-launch")
    gpu, control = _values(folder / "h200.json"), _values(folder / "control.json")
    return Hardware(
        down=gpu["host-publish"] * 1e9,
        up=gpu["host-update-reshard"] * 1e9,
        control=control["control-p50"] / 1e3,
        piece=piece,
        request=1 / requests,
        lateness=ASSUMED_LATENESS if late is None else late / 1e3,
        launch=ASSUMED_LAUNCH if launch is None else launch / 1e3,
        sources=(
            "h200.json host-publish, host-update-reshard",
            "control.json control-p50",
            "nodes.json metaserver-requests" if "metaserver-requests" in nodes else "requests assumed",
            "h200.json overlap-launch" if launch is not None else "launches assumed",
            "nodes.json metaserver-lateness-p99" if "metaserver-lateness-p99" in nodes else "lateness assumed",
        ),
    )


def _values(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return {one["name"]: one["value"] for one in json.loads(path.read_bytes())}
