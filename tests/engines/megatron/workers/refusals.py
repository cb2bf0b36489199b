"""One of two data-parallel ranks: what the adapter makes of models without being told, and of parameters not gathered.

Arguments: folder, rank, world size, socket. Writes ``report.<rank>.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from awexd_client import WeightWriter
from awexd_client.adapters import shards_of
from awexd_client.adapters.megatron import MegatronAdapter
from awexd_transports.errors import InvalidArgument
from tests.engines.megatron.sizes import CONFIGS, TOKENS
from tests.engines.megatron.workers import shim  # noqa: F401  (before the others)
from tests.engines.megatron.workers.models import Layout, build, fill, set_up
from tests.engines.megatron.workers.wrapped import data_parallel, half_precision, step_own_parts


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except InvalidArgument as error:
        return str(error)
    return "not refused"


def made(name: str, **options: Any) -> Any:
    (chunk,) = build(name, Layout(), **options)
    fill([chunk])
    return chunk


def choices() -> dict[str, str]:
    """What happens to models without a configuration, or with another model's."""
    dense, experts = made("qwen3"), made("deepseek_v3")
    mtp = made("deepseek_v3", mtp_num_layers=1)
    biased = made("qwen3_moe", add_bias_linear=True)
    balanced = made("qwen3_moe", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    padded = {shard.name: list(shard.global_shape) for shard in shards_of(made("qwen3"))}
    half = half_precision([made("deepseek_v3")])
    bias = next(s for s in shards_of(half, MegatronAdapter(CONFIGS["deepseek_v3"])) if "correction_bias" in s.name)
    return {
        "names": json.dumps(sorted(padded)),
        "embedding": str(padded["model.embed_tokens.weight"]),
        "wrapped": json.dumps(sorted({shard.name for shard in shards_of([data_parallel(dense)])})),
        "bias": str(bias.tensor.dtype),
        "experts": said(lambda: shards_of(experts)),
        "other": said(lambda: shards_of(experts, MegatronAdapter(CONFIGS["qwen3_moe"]))),
        "sizes": said(lambda: shards_of(dense, MegatronAdapter({**CONFIGS["qwen3"], "num_key_value_heads": 4}))),
        "vocabulary": said(lambda: shards_of(dense, MegatronAdapter({**CONFIGS["qwen3"], "vocab_size": 257}))),
        "tied": said(lambda: shards_of(dense, MegatronAdapter({**CONFIGS["qwen3"], "tie_word_embeddings": True}))),
        "mtp": said(lambda: shards_of(made("qwen3_moe", mtp_num_layers=1), MegatronAdapter(CONFIGS["qwen3_moe"]))),
        "no mtp": str(len(shards_of(mtp, MegatronAdapter(CONFIGS["deepseek_v3"], mtp=False)))),
        "without": str(len(shards_of(experts, MegatronAdapter(CONFIGS["deepseek_v3"])))),
        "ungated": said(lambda: shards_of(made("qwen3", gated_linear_unit=False))),
        "learnable": said(lambda: shards_of(made("qwen3", softmax_type="learnable"))),
        "centred": said(lambda: shards_of(made("gemma2"))),
        "pairs": said(lambda: shards_of(made("glm4"))),
        "router": said(lambda: shards_of(biased, MegatronAdapter(CONFIGS["qwen3_moe"]))),
        "expert biases": said(lambda: shards_of(routed_without_bias(biased), MegatronAdapter(CONFIGS["qwen3_moe"]))),
        "balanced": said(lambda: shards_of(balanced, MegatronAdapter(CONFIGS["qwen3_moe"]))),
    }


def routed_without_bias(model: Any) -> Any:
    for layer in model.decoder.layers:
        layer.mlp.router.bias = None
    return model


def gathering(socket: str) -> tuple[list[str], dict[str, Any]]:
    """Publishes before and after parameters are gathered, at the start and after a step.

    Returns:
        What was said of each that was not gathered; shapes by name.
    """
    chunk = made("llama")
    model = data_parallel(chunk, overlap_param_gather=True, overlap_grad_reduce=True).train()
    heard = []
    with WeightWriter("gathering", dist.get_rank(), 2, socket) as writer:
        writer.register(model, MegatronAdapter(CONFIGS["llama"]))
        for step in (1, 2):
            heard.append(said(lambda step=step: writer.publish(step)))  # type: ignore[misc]
            model.start_param_sync(force_sync=True)
            writer.publish(step).committed(timeout=60)
            train(model)
    return heard, {shard.name: shard.global_shape for shard in MegatronAdapter(CONFIGS["llama"]).shards(model)}


def train(model: Any) -> None:
    model.zero_grad_buffer()
    tokens = torch.tensor([TOKENS])
    hidden = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool), 1)
    model(tokens, torch.arange(tokens.shape[1])[None], hidden, labels=tokens).mean().backward()
    model.finish_grad_sync()
    step_own_parts(model)


def main() -> None:
    folder, rank, world, socket = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    set_up(Layout())
    heard, shapes = gathering(socket)
    report = {"gathering": heard, "shapes": shapes, "choices": choices()}
    (folder / f"report.{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
