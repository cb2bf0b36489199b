"""From the names of a live vLLM model's modules to those of the checkpoint, by the model's own tables.

vLLM's models say how checkpoint names become theirs: ``hf_to_vllm_mapper`` (a WeightsMapper: prefixes, parts and
suffixes renamed, and ``orig_to_new_stacked``, which modules are stacked into which) and ``packed_modules_mapping``
(vllm/model_executor/models/utils.py and interfaces.py). Here they are read backwards, and what comes out is mapped
forwards again: a name that does not lead back to where it came from is never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from awexd_transports.errors import InvalidArgument

STACKED_ON_DISK = {
    "glm": frozenset({"gate_up_proj"}),
    "glm4": frozenset({"gate_up_proj"}),
    "phi3": frozenset({"qkv_proj", "gate_up_proj"}),
}
"""``config.model_type`` to modules that checkpoints hold stacked, as memory does (transformers' modeling files)."""

_SHARDS = {"q": 0, "k": 1, "v": 2}
_WRAPPERS = frozenset({"base_layer"})
"""Path components that vLLM's LoRA layers put in (vllm/lora/layers/base.py); no checkpoint has them."""


@dataclass(frozen=True)
class Names:
    """Of one live model.

    Attributes:
        source: the checkpoint that the engine was started from, a folder or a name on Hugging Face's hub, if it is
            known: the names in it decide where the model's tables take several.
    """

    model: Any
    source: str | None = None

    def checkpoint_name(self, path: str, *, stated: bool = False) -> str:
        """What a checkpoint calls the tensor of that dotted path, stacked modules aside.

        Args:
            stated: the path is a checkpoint's name by the module's own table; the model's mapping has only to agree.

        Raises:
            InvalidArgument: the model's mapping leaves none or several.
        """
        path = _unwrapped(path)
        mapper = self._renames
        if mapper is None or (stated and mapper.map_name(path) == path):
            return path
        candidates = [name for name in dict.fromkeys(_inverted(mapper, path)) if mapper.map_name(name) == path]
        if len(candidates) > 1:
            candidates = [name for name in candidates if name in self._on_disk] or candidates
        if len(candidates) != 1:
            raise InvalidArgument(
                f"{path}: which checkpoint tensor it is does not follow from {type(self.model).__name__}'s"
                f" hf_to_vllm_mapper (it takes {', '.join(candidates) or 'none'})"
            )
        return candidates[0]

    def members(self, path: str) -> list[str]:
        """Paths of the modules that are stacked in the module of that path, in their order in memory.

        Raises:
            InvalidArgument: the model has no table that says so.
        """
        path = _unwrapped(path)
        parent, _, leaf = path.rpartition(".")
        packed = (getattr(self.model, "packed_modules_mapping", None) or {}).get(leaf)
        if leaf in STACKED_ON_DISK.get(self._family, ()) or packed == [leaf]:
            return [path]
        found = self._stacked(path) or [f"{parent}.{member}" if parent else member for member in packed or ()]
        if not found:
            raise InvalidArgument(
                f"{path}: which checkpoint tensors are stacked in it is in neither hf_to_vllm_mapper nor"
                f" packed_modules_mapping of {type(self.model).__name__}"
            )
        return found

    def _stacked(self, path: str) -> list[str]:
        found: dict[int, str] = {}
        for mapper in self._mappers():
            for old, (new, shard) in mapper.orig_to_new_stacked.items():
                order = _SHARDS.get(shard) if isinstance(shard, str) else shard
                if isinstance(order, int) and ("." + path).endswith(new):
                    found.setdefault(order, (("." + path)[: -len(new)] + old).lstrip("."))
        return [found[order] for order in sorted(found)] if sorted(found) == list(range(len(found))) else []

    @cached_property
    def _on_disk(self) -> frozenset[str]:
        """Names of the source's tensors; none where it is not on this machine, or not in safetensors files."""
        folder = _folder(self.source) if self.source else None
        names: set[str] = set()
        for file in sorted(folder.glob("*.safetensors")) if folder else ():
            with open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")  # the format: a length, then a header in JSON
                names |= json.loads(opened.read(size)).keys()
        return frozenset(names)

    @property
    def _family(self) -> str:
        return str(getattr(getattr(self.model, "config", None), "model_type", ""))

    @property
    def _renames(self) -> Any:
        """The outermost mapping that renames anything, without stacking; None where there is none."""
        for mapper in self._mappers():
            plain = replace(mapper, orig_to_new_stacked={})
            if plain != type(mapper)():
                return plain
        return None

    def _mappers(self) -> Iterator[Any]:
        for module in (self.model, *self.model.children()):
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is not None:
                yield mapper


def _unwrapped(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _folder(source: str) -> Path | None:
    if os.path.isdir(source):
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
        return None


def _inverted(mapper: Any, path: str) -> Iterator[str]:
    """Names that may lead to ``path``: itself, and one renaming of each kind undone, in any combination."""
    names = [path]
    for old, new in _pairs(mapper.orig_to_new_suffix):
        names += [name[: len(name) - len(new)] + old for name in names if name.endswith(new)]
    for old, new in _pairs(mapper.orig_to_new_prefix):
        names += [old + name[len(new) :] for name in names if name.startswith(new)]
    for old, new in _pairs(mapper.orig_to_new_substr):
        names += [name.replace(new, old, 1) for name in names if new and new in name]
    yield from names


def _pairs(table: Any) -> Sequence[tuple[str, str]]:
    return [(old, new) for old, new in table.items() if new is not None]
