"""Rules of the adapter for Megatron-Core that need none of it: modules of its names and attributes stand in.

Megatron-Core itself is in ``tests/engines/megatron``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from awexd_client.adapters.experts import SPLIT
from awexd_client.adapters.megatron import FAMILIES, MegatronAdapter, Names
from awexd_client.adapters.megatron.attention import gated_heads
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

HIDDEN, SIZE, HEADS, GROUPS, INNER, ROWS = 8, 4, 4, 2, 12, 16
LLAMA = {"model_type": "llama", "vocab_size": 13}


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


def parameter(*shape: int, cut: bool | None = None) -> Any:
    made: Any = nn.Parameter(torch.randn(*shape))
    if cut is not None:
        made.tensor_model_parallel = cut
    return made


def holder(**parameters: Any) -> Any:
    module: Any = nn.Module()
    for name, value in parameters.items():
        setattr(module, name, value)
    return module


def gpt(rank: int = 0, size: int = 1, **changes: Any) -> Any:
    """One layer in tensor-parallel parts, under Transformer Engine's names."""
    values = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": SIZE,
        "ffn_hidden_size": INNER,
        "gated_linear_unit": True,
        **changes,
    }
    config = SimpleNamespace(**values)
    rows = (HEADS + 2 * GROUPS) * SIZE
    attention = holder(
        linear_qkv=holder(weight=parameter(rows // size, HIDDEN, cut=True), layer_norm_weight=parameter(HIDDEN)),
        linear_proj=holder(weight=parameter(HIDDEN, HEADS * SIZE // size, cut=True)),
    )
    mlp = holder(
        linear_fc1=holder(weight=parameter(2 * INNER // size, HIDDEN, cut=True), layer_norm_weight=parameter(HIDDEN)),
        linear_fc2=holder(weight=parameter(HIDDEN, INNER // size, cut=True)),
    )
    mlp.config = config
    layer = holder(self_attention=attention, mlp=mlp)
    layer.config, layer.layer_number = config, 1
    return holder(
        config=config,
        pg_collection=SimpleNamespace(tp=Group(rank, size), ep=Group(0, 1), expt_tp=Group(rank, size)),
        pre_process=True,
        share_embeddings_and_output_weights=False,
        vocab_size=ROWS,
        embedding=holder(word_embeddings=holder(weight=parameter(ROWS // size, HIDDEN, cut=True))),
        output_layer=holder(weight=parameter(ROWS // size, HIDDEN, cut=True)),
        decoder=holder(layers=nn.ModuleList([layer]), final_layernorm=holder(weight=parameter(HIDDEN))),
    )


def shards(model: Any, config: object = LLAMA, **options: Any) -> list[Shard]:
    return list(MegatronAdapter(config, **options).shards(model))


def boxes(model: Any, name: str, config: object = LLAMA) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(shard.offset, tuple(shard.tensor.shape)) for shard in shards(model, config) if shard.name == name]


def test_shards_are_views_without_gradient() -> None:
    model = gpt()
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    found = shards(model)
    assert {shard.tensor.untyped_storage().data_ptr() for shard in found} == storages
    assert not any(shard.tensor.requires_grad for shard in found)


@pytest.mark.parametrize(("rank", "held"), [(0, [((0, 0), (8, HIDDEN))]), (1, [((8, 0), (5, HIDDEN))])])
def test_padding_of_the_vocabulary_is_nobodys(rank: int, held: object) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert boxes(gpt(rank, 2), name) == held


def test_rank_of_nothing_but_padding_has_no_embedding() -> None:
    assert boxes(gpt(3, 4), "lm_head.weight", {**LLAMA, "vocab_size": 12}) == []


def test_tied_embedding_is_its_heads_too() -> None:
    model = gpt()
    model.share_embeddings_and_output_weights, model.output_layer = True, nn.Identity()
    places = {shard.name: shard.tensor.data_ptr() for shard in shards(model)}
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]


def test_later_stage_keeps_its_copy_of_a_tied_embedding() -> None:
    model = gpt()
    model.share_embeddings_and_output_weights, model.pre_process = True, False
    assert {"lm_head.weight", "model.embed_tokens.weight"} & {shard.name for shard in shards(model)} == set()


def test_layers_are_counted_by_their_own_number() -> None:
    model = gpt()
    model.decoder.layers[0].layer_number = 8
    assert {shard.name.split(".")[2] for shard in shards(model) if ".layers." in shard.name} == {"7"}


def test_glm4s_gate_and_up_are_one_tensor_of_the_checkpoint() -> None:
    model = gpt(1, 2, rotary_interleaved=True)
    glm4 = {"model_type": "glm4", "vocab_size": 13}
    half = INNER // 2
    found = boxes(model, "model.layers.0.mlp.gate_up_proj.weight", glm4)
    assert found == [((half, 0), (half, HIDDEN)), ((INNER + half, 0), (half, HIDDEN))]


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("glm4", {"post_self_attn_layernorm": "post_self_attn_layernorm", "post_mlp_layernorm": "post_mlp_layernorm"}),
        (
            "glm4",
            {
                "self_attention.post_self_attn_layernorm": "post_self_attn_layernorm",
                "mlp.post_mlp_layernorm": "post_mlp_layernorm",
            },
        ),
        (
            "gemma2",
            {
                "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
                "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
                "pre_mlp_layernorm": "pre_feedforward_layernorm",
            },
        ),
    ],
)
def test_norms_after_attention_and_mlp_go_by_the_familys_names(family: str, paths: dict[str, str]) -> None:
    names = FAMILIES[family]
    model = gpt(layernorm_zero_centered_gamma=names.zero_centred, rotary_interleaved=names.rotates_pairs)
    layer = model.decoder.layers[0]
    for path in paths:
        owner, _, name = path.rpartition(".")
        setattr(layer.get_submodule(owner), name, holder(weight=parameter(HIDDEN)))
    found = {shard.name: shard.tensor.data_ptr() for shard in shards(model, {"model_type": family, "vocab_size": 13})}
    for path, name in paths.items():
        assert found[f"model.layers.0.{name}.weight"] == layer.get_submodule(path).weight.data_ptr()


def testgated_heads_are_each_head_before_its_gate() -> None:
    runs = gated_heads("q", "k", "v", h=4, g=2, d=1, part=0, parts=1)
    told = [(run.name, run.start) for run in runs]
    first = [("q", 0), ("q", 2), ("q", 1), ("q", 3), ("k", 0), ("v", 0)]
    second = [(name, start + {"q": 4}.get(name, 1)) for name, start in first]
    assert told == [*first, *second]


def test_sinks_are_cut_by_heads() -> None:
    model = gpt(1, 2)
    model.decoder.layers[0].self_attention.core_attention = holder(softmax_offset=parameter(HEADS // 2))
    found = boxes(model, "model.layers.0.self_attn.sinks", {"model_type": "gpt_oss", "vocab_size": 13})
    assert found == [((2,), (2,))]


class Float8Tensor(torch.Tensor):
    """As Transformer Engine's: a tensor whose bytes are not its elements."""


def fp8(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.weight = nn.Parameter(torch.randn(HIDDEN, INNER).as_subclass(Float8Tensor))


def unknown(model: Any) -> None:
    model.decoder.layers[0].self_attention.linear_gdn = holder(weight=parameter(2, 2))


def unknown_buffer(model: Any) -> None:
    model.decoder.layers[0].mlp.register_buffer("qb_beta", torch.zeros(2))


def position(model: Any) -> None:
    model.embedding.position_embeddings = holder(weight=parameter(2, 2))


def cut_norm(model: Any) -> None:
    model.decoder.final_layernorm.weight = parameter(HIDDEN, cut=True)


def whole_linear(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.weight.tensor_model_parallel = False


def of_experts(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.weight.allreduce = False


def rematerialised(model: Any) -> None:
    model.decoder.layers[0].mlp.linear_fc2.weight.is_gtp_weight_remat = True


def short(model: Any) -> None:
    model.decoder.layers[0].self_attention.linear_qkv.weight = parameter(10, HIDDEN, cut=True)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (fp8, "mlp.linear_fc2.weight: a Float8Tensor is not laid out as a plain tensor"),
        (unknown, "self_attention.linear_gdn.weight: no rule"),
        (unknown_buffer, "mlp.qb_beta: no rule"),
        (position, "embedding.position_embeddings.weight: no rule"),
        (cut_norm, "decoder.final_layernorm.weight: tensor_model_parallel is True, where a whole tensor is expected"),
        (whole_linear, "mlp.linear_fc2.weight: tensor_model_parallel is False, where a part is expected"),
        (of_experts, "mlp.linear_fc2.weight: allreduce is False, where expert groups say True"),
        (rematerialised, "mlp.linear_fc2.weight: a part that GTP gathers again"),
        (short, "q_proj.weight: 16 indices expected along dimension 0, in memory it is [10, 8]"),
    ],
)
def test_what_contradicts_the_rules_is_refused_by_name(spoil: Callable[[Any], None], says: str) -> None:
    model = gpt(0, 2)
    spoil(model)
    with pytest.raises(InvalidArgument) as refused:
        shards(model)
    assert says in str(refused.value)


def test_buffers_that_are_not_saved_are_no_weights() -> None:
    model = gpt()
    model.decoder.layers[0].mlp.register_buffer("local_tokens_per_expert", torch.zeros(2), persistent=False)
    assert len(shards(model)) == len(shards(gpt()))


class MegatronFSDP(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


def test_wrapper_that_shards_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="MegatronFSDP shards the model's parameters"):
        shards(MegatronFSDP(gpt()))


@pytest.mark.parametrize("target", [nn.Linear(2, 2), {"a": torch.ones(1)}, [1]])
def test_other_targets_are_refused(target: object) -> None:
    assert not MegatronAdapter().matches(target)
    with pytest.raises(InvalidArgument):
        shards(target)


@pytest.mark.parametrize("given", ["file", "folder", "object"])
def test_configuration_is_read_from_what_there_is(tmp_path: Path, given: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    config = {"file": path, "folder": str(tmp_path), "object": SimpleNamespace(to_dict=lambda: LLAMA)}[given]
    assert boxes(gpt(), "lm_head.weight", config) == [((0, 0), (13, HIDDEN))]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 13, "model_type": "nobody"}, "'nobody' name their tensors is not known"),
        ({"model_type": "llama"}, "has no vocab_size"),
        ("nowhere/config.json", "nowhere/config.json cannot be read"),
        (3, "a int is no Hugging Face configuration"),
    ],
)
def test_configuration_that_says_nothing_is_refused(config: object, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        MegatronAdapter(config)
    assert says in str(refused.value)


def test_new_family_needs_only_names() -> None:
    names = Names(SPLIT["qwen3_moe"], mlp_norm="ffn_norm")
    found = {shard.name for shard in shards(gpt(), {"model_type": "new", "vocab_size": 13}, names=names)}
    assert "model.layers.0.ffn_norm.weight" in found


def test_families_with_experts_share_the_names_that_transformers_models_go_by() -> None:
    shared = {family: names.experts for family, names in FAMILIES.items() if names.experts and family != "kimi_k2"}
    assert shared == {family: SPLIT[family] for family in shared}
    assert FAMILIES["kimi_k2"] == FAMILIES["deepseek_v3"]
