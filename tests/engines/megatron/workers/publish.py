"""One rank of a Megatron-Core trainer: builds each case's model, publishes it to a daemon, tells how it lies.

Arguments: folder, rank, world size, socket, folder for logits. Jobs are named by their cases. Writes
``report.<rank>.json`` (for each case: for each shard its place in the checkpoint's tensor and in Megatron-Core's own
global tensor) and, where the case runs the model, ``<case>.logits.safetensors`` (rank 0).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from awexd_client import Shard, WeightWriter
from awexd_client.adapters.experts import SPLIT
from awexd_client.adapters.megatron import MegatronAdapter, Names
from tests.engines.megatron.sizes import CONFIGS, TOKENS
from tests.engines.megatron.workers import shim  # noqa: F401  (before the others)
from tests.engines.megatron.workers.models import Layout, build, fill, set_up, sharded, tensor_parallel_group
from tests.engines.megatron.workers.renamed import as_transformer_engine
from tests.engines.megatron.workers.wrapped import half_precision

CALL = 60.0


@dataclass(frozen=True)
class Case:
    """A configuration of ``sizes.py`` in a parallel layout.

    Attributes:
        job: what the case is called.
        runs: whether the model is run too (one pipeline stage only).
        change: to the chunks once they are filled; what Megatron-Core says of them is told of before.
    """

    config: str
    layout: Layout
    job: str
    runs: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    change: Any = None


def case(config: str, *, runs: bool = False, change: Any = None, label: str = "", **sizes: Any) -> Case:
    keys = ("tp", "pp", "vpp", "ep", "etp", "cp")
    layout = Layout(**{key: sizes.pop(key) for key in keys if key in sizes})
    named = "-".join(f"{key}{getattr(layout, key)}" for key in keys if getattr(layout, key) != getattr(Layout, key))
    return Case(config, layout, "-".join(filter(None, (config, named, label))), runs, sizes, change)


CASES: dict[int, list[Case]] = {
    1: [
        *(case(name, runs=True) for name in CONFIGS),
        *(
            case(name, label="te", change=as_transformer_engine)
            for name in ("qwen2", "qwen3_moe", "deepseek_v3", "mixtral", "qwen2_moe")
        ),
        case("deepseek_v3", label="fused", fused=True),
        case("qwen3_moe", label="interleaved", change=as_transformer_engine, moe_mlp_glu_interleave_size=8),
        case("gpt_oss", label="te", change=as_transformer_engine),
        case("gpt_oss", label="interleaved", change=as_transformer_engine, moe_mlp_glu_interleave_size=8),
        case("deepseek_v3", label="mtp", mtp_num_layers=1),
        case("llama_tied", label="half", change=half_precision),
    ],
    2: [
        *(
            case(name, tp=2, runs=True)
            for name in ("llama", "llama_tied", "qwen2_moe", "deepseek_v3", "qwen3_next", "glm4", "gemma3_text")
        ),
        case("qwen3_moe", ep=2, runs=True),
        case("mixtral", ep=2, tp=2, etp=1, runs=True),
        case("mixtral", etp=2, runs=True),
        case("gpt_oss", tp=2, etp=1, runs=True),
        case("gpt_oss", pp=2),
        case("glm4_moe", ep=2),
        case("deepseek_v2", tp=2),
        case("llama", pp=2),
        case("llama", pp=2, vpp=2),
        case("llama", pp=2, label="uneven", num_layers_in_first_pipeline_stage=1),
        case("llama", pp=2, label="laid", pipeline_model_parallel_layout="Ettt|tL"),
        case("llama_tied", pp=2),
        case("llama_tied", pp=2, vpp=2),
        case("llama", label="dp2"),
        case("llama", cp=2),
        case("qwen3_moe", cp=2, ep=2),
        case("llama", tp=2, label="sp", sequence_parallel=True),
        case("qwen3_moe", tp=2, label="sp", sequence_parallel=True),
        case("deepseek_v3", tp=2, label="te", change=as_transformer_engine),
        case("deepseek_v3", tp=2, label="fused", fused=True),
        case("qwen3_moe", ep=2, label="te", change=as_transformer_engine),
        case("deepseek_v3", tp=2, label="mtp", mtp_num_layers=1),
        case("deepseek_v3", pp=2, label="mtp", mtp_num_layers=1),
    ],
    4: [
        # Two groups of keys and values on four ranks.
        *(case(name, tp=4, runs=True) for name in ("llama", "qwen2", "qwen3_next")),
        case("qwen3_moe", tp=2, ep=2, etp=1, runs=True),
        case("gpt_oss", tp=2, ep=2, etp=1, runs=True),
        case("qwen3_moe", tp=2, ep=2, etp=2),
        case("deepseek_v3", tp=2, ep=2, etp=1),
        case("qwen3_moe", pp=2, ep=2),
        case("llama", tp=2, pp=2),
        case("llama_tied", tp=2, pp=2, vpp=2),
    ],
}


def adapter_of(name: str) -> MegatronAdapter:
    # Qwen3-Next as a whole is no family of the table: it has linear attention. This model has none.
    named = Names(SPLIT["qwen3_next"], shared="shared_expert", zero_centred=True) if name == "qwen3_next" else None
    return MegatronAdapter(CONFIGS[name], names=named)


def run_case(each: Case, socket: str, folder: Path) -> list[dict[str, Any]]:
    """Publishes one case's model; what ``places`` says of it."""
    set_up(each.layout)
    chunks = build(each.config, each.layout, **each.options)
    fill(chunks)
    adapter = adapter_of(each.config)
    told = list(places(chunks, list(adapter.shards(chunks))))
    if each.runs:
        logits = run(chunks[0])
        if dist.get_rank() == 0:
            save_file({"logits": logits}, folder / f"{each.job}.logits.safetensors")
    target = each.change(chunks) if each.change else chunks
    with WeightWriter(each.job, dist.get_rank(), dist.get_world_size(), socket, timeout=CALL) as writer:
        writer.register(target[0] if len(target) == 1 else target, adapter, timeout=CALL)
        publication = writer.publish(1, timeout=CALL)
        publication.committed(timeout=CALL)
    return told


