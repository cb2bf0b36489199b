"""Megatron-Core itself, on 1, 2 and 4 processes of gloo, publishes; a model of transformers receives.

What a parameter is filled with follows from Megatron-Core's own ``sharded_state_dict()``, so that the same model gets
the same weights whatever its parallel layout. That the adapter's mapping to checkpoint tensors is right is shown on
one process (and on several again) by the logits: Megatron-Core's, and those of transformers with the weights received.
Other layouts must deliver the very same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from awexd.dryrun.families import FAMILIES, model_of
from awexd.dryrun.spec import TRAINERS, parse
from awexd.dryrun.trainers import trainer
from awexd_client import WorkerWeightsReader
from tests.daemons import Daemon
from tests.engines.environments import run_ranks
from tests.engines.matrix import line
from tests.engines.megatron.sizes import CONFIGS, TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORKER = Path(__file__).parent / "workers" / "publish.py"
ALIKE = {
    1: [
        *(f"{name}-te" for name in ("qwen2", "qwen3_moe", "deepseek_v3", "mixtral", "qwen2_moe")),
        "deepseek_v3-fused",
        *("qwen3_moe-interleaved", "gpt_oss-te", "gpt_oss-interleaved"),
    ],
    2: [
        *("glm4_moe-ep2", "deepseek_v2-tp2", "llama-dp2", "qwen3_moe-ep2-te", "gpt_oss-pp2"),
        *("llama-cp2", "qwen3_moe-ep2-cp2", "llama-tp2-sp", "qwen3_moe-tp2-sp"),
        *("llama-pp2", "llama-pp2-vpp2", "llama-pp2-uneven", "llama-pp2-laid", "llama_tied-pp2", "llama_tied-pp2-vpp2"),
        *("deepseek_v3-tp2-te", "deepseek_v3-tp2-fused"),
    ],
    4: [
        *("qwen3_moe-tp2-ep2-etp2", "deepseek_v3-tp2-ep2-etp1", "qwen3_moe-pp2-ep2"),
        *("llama-tp2-pp2", "llama_tied-tp2-pp2-vpp2"),
    ],
}
RUN = {
    1: list(CONFIGS),
    2: [
        *(
            f"{name}-tp2"
            for name in ("llama", "llama_tied", "qwen2_moe", "deepseek_v3", "qwen3_next", "glm4", "gemma3_text")
        ),
        *("qwen3_moe-ep2", "mixtral-tp2-ep2-etp1", "mixtral-etp2", "gpt_oss-tp2-etp1"),
    ],
    4: ["llama-tp4", "qwen2-tp4", "qwen3_next-tp4", "qwen3_moe-tp2-ep2-etp1", "gpt_oss-tp2-ep2-etp1"],
}
"""Jobs by number of processes: those whose model was run too, and those that are compared by their bytes only."""

LABELS = {
    "te": "(names of Transformer Engine's modules)",
    "fused": "(fused down projections)",
    "interleaved": "(interleaved gate and up, such names)",
    "uneven": "(uneven stages)",
    "laid": "(stages laid out)",
    "sp": "(sequence parallel)",
}
"""What a job's name says beside parallel sizes, for the support matrix."""

MTP = ["deepseek_v3-mtp", "deepseek_v3-tp2-mtp", "deepseek_v3-pp2-mtp"]
WORLD_OF = {
    **{job: world for table in (RUN, ALIKE) for world, jobs in table.items() for job in jobs},
    **dict(zip(MTP, (1, 2, 2), strict=True)),
    "llama_tied-half": 1,
}

Tensors = dict[str, torch.Tensor]


