"""An SGLang server with two tensor ranks, over HTTP: updates in a row, and what goes wrong.

What it must come to is what the same server makes of the same checkpoint with its own ``/update_weights_from_disk``.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from awexd_client import AwexdError, IntegrityError, WeightReader, WeightWriter
from awexd_client.sglang import SGLangServer
from awexd_client.sglang.control import LOADER, pickled
from tests.daemons import Daemon
from tests.engines.sglang.conftest import check_environment, publish, tensors
from tests.engines.sglang.serving import PROMPT, RANKS, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FAMILY = "qwen3"
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    check_environment()
    started = Server(checkpoints / FAMILY / "0", tmp_path_factory.mktemp("server"))
    try:
        started.await_ready()
        yield started
    finally:
        started.end()


class Trainer:
    """Publishes checkpoints as steps 1, 2, ... in single precision."""

    def __init__(self, checkpoints: Path, daemon: Daemon) -> None:
        self._folder = checkpoints / FAMILY
        self.weights = self._of(1)
        self.writer = publish("grpo", daemon.socket, self.weights)
        self.step = 1

    def publish(self, number: int) -> int:
        for name, tensor in self._of(number).items():
            self.weights[name].copy_(tensor)
        self.step += 1
        self.writer.publish(self.step).committed()
        return self.step

    def _of(self, number: int) -> dict[str, torch.Tensor]:
        return {name: tensor.float() for name, tensor in tensors(self._folder / str(number)).items()}


@pytest.fixture(scope="module")
def trainer(checkpoints: Path, module_daemon: Daemon) -> Iterator[Trainer]:
    made = Trainer(checkpoints, module_daemon)
    yield made
    made.writer.close()


@pytest.fixture(scope="module")
def loaded(server: Server, checkpoints: Path) -> list[dict[str, Any]]:
    """What the server itself makes of each checkpoint; it is at the first one afterwards."""
    states = [server.loads_itself(checkpoints / FAMILY / str(number)) for number in (1, 2, 0)]
    return [states[2], *states[:2]]


@pytest.fixture
def instance(server: Server, module_daemon: Daemon) -> Iterator[WeightReader]:
    workers = SGLangServer(server.url, "grpo", "rollout", module_daemon.socket)
    with WeightReader("grpo", "rollout", workers, module_daemon.socket) as reader:
        yield reader


@pytest.fixture
def loading_instance(server: Server, module_daemon: Daemon) -> Iterator[WeightReader]:
    """Its models load everything themselves."""
    workers = SGLangServer(server.url, "grpo", "rollout", module_daemon.socket, direct=False)
    with WeightReader("grpo", "rollout", workers, module_daemon.socket) as reader:
        yield reader


def _events(daemon: Daemon) -> str:
    return json.dumps(daemon.ask("events", job=None, after=0))


def test_checkpoints_give_other_tokens(loaded: list[dict[str, Any]]) -> None:
    assert len({tuple(state["tokens"]) for state in loaded}) == len(loaded)


def test_three_updates_in_a_row(
    server: Server, loaded: list[dict[str, Any]], trainer: Trainer, instance: WeightReader
) -> None:
    assert server.version() == "before"
    for number in (1, 2, 1):
        step = trainer.step if trainer.step == 1 and instance.version is None else trainer.publish(number)
        result = instance.update()
        assert (result.step, len(result.workers), result.workers[0].step) == (step, RANKS, step)
        assert server.state() == loaded[number]
        assert server.version() == f"1.{step}"
        assert (instance.state, instance.version) == ("ready", (1, step))


def test_update_by_the_models_own_loader(
    server: Server, loaded: list[dict[str, Any]], trainer: Trainer, loading_instance: WeightReader
) -> None:
    step = trainer.publish(2)
    assert loading_instance.update().step == step
    assert server.state() == loaded[2]
    assert server.version() == f"1.{step}"


def test_running_request_goes_on_with_the_new_weights(server: Server, trainer: Trainer, instance: WeightReader) -> None:
    trainer.publish(1)
    instance.update()
    old, step = server.version(), trainer.publish(2)
    sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data:")  # it runs
        instance.update()
        said = [line for line in answer if line.startswith(b"data: {")]
    meta = json.loads(said[-1].removeprefix(b"data:"))["meta_info"]
    assert meta["completion_tokens"] == 300
    assert [span["version"] for span in meta["weight_versions"]] == [old, f"1.{step}"]


def test_exception_in_the_loader_of_one_rank(
    server: Server,
    loaded: list[dict[str, Any]],
    trainer: Trainer,
    loading_instance: WeightReader,
    module_daemon: Daemon,
) -> None:
    good = trainer.publish(2)
    loading_instance.update()
    trainer.publish(1)
    server.probe(breaks=1)
    with pytest.raises(AwexdError, match="KeyError: 'no such layer'") as caught:
        loading_instance.update()
    assert caught.value.__notes__ == [f"rollout runs on epoch 1 step {good} again"]
    assert server.state() == loaded[2]
    assert server.version() == f"1.{good}"
    assert "KeyError: 'no such layer'" in _events(module_daemon)
    assert loading_instance.update().step == trainer.step
    assert server.state() == loaded[1]


def test_corrupted_byte(
    server: Server, loaded: list[dict[str, Any]], trainer: Trainer, instance: WeightReader, module_daemon: Daemon
) -> None:
    good = trainer.publish(1)
    instance.update()
    trainer.publish(2)
    _corrupt(module_daemon, trainer.writer, NAME, trainer.weights)
    with pytest.raises(IntegrityError, match=re.escape(NAME)):
        instance.update()
    assert server.state() == loaded[1]
    assert server.version() == f"1.{good}"
    assert NAME in _events(module_daemon)
    step = trainer.publish(2)
    assert instance.update(step).step == step
    assert server.state() == loaded[2]


def test_live_weights_against_a_checkpoint(
    server: Server, trainer: Trainer, instance: WeightReader, checkpoints: Path
) -> None:
    trainer.publish(1)
    instance.update()
    before = server.state()
    found = instance.verify(checkpoints / FAMILY / "1")
    assert found.tensors > 20
    assert found.aside == {}
    with pytest.raises(IntegrityError, match="tensors are not the checkpoint's"):
        instance.verify(checkpoints / FAMILY / "2")
    with pytest.raises(AwexdError, match="files there"):
        instance.verify(checkpoints)
    assert server.state() == before


def test_weights_that_do_not_fit(server: Server, checkpoints: Path, module_daemon: Daemon) -> None:
    before, version = server.state(), server.version()
    workers = SGLangServer(server.url, "other", "rollout", module_daemon.socket)
    with (
        publish("other", module_daemon.socket, tensors(checkpoints / "glm4" / "1")),
        WeightReader("other", "rollout", workers, module_daemon.socket) as reader,
        pytest.raises(AwexdError, match=r"ManifestMismatch: .*does not fit what is declared"),
    ):
        reader.update()
    assert server.state() == before
    assert server.version() == version


def test_message_that_is_not_ours(server: Server) -> None:
    before = server.state()
    for body in (b"{}", b"[", b'{"do": "stage"}', b"\xff" * 100):
        payload = base64.b64encode(pickled(body)).decode()
        request = {"serialized_named_tensors": [payload] * RANKS, "load_format": LOADER, "selector": "target"}
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.ask("update_weights_from_tensor", request)
        with caught.value as refused:
            assert re.search("control message must", refused.read().decode())
    assert server.state() == before


def _corrupt(daemon: Daemon, writer: WeightWriter, name: str, weights: dict[str, torch.Tensor]) -> None:
    """Flips a bit of the newest held version of a tensor."""
    manifest = writer._segment.manifest
    piece = next(number for number, entry in enumerate(manifest.pieces) if entry.tensor.name == name)
    at = 4096 + manifest.piece_offsets[piece]
    body = weights[name].numpy().tobytes()
    for path in (Path("/dev/shm") / entry for entry in daemon.segments()):
        with open(path, "r+b") as file:
            file.seek(at)
            if file.read(len(body)) == body:
                file.seek(at + 3)
                file.write(bytes([body[3] ^ 0x10]))
                return
    pytest.fail(f"no held version has these values of {name}")
