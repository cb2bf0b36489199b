"""A node that fetches, a process of its own: prints a line when the first bytes are there, and one at its end."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

from awexd.peers.fetcher import Fetcher
from awexd.peers.settings import PeerSettings
from awexd_transports.base import Memory, Source, Subject
from awexd_transports.errors import AwexdError
from awexd_transports.ranges import Ranges
from awexd_transports.registry import find


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def main(config: dict[str, Any]) -> None:
    settings = PeerSettings(**config["settings"])
    memories = {int(rank): Memory(fd, nbytes, writable=True) for rank, (fd, nbytes) in config["memories"].items()}
    wants = {rank: Ranges([(0, memory.nbytes)]) for rank, memory in memories.items()}
    sources = [
        Source(
            one["node"],
            one["host"],
            one["port"],
            bytes.fromhex(one["ticket"]),
            bytes.fromhex(one["key"]),
            one["ranks"] and {rank: wants[rank] for rank in one["ranks"]},
        )
        for one in config["sources"]
    ]
    begun = asyncio.Event()

    def arrived(rank: int, start: int, end: int) -> None:
        if not begun.is_set():
            begun.set()
            say(begun=True)

    fetch = Fetcher(
        find(config["transport"])(settings),
        Subject(*config["subject"]),
        wants,
        memories,
        arrived=arrived,
        verify=config["verify"],
        settings=settings,
    )
    try:
        await fetch.run(sources, config["within"])
        say(delivered=fetch.delivered, again=fetch.again)
    except AwexdError as error:
        say(error=error.code, message=error.message, left=fetch.left)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
