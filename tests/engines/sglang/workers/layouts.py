"""Real SGLang models, a process a rank, with no engine around them: ``python layouts.py CASES.json FOLDER``.

Each case builds a model from a checkpoint and, where it names a job, brings that into it through the daemon. FOLDER
gets <case>.<rank>.json: digests of every parameter, buffer and other tensor of the model. SGLang is imported once;
every rank of every case is forked from here.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from digests import digests
from sglang.benchmark.one_batch import _init_process_global_configs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models import deepseek_v2, registry
from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
from sglang.srt.server_args import PortArgs, ServerArgs

from awexd_client import WorkerWeightsReader
from awexd_client.adapters.sglang import SGLangAdapter

Case = dict[str, Any]
PATIENCE = 60.0


def act_as_on_gpus() -> None:
    """Two decisions that SGLang takes otherwise on CPUs: to add heads, and not to fuse the shared expert."""
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, *_: config
    deepseek_v2.get_num_fused_shared_experts = lambda: 1


def build(server_args: ServerArgs, port_args: PortArgs, rank: int, pp_rank: int) -> ModelRunner:
    """What a scheduler process does until the weights are loaded."""
    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=pp_rank)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))
    _init_process_global_configs()
    model_config = ModelConfig.from_server_args(server_args)
    port = port_args.nccl_port
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    return ModelRunner(
        model_config=model_config, mem_fraction_static=0.2, gpu_id=0, nccl_port=port, server_args=server_args
    )


def run(case: Case, server_args: ServerArgs, port_args: PortArgs, rank: int) -> dict[str, Any]:
    tp_size = case["arguments"].get("tp_size", 1)
    if case.get("as_on_gpus"):
        act_as_on_gpus()
    runner = build(server_args, port_args, rank % tp_size, rank // tp_size)
    report: dict[str, Any] = {"loaded": digests(runner.model)}
    for path in ("direct", "loader") if case.get("job") else ():
        report[path] = update(case, runner, rank, path)
        runner.weight_updater.update_weights_from_disk(case["model"], "auto")  # the old one again
    return report


def update(case: Case, runner: ModelRunner, rank: int, path: str) -> dict[str, Any]:
    """The job's newest version through the daemon: in place where that is right, or all by the model's loader."""
    adapter = SGLangAdapter(direct=path == "direct")
    weights = adapter.engine_weights(runner.model)
    engine = f"{case['name']}-{path}"
    with WorkerWeightsReader(case["job"], engine, rank, case["ranks"], case["socket"]) as reader:
        reader.register(runner.model, adapter, timeout=PATIENCE)
        reader.update(timeout=PATIENCE)
        after = digests(runner.model)
    return {"after": after, "direct": sorted({s.name for s in weights.direct}), "reasons": dict(weights.reasons)}


def main(cases: list[Case], folder: Path) -> None:
    """Cases one after another, the ranks of each at once."""
    registry.ModelRegistry.get_supported_archs()  # imports every model, here once
    for case in cases:
        server_args = ServerArgs(
            model_path=case["model"],
            device="cpu",
            attention_backend="torch_native",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            mem_fraction_static=0.2,
            log_level="error",
            **case["arguments"],
        )
        server_args.resolve_once()
        port_args = PortArgs.init_new(server_args)
        children = [_fork(case, server_args, port_args, rank, folder) for rank in range(case["ranks"])]
        for child in children:
            os.waitpid(child, 0)


def _fork(case: Case, server_args: ServerArgs, port_args: PortArgs, rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        report = run(case, server_args, port_args, rank)
    except BaseException:  # noqa: BLE001 - a rank's failure is its report
        report = {"error": traceback.format_exc()}
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
