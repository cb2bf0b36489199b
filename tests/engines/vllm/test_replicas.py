"""A vLLM server of two data-parallel replicas: one driver brings both up to date, each an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from awexd_client import AwexdError, IntegrityError, WeightReader, WeightWriter, WorkerWeightsReader
from awexd_client.vllm import VLLMServer
from tests.daemons import Daemon
from tests.engines.matrix import line
from tests.engines.vllm.serving import Server, serving
from tests.engines.vllm.workers.generation import generated
from tests.engines.vllm.workers.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def _all_say(server: Server, tokens: list[int]) -> bool:
    """Requests go to the replicas in turn."""
    return all(server.tokens() == tokens for _ in range(4))


@pytest.mark.parametrize(
    "family", [line("qwen3", model="qwen3", trainer="hf", engine="vllm server DP2", checked="transformers' tokens")]
)
def test_both_replicas_follow(family: str, models: Path, place: Path, served: Daemon) -> None:
    folder = models / family
    old, new, newer = (generated(folder / version) for version in ("old", "new", "newer"))
    flags = ("--tensor-parallel-size", "1", "--data-parallel-size", "2")
    with (
        serving(folder / "old", place, *flags) as server,
        WeightWriter("dp", 0, 1, served.socket, keep=8) as writer,
    ):
        trainer = Trainer(writer, folder)
        assert _all_say(server, old)
        with WorkerWeightsReader("dp", "rollout-1", 0, 1, served.socket) as other:
            other.register(trainer.held)
            with pytest.raises(AwexdError, match="rank 0 of engine rollout-1 is registered by process"):
                VLLMServer(server.url).connect("dp", "rollout", served.socket)
        workers = VLLMServer(server.url).connect("dp", "rollout", served.socket)
        with WeightReader("dp", "rollout", workers, served.socket) as reader:
            reader.update(trainer.publish(1, "new"))
            assert _all_say(server, new)
            with pytest.raises(IntegrityError, match=r"input_layernorm\.weight"):
                reader.update(trainer.corrupted(2, "model.layers.1.input_layernorm.weight"))
            assert _all_say(server, new)
            reader.update(trainer.publish(3, "newer"))
            assert _all_say(server, newer)
