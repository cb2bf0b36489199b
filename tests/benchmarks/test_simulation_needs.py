"""Manifests of the simulated jobs, and what a node of an engine must bring of a trainer's segments."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from awexd.dryrun.families import model_of
from awexd_transports.dtypes import ITEMSIZE
from awexd_transports.layout import Box, Entry, Manifest, TensorSpec
from awexd_transports.share import share
from benchmarks.simulation.models import KIMI_K2, LING_1T, Layout, fp8_model, in_fp8
from benchmarks.simulation.needs import needs_of

TINY = {
    **KIMI_K2,
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
LAYOUT = Layout("megatron:tp=2,pp=2,cp=1,dp=2,ep=4,etp=1", "sglang:tp=4,ep=4,dp_attention=4,shared=whole")


@pytest.mark.parametrize(("values", "billions"), [(KIMI_K2, 1026.4), (LING_1T, 999.7)])
def test_models_have_their_published_numbers_of_parameters(values: dict[str, object], billions: float) -> None:
    assert model_of(values).elements / 1e9 == pytest.approx(billions, abs=0.1)


def test_fp8_model_has_a_byte_an_element_and_a_scale_a_block() -> None:
    plain = {each.name: each for each in model_of(TINY).tensors}
    quantized = {each.name: each for each in in_fp8(model_of(TINY)).tensors}
    for name, tensors in quantized.items():
        if name.endswith("_scale_inv"):
            of = quantized[name.removesuffix("_scale_inv")]
            assert tensors.dtype == "float32"
            assert of.dtype == "float8_e4m3fn"
            assert tensors.shape == tuple(math.ceil(size / 128) for size in of.shape)
            assert tensors.count == of.count
        elif tensors.dtype != "float8_e4m3fn":
            assert tensors == plain[name]
    assert plain.keys() == {name for name in quantized if not name.endswith("_scale_inv")}
    assert quantized["model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"].dtype == "float8_e4m3fn"
    assert quantized["model.embed_tokens.weight"].dtype == quantized["model.norm.weight"].dtype == "bfloat16"


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 30])
def test_needs_are_the_union_of_what_workers_need_each_byte_once(piece_bytes: int) -> None:
    model = fp8_model(TINY)
    segments, workers = list(share(LAYOUT.trainer(model))), LAYOUT.engine(model)
    for node in (workers[:2], workers[2:]):
        needs = needs_of(segments, node, piece_bytes)
        assert needs.total == pytest.approx(union_bytes(node), abs=1)
        assert needs.of_workers == pytest.approx([worker.nbytes for worker in node], abs=len(needs))
        assert needs.nbytes.max() <= piece_bytes
        assert (np.diff(needs.rank) >= 0).all()
        assert (needs.of_ranks(len(segments)) < [segment.nbytes + 1 for segment in segments]).all()
        for rank, segment in enumerate(segments):
            ends = needs.end[needs.rank == rank]
            assert (np.diff(ends) > 0).all()
            assert ends.max(initial=0) <= segment.segment_nbytes


def test_needs_of_a_whole_model_are_all_that_is_published() -> None:
    model = fp8_model(TINY)
    segments, workers = list(share(LAYOUT.trainer(model))), LAYOUT.engine(model)
    needs = needs_of(segments, workers, 1 << 20)
    assert needs.of_ranks(len(segments)) == pytest.approx([segment.nbytes for segment in segments], abs=1)


def test_needs_refuse_boxes_that_overlap_in_part() -> None:
    def manifest(*parts: tuple[int, int]) -> Manifest:
        spec = TensorSpec("w", (8, 4), "float32")
        return Manifest.of(Entry(spec, Box((at, 0), (rows, 4)), piece) for piece, (at, rows) in enumerate(parts))

    with pytest.raises(ValueError, match="overlapping boxes of rank 0"):
        needs_of([manifest((0, 8))], [manifest((0, 5)), manifest((3, 5))], 1 << 20)


def union_bytes(workers: list[Manifest]) -> int:
    """By brute force: every element that any of them has."""
    held: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = {}
    dtypes: dict[str, str] = {}
    for worker in workers:
        for entry in worker.entries:
            name = entry.tensor.name
            mask = held.setdefault(name, np.zeros(entry.tensor.shape, bool))
            mask[tuple(slice(low, low + n) for low, n in zip(entry.box.offset, entry.box.shape, strict=True))] = True
            dtypes[name] = entry.tensor.dtype
    counted = Counter({name: int(mask.sum()) * ITEMSIZE[dtypes[name]] for name, mask in held.items()})
    return counted.total()
