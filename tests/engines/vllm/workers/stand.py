"""vLLM's models without its scheduler: made, loaded and transformed by vLLM's own code, in this process as one rank.

And a whole engine, for what needs one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="awexd",
)

import torch

Snapshot = dict[str, torch.Tensor]


def without_prepacking() -> None:
    """Linear layers keep their weights as loaded, as they do on GPUs, where oneDNN would pack them."""
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def join(rank: int, world_size: int, store: Path, stages: int = 1) -> None:
    """Makes this process one rank, of a stage's tensor-parallel ones; its peers meet it in the file ``store``."""
    # As vLLM's own worker for CPUs does (vllm/v1/worker/cpu_model_runner.py).
    torch.accelerator.empty_cache = lambda: None
    os.environ["VLLM_DIST_IDENT"] = str(rank)  # ranks that differ in it talk by gloo, not by shared memory
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world_size, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world_size // stages, stages)


def configure(model: Path, world_size: int, *, stages: int = 1, **options: Any) -> Any:
    """vLLM's configuration of a model, as its command line makes it."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=world_size // stages,
        pipeline_parallel_size=stages,
        **options,
    )
    return arguments.create_engine_config()


def engine(model: Path, **options: Any) -> Any:
    """A whole ``vllm.LLM``, in single precision, with our back end."""
    from vllm import LLM

    from awexd_client.vllm import register

    register()
    register()  # once more than once: every process of vLLM calls it, and some twice
    return LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        weight_transfer_config={"backend": "awexd"},
        **options,
    )


def load(config: Any, *, transform: bool = True) -> Any:
    """A model as a worker has it; ``transform=False``: as it is between loading and processing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    config.compilation_config.static_forward_context.clear()
    loader = get_model_loader(config.load_config)
    kept = base_loader.process_weights_after_loading
    try:
        if not transform:
            base_loader.process_weights_after_loading = lambda *_: None
        with set_current_vllm_config(config):
            return loader.load_model(config, config.model_config)
    finally:
        base_loader.process_weights_after_loading = kept


def snapshot(model: Any) -> Snapshot:
    """Every parameter and buffer, and what packed linear layers compute of the identity: their weights, exactly."""
    found = {name: tensor.detach().clone() for name, tensor in model.named_parameters(remove_duplicate=False)}
    found |= {name: tensor.detach().clone() for name, tensor in model.named_buffers(remove_duplicate=False)}
    for name, module in model.named_modules(remove_duplicate=False):
        columns = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
        if hasattr(module, "cpu_linear") and columns:
            weight = module._parameters["weight"]
            identity = torch.eye(columns, dtype=weight.dtype)
            found[f"{name}.effective"] = module.cpu_linear(identity, weight, None).t().contiguous()
    return found


def held(names: Sequence[str], model: Any) -> dict[str, list[float]]:
    """What a worker has of parameters, if it has them: for ``LLM.apply_model``, which imports it in the workers."""
    return {name: tensor.flatten().tolist() for name, tensor in model.named_parameters() if name in names}


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """Names that differ in a byte, in shape or dtype, or that only one has."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if not _same(one.get(name), other.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
