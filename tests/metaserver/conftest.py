"""The MetaServer's fixtures for this folder."""

from __future__ import annotations

from tests.daemons import daemon, folder
from tests.metaserver.servers import client, metaserver

__all__ = ["client", "daemon", "folder", "metaserver"]
