"""One rank of a world of DTensors: makes each case, then dumps its shards, after the process group is gone.

Arguments: folder, rank, world size, "train" (world 2) or "layouts" (world 4). Writes ``<case>.<rank>.safetensors`` (a
tensor a shard; names and boxes in the metadata) and ``<case>.reference.safetensors`` (rank 0).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from awexd_client.adapters import shards_of, watch
from awexd_client.adapters.watch import Watch
from awexd_transports.errors import InvalidArgument

Reference = dict[str, torch.Tensor]
Case = tuple[str, object, Reference]


class MLP(nn.Module):
    """Sizes that no world divides, bias and a buffer that is a weight."""

    def __init__(self, inner: int = 10, outer: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(outer, inner), nn.Linear(inner, outer, bias=False)
        self.register_buffer("e_score_correction_bias", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


class Experts(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)


class MoE(nn.Module):
    """Looks like a Qwen3 MoE to the adapter."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="qwen3_moe")
        self.mlp = nn.ModuleDict({"experts": Experts(gate_up, down)})


def tiny(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **heads, "moe_intermediate_size": 12, **changes}))


def reference(module: nn.Module) -> Reference:
    """The whole tensors, cloned, by the adapter of plain modules (which has its own tests)."""
    return {shard.name: shard.tensor.clone() for shard in shards_of(module, "hf")}


def layouts() -> Iterator[Case]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tiny(tie_word_embeddings=True)
    whole = reference(model)
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = fully_shard(checkpoint_wrapper(layer), mesh=line)
    yield "moe_tied", fully_shard(model, mesh=line), whole

    for name, mesh in (("uneven", line), ("hsdp", square)):
        mlp = MLP()
        whole = reference(mlp)
        yield name, fully_shard(mlp, mesh=mesh), whole

    for inner, outer in ((10, 6), (7, 4), (3, 2)):
        mlp = MLP(inner, outer)
        whole = reference(mlp)
        parallelize_module(mlp, square["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        yield f"fsdp_tp_{inner}", fully_shard(mlp, mesh=square["dp"]), whole

    mlp = MLP(8, 12)
    whole = reference(mlp)
    ignored = {mlp.up.bias}
    place = lambda p: Shard(p.ndim - 1)  # noqa: E731
    yield "dim_1_and_ignored", fully_shard(mlp, mesh=line, shard_placement_fn=place, ignored_params=ignored), whole
    yield from _stacks(line, square)
    yield from _mappings(line, square)


def _stacks(line: Any, square: Any) -> Iterator[Case]:
    gate_up, down = torch.randn(5, 10, 6), torch.randn(5, 6, 5)
    whole = reference(MoE(gate_up, down))
    for dim in range(3):
        parts = (distribute_tensor(t, line, [Shard(dim)], src_data_rank=None) for t in (gate_up, down))
        yield f"experts_dim_{dim}", MoE(*parts), whole
    parts = (distribute_tensor(t, square, [Shard(0), Shard(1)], src_data_rank=None) for t in (gate_up, down))
    yield "experts_two_dims", MoE(*parts), whole


def _mappings(line: Any, square: Any) -> Iterator[Case]:
    full = torch.randn(13, 7)
    placements: list[list[Any]] = [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Shard(1), Replicate()],
        [Replicate()] * 2,
    ]
    tensors = {str(p): distribute_tensor(full, square, p, src_data_rank=None) for p in placements}
    yield "mapping", {**tensors, "plain": full}, dict.fromkeys([*tensors, "plain"], full)
    yield (
        "strided",
        {name: _strided(full, line, name) for name in ("2", "3", "20")},
        dict.fromkeys(("2", "3", "20"), full),
    )


def _strided(full: torch.Tensor, mesh: Any, factor: str) -> DTensor:
    placement = _StridedShard(0, split_factor=int(factor))
    local = placement._split_tensor(full, mesh.size(), with_padding=False)[0][mesh.get_local_rank()]
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


def train() -> Iterator[Case]:
    mesh = init_device_mesh("cpu", (2,))
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    watched = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens = torch.arange(6).reshape(1, 6) + dist.get_rank() + step
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check(not watched.changed(), "a training step keeps every tensor where it was")
    whole = reference(_gathered(model))
    yield "trained", model, whole

    evaluated: Any = fully_shard(MLP(), mesh=mesh)
    with torch.no_grad():
        evaluated(torch.randn(2, 6))
    check("gathered at the moment" in refused(evaluated), "gathered parameters are refused")
    check(watch_says_change(evaluated), "gathering and resharding is noticed")
    yield "resharded", evaluated, reference(_gathered(evaluated))

    ones = torch.ones(4, 2)
    partial = {"w": DTensor.from_local(ones, mesh, [Partial()], run_check=False)}
    check(refused(partial).startswith("w: "), "Partial is refused by name")
    wrong = {"w": DTensor.from_local(ones, mesh, [Shard(0)], run_check=False, shape=torch.Size((11, 2)), stride=(2, 1))}
    check("placements say" in refused(wrong), "a local tensor that its placements do not explain is refused")
    meta = {"w": DTensor.from_local(ones.to("meta"), mesh, [Shard(0)], run_check=False)}
    check("w: on the meta device" in refused(meta), "a meta tensor is refused by name")

    rebound: Any = distribute_tensor(ones, mesh, [Shard(0)], src_data_rank=None)
    watched = watch({"w": rebound})
    rebound._local_tensor = rebound._local_tensor.clone()
    check(watched.changed(), "a local tensor that is rebound is noticed")

    alone = _first_rank_mesh()
    yield "outside", {"w": distribute_tensor(ones, alone, [Shard(0)], src_data_rank=None)}, {"w": ones}


def _first_rank_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0])


