from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from awexd.dryrun.families import FAMILIES, model_of
from awexd.dryrun.models import Kind
from awexd.dryrun.trainers import whole_model
from awexd_client.holding import Holding
from awexd_transports.columns import check
from awexd_transports.errors import InvalidArgument
from awexd_transports.layout import Manifest
from tests.awexd.dryrun_models import TINY, tiny


def _written(variant: str, folder: Path) -> Any:
    """A model of that configuration, saved by transformers."""
    import transformers

    values = tiny(variant)
    family = values.pop("model_type")
    config = transformers.AutoConfig.for_model(family, **values)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return model


def _on_disk(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                tensor = opened.get_tensor(name)
                found[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return found


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("variant", TINY)
def test_tensors_are_those_that_transformers_writes(variant: str, tmp_path: Path) -> None:
    model = _written(variant, tmp_path)
    # The configuration that it wrote beside them, and the short one that a person may write.
    for values in (json.loads((tmp_path / "config.json").read_text()), tiny(variant)):
        found = model_of(values)
        ours = {name: (each.shape, each.dtype) for each in found.tensors for name in each.names()}
        assert ours == _on_disk(tmp_path)
        assert len(ours) == found.names
    _check_against_adapter(whole_model(found), model)


def _check_against_adapter(ours: Manifest, model: Any) -> None:
    """The same names, boxes and aliases as a writer of the live model registers."""
    assert _parts(ours) == _parts(Holding.of(model).manifest)


def _parts(manifest: Manifest) -> set[tuple[object, ...]]:
    names: dict[int, list[str]] = {}
    for entry in manifest.entries:
        names.setdefault(entry.piece, []).append(entry.tensor.name)
    return {(entry.tensor, entry.box, tuple(sorted(names[entry.piece]))) for entry in manifest.entries}


def test_every_family_is_compared_with_transformers() -> None:
    compared = {variant.partition(",")[0] for variant in TINY}
    assert FAMILIES.keys() - compared == {"kimi_k2"}  # DeepSeek-V3's classes
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


@pytest.mark.parametrize("variant", TINY)
def test_manifest_in_columns_is_the_one_of_its_entries(variant: str) -> None:
    built = whole_model(model_of(tiny(variant)))
    spelled = Manifest.of(built.entries)
    assert built == spelled
    assert Manifest.decode(built.encoded) == spelled
    check(built.columns)


def test_router_bias_is_float32_whatever_the_model_is() -> None:
    found = model_of(tiny("deepseek_v3") | {"dtype": "bfloat16"})
    assert {each.dtype for each in found.tensors if each.kind is Kind.ROUTER_BIAS} == {"float32"}
    assert {each.dtype for each in found.tensors if each.kind is not Kind.ROUTER_BIAS} == {"bfloat16"}


def test_sizes_of_a_published_model() -> None:
    """Qwen3-30B-A3B: 18,867 tensors, 30,532,122,624 parameters (its model card and index)."""
    values = {
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    }
    found = model_of(values)
    assert (found.names, found.elements, found.nbytes) == (18_867, 30_532_122_624, 61_064_245_248)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "model type 'bert' hold is not known"),
        ({"model_type": "gemma3", "text_config": {}}, "give its text_config as a file"),
        ({"dtype": None}, "say it with --dtype"),
        ({"dtype": "float31"}, "float31"),
        ({"quantization_config": {"quant_method": "fp8"}}, "--dtype bfloat16"),
        ({"hidden_size": None}, "needs hidden_size, a whole number"),
        ({"head_dim": None}, "needs head_dim"),
        ({"num_key_value_heads": "2"}, "needs num_key_value_heads"),
        ({"num_hidden_layers": -1}, "needs num_hidden_layers"),
    ],
)
def test_configuration_that_is_not_understood_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        model_of(tiny("qwen3") | change)


def test_quantized_checkpoint_is_planned_plain_where_that_is_asked_for() -> None:
    values = tiny("deepseek_v3") | {"quantization_config": {}, "num_nextn_predict_layers": 1}
    found = model_of(values, "bfloat16")
    assert found.tensors == model_of(tiny("deepseek_v3"), "bfloat16").tensors
    assert "multi-token prediction" in found.notes[0]
