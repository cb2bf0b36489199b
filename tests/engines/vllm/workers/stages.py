"""A whole vLLM of two pipeline stages: updates and failures, and what its workers hold after each.

``python stages.py '{...}'`` prints a line of JSON. With stages vLLM 0.32 cannot generate on CPUs; it loads and updates.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the look into the workers, below

import stand
import torch
from safetensors.torch import load_file
from trainer import Trainer

from awexd_client import AwexdError, WeightReader, WeightWriter
from awexd_client.vllm import VLLMWorkers

LAST = "model.layers.1.input_layernorm.weight"
LOOKED_AT = ("model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight", LAST, "lm_head.weight")


def expected(folder: Path) -> dict[str, list[float]]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensors[name].float().flatten().tolist() for name in LOOKED_AT}


def main() -> None:
    task = json.loads(sys.argv[1])
    folder, socket = Path(task["models"]) / "qwen3", task["socket"]
    llm = stand.engine(folder / "old", pipeline_parallel_size=2)
    report: dict[str, Any] = {}

    def note(name: str, version: str, act: Callable[[], object]) -> None:
        said = None
        try:
            act()
        except AwexdError as error:
            said = [str(error), *getattr(error, "__notes__", ())]
        stages = llm.apply_model(partial(stand.held, LOOKED_AT))
        whole = {name: values[: len(wanted[version][name])] for stage in stages for name, values in stage.items()}
        report[name] = {
            "right": whole == wanted[version],
            "split": [sorted(stage) for stage in stages],
            "version": llm.get_weight_version(),
            "error": said,
        }

    wanted = {version: expected(folder / version) for version in ("old", "new", "newer")}
    with WeightWriter("stages", 0, 1, socket, keep=8) as writer:
        trainer = Trainer(writer, folder)
        workers = VLLMWorkers(llm).connect("stages", "rollout", socket)
        with WeightReader("stages", "rollout", workers, socket) as reader:
            note("start", "old", lambda: None)
            note("update", "new", lambda: reader.update(trainer.publish(1, "new")))
            note("corrupted", "new", lambda: reader.update(trainer.corrupted(2, LAST)))
            note("again", "newer", lambda: reader.update(trainer.publish(3, "newer")))
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
