"""Models of a trillion parameters as their published configurations have them, and as FP8 engines hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from awexd.dryrun.engines import engine
from awexd.dryrun.families import model_of
from awexd.dryrun.models import Kind, Model, Tensors
from awexd.dryrun.spec import ENGINES, TRAINERS, parse
from awexd.dryrun.trainers import trainer
from awexd_transports.layout import Manifest

BLOCK = 128
"""Rows and columns that share a scale."""

KIMI_K2: Mapping[str, Any] = {
    "model_type": "kimi_k2",
    "dtype": "bfloat16",
    "vocab_size": 163_840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LING_1T: Mapping[str, Any] = {
    "model_type": "glm4_moe",
    "dtype": "bfloat16",
    "vocab_size": 157_184,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "first_k_dense_replace": 4,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_qk_norm": True,
}
"""Sizes of Ling-1T (999.7 billion parameters) under the names of GLM-4's family, which has the same parts: grouped
queries with norms, a router with a bias, shared experts, dense layers first. Ling's own q, k and v are one tensor."""

PLAIN = frozenset({Kind.EMBEDDING, Kind.HEAD, Kind.FINAL_NORM, Kind.WHOLE, Kind.ROUTER_BIAS})
"""What FP8 checkpoints leave as it was: tables, norms and routers."""
_CUT_AS = {Kind.QUERY: Kind.HEADED, Kind.KEY: Kind.HEADED, Kind.VALUE: Kind.HEADED}
"""Scales of packed queries, keys and values have no heads of their own size: rows are cut evenly, as theirs are."""


def in_fp8(model: Model) -> Model:
    """The model with matrices of one byte an element, and a float32 scale for each block of 128 x 128 of them."""
    return replace(model, tensors=tuple(each for one in model.tensors for each in _quantized(one)))


def _quantized(tensors: Tensors) -> Iterator[Tensors]:
    if tensors.kind in PLAIN:
        yield tensors
        return
    yield replace(tensors, dtype="float8_e4m3fn")
    blocks = tuple(-(-size // BLOCK) for size in tensors.shape)
    kind = _CUT_AS.get(tensors.kind, tensors.kind)
    yield replace(tensors, name=f"{tensors.name}_scale_inv", kind=kind, shape=blocks, dtype="float32")


@dataclass(frozen=True)
class Layout:
    """A trainer and its engines in the words of ``awexctl plan``; ranks fill nodes in their order."""

    train: str
    infer: str

    @property
    def engines(self) -> int:
        return parse(self.infer, ENGINES).size("engines")

    def trainer(self, model: Model) -> list[Manifest]:
        return trainer(model, parse(self.train, TRAINERS))

    def engine(self, model: Model) -> list[Manifest]:
        """The workers of one of the engines, which are alike."""
        return engine(model, parse(self.infer, ENGINES))


def fp8_model(values: Mapping[str, Any]) -> Model:
    return in_fp8(model_of(values))
