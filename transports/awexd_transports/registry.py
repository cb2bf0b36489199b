"""Transports between nodes by name: our own, and those of the entry-point group ``awexd.transports``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from awexd_transports.errors import InvalidArgument

GROUP = "awexd.transports"
BUILT_IN = {"rdma": "awexd.rdma.transport:Rdma", "tcp": "awexd.peers.tcp:Tcp"}
"""Loaded when asked for: they stand above this package."""


def find(name: str) -> Callable[..., Any]:
    """The class of the transport of that name (see ``base.Transport``); imported only now.

    Raises:
        InvalidArgument: there is none, two have that name, or it cannot be loaded.
    """
    others = {(point.name, point.value) for point in entry_points(group=GROUP)}
    values = {value for known, value in others | set(BUILT_IN.items()) if known == name}
    if not values:
        known = sorted({*BUILT_IN, *(one for one, _ in others)})
        raise InvalidArgument(f"no transport is called {name!r}; known: {', '.join(known)}")
    if len(values) > 1:
        raise InvalidArgument(f"two transports are called {name!r}: {' and '.join(sorted(values))}; uninstall one")
    module, _, attribute = values.pop().partition(":")
    try:
        loaded: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"transport {name!r} ({module}:{attribute}) cannot be loaded: {error}") from error
    return loaded
