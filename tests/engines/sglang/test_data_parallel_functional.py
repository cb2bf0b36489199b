"""SGLang servers with data parallelism: over attention, where updates work, and of whole replicas, where they do not.

SGLang 0.5.23 cannot run a batch with data-parallel attention on CPUs, so what is compared is the weights: with what the
same server makes of the same checkpoint with its own ``/update_weights_from_disk``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from awexd_client import AwexdError, WeightReader
from awexd_client.sglang import SGLangServer
from tests.daemons import Daemon
from tests.engines.matrix import line
from tests.engines.sglang.conftest import check_environment, publish, tensors
from tests.engines.sglang.serving import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FAMILY = "deepseek_v3"


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Server]:
    check_environment()
    started = Server(model, folder, *flags)
    try:
        started.await_ready()
        yield started
    finally:
        started.end()


@pytest.mark.parametrize(
    "family",
    [line(FAMILY, model=FAMILY, trainer="hf", engine="sglang server TP2, DP attention", checked="SGLang's own loader")],
)
def test_updates_under_data_parallel_attention(
    family: str, checkpoints: Path, module_daemon: Daemon, tmp_path: Path
) -> None:
    models = checkpoints / family
    weights = {name: tensor.float() for name, tensor in tensors(models / "1").items()}
    with serving(models / "0", tmp_path, "--dp-size", "2", "--enable-dp-attention") as server:
        loaded = []
        for number in (1, 2, 0):
            server.ask("update_weights_from_disk", {"model_path": str(models / str(number))})
            loaded.append(server.digests())
        assert loaded[0] != loaded[1] != loaded[2]
        workers = SGLangServer(server.url, "dp", "rollout", module_daemon.socket)
        with (
            publish("dp", module_daemon.socket, weights) as writer,
            WeightReader("dp", "rollout", workers, module_daemon.socket) as reader,
        ):
            for step, number in ((1, 1), (2, 2)):
                for name, tensor in tensors(models / str(number)).items():
                    weights[name].copy_(tensor)
                if step > 1:
                    writer.publish(step).committed()
                assert len(reader.update(step).workers) == 2
                assert server.digests() == loaded[number - 1]
                assert server.version() == f"1.{step}"


def test_replicas_behind_one_server_are_refused(checkpoints: Path, module_daemon: Daemon, tmp_path: Path) -> None:
    """SGLang itself refuses; without a word of ours that would be an internal error of its."""
    flags = ("--tp-size", "1", "--dp-size", "2")
    with serving(checkpoints / "qwen3" / "0", tmp_path, *flags) as server:
        before = server.tokens()
        workers = SGLangServer(server.url, "replicas", "rollout", module_daemon.socket)
        weights = tensors(checkpoints / "qwen3" / "1")
        with (
            publish("replicas", module_daemon.socket, weights),
            WeightReader("replicas", "rollout", workers, module_daemon.socket) as reader,
            pytest.raises(AwexdError, match="start a server for each of the 2 replicas"),
        ):
            reader.update()
        assert server.tokens() == before
