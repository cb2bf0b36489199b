"""Local modules of Megatron-Core under the names that Transformer Engine's have, which need a GPU to be built.

Only names, class names and the attributes that the adapter reads are Transformer Engine's; the parameters are the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter


class TEGroupedMLP(nn.Module):
    """A parameter an expert; where ``stacked``, one for all."""

    def __init__(self, experts: Any, *, interleave: int | None = None) -> None:
        super().__init__()
        self.config = experts.config
        for name in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, name).weight for expert in experts.local_experts]
            if interleave and name == "linear_fc1":
                weights = [_interleaved(weight, interleave) for weight in weights]
            biases = [getattr(expert, name).bias for expert in experts.local_experts if experts.config.add_bias_linear]
            if interleave and name == "linear_fc1":
                biases = [_interleaved(bias, interleave) for bias in biases]
            setattr(self, name, _Grouped(weights, biases))


class _Grouped(nn.Module):
    def __init__(self, weights: list[Any], biases: list[Any]) -> None:
        super().__init__()
        for key, each in (("weight", weights), ("bias", biases)):
            for at, tensor in enumerate(each):
                self.register_parameter(f"{key}{at}", tensor)


class _Stack(nn.Module):
    """``moe_single_grouped_weight``, as a plain tensor."""

    def __init__(self, grouped: _Grouped) -> None:
        super().__init__()
        import torch

        self.weight = _like(torch.stack(list(grouped.parameters())), grouped.weight0)


def _interleaved(weight: Any, size: int) -> Parameter:
    """Blocks of rows of gate and up in turn: what ``TEGroupedMLP._remove_glu_interleaving`` undoes."""
    made = weight.detach().view(2, len(weight) // (2 * size), size, *weight.shape[1:]).transpose(0, 1)
    made = made.reshape(weight.shape)
    return _like(made.contiguous(), weight)


def _like(tensor: Any, other: Any) -> Parameter:
    parameter = Parameter(tensor.detach(), requires_grad=False)
    marked: Any = parameter
    marked.allreduce, marked.tensor_model_parallel = other.allreduce, other.tensor_model_parallel
    return parameter


def as_transformer_engine(chunks: list[Any]) -> list[Any]:
    """Changes the chunks in place."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            _attention(layer)
            _mlp(layer)
    return chunks


def _attention(layer: Any) -> None:
    attention = layer.self_attention
    if not hasattr(attention, "linear_kv_down_proj"):
        _into(layer, "input_layernorm", attention.linear_qkv)
        return
    _into(attention, "q_layernorm", attention.linear_q_up_proj)
    _into(attention, "kv_layernorm", attention.linear_kv_up_proj)
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        _duplicate(getattr(attention, name), attention.tp_group)


def _duplicate(linear: Any, group: Any) -> None:
    """TELinear with ``parallel_mode="duplicated"``: whole on every rank."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(linear.weight) for _ in range(group.size())]
    dist.all_gather(parts, linear.weight.detach(), group=group)
    linear.weight = _like(torch.cat(parts), linear.weight)
    linear.weight.tensor_model_parallel = False
    linear.parallel_mode = "duplicated"


def _mlp(layer: Any) -> None:
    experts = getattr(layer.mlp, "experts", None)
    if experts is None:
        _into(layer, "pre_mlp_layernorm", layer.mlp.linear_fc1)
        return
    layer.mlp.experts = TEGroupedMLP(experts, interleave=layer.config.moe_mlp_glu_interleave_size)
    if layer.config.num_moe_experts == 4:  # two of the models
        for name in ("linear_fc1", "linear_fc2"):
            setattr(layer.mlp.experts, name, _Stack(getattr(layer.mlp.experts, name)))


def _into(owner: Any, name: str, linear: Any) -> None:
    """The norm becomes part of the linear that follows it."""
    linear.layer_norm_weight = getattr(owner, name).weight
    setattr(owner, name, nn.Identity())
