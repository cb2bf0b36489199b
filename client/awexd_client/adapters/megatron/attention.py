"""Rules of self-attention: grouped queries (megatron/core/transformer/attention.py) and multi-head latent attention
(megatron/core/transformer/multi_latent_attention.py), names of Transformer Engine's modules and of local ones."""

from __future__ import annotations

from collections.abc import Iterator

from awexd_client.adapters.megatron.part import Part, Rule, check_cut, columns, named, of_family, rows, whole
from awexd_client.adapters.rules import Run, grouped_heads, shards_along, share_of, split, stacked, within
from awexd_transports.layout import Shard


def _qkv(part: Part) -> Iterator[Shard]:
    """``linear_qkv``: see ``rules.grouped_heads``; with ``attention_output_gate`` see ``gated_heads``."""
    config = part.config
    q, k, v = (f"{part.prefix}self_attn.{name}_proj.{part.leaf}" for name in "qkv")
    sizes = {"h": config.num_attention_heads, "g": config.num_query_groups, "d": config.kv_channels}
    rule = gated_heads if getattr(config, "attention_output_gate", False) else grouped_heads
    rank, size = part.places.tensor
    yield from rows(part, rule(q, k, v, **sizes, part=rank, parts=size))


def gated_heads(queries: str, keys: str, values: str, *, h: int, g: int, d: int, part: int, parts: int) -> list[Run]:
    """For each group its R query heads, the R gates of their output, its key head, its value head.

    That is ``SelfAttention.get_query_key_value_tensors(output_gate=True)``; the checkpoint's ``q_proj`` has each query
    head followed by its gate (Qwen3NextAttention of transformers: ``view(..., 2 * head_dim)``, then ``chunk``).
    """
    r, runs = h // g, list[Run]()
    for group in range(g):
        heads = range(group * r, (group + 1) * r)
        runs += [Run(queries, 2 * h * d, (2 * head + gate) * d, d) for gate in (0, 1) for head in heads]
        runs += [Run(name, g * d, group * d, d) for name in (keys, values)]
    return within(runs, *share_of(queries, g * (2 * r + 2) * d, part, parts))


def _proj(part: Part) -> Iterator[Shard]:
    """``linear_proj``: heads are cut in order, whatever the number of groups."""
    config = part.config
    size = config.v_head_dim if getattr(config, "multi_latent_attention", False) else config.kv_channels
    yield from columns(part, f"self_attn.o_proj.{part.leaf}", config.num_attention_heads * size)


def _sinks(part: Part) -> Iterator[Shard]:
    """``softmax_offset``, a logit a head (megatron/core/transformer/dot_product_attention.py): gpt-oss's sinks."""
    if not part.names.sinks:
        raise part.refuse("checkpoints of this family have no such tensor")
    yield from rows(part, split(f"{part.prefix}self_attn.sinks", part.config.num_attention_heads, *part.places.tensor))


def _head_norm(part: Part) -> Iterator[Shard]:
    """``q_layernorm``, ``k_layernorm``: over each head; with MLA ``q_layernorm`` is over the latent."""
    which = part.found["which"]
    if getattr(part.config, "multi_latent_attention", False):
        if which == "k":
            raise part.refuse("MLA has no norm of that name")
        yield from whole(part, f"self_attn.q_a_layernorm.{part.leaf}")
        return
    yield from whole(part, f"self_attn.{which}_norm.{part.leaf}")


def _latent(name: str) -> Rule:
    """A rule of MLA only."""
    rule = named(name)

    def checked(part: Part) -> Iterator[Shard]:
        _check_latent(part)
        yield from rule(part)

    return checked


def _query_heads(part: Part) -> Iterator[Shard]:
    """``linear_q_proj`` and ``linear_q_up_proj``: for each head what has no position, then what rotates."""
    config = part.config
    size = config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    yield from _up(part, {"q": "q_proj", "q_up": "q_b_proj"}[part.found["which"]], size)


def _key_value_heads(part: Part) -> Iterator[Shard]:
    """``linear_kv_up_proj``: for each head its key without position, then its value."""
    config = part.config
    yield from _up(part, "kv_b_proj", config.num_attention_heads * (config.qk_head_dim + config.v_head_dim))


def _up(part: Part, name: str, size: int) -> Iterator[Shard]:
    _check_latent(part)
    yield from rows(part, split(f"{part.prefix}self_attn.{name}.{part.leaf}", size, *part.places.tensor))


def _down(part: Part) -> Iterator[Shard]:
    """The projections to the latents: rows cut by a ColumnParallelLinear, whole in Transformer Engine's ``duplicated``.

    ``linear_qkv_down_proj`` (``mla_down_proj_fusion``, FusedMLASelfAttention) is the query's rows, then the other's;
    where it is cut, a rank's part of each.
    """
    _check_latent(part)
    config = part.config
    query = (f"{part.prefix}self_attn.q_a_proj.weight", config.q_lora_rank)
    other = (f"{part.prefix}self_attn.kv_a_proj_with_mqa.weight", config.kv_lora_rank + config.qk_pos_emb_head_dim)
    tensors = {"q": [query], "kv": [other], "qkv": [query, other]}[part.found["which"]]
    duplicated = getattr(part.owner, "parallel_mode", None) == "duplicated"
    if not duplicated and getattr(part.tensor, "tensor_model_parallel", None) is None:
        raise part.refuse(f"nothing says whether a {type(part.owner).__name__} is cut")
    check_cut(part, cut=not duplicated)
    rank, size = (0, 1) if duplicated else part.places.tensor
    yield from shards_along(part.tensor, stacked(tensors, rank, size))


def _check_latent(part: Part) -> None:
    if not part.names.latent:
        raise part.refuse("multi-head latent attention, which checkpoints of this family do not have")


_A = r"self_attention\."

RULES: list[tuple[str, Rule]] = [
    (
        rf"input_layernorm\.(weight|bias)|{_A}linear_(qkv|qkv_down_proj)\.layer_norm_(weight|bias)",
        named("input_layernorm.{leaf}"),
    ),
    (rf"{_A}linear_qkv\.(weight|bias)", _qkv),
    (rf"{_A}linear_proj\.(weight|bias)", _proj),
    (rf"{_A}(?P<which>[qk])_layernorm\.(weight|bias)", _head_norm),
    (rf"{_A}core_attention\.softmax_offset", _sinks),
    (rf"{_A}linear_(?P<which>q|q_up)(_proj)\.weight", _query_heads),
    (rf"{_A}linear_kv_up_proj\.weight", _key_value_heads),
    (rf"{_A}linear_(?P<which>q|kv|qkv)_down_proj\.weight", _down),
    (rf"{_A}linear_q_up_proj\.layer_norm_(weight|bias)", _latent("self_attn.q_a_layernorm.{leaf}")),
    (rf"{_A}(kv_layernorm\.|linear_kv_up_proj\.layer_norm_)(weight|bias)", _latent("self_attn.kv_a_layernorm.{leaf}")),
    (
        # Megatron-Bridge's norm in linear_proj (Gemma), and two places where GLM-4's is kept.
        rf"({_A})?(linear_proj\.post_layernorm|post_self_attn_layernorm)\.(weight|bias)",
        of_family("after_attention", "{}.{leaf}"),
    ),
]
"""Patterns of names inside a layer, and their rules."""
