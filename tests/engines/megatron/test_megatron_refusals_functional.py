"""What the adapter refuses of Megatron-Core's own models, and when; see ``workers/refusals.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd_client import WorkerWeightsReader
from tests.daemons import Daemon
from tests.engines.environments import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

WORKER = Path(__file__).parent / "workers" / "refusals.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """The daemon's socket, and what rank 0 reports."""
    folder = tmp_path_factory.mktemp("refusals")
    with Daemon(tmp_path_factory.mktemp("d")) as daemon:
        run_ranks("megatron", WORKER, 2, [folder, daemon.socket], 180)
        ranks = [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(2)]
        assert ranks[0] == ranks[1]
        yield daemon.socket, ranks[0]


def test_parameters_that_are_not_gathered_are_refused_until_they_are(told: tuple[str, dict[str, Any]]) -> None:
    socket, report = told
    assert ["start_param_sync(force_sync=True)" in text for text in report["gathering"]] == [True, True]
    with WorkerWeightsReader("gathering", "engine", 0, 1, socket) as reader:
        held = {}
        for step in (1, 2):
            target = {name: torch.empty(shape) for name, shape in report["shapes"].items()}
            reader.register(target)
            reader.update(step)
            held[step] = target
    # Each rank's step adds one to its own part: gathered, all of it has moved.
    wrong = [name for name, tensor in held[1].items() if not torch.equal(tensor + 1, held[2][name])]
    assert wrong == []


def test_dense_model_is_recognised_without_a_configuration(told: tuple[str, dict[str, Any]]) -> None:
    choices = told[1]["choices"]
    assert "model.layers.1.self_attn.q_norm.weight" in json.loads(choices["names"])
    assert choices["wrapped"] == choices["names"]
    assert choices["embedding"] == "[256, 64]", "padding is not known without a configuration"


def test_expert_bias_stays_in_single_precision(told: tuple[str, dict[str, Any]]) -> None:
    assert told[1]["choices"]["bias"] == "torch.float32"


def test_layers_of_multi_token_prediction_can_be_left_out(told: tuple[str, dict[str, Any]]) -> None:
    assert told[1]["choices"]["no mtp"] == told[1]["choices"]["without"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("experts", "without the model's configuration only dense models are taken"),
        (
            "other",
            "linear_q_down_proj.weight: multi-head latent attention, which checkpoints of this family do not have",
        ),
        ("sizes", "the model's num_query_groups is 2, its configuration's num_key_value_heads 4: not the same model"),
        ("vocabulary", "embedding.word_embeddings.weight: 256 rows, fewer than the vocabulary's 257"),
        ("tied", "the configuration ties lm_head to the embedding, the model does not"),
        ("expert biases", "linear_fc1.bias: checkpoints of this family have no biases of experts"),
        ("mtp", "mtp.layers.0.enorm.weight: how this family's checkpoints name multi-token prediction is not known"),
        ("ungated", "decoder.layers.0.mlp.linear_fc1.weight: not a gated linear unit"),
        ("learnable", "core_attention.softmax_offset: checkpoints of this family have no such tensor"),
        ("centred", "layernorm_zero_centered_gamma is True: norms are stored in another way"),
        ("pairs", "rotary_interleaved is True: queries and keys are stored in another way"),
        ("router", "mlp.router.bias: checkpoints of this family have no such tensor"),
        ("balanced", "mlp.router.expert_bias: checkpoints of this family have no e_score_correction_bias"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(told: tuple[str, dict[str, Any]], choice: str, says: str) -> None:
    assert says in told[1]["choices"][choice]
