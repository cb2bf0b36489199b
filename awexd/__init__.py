"""The node daemon that keeps a trainer's weights in shared memory, the MetaServer, and their commands."""

from __future__ import annotations

__version__ = "0.1.0"