def _gathered(model: Any) -> nn.Module:
    """A plain copy of a sharded module, by torch's own gathering."""
    plain = tiny() if hasattr(model, "model") else MLP()
    plain.load_state_dict({name: t.full_tensor() for name, t in model.state_dict().items()})
    if hasattr(model, "e_score_correction_bias"):
        plain.e_score_correction_bias = model.e_score_correction_bias
    return plain


def watch_says_change(module: nn.Module) -> bool:
    watched = watch(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return watched.changed() and not Watch(module).changed()


def refused(target: object) -> str:
    try:
        shards_of(target)
    except InvalidArgument as error:
        return str(error)
    return "not refused"


def check(fact: bool, what: str) -> None:
    if not fact:
        raise SystemExit(f"rank {dist.get_rank()}: it is not true that {what}")


def dump(folder: Path, rank: int, case: Case) -> None:
    name, target, whole = case
    shards = shards_of(target)
    boxes = [
        {
            "name": s.name,
            "shape": s.global_shape,
            "offset": s.offset,
            "at": s.tensor.data_ptr(),
            "live": is_live(s, target),
        }
        for s in shards
    ]
    tensors = {str(at): s.tensor.clone(memory_format=torch.contiguous_format) for at, s in enumerate(shards)}
    save_file(tensors, folder / f"{name}.{rank}.safetensors", metadata={"shards": json.dumps(boxes)})
    if rank == 0:
        save_file({key: t.clone() for key, t in whole.items()}, folder / f"{name}.reference.safetensors")


def is_live(shard: Any, target: Any) -> bool:
    """Whether a shard lies in the memory of the target's own tensors, without autograd."""
    tensors = target.values() if isinstance(target, dict) else [*target.parameters(), *target.buffers()]
    locals_: list[Any] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr() for tensor in locals_}
    return not shard.tensor.requires_grad and shard.tensor.untyped_storage().data_ptr() in storages


def main() -> None:
    folder, rank, world, which = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    cases = list(train() if which == "train" else layouts())
    dist.barrier()
    dist.destroy_process_group()  # from here on a collective would fail
    for case in cases:
        dump(folder, rank, case)


if __name__ == "__main__":
    main()
