"""The long form: parts one at a time, whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from awexd_client import (
    ManifestMismatch,
    Shard,
    VersionConflict,
    WeightWriter,
    WorkerWeightsReader,
)


def test_case_56_captured_before_the_block_has_ended(writer: WeightWriter) -> None:
    weights = {"w": torch.zeros(3)}
    writer.register(weights)
    with writer.begin(1) as update:
        with pytest.raises(VersionConflict, match="not sealed"):
            update.publication.captured()
        update.write(weights)
    update.publication.captured()
    update.publication.committed()


class TestLongForm:
    """begin, parts, seal."""

    @pytest.fixture
    def weights(self, writer: WeightWriter) -> dict[str, torch.Tensor]:
        weights = {"a": torch.full((4,), 1.0), "b": torch.full((2, 2), 1.0)}
        writer.register(weights)
        writer.publish(1).committed()
        for tensor in weights.values():
            tensor.fill_(2)
        return weights

    def check_still_one(self, writer: WeightWriter, reader: WorkerWeightsReader) -> None:
        into = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
        reader.register(into)
        assert reader.update().step == 1
        assert {v for tensor in into.values() for v in tensor.flatten().tolist()} == {1.0}
        writer.publish(2).committed()
        assert reader.update().step == 2

    def test_case_4_part_that_is_missing(
        self, writer: WeightWriter, reader: WorkerWeightsReader, weights: dict[str, torch.Tensor]
    ) -> None:
        with pytest.raises(ManifestMismatch) as caught, writer.begin(2) as update:
            update.write({"a": weights["a"]})
        assert caught.value.missing == ["b"]
        self.check_still_one(writer, reader)

    def test_case_4_part_that_fails(
        self, writer: WeightWriter, reader: WorkerWeightsReader, weights: dict[str, torch.Tensor]
    ) -> None:
        with pytest.raises(RuntimeError, match="part 2"), writer.begin(2) as update:  # noqa: PT012 - the block is what is tested
            update.write({"a": weights["a"]})
            raise RuntimeError("part 2 of 3")
        self.check_still_one(writer, reader)

    @pytest.mark.parametrize(
        ("part", "name"),
        [
            ({"a": torch.zeros(5)}, "a"),
            ({"a": torch.zeros(4, dtype=torch.bfloat16)}, "a"),
            ({"stranger": torch.zeros(4)}, "stranger"),
            ([Shard("b", torch.zeros(1, 2), (2, 2), (0, 0))], "b"),
        ],
        ids=["shape", "dtype", "name", "box"],
    )
    def test_part_that_was_not_registered_so(
        self,
        writer: WeightWriter,
        reader: WorkerWeightsReader,
        weights: dict[str, torch.Tensor],
        part: Any,
        name: str,
    ) -> None:
        with pytest.raises(ManifestMismatch) as caught, writer.begin(2) as update:
            update.write(part)
        assert list(caught.value.mismatched) == [name]
        self.check_still_one(writer, reader)

    def test_part_written_twice(
        self, writer: WeightWriter, reader: WorkerWeightsReader, weights: dict[str, torch.Tensor]
    ) -> None:
        with pytest.raises(ManifestMismatch, match="already"), writer.begin(2) as update:  # noqa: PT012 - the block is what is tested
            update.write(weights)
            update.write({"a": weights["a"]})
        self.check_still_one(writer, reader)

    def test_write_after_the_block(self, writer: WeightWriter, weights: dict[str, torch.Tensor]) -> None:
        with writer.begin(2) as update:
            update.write(weights)
        with pytest.raises(VersionConflict, match="over"):
            update.write(weights)

    def test_part_from_other_memory_with_other_strides(
        self, writer: WeightWriter, reader: WorkerWeightsReader, weights: dict[str, torch.Tensor]
    ) -> None:
        with writer.begin(2) as update:
            update.write({"a": torch.arange(8.0)[::2]})
            update.write({"b": torch.arange(4.0).view(2, 2).t()})
        into = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
        reader.register(into)
        reader.update()
        assert into["a"].tolist() == [0.0, 2.0, 4.0, 6.0]
        assert into["b"].tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_case_40_tied_names_in_the_long_form(writer: WeightWriter, reader: WorkerWeightsReader, at_once: bool) -> None:
    tied = torch.arange(6.0)
    weights = {"embed": tied, "head": tied}
    writer.register(weights)
    with writer.begin(1) as update:
        for part in [weights] if at_once else [{name: tensor} for name, tensor in weights.items()]:
            update.write(part)
    into = {"embed": torch.zeros(6), "head": torch.zeros(6)}
    reader.register(into)
    reader.update()
    assert torch.equal(into["embed"], tied)
    assert torch.equal(into["head"], tied)
