"""torchstore: a trainer's process puts its tensors, an engine's gets them in place, through a storage volume."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any

from awexd.bench.link import Answer, serve
from benchmarks.peers.torchstore_member import Member, this_host, torchstore


class Job:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def open(self, weights: dict[str, Any]) -> Answer:
        self._run(self._open(weights))
        return {}

    def round(self, step: int) -> Answer:
        """Seconds from put called to get done."""
        return {"seconds": self._run(self._round(step))}

    def check(self, step: int) -> Answer:
        return {"wrong": self._run(self._check(step))}

    def close(self) -> Answer:
        self._run(torchstore.shutdown())
        return {}

    async def _open(self, weights: dict[str, Any]) -> None:
        trainer, engine = (this_host().spawn_procs(per_host={"gpus": 1}) for _ in range(2))
        self.trainer = trainer.spawn("trainer", Member, weights, True)
        self.engine = engine.spawn("engine", Member, weights, False)
        await torchstore.initialize()

    async def _round(self, step: int) -> float:
        started = await self.trainer.put.call_one(step)
        return float(await self.engine.get.call_one() - started) / 1e9

    async def _check(self, step: int) -> list[str]:
        return list(await self.engine.wrong.call_one(step))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)


if __name__ == "__main__":
    job = Job()
    serve(int(sys.argv[1]), {"open": job.open, "round": job.round, "check": job.check, "close": job.close})
    os._exit(0)  # Monarch's threads do not end by themselves
