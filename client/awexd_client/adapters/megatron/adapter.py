"""Megatron-Core's GPTModel: each parameter's part of the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.megatron import attention, mlp
from awexd_client.adapters.megatron.families import Checkpoint, Names, check_model, checkpoint_of
from awexd_client.adapters.megatron.parallel import Places, check_gathered, chunks_of, is_megatron, places_of
from awexd_client.adapters.megatron.part import Part, Rule, check_cut, check_plain, named, rows
from awexd_client.adapters.rules import shards_along, share_of, split, vocabulary
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Shard

if TYPE_CHECKING:
    import torch

_RULES: list[tuple[re.Pattern[str], Rule]] = [
    (re.compile(pattern), rule) for pattern, rule in [*attention.RULES, *mlp.RULES]
]
_IN_DECODER = re.compile(r"decoder\.layers\.(?P<at>\d+)\.(?P<path>.+)")
_IN_MTP = re.compile(r"mtp\.layers\.(?P<at>\d+)\.(?:(?P<inner>mtp_model_layer|transformer_layer)\.)?(?P<path>.+)")
_FINAL_NORM = re.compile(r"decoder\.final_layernorm\.(weight|bias)")
_EMBEDDING = re.compile(r"embedding\.word_embeddings\.weight")
_HEAD = re.compile(r"output_layer\.weight")


class MegatronAdapter:
    """Models of Megatron-Core 0.16 to 0.19: GPTModel, its wrappers, or the list of chunks of virtual pipelining.

    Sizes and ranks come from the model itself: its ``TransformerConfig``, its process groups, each layer's
    ``layer_number``; shapes only bear them out. What no rule knows is refused by name.

    Args:
        config: the Hugging Face configuration: a dict, a path of ``config.json`` or of its folder, or an object of
            transformers. Without one, only dense models whose names are the same in every family are taken (Llama,
            Qwen2, Qwen3), and the vocabulary counts as long as it is in memory, padding included.
        names: what checkpoints of a family are called that the table of families does not have.
        mtp: whether layers of multi-token prediction are handed out; an engine that does not load them wants none.
    """

    name = "megatron"

    def __init__(self, config: object = None, *, names: Names | None = None, mtp: bool = True) -> None:
        self._checkpoint = checkpoint_of(config, names)
        self._mtp = mtp

    def matches(self, target: object) -> bool:
        return is_megatron(target)

    def shards(self, target: object) -> Iterator[Shard]:
        for chunk in chunks_of(target):
            check_model(self._checkpoint, chunk)
            yield from _Chunk(chunk, self._checkpoint, self._mtp).shards()

    def check_current(self, target: object) -> None:
        """Before each publication: see ``parallel.check_gathered``."""
        check_gathered(target)


class _Chunk:
    """One GPTModel: all layers of a pipeline stage, or of one of its virtual stages."""

    def __init__(self, model: Any, checkpoint: Checkpoint, mtp: bool) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._mtp = mtp
        self._places: Places = places_of(model)

    def shards(self) -> Iterator[Shard]:
        for path, tensor in [*self._model.named_parameters(remove_duplicate=False), *self._buffers()]:
            check_plain(path, tensor)
            yield from self._shards_of(path, tensor)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What Megatron-Core saves; all else is derived, or counts tokens."""
        for prefix, module in self._model.named_modules():
            for key in module._buffers.keys() - module._non_persistent_buffers_set:
                if key == "expert_bias" and hasattr(module, "_maintain_float32_expert_bias"):
                    module._maintain_float32_expert_bias()  # Float16Module has cast it; saving it does the same
                if module._buffers[key] is not None:
                    yield f"{prefix}.{key}", module._buffers[key]

    def _shards_of(self, path: str, tensor: torch.Tensor) -> Iterator[Shard]:
        if found := _EMBEDDING.fullmatch(path):
            yield from self._embedding(self._part(path, tensor, self._model, "", found))
        elif found := _HEAD.fullmatch(path):
            yield from self._head(self._part(path, tensor, self._model, "", found))
        elif found := _FINAL_NORM.fullmatch(path):
            yield from named("model.norm.{leaf}")(self._part(path, tensor, self._model, "", found))
        elif found := _IN_DECODER.fullmatch(path):
            layer = self._model.decoder.layers[int(found["at"])]
            yield from self._in_layer(path, tensor, layer, int(layer.layer_number) - 1, found["path"])
        elif found := _IN_MTP.fullmatch(path):
            if self._mtp:
                yield from self._in_mtp(path, tensor, found)
        else:
            raise InvalidArgument(f"{path}: no rule of the adapter 'megatron' knows this tensor")

    def _in_layer(self, path: str, tensor: torch.Tensor, layer: Any, number: int, inside: str) -> Iterator[Shard]:
        for pattern, rule in _RULES:
            if found := pattern.fullmatch(inside):
                yield from rule(self._part(path, tensor, layer, f"model.layers.{number}.", found))
                return
        raise InvalidArgument(f"{path}: no rule of the adapter 'megatron' knows this tensor")

    def _in_mtp(self, path: str, tensor: torch.Tensor, found: re.Match[str]) -> Iterator[Shard]:
        """Layer k of multi-token prediction is layer L + k of the checkpoint, beside three tensors of its own.

        ``eh_proj`` takes the embedding's features first, then the hidden state's, as the checkpoint's does
        (``MultiTokenPredictionLayer._concat_embeddings``, multi_token_prediction.py).
        """
        if not self._checkpoint.names.mtp:
            raise InvalidArgument(
                f"{path}: how this family's checkpoints name multi-token prediction is not known; leave it out with"
                " MegatronAdapter(config, mtp=False)"
            )
        layer = self._model.mtp.layers[int(found["at"])]
        number = int(self._model.config.num_layers) + int(layer.layer_number) - 1
        if found["inner"]:
            yield from self._in_layer(path, tensor, getattr(layer, found["inner"]), number, found["path"])
            return
        part = self._part(path, tensor, layer, f"model.layers.{number}.", found)
        leaf = {"final_layernorm.weight": "shared_head.norm.weight"}.get(found["path"], found["path"])
        if leaf == "eh_proj.weight":
            size = int(self._model.config.hidden_size)
            yield from rows(part, split(f"{part.prefix}{leaf}", size, *self._places.tensor))
        elif leaf in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield from named(leaf)(part)
        else:
            raise part.refuse("no rule of the adapter 'megatron' knows this tensor")

    def _embedding(self, part: Part) -> Iterator[Shard]:
        """The first stage's; stages of multi-token prediction have a copy, a tied last stage one as its output layer.

        Those copies are kept equal by adding up their gradients; they are left out all the same, so that whatever
        befalls one of them, no version is made of both (and Megatron-Core's own checkpoint is the first stage's).
        """
        if not self._model.pre_process:
            return
        names = ["model.embed_tokens.weight"]
        if self._model.share_embeddings_and_output_weights:
            names.append("lm_head.weight")
        names += self._mtp_copies("embed_tokens.weight")
        if self._model.share_embeddings_and_output_weights:
            names += self._mtp_copies("shared_head.head.weight")
        yield from self._vocabulary(part, names)

    def _head(self, part: Part) -> Iterator[Shard]:
        if not self._model.share_embeddings_and_output_weights:
            yield from self._vocabulary(part, ["lm_head.weight", *self._mtp_copies("shared_head.head.weight")])

    def _mtp_copies(self, leaf: str) -> list[str]:
        """Further names in the checkpoint: each layer of multi-token prediction repeats embedding and head there."""
        config, names = self._model.config, self._checkpoint.names
        count = int(getattr(config, "mtp_num_layers", None) or 0) if self._mtp and names.mtp else 0
        return [f"model.layers.{int(config.num_layers) + at}.{leaf}" for at in range(count)]

    def _vocabulary(self, part: Part, names: list[str]) -> Iterator[Shard]:
        """VocabParallelEmbedding: equal parts of the padded vocabulary; rows beyond the real one are nobody's."""
        check_cut(part, cut=True)
        padded = int(self._model.vocab_size)
        real = padded if self._checkpoint.vocabulary is None else self._checkpoint.vocabulary
        if real > padded:
            raise part.refuse(f"{padded} rows, fewer than the vocabulary's {real}")
        first, length = share_of(part.path, padded, *self._places.tensor)
        for name in names:
            yield from shards_along(part.tensor, vocabulary(name, real, first, length))

    def _part(self, path: str, tensor: torch.Tensor, layer: Any, prefix: str, found: re.Match[str]) -> Part:
        return Part(
            path=path,
            tensor=tensor,
            layer=layer,
            owner=self._model.get_submodule(path.rpartition(".")[0]),
            prefix=prefix,
            config=layer.config,
            places=self._places,
            names=self._checkpoint.names,
            found=found,
        )
