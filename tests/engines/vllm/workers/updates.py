"""One tensor-parallel rank: models go through updates by a real daemon, and are compared with what vLLM loads.

``python updates.py '{...}'`` prints a line of JSON (see ``Task``): what differs after each update, and how each
checkpoint tensor was brought in. This process is trainer and worker at once: it publishes its part of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import stand
import torch
from safetensors.torch import load_file

from awexd_client import AwexdError, Shard, WeightWriter, WorkerWeightsReader
from awexd_client.adapters.vllm import VLLMAdapter

ROUNDS = ("new", "newer", "old")


@dataclass
class Task:
    """What to do, as the test says it on the command line."""

    models: str
    families: list[str]
    socket: str
    store: str
    rank: int = 0
    world_size: int = 1
    prepack: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """Of one family, on one rank."""

    changed: int = 0
    rounds: dict[str, list[str]] = field(default_factory=dict)
    direct: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    if not task.prepack:
        stand.without_prepacking()
    stand.join(task.rank, task.world_size, Path(task.store), task.options.get("stages", 1))
    reports = {family: asdict(_updated(task, family)) for family in task.families}
    sys.stdout.write("\n" + json.dumps(reports) + "\n")


def _updated(task: Task, family: str) -> Report:
    folder = Path(task.models) / family
    configs = {version: stand.configure(folder / version, task.world_size, **task.options) for version in ROUNDS}
    wanted = {version: stand.snapshot(stand.load(config)) for version, config in configs.items()}
    config = configs["old"]
    model = stand.load(config)
    report = Report(changed=len(stand.differences(wanted["old"], wanted["new"])))
    with contextlib.ExitStack() as stack:
        job = "-".join((family, str(task.world_size), *map(str, task.options.values())))
        writer = stack.enter_context(WeightWriter(job, task.rank, task.world_size, task.socket))
        reader = stack.enter_context(WorkerWeightsReader(job, "e", task.rank, task.world_size, task.socket))
        held = _part(folder / ROUNDS[0], task)
        writer.register(list(held.values()))
        adapter = VLLMAdapter(config)
        reader.register(model, adapter)
        weights = adapter.engine_weights(model)
        report.direct, report.aside = sorted({shard.name for shard in weights.direct}), dict(weights.reasons)
        for step, version in enumerate(ROUNDS):
            for name, shard in _part(folder / version, task).items():
                held[name].tensor.copy_(shard.tensor)
            writer.publish(step)
            if step == 1 and report.aside:
                report.failed = _fail_once(model, reader, wanted["new"])
            result = reader.update(step)
            report.rounds[version] = stand.differences(stand.snapshot(model), wanted[version])
            report.states[version] = f"{reader.state} {result.epoch}.{result.step}"
    return report


def _part(checkpoint: Path, task: Task) -> dict[str, Shard]:
    """This rank's share of a checkpoint: of each tensor some of its rows."""
    shards = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            first, last = (len(tensor) * at // task.world_size for at in (task.rank, task.rank + 1))
            offset = (first, *(0 for _ in tensor.shape[1:]))
            shards[name] = Shard(name, tensor[first:last].clone(), tuple(tensor.shape), offset)
    return shards


def _fail_once(model: Any, reader: WorkerWeightsReader, before: stand.Snapshot) -> dict[str, Any]:
    """vLLM's loader breaks off after half of what it is given: what is left of the model then."""
    try:
        with _failing(model):
            reader.update(1)
    except AwexdError as error:
        now = stand.snapshot(model)
        return {
            "said": str(error),
            "state": reader.state,
            "meta": [name for name, tensor in now.items() if tensor.is_meta],
            "lost": sorted(before.keys() ^ now.keys()),
            "shapes": [name for name in before if name in now and before[name].shape != now[name].shape],
        }
    return {}


@contextlib.contextmanager
def _failing(model: Any) -> Iterator[None]:
    loaded = model.load_weights

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        every = list(weights)

        def half() -> Iterator[tuple[str, torch.Tensor]]:
            yield from every[: len(every) // 2]
            raise OSError("the loader broke off")

        loaded(half())

    model.load_weights = load_weights
    try:
        yield
    finally:
        del model.load_weights


if __name__ == "__main__":
    main()
