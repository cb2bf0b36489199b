"""Names, shapes and bytes against what transformers' own ``save_pretrained`` writes; names without transformers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from awexd_client.adapters import shards_of
from awexd_client.adapters.experts import FUSED_ON_DISK, SPLIT
from awexd_client.adapters.names import checkpoint_path, is_weight_buffer
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard
from awexd_transports.shard import PAIRS

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1}
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_group": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Qwen3Moe": {**MOE, "num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    "Qwen2Moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "Mixtral": {"num_local_experts": 4},
    "MiniMaxM2": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV2": {**MOE, **ROUTED, **MLA},
    "DeepseekV3": {**MOE, **ROUTED, **MLA},
    "Glm4Moe": {**MOE, **ROUTED, "head_dim": 8, "use_qk_norm": True, "n_group": 1},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


def build(kind: str, *, tied: bool) -> nn.Module:
    """A tiny model whose every element is random, those of constant initialisation too."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **HEADS, **MODELS[kind]}, tie_word_embeddings=tied)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.normal_()
    return model.to(torch.bfloat16)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", MODELS)
def test_shards_are_what_save_pretrained_writes(kind: str, tied: bool, tmp_path: Path) -> None:
    model = build(kind, tied=tied)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    saved = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    shards = {shard.name: shard for shard in shards_of(model)}
    aliases = {"lm_head.weight"} if tied else set()
    assert shards.keys() - saved.keys() == aliases
    assert saved.keys() - shards.keys() == set()
    for name, tensor in saved.items():
        paired = kind == "GptOss" and "experts.gate_up_proj" in name
        assert shards[name].layout == (PAIRS if paired else None)
        assert same_bytes(shards[name].tensor.flatten(-2) if paired else shards[name].tensor, tensor), name
    for name in aliases:
        assert shards[name].tensor.data_ptr() == shards["model.embed_tokens.weight"].tensor.data_ptr()


def test_shards_are_views_that_write_through() -> None:
    model = build("Mixtral", tied=False)
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    shards = shards_of(model)
    assert {shard.tensor.untyped_storage().data_ptr() for shard in shards} == storages
    assert not any(shard.tensor.requires_grad for shard in shards)
    for shard in shards:
        shard.tensor.fill_(2.0)
    assert all(bool((parameter == 2.0).all()) for parameter in model.parameters())


def test_families_agree_with_the_mapping_of_transformers() -> None:
    """Every family of ours converts as its example does, in the version of transformers that is installed."""
    mapping = importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping

    def rules(family: str) -> list[Any]:
        return [
            (
                rule._original_source_patterns,
                rule._original_target_patterns,
                [type(o) for o in getattr(rule, "operations", [])],
            )
            for rule in mapping(family) or []
        ]

    for family, names in SPLIT.items():
        example = rules("mixtral" if names.block == "block_sparse_moe" else "qwen2_moe")
        assert example
        assert [rule for rule in example if rule not in rules(family)] == [], family
    assert all(not rules(family) for family in FUSED_ON_DISK)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_wrapper_prefix_is_stripped(prefix: str) -> None:
    assert checkpoint_path(f"{prefix}model.layers.0.{prefix}mlp.weight") == "model.layers.0.mlp.weight"


def test_wrapped_modules_keep_their_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), compiled)
    wrapped = nn.Module()
    wrapped.module = inner
    assert [s.name for s in shards_of(wrapped)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("path", "persistent", "weight"),
    [
        ("model.rotary_emb.inv_freq", True, False),
        ("model.rotary_emb.anything", True, False),
        ("model.sliding_attention_original_inv_freq", False, False),
        ("model.embed_tokens.embed_scale", True, False),
        ("h.0.attn.masked_bias", True, False),
        ("mlp.gate.e_score_correction_bias", True, True),
        ("mlp.gate.e_score_correction_bias", False, True),
        ("bn.running_mean", True, True),
        ("scratch", False, False),
    ],
)
def test_buffers_are_weights_or_derived(path: str, persistent: bool, weight: bool) -> None:
    assert is_weight_buffer(path, persistent=persistent) is weight


class Fused(nn.Module):
    def __init__(self, family: str | None, rows: int = 6) -> None:
        super().__init__()
        experts = nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.arange(2.0 * rows * 4).reshape(2, rows, 4))
        self.mlp = nn.ModuleDict({"experts": experts})
        if family:
            self.config = SimpleNamespace(model_type=family)


def test_fused_experts_of_an_unknown_family_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"mlp\.experts\.gate_up_proj: .*'novel_moe'"):
        shards_of(Fused("novel_moe"))


def test_fused_experts_without_a_family_keep_their_name() -> None:
    assert [shard.name for shard in shards_of(Fused(None))] == ["mlp.experts.gate_up_proj"]


def test_fused_rows_that_do_not_halve_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="do not halve"):
        shards_of(Fused("qwen3_moe", rows=5))


def test_chunk_without_configuration_takes_that_of_its_parts() -> None:
    chunk = nn.ModuleDict({"layers": nn.ModuleList([Fused("mixtral")])})
    names = {shard.name for shard in shards_of([chunk, nn.Linear(1, 1, bias=False)])}
    assert names == {f"layers.0.block_sparse_moe.experts.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w3")} | {
        "weight"
    }


def test_module_under_two_names_yields_both() -> None:
    linear = nn.Linear(2, 2, bias=False)
    shards = shards_of(nn.ModuleDict({"a": linear, "b": linear}))
    assert [shard.name for shard in shards] == ["a.weight", "b.weight"]


def test_mapping_keeps_names_as_given() -> None:
    tensors = {"module.x": torch.ones(2), "mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}
    assert [shard.name for shard in shards_of(tensors)] == list(tensors)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (lambda: nn.parameter.UninitializedParameter(), "lazy"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: type("Params4bit", (nn.Parameter,), {})(torch.ones(2)), "quantised"),
    ],
)
def test_tensor_without_plain_bytes_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^layer.weight: .*{words}"):
        shards_of({"layer.weight": make()})


def test_fsdp1_with_flattened_weights_is_refused() -> None:
    flattened = type(
        "FullyShardedDataParallel", (nn.Linear,), {"sharding_strategy": SimpleNamespace(name="FULL_SHARD")}
    )
    with pytest.raises(InvalidArgument, match="FSDP1"):
        shards_of(flattened(2, 2))


def test_transformers_is_not_imported() -> None:
    code = "import sys, torch; from awexd_client.adapters import shards_of; shards_of(torch.nn.Linear(2, 2)); "
    code += "sys.exit('transformers' in sys.modules or 'torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_expert_shard_of_a_part_keeps_global_boxes() -> None:
    from awexd_client.adapters.experts import checkpoint_shards

    local = torch.arange(24.0).reshape(1, 4, 6)
    part = Shard("mlp.experts.gate_up_proj", local, (3, 10, 12), (1, 3, 6))  # rows 3 to 6 of 10: gate 3, 4 and up 0, 1
    found = {shard.name: shard for shard in checkpoint_shards(part, "qwen3_moe")}
    gate, up = found["mlp.experts.1.gate_proj.weight"], found["mlp.experts.1.up_proj.weight"]
    assert (gate.global_shape, gate.offset, up.offset) == ((5, 12), (3, 6), (0, 6))
    assert torch.equal(gate.tensor, local[0, :2])
    assert torch.equal(up.tensor, local[0, 2:])