@dataclass
class Trainers:
    """What all trainers have published, and told of it."""

    folder: Path
    socket: str
    reports: dict[str, list[list[dict[str, Any]]]]

    def receive(self, job: str, target: object) -> None:
        with WorkerWeightsReader(job, "engine", 0, 1, self.socket) as reader:
            reader.register(target, "hf" if not isinstance(target, dict) else None)
            reader.update(1)

    def logits(self, job: str) -> torch.Tensor:
        return load_file(self.folder / f"{job}.logits.safetensors")["logits"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    folder = tmp_path_factory.mktemp("megatron")
    reports: dict[str, list[list[dict[str, Any]]]] = {}
    with Daemon(tmp_path_factory.mktemp("d")) as daemon:
        for world in (1, 2, 4):
            own = tmp_path_factory.mktemp(f"world{world}")
            run_ranks("megatron", WORKER, world, [own, daemon.socket, folder], 180)
            ranks = [json.loads((own / f"report.{rank}.json").read_text()) for rank in range(world)]
            reports |= {job: [rank[job] for rank in ranks] for job in ranks[0]}
        yield Trainers(folder, daemon.socket, reports)


@pytest.fixture(scope="module")
def alone(trainers: Trainers) -> dict[str, Tensors]:
    """What one process delivers of each model; the tests of logits say that it is right."""
    found = {}
    for name in CONFIGS:
        model = empty_model(name)
        trainers.receive(name, model)
        found[name] = weights(model)
    return found


def config_of(job: str) -> str:
    return max((name for name in CONFIGS if job == name or job.startswith(f"{name}-")), key=len)


def empty_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a configuration; whatever of it is not received is not a number."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_config(AutoConfig.for_model(**CONFIGS[name]), dtype=dtype).eval()
    for tensor in weights(model).values():
        tensor.fill_(torch.nan)
    return model


def weights(model: Any) -> Tensors:
    from awexd_client.adapters import shards_of

    return {shard.name: shard.tensor for shard in shards_of(model, "hf")}


def assert_equal(received: Tensors, expected: Tensors) -> None:
    assert received.keys() == expected.keys()
    assert [name for name, tensor in received.items() if not torch.equal(tensor, expected[name])] == []


def told(job: str, checked: str) -> Any:
    """A job with its line of the support matrix."""
    config = config_of(job)
    layout = " ".join(LABELS.get(part, part.upper()) for part in job.removeprefix(config).split("-") if part)
    return line(job, model=config, trainer=f"megatron {layout or '1 process'}", engine="hf", checked=checked)


@pytest.mark.parametrize("job", [told(job, "Megatron-Core's logits") for jobs in RUN.values() for job in jobs])
def test_transformers_with_the_weights_received_computes_megatrons_logits(trainers: Trainers, job: str) -> None:
    model = empty_model(config_of(job))
    trainers.receive(job, model)
    with torch.no_grad():
        computed = model(torch.tensor([TOKENS])).logits
    expected = trainers.logits(job)[..., : computed.shape[-1]]
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "job",
    [
        told(job, "the bytes of 1 process")
        for table in (RUN, ALIKE)
        for world in table
        for job in table[world]
        if job not in CONFIGS
    ],
)
def test_every_layout_delivers_the_bytes_that_one_process_does(
    trainers: Trainers, alone: dict[str, Tensors], job: str
) -> None:
    model = empty_model(config_of(job))
    trainers.receive(job, model)
    assert_equal(weights(model), alone[config_of(job)])


def test_half_precision_in_wrappers_delivers_the_same_weights_rounded(
    trainers: Trainers, alone: dict[str, Tensors]
) -> None:
    model = empty_model("llama_tied", torch.bfloat16)
    trainers.receive("llama_tied-half", model)
    assert_equal(weights(model), {name: tensor.bfloat16() for name, tensor in alone["llama_tied"].items()})


def test_every_case_of_the_trainers_is_tested(trainers: Trainers) -> None:
    assert {job: len(ranks) for job, ranks in trainers.reports.items()} == WORLD_OF


@pytest.mark.parametrize("job", WORLD_OF)
def test_places_agree_with_sharded_state_dict(trainers: Trainers, job: str) -> None:
    config = CONFIGS[config_of(job)]
    wrong = [
        shard for rank in trainers.reports[job] for shard in rank if shard["key_offset"] != key_offset(shard, config)
    ]
    assert wrong == []


def spec_of(job: str) -> str | None:
    """What ``awexctl plan`` calls a job's layout, where it has words for it."""
    config = CONFIGS[config_of(job)]
    parts = [part for part in job.removeprefix(config_of(job)).split("-") if part]
    found = [re.fullmatch(r"(tp|pp|vpp|ep|etp|dp|cp)(\d+)", part) for part in parts]
    sizes = {one[1]: int(one[2]) for one in found if one}
    if config["model_type"] not in FAMILIES or len(sizes) < len(parts) or job in MTP:
        return None
    sizes["dp"] = WORLD_OF[job] // prod(sizes.get(word, 1) for word in ("tp", "pp", "cp"))
    words = [f"{word}={size}" for word, size in sizes.items()] + ["pad=64"]
    return ",".join([*words, "mla=cut"] if "kv_lora_rank" in config else words)  # as in local specifications


