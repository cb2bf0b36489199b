"""The back end as verl makes and calls it, a master and a rollout worker in one process. Writes a JSON report.

``alone.py REPORT SOCKET``. What verl's manager does around an update is done by hand here, to stop in its middle.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from awexd_client.session import Connection

JOB = "alone"
BYTES = 8 << 20


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((BYTES // 4,), step + at / 8) for at, name in enumerate("abcd")}


def stream(step: int, started: list[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors(step).items():
        if started is not None:
            started.append(step)
        yield name, tensor
        tensor.zero_()


class Pair:
    """A master and a rollout worker, and a connection to ask the daemon."""

    def __init__(self, socket: str) -> None:
        import_external_libs("awexd_client.verl")
        self.socket = socket
        self.master = self.make(is_master=True)
        self.worker = self.make(timeout=20)

    def make(self, **arguments: Any) -> Any:
        return CheckpointEngineRegistry.new("awexd", bucket_size=1 << 20, job=JOB, socket=self.socket, **arguments)

    def connect(self) -> None:
        """As verl's manager does before each update."""
        actors, workers = type(self.master).build_topology(1, 1, [self.master.prepare(), self.worker.prepare()])
        self.master.init_process_group(**{name: values[0] for name, values in actors.items()})
        self.worker.init_process_group(**{name: values[0] for name, values in workers.items()})

    async def publish(self, step: int) -> None:
        self.connect()
        await self.master.send_weights(stream(step), global_steps=step)

    async def update(self, step: int) -> bool:
        """Whether the worker gets what the master sends."""
        self.connect()
        received, _ = await asyncio.gather(
            self.receive(step), self.master.send_weights(stream(step), global_steps=step)
        )
        return equal(received, step)

    async def receive(self, step: int) -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in self.worker.receive_weights(global_steps=step)}

    def ask(self, operation: str, **arguments: Any) -> Any:
        connection = Connection(self.socket)
        try:
            return connection.call(operation, arguments, timeout=10)[0]
        finally:
            connection.goodbye()

    def state(self) -> Any:
        (job,) = self.ask("status")["jobs"]
        (worker,) = (worker for engine in job["engines"] for worker in engine["workers"])
        return [worker["state"], worker["version"]]


def equal(received: dict[str, torch.Tensor], step: int) -> bool:
    expected = tensors(step)
    return list(received) == list(expected) and all(torch.equal(received[name], expected[name]) for name in expected)


async def failure(awaitable: Any) -> str:
    results: list[object] = await asyncio.gather(awaitable, return_exceptions=True)
    return f"{type(results[0]).__name__}: {results[0]}"


async def steps(pair: Pair) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["first"] = await failure(pair.receive(1))
    found["updates"] = [await pair.update(step) for step in (1, 2)]

    pair.connect()
    waiting = asyncio.ensure_future(pair.receive(3))
    turns = 0
    while turns < 50:  # the loop turns while the worker waits for step 3
        await asyncio.sleep(0.002)
        turns += 1
    found["waits"] = not waiting.done()
    await pair.master.send_weights(stream(3), global_steps=3)
    found["waited"] = equal(await waiting, 3)

    await pair.publish(4)
    halfway = pair.worker.receive_weights(global_steps=4)
    found["halfway"] = (await anext(halfway))[0]
    found["second_receiver"] = await failure(pair.receive(4))
    await halfway.aclose()
    found["closed_early"] = pair.state()
    found["after_closing"] = await pair.update(5)
    found["state_after_closing"] = pair.state()

    await pair.publish(6)
    withdrawn = pair.worker.receive_weights(global_steps=6)
    await anext(withdrawn)
    pair.ask("rollback", job=JOB, step=5)
    found["withdrawn"] = await failure(exhausted(withdrawn))
    found["state_withdrawn"] = pair.state()
    found["after_withdrawing"] = await pair.update(7)

    pair.connect()
    cancelled = asyncio.ensure_future(pair.receive(8))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    found["cancelled"] = await failure(cancelled)
    found["after_cancelling"] = await pair.update(8)

    pair.connect()
    abandoned = asyncio.ensure_future(pair.receive(9))
    await asyncio.sleep(0.05)
    found["after_abandoning"] = await pair.update(9)
    found["abandoned"] = await failure(abandoned)

    started: list[int] = []
    pair.master.init_process_group(rank=None, world_size=0, master=("", 1, 3))
    found["not_rising"] = await failure(pair.master.send_weights(stream(4, started), global_steps=4))
    found["exhausted"] = len(started)
    bystander = pair.make()
    found["bystander"] = await bystander.send_weights(stream(1, started)), len(started)
    found["elsewhere"] = await failure(asyncio.to_thread(pair.worker.init_process_group, **elsewhere(pair)))
    found["at_end"] = await pair.update(10)
    return found


def elsewhere(pair: Pair) -> dict[str, Any]:
    return {"rank": 0, "world_size": 1, "master": ("another-node", pair.master.prepare()[1], 9)}


async def exhausted(received: Any) -> None:
    async for _ in received:
        pass


def main() -> None:
    report, socket = sys.argv[1:]
    torch.set_num_threads(1)
    Path(report).write_text(json.dumps(asyncio.run(steps(Pair(socket)))))


if __name__ == "__main__":
    main()
