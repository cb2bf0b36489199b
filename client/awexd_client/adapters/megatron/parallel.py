"""Where a process stands in Megatron-Core's groups, and whether its parameters are the newest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from awexd_client.adapters.live import modules_of
from awexd_transports.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

_SHARDED_WRAPPERS = frozenset({"FullyShardedDataParallel", "MegatronFSDP", "TorchFullyShardedDataParallel"})


class Place(NamedTuple):
    """This process in a group: its rank of how many."""

    rank: int
    size: int


@dataclass(frozen=True)
class Places:
    """Of the groups that parameters are cut by. Data, context and sequence parallelism cut none.

    Attributes:
        tensor: of everything but experts.
        expert: which of the experts are here.
        expert_tensor: of each of them.
    """

    tensor: Place
    expert: Place
    expert_tensor: Place


def is_megatron(target: object) -> bool:
    """Whether it is a GPTModel of Megatron-Core, wrapped or not, or a list of them; imports nothing."""
    modules = modules_of(target)
    return modules is not None and all(_is_gpt(unwrapped(module)) for module in modules)


def chunks_of(target: object) -> list[Any]:
    """The GPTModels of a model, or of the list of chunks that virtual pipeline parallelism makes.

    Raises:
        InvalidArgument: something else, or sharded by a wrapper.
    """
    modules = modules_of(target)
    if modules is None:
        raise InvalidArgument(f"a {type(target).__name__} is no Megatron-Core model, nor a list of model chunks")
    for module in modules:
        for wrapper in _chain(module):
            if type(wrapper).__name__ in _SHARDED_WRAPPERS:
                raise InvalidArgument(f"{type(wrapper).__name__} shards the model's parameters; use DDP")
    chunks = [unwrapped(module) for module in modules]
    for chunk in chunks:
        if not hasattr(chunk, "decoder") or not hasattr(chunk, "config"):
            raise InvalidArgument(f"a {type(chunk).__name__} has no decoder of Megatron-Core")
    return chunks


def unwrapped(module: torch.nn.Module) -> Any:
    """The model in DistributedDataParallel and Float16Module, which call what they wrap ``module``."""
    *_, innermost = _chain(module)
    return innermost


def _chain(module: Any) -> Iterator[Any]:
    while True:
        yield module
        inner = getattr(module, "module", None)
        if inner is None or hasattr(module, "decoder"):
            return
        module = inner


def _is_gpt(module: Any) -> bool:
    return any(cls.__name__ == "GPTModel" and cls.__module__.startswith("megatron.") for cls in type(module).__mro__)


def places_of(chunk: Any) -> Places:
    """From the model's own process groups (``pg_collection``), else from ``parallel_state``."""
    groups = getattr(chunk, "pg_collection", None)
    found: list[Any] = [getattr(groups, name, None) for name in ("tp", "ep", "expt_tp")]
    if None not in found:
        return Places(*(Place(int(group.rank()), int(group.size())) for group in found))
    from megatron.core import parallel_state as state

    return Places(
        Place(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        Place(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        Place(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )


def check_gathered(target: object) -> None:
    """Refuses parameters that are older than the optimizer's last step.

    With ``overlap_param_gather`` the optimizer writes only its own part of each bucket; the others' parts come with
    the next forward pass. A bucket is whole when its all-gather was started since the gradients were reduced
    (``param_gather_dispatched``) and waited for (no ``param_gather_handle``):
    megatron/core/distributed/param_and_grad_buffer.py, ``_ParamAndGradBucketGroup``.

    Raises:
        InvalidArgument: parameters are not gathered, or are being gathered; says what to call.
    """
    for module in modules_of(target) or ():
        for wrapper in _chain(module):
            settings = getattr(wrapper, "ddp_config", None)
            if settings is None or not getattr(settings, "overlap_param_gather", False):
                continue
            for group in [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups]:
                if not group.param_gather_dispatched or group.param_gather_handle is not None:
                    raise InvalidArgument(
                        "overlap_param_gather: parameters of the last optimizer step are not gathered yet; call"
                        " start_param_sync(force_sync=True) on each model chunk, on all ranks, before publishing"
                    )