def run(model: Any) -> torch.Tensor:
    """The logits of all ranks of a tensor-parallel group."""
    tokens = torch.tensor([TOKENS])
    length = len(TOKENS)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        part = model(tokens, torch.arange(length)[None], hidden).contiguous()
    group = tensor_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, -1)


def places(chunks: list[Any], shards: list[Shard]) -> Iterator[dict[str, Any]]:
    """Where each shard starts, by its own account and by ``sharded_state_dict()``'s."""
    known = sorted(sharded(chunks), key=lambda entry: entry.data.data_ptr())
    for shard in shards:
        at = shard.tensor.data_ptr()
        held = (entry for entry in known if 0 <= at - entry.data.data_ptr() < entry.data.nbytes)
        entry = next(held, None)
        if entry is None:
            raise SystemExit(f"{shard.name} lies where sharded_state_dict() knows of nothing")
        local = torch.unravel_index(torch.tensor((at - entry.data.data_ptr()) // 4), entry.data.shape)
        before = entry.prepend_axis_num
        within = zip(entry.global_offset[before:], local, strict=True)
        yield {
            "name": shard.name,
            "offset": shard.offset,
            "shape": list(shard.tensor.shape),
            "global_shape": shard.global_shape,
            "key": entry.key,
            "key_offset": [*entry.global_offset[:before], *(start + int(index) for start, index in within)],
        }


def main() -> None:
    folder, rank, world, socket = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    report = {each.job: run_case(each, socket, Path(sys.argv[5])) for each in CASES[world]}
    (folder / f"report.{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
