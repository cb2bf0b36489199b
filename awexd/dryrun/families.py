"""From a Hugging Face ``config.json`` to the tensors of that model's checkpoint: a table keyed by ``model_type``.

Names and shapes are those that transformers writes (the tests compare each family with ``save_pretrained``); layers of
multi-token prediction, which it does not write, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from awexd.dryrun.models import STACKS, Kind, Model, Tensors
from awexd_client.adapters.experts import SPLIT, ExpertNames
from awexd_transports.dtypes import dtype_name
from awexd_transports.errors import InvalidArgument


class _Config:
    """A configuration's values; what is missing is named."""

    def __init__(self, values: Mapping[str, Any], dtype: str) -> None:
        self.values = values
        self.dtype = dtype
        self.family = str(values["model_type"])

    def size(self, *keys: str) -> int:
        for key in keys:
            if type(self.values.get(key)) is int and self.values[key] >= 0:
                return int(self.values[key])
        raise InvalidArgument(f"the configuration of {self.family} needs {keys[0]}, a whole number")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.size("num_hidden_layers")))

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")


Found = Iterator[Tensors]
_Attention = Callable[[_Config], Found]
_Mlp = Callable[[_Config], Found]

_LAYER = "model.layers.{layer}."


def _in_layers(config: _Config, name: str, kind: Kind, *shape: int, layers: tuple[int, ...] | None = None) -> Tensors:
    return Tensors(_LAYER + name, kind, shape, config.dtype, config.layers if layers is None else layers)


def _head_size(config: _Config) -> int:
    if config.values.get("head_dim") is None and not FAMILIES[config.family].head_size_given:
        return config.hidden // config.heads
    return config.size("head_dim")


def _groups(config: _Config) -> int:
    if config.values.get("num_key_value_heads") is None and config.family in ("llama", "mistral"):
        return config.heads
    return config.size("num_key_value_heads")


def _grouped(biases: Callable[[_Config], str], *, norms: Callable[[_Config], bool] | bool = False) -> _Attention:
    """Grouped queries: matrices of q, k, v and o, biases of those that ``biases`` names, norms of q's and k's heads."""

    def attention(config: _Config) -> Found:
        size, hidden, biased = _head_size(config), config.hidden, biases(config)
        rows = {"q": config.heads * size, "k": _groups(config) * size, "v": _groups(config) * size}
        kinds = {"q": Kind.QUERY, "k": Kind.KEY, "v": Kind.VALUE}
        for which, kind in kinds.items():
            yield _in_layers(config, f"self_attn.{which}_proj.weight", kind, rows[which], hidden)
            if which in biased:
                yield _in_layers(config, f"self_attn.{which}_proj.bias", kind, rows[which])
        yield _in_layers(config, "self_attn.o_proj.weight", Kind.OUTPUT, hidden, rows["q"])
        if "o" in biased:
            yield _in_layers(config, "self_attn.o_proj.bias", Kind.WHOLE, hidden)
        if norms if isinstance(norms, bool) else norms(config):
            for which in "qk":
                yield _in_layers(config, f"self_attn.{which}_norm.weight", Kind.WHOLE, size)

    return attention


def _with_sinks(attention: _Attention) -> _Attention:
    def both(config: _Config) -> Found:
        yield from attention(config)
        yield _in_layers(config, "self_attn.sinks", Kind.HEADED, config.heads)

    return both


def _latent(config: _Config) -> Found:
    """Multi-head latent attention (DeepseekV3Attention of transformers)."""
    hidden, heads = config.hidden, config.heads
    latent, value = config.size("kv_lora_rank"), config.size("v_head_dim")
    plain, rotated = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    biased = config.flag("attention_bias")

    def down(name: str, rows: int) -> Found:
        yield _in_layers(config, f"self_attn.{name}.weight", Kind.LATENT, rows, hidden)
        if biased:
            yield _in_layers(config, f"self_attn.{name}.bias", Kind.LATENT, rows)

    if config.values.get("q_lora_rank") is None:
        rows = heads * (plain + rotated)
        yield _in_layers(config, "self_attn.q_proj.weight", Kind.HEADED, rows, hidden)
    else:
        rank = config.size("q_lora_rank")
        yield from down("q_a_proj", rank)
        yield _in_layers(config, "self_attn.q_a_layernorm.weight", Kind.WHOLE, rank)
        yield _in_layers(config, "self_attn.q_b_proj.weight", Kind.HEADED, heads * (plain + rotated), rank)
    yield from down("kv_a_proj_with_mqa", latent + rotated)
    yield _in_layers(config, "self_attn.kv_a_layernorm.weight", Kind.WHOLE, latent)
    yield _in_layers(config, "self_attn.kv_b_proj.weight", Kind.HEADED, heads * (plain + value), latent)
    yield _in_layers(config, "self_attn.o_proj.weight", Kind.OUTPUT, hidden, heads * value)
    if biased:
        yield _in_layers(config, "self_attn.o_proj.bias", Kind.WHOLE, hidden)


