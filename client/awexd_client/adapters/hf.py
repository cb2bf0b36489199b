"""Plain modules and mappings: whole tensors under Hugging Face checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator

from awexd_client.adapters.base import is_dtensor, live_view
from awexd_client.adapters.experts import checkpoint_shards
from awexd_client.adapters.live import mapping_of, modules_of, weights_of
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard


class HFAdapter:
    """A module (or pipeline chunks, or ``{name: tensor}``) whose tensors are whole on this process.

    Names are those that ``save_pretrained`` writes, so a model of transformers >= 5 with fused experts yields a shard
    an expert and projection; transformers itself is not needed.
    """

    name = "hf"

    def matches(self, target: object) -> bool:
        return modules_of(target) is not None or mapping_of(target) is not None

    def shards(self, target: object) -> Iterator[Shard]:
        for weight in weights_of(target):
            if is_dtensor(weight.tensor):
                raise InvalidArgument(f"{weight.name}: a DTensor holds a part only; register with adapter='fsdp'")
            yield from checkpoint_shards(Shard(weight.name, live_view(weight.name, weight.tensor)), weight.family)
