"""Whether this node can do it, found out without loading anything of NIXL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

MODULES = ("nixl_cu12", "nixl_cu13")
"""The packages ``nixl-cu12`` and ``nixl-cu13``; the first that is there is used."""
DEVICES = Path("/sys/class/infiniband")
UCX_TLS = "UCX_TLS"
"""UCX's own setting: which networks it may use. Set, it is taken for the user's wish to do without a device."""


def module() -> str | None:
    """The name of NIXL's package here."""
    return next((name for name in MODULES if find_spec(name) is not None), None)


def devices() -> list[str]:
    """The RDMA devices of this node."""
    try:
        return sorted(os.listdir(DEVICES))
    except FileNotFoundError:
        return []


def why_not(environ: Mapping[str, str], *, forced: bool = True) -> str | None:
    """Why ``rdma`` cannot be used here; None where it can.

    Args:
        forced: by somebody who asked for it; otherwise only a device makes it worth while.
    """
    if module() is None:
        return "rdma: NIXL is not installed; pip install 'awexd[rdma]'"
    if devices() or (forced and environ.get(UCX_TLS)):
        return None
    return f"rdma: there is no RDMA device in {DEVICES}; UCX_TLS=tcp in the environment does without, for tests"
