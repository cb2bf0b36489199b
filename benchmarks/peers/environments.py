"""Where peers' virtual environments are, and how their processes find what they share with ours."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("BENCH_PEERS", ROOT / ".peers"))  # no AWEXD_ name: the daemon would refuse it


def environment() -> dict[str, str]:
    """awexd itself is not installed there: the few modules of its that need nothing heavy are found by path."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "transports")])}


def python(peer: str) -> Path | None:
    """The peer's interpreter; None where ``make bench-peers`` has not made its environment."""
    found = ENVIRONMENTS / peer / "bin" / "python"
    return found if found.exists() else None
