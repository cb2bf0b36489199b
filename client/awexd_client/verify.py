"""Weights against a checkpoint on disk, tensor by tensor and bit by bit; a few MiB of it in memory at a time.

The checkpoint is a folder of safetensors files as Hugging Face writes them. A tensor that it has in another
floating-point dtype is compared after a cast to the weights' own, as ``copy_`` casts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.errors import IntegrityError, InvalidArgument, abbreviate
from awexd_transports.layout import Box, Entry
from awexd_transports.shard import PAIRS
from awexd_transports.view import View

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 << 20
INDEX = "model.safetensors.index.json"
_WHOLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}
"""Integers that have the bits of an element."""

Progress = Callable[[int, int], None]
"""Called with the bytes compared so far, and those to be compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the checkpoint's.

    Attributes:
        name: of the tensor. ``index``: its first element that differs, in the global tensor; None: nothing of it could
            be compared, and ``why`` says why not.
        found, expected: that element here and in the checkpoint.
        elements: how many differ in the part (the chunk) where the first was found.
    """

    name: str
    index: tuple[int, ...] | None
    why: str = ""
    found: Any = None
    expected: Any = None
    elements: int = 0

    def told(self) -> list[Any]:
        """As ``read.verified`` takes it."""
        index = None if self.index is None else list(self.index)
        return [self.name, index, self.why[:500], str(self.found)[:100], str(self.expected)[:100], self.elements]

    @classmethod
    def heard(cls, told: Sequence[Any]) -> Self:
        """From a worker; ``found`` and ``expected`` are text."""
        name, index, why, found, expected, elements = told
        return cls(name, None if index is None else tuple(index), why, found, expected, elements)

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.name}: {self.why}"
        return f"{self.name}{list(self.index)} is {self.found}, in the checkpoint {self.expected}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared.

    Attributes:
        tensors, nbytes: compared; of several workers, by each of them.
        differences: the first of each tensor that differs.
        unseen: names that only the checkpoint has (another rank has them, or nobody). Not told by workers that are
            reached through their engine's calls.
        aside: names that were not compared, since their engine keeps them in another form, and why.
        more: tensors that differ beyond ``differences``, at least: a worker behind an engine's calls names a few.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    unseen: tuple[str, ...] = ()
    aside: Mapping[str, str] = field(default_factory=dict)
    more: int = 0

    @classmethod
    def joined(cls, found: Sequence[Verified]) -> Verified:
        """What several workers of one model have found."""
        first: dict[str, Difference] = {}
        for one in found:
            first = {difference.name: difference for difference in one.differences} | first
        unseen = set.intersection(*(set(one.unseen) for one in found)) if found else set()
        aside = {name: why for one in found for name, why in one.aside.items()}
        return cls(
            sum(one.tensors for one in found),
            sum(one.nbytes for one in found),
            tuple(first.values()),
            tuple(sorted(unseen - aside.keys())),
            aside,
            max((one.more for one in found), default=0),
        )

    def check(self) -> Self:
        """Itself, if nothing differs.

        Raises:
            IntegrityError: names the first difference; ``details["differences"]`` has one of each tensor.
        """
        if not self.differences:
            return self
        rest = abbreviate(difference.name for difference in self.differences[1:])
        raise IntegrityError(
            f"{len(self.differences) + self.more} of {self.tensors} tensors are not the checkpoint's:"
            f" {self.differences[0]}" + (f"; also {rest}" if rest else ""),
            {"differences": [str(difference) for difference in self.differences]},
        )


class Checkpoint:
    """A folder of safetensors files. A context manager; keeps the files open, maps them, and reads parts.

    Raises:
        InvalidArgument: no such files, or the package ``safetensors`` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise InvalidArgument(
                "reading checkpoints needs the package safetensors: pip install safetensors"
            ) from error
        self.folder = Path(folder)
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in _paths(self.folder):
                opened = self._open.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except BaseException as error:
            self._open.close()
            if isinstance(error, InvalidArgument) or not isinstance(error, Exception):
                raise
            raise InvalidArgument(f"{self.folder}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str, layout: str | None = None) -> tuple[int, ...]:
        """Its global shape; with ``"pairs"`` as that layout has it."""
        shape = tuple(self._files[name].get_slice(name).get_shape())
        return (*shape[:-1], shape[-1] // 2, 2) if layout == PAIRS and shape else shape

    def read(self, name: str, box: Box, layout: str | None = None) -> torch.Tensor:
        """That part of a tensor."""
        if layout == PAIRS:
            (first, of_pair), (count, length) = box.offset[-2:], box.shape[-2:]
            flat = Box((*box.offset[:-2], 2 * first), (*box.shape[:-2], 2 * count))
            return self.read(name, flat).reshape(*flat.shape[:-1], count, 2).narrow(-1, of_pair, length)
        if not box.shape:
            scalar: torch.Tensor = self._files[name].get_tensor(name)
            return scalar
        slices = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        part: torch.Tensor = self._files[name].get_slice(name)[slices]
        return part


def verify(
    parts: Sequence[tuple[Entry, View]],
    checkpoint: Checkpoint,
    *,
    aside: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Compares weights with a checkpoint.

    Args:
        parts: what to compare: each with where its bytes lie. Of an alias that the checkpoint lacks (a tied head, say),
            the name that it has counts.
        aside: names that are not to be compared, and why.
    """
    known = checkpoint.names
    whole = sum(entry.nbytes for entry, _ in parts)
    saved = {_place(entry, view) for entry, view in parts if entry.tensor.name in known}
    differences: dict[str, Difference] = {}
    names: set[str] = set()
    done = 0
    for entry, view in parts:
        name = entry.tensor.name
        if name not in known and _place(entry, view) in saved:
            whole -= entry.nbytes
            continue
        names.add(name)
        if name not in differences:
            found = _compare(entry, view, checkpoint)
            differences |= {name: found} if found else {}
        done += entry.nbytes
        if progress:
            progress(done, whole)
    unseen = known - names - (aside or {}).keys()
    return Verified(len(names), done, tuple(differences.values()), tuple(sorted(unseen)), aside or {})


def _place(entry: Entry, view: View) -> tuple[int, Box]:
    return view.address, entry.box


def _compare(entry: Entry, view: View, checkpoint: Checkpoint) -> Difference | None:
    name = entry.tensor.name
    if name not in checkpoint.names:
        return Difference(name, None, "the checkpoint has no tensor of that name")
    if entry.layout not in (None, PAIRS):
        return Difference(name, None, f"its layout {entry.layout} cannot be compared")
    if checkpoint.shape(name, entry.layout) != entry.tensor.shape:
        return Difference(name, None, f"{list(entry.tensor.shape)}, in the checkpoint {list(checkpoint.shape(name))}")
    for box in _chunks(entry):
        difference = _compare_chunk(entry, box, view.sub(box.relative_to(entry.box.offset)), checkpoint)
        if difference is not None:
            return difference
    return None


def _chunks(entry: Entry) -> Iterator[Box]:
    """The entry's box, along its first dimension, a few MiB at a time."""
    box = entry.box
    if not box.numel:
        return
    if not box.shape:
        yield box
        return
    rows = max(1, CHUNK_BYTES // (entry.nbytes // box.shape[0]))
    for first in range(0, box.shape[0], rows):
        length = min(rows, box.shape[0] - first)
        yield Box((box.offset[0] + first, *box.offset[1:]), (length, *box.shape[1:]))


def _compare_chunk(entry: Entry, box: Box, view: View, checkpoint: Checkpoint) -> Difference | None:
    live, saved = view.tensor().cpu(), checkpoint.read(entry.tensor.name, box, entry.layout)
    if saved.dtype != live.dtype:
        if not (saved.is_floating_point() and live.is_floating_point()):
            return Difference(entry.tensor.name, None, f"{live.dtype}, in the checkpoint {saved.dtype}")
        saved = saved.to(live.dtype)
    unequal = _bits(live) != _bits(saved)
    if not unequal.any():
        return None
    if unequal.ndim > live.ndim:
        unequal = unequal.any(-1)
    at = tuple(unequal.nonzero()[0].tolist())
    index = tuple(a + b for a, b in zip(at, box.offset, strict=True))
    return Difference(entry.tensor.name, index, "", live[at].item(), saved[at].item(), int(unequal.sum()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of elements of 16 bytes, two integers each, in a dimension of their own."""
    import torch

    packed = tensor.contiguous()
    size = ITEMSIZE[str(packed.dtype).removeprefix("torch.")]
    if size == 16:
        packed = torch.view_as_real(packed)
    return packed.view(getattr(torch, _WHOLE[size]))


def _paths(folder: Path) -> Iterable[Path]:
    """The files of the checkpoint: those of its index, where it has one."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise InvalidArgument(f"{index}: names files outside its folder")
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidArgument(f"{folder}: no *.safetensors files there")
    return paths
