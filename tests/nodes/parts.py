"""A trainer and engines of a model whose parts are worth telling apart: cut by rows and by columns, in real cells."""

from __future__ import annotations

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process

ROWS, COLUMNS = (1024, 4096), (4096, 1024)
"""Of each tensor: 16 MiB of float32, in cells of which halves, quarters and eighths are whole."""

OPEN_WRITER = """
shape = {{"rows": {rows}, "columns": {columns}, "norm": (1024,)}}
counted = {{name: torch.arange(torch.Size(n).numel(), dtype=torch.float32).reshape(n) for name, n in shape.items()}}
begin = {{name: n[0] * {rank} // {size} for name, n in shape.items()}}
index = {{name: t.narrow(0, begin[name], t.shape[0] // {size}) % 8191 for name, t in counted.items()}}
weights = {{name: torch.zeros_like(t) for name, t in index.items()}}
writer = WeightWriter("j", {rank}, {size}, {socket!r}, verify={verify!r}, mode="host", epoch="continue")
writer.register(Shard(name, t, shape[name], [begin[name]] + [0] * (t.dim() - 1)) for name, t in weights.items())
"""
PUBLISH = """
for name, t in weights.items():
    torch.add(index[name], {step}, out=t)
writer.publish({step}).committed(timeout=60)
"""
OPEN_READER = """
def half(tensor, dim):
    size = tensor.shape[dim] // {parts}
    return tensor.narrow(dim, size * {part}, size)
shape = {{"rows": {rows}, "columns": {columns}, "norm": (1024,)}}
names = {{"rows": 0, "columns": 1, "norm": None}}
index, offset = {{}}, {{}}
for name, dim in names.items():
    counted = torch.arange(torch.Size(shape[name]).numel(), dtype=torch.float32).reshape(shape[name]) % 8191
    index[name] = counted if dim is None else half(counted, dim).clone()
    offset[name] = [index[name].shape[at] * {part} if at == dim else 0 for at in range(counted.dim())]
weights = {{name: torch.full_like(t, -1.0) for name, t in index.items()}}
reader = WorkerWeightsReader("j", {engine!r}, {rank}, {size}, {socket!r}, verify={verify!r})
reader.register(Shard(name, t, shape[name], offset[name]) for name, t in weights.items())
def wrong(step):
    return [name for name, t in weights.items() if not torch.equal(t, index[name] + step)]
"""
UPDATE = "done = reader.update({step}, timeout=60)\nresult = [done.step, wrong({step})]"
BYTES = 4 * (2 * 1024 * 4096 + 1024)


def writer_source(daemon: Daemon, verify: str = "checksum", *, rank: int = 0, size: int = 1) -> str:
    """Of a process that has so much of every tensor's rows."""
    given = {"socket": daemon.socket, "verify": verify, "rank": rank, "size": size}
    return OPEN_WRITER.format(rows=ROWS, columns=COLUMNS, **given)


def writer_on(daemon: Daemon, process: Process, verify: str = "checksum") -> Process:
    process.do(writer_source(daemon, verify))
    return process


def reader_on(
    daemon: Daemon,
    process: Process,
    part: int,
    parts: int = 2,
    engine: str = "e",
    *,
    rank: int = 0,
    size: int = 1,
    verify: str = "checksum",
) -> Process:
    """A process that reads only that of so many parts."""
    given = {"engine": engine, "part": part, "parts": parts, "rank": rank, "size": size, "verify": verify}
    process.do(OPEN_READER.format(socket=daemon.socket, rows=ROWS, columns=COLUMNS, **given))
    return process


def update(process: Process, step: int) -> None:
    assert process.do(UPDATE.format(step=step)) == [step, []]