def held(entries: Iterable[tuple[str, Sequence[int], Sequence[int], Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Which elements of each tensor a rank has."""
    masks: dict[str, torch.Tensor] = {}
    for name, whole, offset, shape in entries:
        mask = masks.setdefault(name, torch.zeros(tuple(whole), dtype=torch.bool))
        mask[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))] = True
    return masks


@pytest.mark.parametrize("job", [job for job in WORLD_OF if spec_of(job) is not None])
def test_dry_run_knows_what_each_rank_holds(trainers: Trainers, job: str) -> None:
    planned = trainer(model_of(CONFIGS[config_of(job)], "float32"), parse(f"megatron:{spec_of(job)}", TRAINERS))
    assert len(planned) == WORLD_OF[job]
    for manifest, shards in zip(planned, trainers.reports[job], strict=True):
        foreseen = held((e.tensor.name, e.tensor.shape, e.box.offset, e.box.shape) for e in manifest.entries)
        found = held((s["name"], s["global_shape"], s["offset"], s["shape"]) for s in shards)
        assert foreseen.keys() == found.keys()
        assert [name for name, mask in found.items() if not torch.equal(mask, foreseen[name])] == []


def key_offset(shard: dict[str, Any], config: dict[str, Any]) -> list[int]:
    """Where Megatron-Core's own global tensor, with its axes of layers and experts, has a shard's first element."""
    parts, key = shard["name"].split("."), shard["key"]
    numbers = {part: int(parts[at + 1]) for at, part in enumerate(parts[:-1]) if parts[at + 1].isdigit()}
    axes = [numbers["layers"]] if key.startswith("decoder.layers.") and not key.split(".")[2].isdigit() else []
    if ".mlp.experts." in shard["name"] and config["model_type"] == "gpt_oss":
        return [*axes, *in_stack(parts[-1], shard["offset"], config)]
    axes += [numbers["experts"]] if ".experts.experts." in key else []
    first, *others = shard["offset"]
    return [*axes, first + rows_before(parts[-2], first, shard, config), *others]


def in_stack(leaf: str, offset: Sequence[int], config: dict[str, Any]) -> list[int]:
    """Expert and element of its own matrix or bias, where a box of gpt-oss's tensor of all experts starts."""
    expert, *inside = offset
    if leaf.startswith("gate_up_proj"):
        *inside, row, half = inside
        inside.append(row + half * int(config["intermediate_size"]))
    return [expert, *reversed(inside)]


def rows_before(leaf: str, row: int, shard: dict[str, Any], config: dict[str, Any]) -> int:
    """Rows of other tensors that stand before one of this tensor's in the fused parameter."""
    if leaf in ("up_proj", "w3"):
        return int(shard["global_shape"][0])
    if "kv_lora_rank" in config or leaf not in ("q_proj", "k_proj", "v_proj"):
        return 0
    heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    size = int(config.get("head_dim", config["hidden_size"] // heads))
    gated = config["model_type"] == "qwen3_next"
    queries = heads // groups * size * (2 if gated else 1)
    group, within = divmod(row, queries if leaf == "q_proj" else size)
    if leaf == "q_proj" and gated:  # a head and its gate in turn, where Megatron-Core has the group's heads first
        head, inside = divmod(within, 2 * size)
        gate, inside = divmod(inside, size)
        within = gate * queries // 2 + head * size + inside
    before = {"q_proj": 0, "k_proj": queries, "v_proj": queries + size}[leaf]
    return group * (queries + 2 * size) + before + within - row


@pytest.mark.parametrize("job", MTP)
def test_multi_token_prediction_is_the_checkpoints_next_layer(
    trainers: Trainers, alone: dict[str, Tensors], job: str
) -> None:
    """transformers has no such layers: names and shapes are those of DeepSeek-V3's published index."""
    layer, own = "model.layers.2.", alone["deepseek_v3"]
    shapes = {name.replace("model.layers.1.", layer): t.shape for name, t in own.items() if "layers.1." in name}
    hidden = own["model.norm.weight"].shape[0]
    shapes |= {f"{layer}{name}.weight": torch.Size([hidden]) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{layer}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    shared = {
        f"{layer}embed_tokens.weight": "model.embed_tokens.weight",
        f"{layer}shared_head.head.weight": "lm_head.weight",
    }
    shapes |= {name: own[other].shape for name, other in shared.items()}
    target = {name: torch.full(t.shape, torch.nan) for name, t in own.items()}
    target |= {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    trainers.receive(job, target)
    assert_equal({name: target[name] for name in own}, own)
    assert_equal({name: target[name] for name in shared}, {name: own[other] for name, other in shared.items()})
    keys = {shard["name"]: shard["key"] for rank in trainers.reports[job] for shard in rank}
    assert {keys[f"{layer}{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")} == {
        f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")
    }
    assert keys[f"{layer}shared_head.norm.weight"] == "mtp.layers.0.final_layernorm.weight"


def test_copies_of_a_tied_embedding_are_left_out(trainers: Trainers) -> None:
    first, last = trainers.reports["llama_tied-pp2"]
    held = [{shard["name"] for shard in rank} for rank in (first, last)]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= held[0]
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & held[1]