def _gated(config: _Config, base: str, up: Kind, down: Kind, size: int, layers: tuple[int, ...]) -> Found:
    for name in ("gate_proj", "up_proj"):
        yield _in_layers(config, f"{base}.{name}.weight", up, size, config.hidden, layers=layers)
    yield _in_layers(config, f"{base}.down_proj.weight", down, config.hidden, size, layers=layers)


def _dense(config: _Config, layers: tuple[int, ...] | None = None) -> Found:
    layers = config.layers if layers is None else layers
    size = config.size("intermediate_size")
    yield from _gated(config, "mlp", Kind.UP, Kind.DOWN, size, layers)
    if config.family == "llama" and config.flag("mlp_bias"):
        for name in ("gate_proj", "up_proj"):
            yield _in_layers(config, f"mlp.{name}.bias", Kind.UP, size, layers=layers)
        yield _in_layers(config, "mlp.down_proj.bias", Kind.WHOLE, config.hidden, layers=layers)


def _fused_dense(config: _Config) -> Found:
    size = config.size("intermediate_size")
    yield _in_layers(config, "mlp.gate_up_proj.weight", Kind.GATE_UP, 2 * size, config.hidden)
    yield _in_layers(config, "mlp.down_proj.weight", Kind.DOWN, config.hidden, size)


def _every_layer(config: _Config) -> tuple[int, ...]:
    return config.layers


def _by_step(config: _Config) -> tuple[int, ...]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer, but those of ``mlp_only_layers``."""
    step, dense = config.values.get("decoder_sparse_step") or 1, config.values.get("mlp_only_layers") or ()
    return tuple(layer for layer in config.layers if layer not in dense and (layer + 1) % step == 0)


def _after_dense(config: _Config) -> tuple[int, ...]:
    """DeepSeek's and GLM's rule: all but the first ones."""
    return config.layers[config.size("first_k_dense_replace") :]


def _shared_of_many(config: _Config) -> int:
    return (config.values.get("n_shared_experts") or 0) * config.size("moe_intermediate_size")


def _shared_alone(config: _Config) -> int:
    return config.size("shared_expert_intermediate_size")


def _mixture(
    names: ExpertNames,
    sparse: Callable[[_Config], tuple[int, ...]] = _every_layer,
    *,
    size: str = "moe_intermediate_size",
    shared: tuple[str, Callable[[_Config], int]] | None = None,
    bias: bool = False,
) -> _Mlp:
    """Routed experts in the layers of ``sparse``, a dense MLP in the others."""

    def mlp(config: _Config) -> Found:
        layers, block = sparse(config), names.block
        dense = tuple(layer for layer in config.layers if layer not in layers)
        if dense:
            yield from _dense(config, dense)
        count, width, hidden = config.size(*_EXPERTS), config.size(size), config.hidden
        yield _in_layers(config, f"{block}.gate.weight", Kind.WHOLE, count, hidden, layers=layers)
        if bias:
            name = f"{_LAYER}{block}.gate.e_score_correction_bias"
            yield Tensors(name, Kind.ROUTER_BIAS, (count,), "float32", layers)
        for leaf, kind, shape in (
            (names.gate, Kind.EXPERT_UP, (width, hidden)),
            (names.up, Kind.EXPERT_UP, (width, hidden)),
            (names.down, Kind.EXPERT_DOWN, (hidden, width)),
        ):
            name = f"{_LAYER}{block}.experts.{{expert}}.{leaf}.weight"
            yield Tensors(name, kind, shape, config.dtype, layers, count)
        if shared and shared[1](config):
            base = f"{block}.{shared[0]}"
            yield from _gated(config, base, Kind.SHARED_UP, Kind.SHARED_DOWN, shared[1](config), layers)
            if shared[0] == "shared_expert":
                yield _in_layers(config, f"{base}_gate.weight", Kind.WHOLE, 1, hidden, layers=layers)

    return mlp


def _stacked(config: _Config) -> Found:
    """gpt-oss: all experts of a layer in one tensor, transposed, gate and up interleaved, with biases."""
    count, size, hidden = config.size(*_EXPERTS), config.size("intermediate_size"), config.hidden
    yield _in_layers(config, "mlp.router.weight", Kind.WHOLE, count, hidden)
    yield _in_layers(config, "mlp.router.bias", Kind.WHOLE, count)
    yield _in_layers(config, "mlp.experts.gate_up_proj", Kind.STACK_UP, count, hidden, 2 * size)
    yield _in_layers(config, "mlp.experts.gate_up_proj_bias", Kind.STACK_UP_BIAS, count, 2 * size)
    yield _in_layers(config, "mlp.experts.down_proj", Kind.STACK_DOWN, count, size, hidden)
    yield _in_layers(config, "mlp.experts.down_proj_bias", Kind.STACK_DOWN_BIAS, count, hidden)


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_PRE_POST = ("input_layernorm", "post_attention_layernorm")


def _if_asked(which: str) -> Callable[[_Config], str]:
    return lambda config: which if config.flag("attention_bias") else ""


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints are made up.

    Attributes:
        norms: of each layer, each of the hidden size.
        tied: whether ``lm_head`` is the embedding where the configuration does not say.
        head_size_given: ``head_dim`` is a size of its own, never hidden size by heads.
    """

    attention: _Attention
    mlp: _Mlp
    norms: tuple[str, ...] = _PRE_POST
    tied: bool = False
    head_size_given: bool = False


