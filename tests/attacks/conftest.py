"""The daemon's fixtures for this folder."""

from __future__ import annotations

from tests.daemons import daemon, folder

__all__ = ["daemon", "folder"]
