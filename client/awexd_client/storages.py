"""Whole storages: which lie under given tensors, whether they may be let go, and letting go of them for real."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.base import is_dtensor
from awexd_transports.errors import BudgetExceeded, InvalidArgument
from awexd_transports.view import View, covers

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]

CHUNK = 1 << 30
"""Bytes that leave or come back together: so much more memory is taken than what has not moved yet, or one storage."""


@dataclass(eq=False)
class Stored:
    """One storage under given tensors. Keeps it, so that its tensors find their memory again.

    Attributes:
        nbytes: its size, also while it is let go.
        tensors: those given that lie in it, by name.
    """

    storage: torch.UntypedStorage
    nbytes: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return next(iter(self.tensors))

    @property
    def on_device(self) -> bool:
        return self.storage.device.type == "cuda"

    def view(self) -> View:
        """All of its bytes."""
        import torch

        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return View.of(whole)

    def views(self) -> Iterator[View]:
        """Where its tensors lie, their elements as integers of the same size."""
        for tensor in self.tensors.values():
            yield bits_of(tensor)


def named(tensors: object) -> dict[str, torch.Tensor]:
    """Given tensors by name, of distributed ones their own parts; a list's are called by their numbers.

    What FSDP2 puts behind an uneven shard, so that all ranks' are of one size, is a tensor of its own here.

    Raises:
        InvalidArgument: something else, or no tensor at all.
    """
    import torch

    if isinstance(tensors, Mapping):
        items: Iterable[tuple[Any, Any]] = tensors.items()
    elif isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor | str | bytes):
        items = ((str(number), tensor) for number, tensor in enumerate(tensors))
    else:
        raise InvalidArgument(f"tensors must be a list, or a mapping of names, not a {type(tensors).__name__}")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        if not isinstance(name, str):
            raise InvalidArgument(f"a tensor's name must be text, not {name!r}")
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        if not isinstance(local, torch.Tensor) or hasattr(local, "__tensor_flatten__"):
            raise InvalidArgument(f"{name}: a {type(local).__name__} is no plain tensor; give its parts")
        if local.device.type not in ("cpu", "cuda") or local.layout != torch.strided:
            raise InvalidArgument(f"{name}: {local.layout} on {local.device} has no plain memory")
        found[name] = local
        padding = _padding_of(tensor, local) if local is not tensor else None
        if padding is not None:
            found[f"{name} (padding)"] = padding
    if not found:
        raise InvalidArgument("no tensors were given")
    return found


def _padding_of(whole: Any, local: torch.Tensor) -> torch.Tensor | None:
    """The rest of a shard's storage, where that makes the shard as large as the first rank's along dimension 0."""
    from torch.distributed.tensor import Shard

    split = [at for at, placement in enumerate(whole.placements) if isinstance(placement, Shard)]
    if len(split) != 1 or whole.placements[split[0]].dim != 0 or local.storage_offset() or not local.is_contiguous():
        return None
    rows, row = -(-whole.shape[0] // whole.device_mesh.size(split[0])), math.prod(local.shape[1:])
    size, held = local.element_size(), local.untyped_storage().nbytes()
    if held != rows * row * size or local.numel() * size == held:
        return None
    return local.detach().as_strided((rows * row - local.numel(),), (1,), local.numel())


def storages_of(tensors: Tensors) -> list[Stored]:
    """The distinct storages under these tensors, in order of first appearance.

    Raises:
        InvalidArgument: one has been let go already; names a tensor.
    """
    found: dict[int, Stored] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        stored = found.setdefault(storage._cdata, Stored(storage, storage.nbytes()))
        stored.tensors[name] = tensor
    for stored in found.values():
        if stored.nbytes == 0 and any(tensor.numel() for tensor in stored.tensors.values()):
            raise InvalidArgument(f"{stored.label}: its memory has been let go already")
    return list(found.values())


def check_releasable(stored: Iterable[Stored]) -> None:
    """Refuses what is not the given tensors' own, before anything is touched.

    Raises:
        InvalidArgument: memory of a file, of another process, of NumPy, or the like; or a storage with bytes that none
            of the given tensors has. Names a tensor.
    """
    for one in (one for one in stored if one.nbytes):
        if not one.storage.resizable() or (one.storage.device.type == "cpu" and one.storage.is_shared()):
            raise InvalidArgument(
                f"{one.label}: its memory is not torch's own (a file's, shared with another process, NumPy's, "
                "imported); it is not let go"
            )
        if not covers(one.views(), one.storage.data_ptr(), one.nbytes):
            raise InvalidArgument(
                f"{one.label}: a view of a storage of {one.nbytes} bytes of which the given tensors have only a part; "
                "give the whole one, or a clone"
            )


def grouped(stored: Sequence[Stored]) -> Iterator[list[Stored]]:
    """Storages that move together: at most CHUNK bytes, or one."""
    group: list[Stored] = []
    size = 0
    for one in stored:
        if group and size + one.nbytes > CHUNK:
            yield group
            group, size = [], 0
        group.append(one)
        size += one.nbytes
    if group:
        yield group


def release(stored: Iterable[Stored]) -> None:
    """Gives their memory back: of devices to the driver, so that another process can have it."""
    import torch

    given = [one for one in stored if one.nbytes]
    devices = {one.storage.device for one in given if one.on_device}
    for device in devices:
        torch.cuda.synchronize(device)
    for one in given:
        one.storage.resize_(0)
    if devices:
        torch.cuda.empty_cache()


def allocate(stored: Iterable[Stored]) -> None:
    """Memory for all of them again, of any content; on an error none has it.

    Raises:
        BudgetExceeded: there is no room.
        InvalidArgument: one has been given memory by somebody else.
    """
    done: list[Stored] = []
    try:
        for one in stored:
            if one.storage.nbytes():
                raise InvalidArgument(f"{one.label}: it has been given other memory since it was let go")
            try:
                one.storage.resize_(one.nbytes)
            except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
                text = f"{one.label}: no room for {one.nbytes} bytes on {one.storage.device}: make room, restore again"
                raise BudgetExceeded(text) from error
            done.append(one)
    except BaseException:
        release(done)
        raise


_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def bits_of(tensor: torch.Tensor) -> View:
    """Where a tensor's elements lie, whatever they are, as others of the same size."""
    import torch

    size = tensor.element_size()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (tensor.storage_offset() + last + 1) * size > tensor.untyped_storage().nbytes():
        raise InvalidArgument("a tensor whose memory has been let go")  # set_ would give it other memory
    with torch.inference_mode(False):
        raw = torch.empty(0, dtype=getattr(torch, _BITS[size]), device=tensor.device)
        raw.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return View.of(raw)
