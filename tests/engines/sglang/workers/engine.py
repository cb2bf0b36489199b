"""``sgl.Engine`` of this process, updated from Python: ``python engine.py MODELS SOCKET JOB REPORT``.

MODELS/1 and MODELS/2 are published as steps 1 and 2; the engine begins with MODELS/0. REPORT gets what it generated and
its digests, after each update and after SGLang's own load of the same checkpoint.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang
import torch
from safetensors.torch import load_file

from awexd_client import AwexdError, WeightReader, WeightWriter
from awexd_client.sglang import SGLangWorkers
from awexd_client.sglang.control import LOADER


def state(engine: Any) -> dict[str, Any]:
    """Greedy tokens, and digests of every tensor in the scheduler process."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    tokens = engine.generate(input_ids=[[10, 20, 30, 40, 50]], sampling_params=sampling)[0]["output_ids"]
    with tempfile.TemporaryDirectory() as folder:
        asked = torch.frombuffer(bytearray(json.dumps({"digests": folder}).encode()), dtype=torch.uint8)
        engine.begin_weight_update("target")
        engine.update_weights_from_tensor([("probe", asked)], load_format="probe.load", flush_cache=False)
        engine.end_weight_update()
        return {"tokens": tokens, "digests": json.loads(Path(folder, "0.json").read_text())}


def run(models: Path, socket: str, job: str) -> dict[str, Any]:
    weights = {number: load_file(models / number / "model.safetensors") for number in "12"}
    writer = WeightWriter(job, 0, 1, socket)
    live = {name: tensor.clone() for name, tensor in weights["1"].items()}
    writer.register(live, dtype=torch.float32)
    engine = sglang.Engine(
        model_path=str(models / "0"),
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        skip_server_warmup=True,
        max_total_tokens=2048,
        max_running_requests=4,
        mem_fraction_static=0.2,
        log_level="error",
        custom_weight_loader=[LOADER, "probe.load"],
    )
    report: dict[str, Any] = {"before": state(engine)}
    workers = SGLangWorkers(engine, job, "rollout", socket)
    with WeightReader(job, "rollout", workers, socket) as reader:
        try:
            reader.update(step=9, timeout=1)
        except AwexdError as error:
            report["too early"] = f"{type(error).__name__}: {error}"
        report["still before"] = state(engine)
        for number in "12":
            for name, tensor in weights[number].items():
                live[name].copy_(tensor)
            writer.publish(int(number)).committed()
            reader.update()
            report[f"updated {number}"] = state(engine)
            report[f"version {number}"] = engine.get_model_info()["weight_version"]
    for number in "12":
        engine.update_weights_from_disk(str(models / number))
        report[f"loaded {number}"] = state(engine)
    engine.shutdown()
    writer.close()
    return report


if __name__ == "__main__":
    report = run(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    Path(sys.argv[4]).write_text(json.dumps(report))
