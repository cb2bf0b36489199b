"""Every weight of a module, of pipeline chunks or of a mapping, under its checkpoint name but for the experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from awexd_client.adapters.names import checkpoint_path, is_weight_buffer
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


class Weight(NamedTuple):
    """A live tensor, as it lies in its module or mapping.

    Attributes:
        name: its dotted path without wrappers, or its key.
        tensor: the live object, plain or DTensor.
        family: ``config.model_type`` of the nearest module that has one; None in a mapping.
    """

    name: str
    tensor: torch.Tensor
    family: str | None


def modules_of(target: object) -> list[torch.nn.Module] | None:
    """The modules of a module or a non-empty list of modules; None for anything else."""
    from torch.nn import Module

    if isinstance(target, Module):
        return [target]
    if isinstance(target, list | tuple) and target and all(isinstance(item, Module) for item in target):
        return list(target)
    return None


def mapping_of(target: object) -> Mapping[str, torch.Tensor] | None:
    """The target if it maps names to tensors; None for anything else."""
    from torch import Tensor
    from torch.nn import Module

    if not isinstance(target, Mapping) or isinstance(target, Module):
        return None
    fits = all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in target.items())
    return target if fits else None


def weights_of(target: object) -> Iterator[Weight]:
    """All weights of the target; tied ones under each of their names. A mapping's names are taken as they are.

    Raises:
        InvalidArgument: neither modules nor a mapping of tensors, or an FSDP1 module that has flattened its weights.
    """
    mapping = mapping_of(target)
    if mapping is not None:
        yield from (Weight(name, tensor, None) for name, tensor in mapping.items())
        return
    modules = modules_of(target)
    if modules is None:
        raise InvalidArgument(f"a {type(target).__name__} is no module, list of modules or mapping of tensors")
    for module in modules:
        yield from _module_weights(module)


def _module_weights(root: torch.nn.Module) -> Iterator[Weight]:
    whole = _any_family(root)
    families: dict[str, str | None] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        _refuse_flattened(path, module)
        parent = families.get(path.rpartition(".")[0]) if path else None
        family = families[path] = _family(module) or parent
        prefix = path + "." if path else ""
        for key, tensor in _own_weights(module, prefix):
            yield Weight(checkpoint_path(prefix + key), tensor, family or whole)


def _own_weights(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter
    for key, buffer in module._buffers.items():
        persistent = key not in module._non_persistent_buffers_set
        if buffer is not None and is_weight_buffer(prefix + key, persistent=persistent):
            yield key, buffer


def _family(module: Any) -> str | None:
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    return model_type if isinstance(model_type, str) and model_type else None


def _any_family(root: torch.nn.Module) -> str | None:
    """The one family that modules inside speak of: a pipeline chunk often has no configuration of its own."""
    found = {family for family in map(_family, root.modules()) if family}
    return found.pop() if len(found) == 1 else None


def _refuse_flattened(path: str, module: Any) -> None:
    if not any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__):
        return
    if getattr(getattr(module, "sharding_strategy", None), "name", None) != "NO_SHARD":
        raise InvalidArgument(
            f"{path or type(module).__name__}: FSDP1 keeps flattened pieces, not tensors; use fully_shard (FSDP2),"
            " or give Shards of your own"
        )
