"""FSDP2 and any other DTensor: this rank's part of each tensor, where it lies; nothing is gathered."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import is_dtensor, live_view
from awexd_client.adapters.experts import checkpoint_shards
from awexd_client.adapters.live import mapping_of, modules_of, weights_of
from awexd_client.adapters.runs import Run, Split, held, held_left_to_right, in_order, total
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch


class FSDPAdapter:
    """Modules, pipeline chunks or mappings with DTensors among their tensors.

    A DTensor gives its local tensor with its box in the global one, or several boxes where its rows are not
    consecutive; an empty part is yielded too, so that the name exists. A replicated or plain tensor is
    whole on each rank: a replica. A rank outside a tensor's mesh yields nothing of it.
    """

    name = "fsdp"

    def matches(self, target: object) -> bool:
        mapping = mapping_of(target)
        if mapping is not None:
            return any(map(is_dtensor, mapping.values()))
        return any(
            _is_fsdp(module) or any(map(is_dtensor, module.parameters(recurse=False)))
            for root in modules_of(target) or ()
            for module in root.modules()
        )

    def shards(self, target: object) -> Iterator[Shard]:
        for root in modules_of(target) or ():
            _refuse_unsharded(root)
        for weight in weights_of(target):
            for shard in _parts(weight.name, weight.tensor):
                yield from checkpoint_shards(shard, weight.family)


def _parts(name: str, tensor: Any) -> Iterator[Shard]:
    """The shards of one tensor in memory: whole if plain, else those of this rank."""
    if not is_dtensor(tensor):
        yield Shard(name, live_view(name, tensor))
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    local = live_view(name, _local(tensor))
    shape = tuple(int(n) for n in tensor.shape)
    splits = _splits(name, tensor, coordinate)
    dims = [_dim_runs(name, dim, size, int(local.shape[dim]), splits[dim]) for dim, size in enumerate(shape)]
    for chosen in itertools.product(*(_located(runs) for runs in dims)):
        view = local[tuple(slice(at, at + run.length) for at, run in chosen)] if _is_split(dims) else local
        yield Shard(name, view, shape, tuple(run.start for _, run in chosen))


def _local(tensor: Any) -> torch.Tensor:
    import torch

    with torch.no_grad():  # with autograd on, to_local() is an operation of the graph
        local: torch.Tensor = tensor.to_local()
    return local


def _splits(name: str, tensor: Any, coordinate: Sequence[int]) -> list[list[Split]]:
    """Per tensor dimension, the mesh dimensions that cut it, in mesh order."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    splits: list[list[Split]] = [[] for _ in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        parts, index = int(tensor.device_mesh.size(mesh_dim)), int(coordinate[mesh_dim])
        if isinstance(placement, Replicate):
            continue
        # Named, not imported: it is private, moves between versions, and is a subclass of Shard in some of them only.
        if type(placement).__name__ == "_StridedShard":
            splits[placement.dim].append(Split(parts, index, int(placement.split_factor)))
        elif isinstance(placement, ShardPlacement):
            splits[placement.dim].append(Split(parts, index))
        elif placement.is_partial():
            raise InvalidArgument(f"{name}: {placement} holds terms of a sum, not a weight; redistribute it first")
        else:
            raise InvalidArgument(f"{name}: placement {placement!r} is not known to this version of awexd")
    return splits


def _dim_runs(name: str, dim: int, size: int, length: int, splits: Sequence[Split]) -> list[Run]:
    """The global runs of one dimension; the local length must bear them out."""
    for rule in (held, held_left_to_right):
        runs = rule(size, splits)
        if total(runs) == length:
            break
    else:
        raise InvalidArgument(
            f"{name}: {length} elements along dimension {dim}, where its placements say {total(runs)} of {size}"
        )
    if in_order(splits) is None and not _divides(size, splits) and not _torch_cuts_pieces_first():
        raise InvalidArgument(
            f"{name}: dimension {dim} of {size} elements, unevenly divided by a _StridedShard, which this version of"
            " torch lays out in another way; redistribute it, or use the newest torch"
        )
    return runs


def _divides(size: int, splits: Sequence[Split]) -> bool:
    for split in splits:
        pieces = split.parts * (split.factor or 1)
        if size % pieces:
            return False
        size //= split.parts
    return True


@cache
def _torch_cuts_pieces_first() -> bool:
    """Whether torch lays out a lone ``_StridedShard`` as ``runs`` does; others cut into ``factor * parts`` at once."""
    import torch
    from torch.distributed.tensor import placement_types

    strided: Any = getattr(placement_types, "_StridedShard", None)
    if strided is None:
        return False
    try:
        pieces, _ = strided(0, split_factor=2)._split_tensor(torch.arange(10), 2, with_padding=False, contiguous=True)
    except (AttributeError, TypeError):
        return False
    return bool(pieces[0].tolist() == [0, 1, 2, 5, 6, 7])


def _located(runs: Sequence[Run]) -> list[tuple[int, Run]]:
    """Each run with the place where the local tensor holds it."""
    starts = itertools.accumulate((run.length for run in runs), initial=0)
    return list(zip(starts, runs, strict=False))


def _is_split(dims: Sequence[Sequence[Run]]) -> bool:
    return any(len(runs) > 1 for runs in dims)


def _is_fsdp(module: object) -> bool:
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


def _refuse_unsharded(root: torch.nn.Module) -> None:
    """Between forward and reshard, FSDP2 puts full tensors into its modules that are freed soon and may be casts.

    As replicas they would pass for weights on every rank, and their memory would go under the reader's hands.
    """
    for path, module in root.named_modules():
        if not _is_fsdp(module):
            continue
        if not all(group.is_sharded for group in _param_groups(module)):
            raise InvalidArgument(
                f"{path or type(module).__name__}: FSDP2 has its parameters gathered at the moment, in memory that"
                " it frees again; call reshard() on each FSDP module (the root stays gathered after an evaluation)"
            )


def _param_groups(module: Any) -> list[Any]:
    import torch

    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.8 has one group a module, later ones have several
        groups = [state._fsdp_param_group] if groups is None else groups
        found = [group for group in groups if group is not None]
        _ = [group.is_sharded for group in found]
    except AttributeError as error:
        raise InvalidArgument(
            f"torch {torch.__version__} keeps FSDP2's state where awexd does not know it (known: 2.8 to 2.13): {error}"
        ) from error
    return found
