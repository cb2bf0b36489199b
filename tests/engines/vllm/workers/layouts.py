"""One rank of a model that vLLM has loaded and not yet transformed: is every element where its rule says?

``python layouts.py '{...}'`` prints a line of JSON: for each case and family the live tensors that differ from the
checkpoint's, how many elements no rule accounts for, and what was refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import stand
import torch
from safetensors.torch import load_file

from awexd_client.adapters.vllm import VLLMAdapter
from awexd_client.adapters.vllm.layout import Layout, own_tensors
from awexd_transports.errors import InvalidArgument


def main() -> None:
    task = json.loads(sys.argv[1])
    stand.without_prepacking()
    stand.join(task["rank"], task["world_size"], Path(task["store"]))
    models = Path(task["models"])
    report = {
        case: {
            family: _look(models / family / "new", task["world_size"], each["options"]) for family in each["families"]
        }
        for case, each in task["cases"].items()
    }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


def _look(folder: Path, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    config = stand.configure(folder, world_size, **options)
    model = stand.load(config, transform=False)
    try:
        return _checked(model, config, folder)
    except InvalidArgument as error:
        return {"refused": str(error)}


def _checked(model: Any, config: Any, folder: Path) -> dict[str, Any]:
    checkpoint: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        checkpoint |= load_file(file)
    wrong, padding, names, tensors = [], 0, set(), 0
    for owner in VLLMAdapter(config).owners(model):
        for layout in owner.layouts:
            live = owner.module._parameters[layout.path.rpartition(".")[2]]
            tensors += 1
            names |= {part.name for part in layout.parts}
            if not _same(layout, live, checkpoint):
                wrong.append(layout.path)
            padding += int(_uncovered(layout, live).count_nonzero())
    alive = len({id(tensor) for module in model.modules() for tensor in own_tensors(module).values()})
    return {
        "wrong": wrong,
        "uncovered": padding,
        "forgotten": alive - tensors,
        "names": sorted(names),
        "missing": sorted(checkpoint.keys() - names),
    }


def _same(layout: Layout, live: torch.Tensor, checkpoint: dict[str, torch.Tensor]) -> bool:
    for part in layout.parts:
        box, whole = live[part.index], checkpoint[part.name]
        box = box.mT if part.turned else box
        there = whole[tuple(slice(at, at + size) for at, size in zip(part.offset, box.shape, strict=True))]
        there = torch.zeros_like(there) if part.zeros else there
        if tuple(whole.shape) != part.shape or not torch.equal(box, there.to(box.dtype)):
            return False
    return True


def _uncovered(layout: Layout, live: torch.Tensor) -> torch.Tensor:
    """The live tensor with zeros wherever a part says what it is: vLLM fills padding with zeros."""
    left = live.detach().clone()
    for part in layout.parts:
        left[part.index] = 0
    return left


if __name__ == "__main__":
    main()
