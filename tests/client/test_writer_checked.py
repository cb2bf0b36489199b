"""WeightWriter and an adapter that knows whether live memory is the newest weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from awexd_client import InvalidArgument, Shard, WeightWriter, WorkerWeightsReader


class Late:
    """Its tensors are not the weights while ``late`` is true."""

    name = "late"

    def __init__(self) -> None:
        self.late = False

    def matches(self, target: object) -> bool:
        return False

    def shards(self, target: Any) -> Iterator[Shard]:
        yield from (Shard(name, tensor) for name, tensor in target.items())

    def check_current(self, target: Any) -> None:
        if self.late:
            raise InvalidArgument(f"{', '.join(target)}: not gathered")


def test_weights_that_are_not_current_are_not_published(writer: WeightWriter, reader: WorkerWeightsReader) -> None:
    adapter, weights, held = Late(), {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    writer.register(weights, adapter)
    writer.publish(1).committed()
    reader.register(held)
    adapter.late = True
    weights["w"].fill_(2)
    for call in (writer.publish, writer.begin):
        with pytest.raises(InvalidArgument, match="w: not gathered"):
            call(2)
    reader.update()
    assert reader.version == (1, 1)
    adapter.late = False
    writer.publish(2).committed()
    reader.update()
    assert held["w"].tolist() == [2, 2, 2]