_QKVO = _if_asked("qkvo")
_GEMMA_NORMS = (*_PRE_POST, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_DEEPSEEK_V3 = Family(
    _latent, _mixture(SPLIT["deepseek_v3"], _after_dense, shared=("shared_experts", _shared_of_many), bias=True)
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_grouped(_QKVO), _dense),
    "mistral": Family(_grouped(lambda config: ""), _dense),
    "qwen2": Family(_grouped(lambda config: "qkv"), _dense),
    "qwen3": Family(_grouped(_QKVO, norms=True), _dense, head_size_given=True),
    "qwen2_moe": Family(
        _grouped(lambda config: "qkv" if config.flag("qkv_bias", True) else ""),
        _mixture(SPLIT["qwen2_moe"], _by_step, shared=("shared_expert", _shared_alone)),
    ),
    "qwen3_moe": Family(_grouped(_QKVO, norms=True), _mixture(SPLIT["qwen3_moe"], _by_step)),
    "mixtral": Family(_grouped(lambda config: ""), _mixture(SPLIT["mixtral"], size="intermediate_size")),
    "deepseek_v2": Family(
        _latent, _mixture(SPLIT["deepseek_v2"], _after_dense, shared=("shared_experts", _shared_of_many))
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4": Family(
        _grouped(_if_asked("qkv")),
        _fused_dense,
        (*_PRE_POST, "post_self_attn_layernorm", "post_mlp_layernorm"),
        head_size_given=True,
    ),
    "glm4_moe": Family(
        _grouped(_if_asked("qkv"), norms=lambda config: config.flag("use_qk_norm")),
        _mixture(SPLIT["glm4_moe"], _after_dense, shared=("shared_experts", _shared_of_many), bias=True),
        head_size_given=True,
    ),
    "gemma2": Family(_grouped(_QKVO), _dense, _GEMMA_NORMS, tied=True, head_size_given=True),
    "gemma3_text": Family(_grouped(_QKVO, norms=True), _dense, _GEMMA_NORMS, tied=True, head_size_given=True),
    "gpt_oss": Family(
        _with_sinks(_grouped(lambda config: "qkvo" if config.flag("attention_bias", True) else "")),
        _stacked,
        head_size_given=True,
    ),
}


def model_of(values: Mapping[str, Any], dtype: str | None = None) -> Model:
    """The model that a configuration describes.

    Args:
        dtype: of the weights; None: the configuration's.

    Raises:
        InvalidArgument: a family that is not known, a value that is missing, or a quantized checkpoint.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        inner = values.get("text_config")
        hint = "; give its text_config as a file of its own" if isinstance(inner, Mapping) else ""
        raise InvalidArgument(
            f"what checkpoints of model type {family!r} hold is not known{hint} (known: {', '.join(sorted(FAMILIES))})"
        )
    if values.get("quantization_config") is not None and dtype is None:
        raise InvalidArgument(
            "a quantized checkpoint: what its tensors look like is not known; plan the plain weights with --dtype"
            " bfloat16, or take quantization_config out"
        )
    config = _Config(values, _dtype_of(values, dtype))
    return _model(config, FAMILIES[family])


def _dtype_of(values: Mapping[str, Any], dtype: str | None) -> str:
    found = dtype or values.get("dtype") or values.get("torch_dtype")
    if not isinstance(found, str):
        raise InvalidArgument("the configuration names no dtype; say it with --dtype, such as --dtype bfloat16")
    return dtype_name(found)


def _model(config: _Config, family: Family) -> Model:
    tied = config.flag("tie_word_embeddings", family.tied)
    vocabulary, hidden = config.size("vocab_size"), config.hidden
    tensors = [Tensors("model.embed_tokens.weight", Kind.EMBEDDING, (vocabulary, hidden), config.dtype)]
    tensors += family.attention(config)
    tensors += [_in_layers(config, f"{name}.weight", Kind.WHOLE, hidden) for name in family.norms]
    tensors += family.mlp(config)
    tensors.append(Tensors("model.norm.weight", Kind.FINAL_NORM, (hidden,), config.dtype))
    if not tied:
        tensors.append(Tensors("lm_head.weight", Kind.HEAD, (vocabulary, hidden), config.dtype))
    latent = family.attention is _latent
    experts = any(each.experts or each.kind in STACKS for each in tensors)
    more = config.values.get("num_nextn_predict_layers")
    note = f"{more} layers of multi-token prediction are left out: an engine loads them for speculative decoding only"
    return Model(
        family=config.family,
        tensors=tuple(each for each in tensors if each.count),
        layers=len(config.layers),
        vocabulary=vocabulary,
        heads=config.heads,
        groups=config.heads if latent else _groups(config),
        head=0 if latent else _head_size(config),
        experts=config.size(*_EXPERTS) if experts else 0,
        tied=tied,
        notes=(note,) if more else (),
    )
