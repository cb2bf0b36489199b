"""A trainer and engines whose weights are large enough to be caught on their way: uniform tensors, worth their step."""

from __future__ import annotations

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process
from tests.nodes.clusters import job_of, until

ELEMENTS = 32 << 20
"""Of each tensor: a version takes long enough to be caught on its way."""

OPEN_WRITER = """
weights = {{"a": torch.zeros({elements}), "b": torch.zeros(1001)}}
writer = WeightWriter("j", 0, 1, {socket!r}, verify="checksum", mode="host", epoch="continue")
writer.register(weights)
"""
OPEN_READER = """
weights = {{"a": torch.full(({elements},), -1.0), "b": torch.full((1001,), -1.0)}}
reader = WorkerWeightsReader("j", {engine!r}, {rank}, {size}, {socket!r}, verify="checksum")
reader.register(weights)
def seen():
    return sorted({{float(t.min()) for t in weights.values()}} | {{float(t.max()) for t in weights.values()}})
"""
PUBLISH = "[t.fill_({step}) for t in weights.values()]\nwriter.publish({step}).committed(timeout=60)"
UPDATE = "done = reader.update({step}, timeout=60)\nresult = [done.step, seen()]"


def writer_on(daemon: Daemon, process: Process, elements: int = ELEMENTS) -> Process:
    process.do(OPEN_WRITER.format(socket=daemon.socket, elements=elements))
    return process


def reader_on(
    daemon: Daemon, process: Process, engine: str = "e", elements: int = ELEMENTS, *, rank: int = 0, size: int = 1
) -> Process:
    """Each worker of an engine has all of it."""
    given = {"socket": daemon.socket, "engine": engine, "elements": elements, "rank": rank, "size": size}
    process.do(OPEN_READER.format(**given))
    return process


def on_its_way(daemon: Daemon, step: int) -> bool:
    """Waits until that step is being fetched there, or is there; whether the former."""

    def there(status: dict[str, object]) -> bool:
        job = job_of(status, "j")
        fetching = (job.get("elsewhere") or {}).get("fetching")
        coming = fetching is not None and fetching["version"][1] == step and fetching["here_bytes"] > 0
        return coming or [1, step] in job.get("held", [])

    job = job_of(until(daemon, there), "j")
    return [1, step] not in job["held"]
