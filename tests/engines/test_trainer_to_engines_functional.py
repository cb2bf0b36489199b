"""Megatron-Core in two tensor ranks and two stages, to servers of vLLM and SGLang of two ranks each, at once.

The reference is a plain reader, which writes each step as a checkpoint; what the engines' own loaders make of that,
their tensors must be after an update, bit by bit. (That what the reader gets is right is for the adapter's own tests:
logits of transformers equal Megatron-Core's.)
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from awexd_client import DeadlineExceeded, IntegrityError, WeightReader, WorkerWeightsReader
from awexd_client.sglang import SGLangServer
from awexd_client.vllm import VLLMServer
from tests.daemons import Daemon
from tests.engines.environments import ROOT, python_of
from tests.engines.megatron.sizes import CONFIGS
from tests.engines.sglang.conftest import removes_what_sglang_leaves
from tests.engines.sglang.serving import Server as SGLang
from tests.engines.vllm.serving import Server as VLLM
from tests.engines.vllm.serving import serving
from tests.engines.vllm.workers.trainer import corrupt

__all__ = ["removes_what_sglang_leaves"]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = CONFIGS["served"]
TP, PP = 2, 2
TOKENS = 8
NAME = "model.layers.0.mlp.down_proj.weight"


class Trainer:
    """Four processes of Megatron-Core."""

    def __init__(self, folder: Path, socket: str) -> None:
        script = ROOT / "tests/engines/megatron/workers/training.py"
        self._stack = contextlib.ExitStack()
        self._ranks: list[subprocess.Popen[str]] = []
        for rank in range(TP * PP):
            arguments = [folder, rank, TP * PP, socket, "grpo", "served", TP, PP]
            log = self._stack.enter_context((folder / f"log.{rank}").open("w"))
            self._ranks.append(
                subprocess.Popen(
                    [str(python_of("megatron")), str(script), *map(str, arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
            )
        self._folder = folder

    def publish(self, step: int, seed: int) -> None:
        for process in self._ranks:
            assert process.stdin
            process.stdin.write(f"{step} {seed}\n")
            process.stdin.flush()
        for rank, process in enumerate(self._ranks):
            assert process.stdout
            if process.stdout.readline() != f"{step}\n":
                pytest.fail(f"rank {rank}:\n{(self._folder / f'log.{rank}').read_text()[-4000:]}", pytrace=False)

    def die(self, step: int, seed: int) -> None:
        """The last rank is killed while the others have published that step and wait for it."""
        *others, last = self._ranks
        for process in others:
            assert process.stdin
            process.stdin.write(f"{step} {seed}\n")
            process.stdin.flush()
        last.kill()
        last.wait()

    def end(self) -> None:
        for process in self._ranks:
            process.kill()
            process.communicate()
        self._stack.close()


class Reference:
    """A plain reader that writes what it gets as a checkpoint."""

    def __init__(self, socket: str, folder: Path) -> None:
        import transformers

        config = transformers.Qwen3Config(**CONFIG)
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(config)
        self.weights = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
        self._config, self._folder, self._socket = config, folder, socket

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[int], Path]]:
        """What is yielded brings a step in and writes it; the folder."""
        with WorkerWeightsReader("grpo", "reference", 0, 1, self._socket) as reader:
            reader.register(self.weights)

            def checkpoint(step: int) -> Path:
                reader.update(step)
                return self.write(f"{step}", self.weights)

            yield checkpoint

    def write(self, name: str, weights: dict[str, torch.Tensor]) -> Path:
        folder = self._folder / name
        folder.mkdir()
        self._config.architectures = ["Qwen3ForCausalLM"]
        self._config.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


class Scene:
    """All of it, running."""

    def __init__(self, daemon: Daemon, trainer: Trainer, reference: Reference, vllm: VLLM, sglang: SGLang) -> None:
        self.daemon, self.trainer, self.reference, self.vllm, self.sglang = daemon, trainer, reference, vllm, sglang
        self.readers = {
            "vllm": WeightReader(
                "grpo", "vllm", VLLMServer(vllm.url).connect("grpo", "vllm", daemon.socket), daemon.socket
            ),
            "sglang": WeightReader(
                "grpo", "sglang", SGLangServer(sglang.url, "grpo", "sglang", daemon.socket), daemon.socket
            ),
        }

    def states(self) -> dict[str, Any]:
        """All that an update changes in each engine: every tensor, and the tokens that follow from them."""
        checked = self.vllm.ask("weight_checker", {"action": "checksum"})
        return {"vllm": {"tokens": self.vllm.tokens(TOKENS), "digests": checked}, "sglang": self.sglang.state()}

    def loaded(self, checkpoint: Path) -> dict[str, Any]:
        """The same, once each engine has loaded that checkpoint itself."""
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
        self.vllm.ask("collective_rpc", asked)
        self.vllm.ask("reset_prefix_cache", {})
        self.sglang.loads_itself(checkpoint)
        return self.states()

    def versions(self) -> dict[str, str]:
        return {"vllm": str(self.vllm.ask("weight_info")["weight_version"]), "sglang": self.sglang.version()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="awexd-x")))
        daemon = stack.enter_context(Daemon(short))
        trainer = Trainer(tmp_path_factory.mktemp("trainer"), daemon.socket)
        stack.callback(trainer.end)
        reference = Reference(daemon.socket, tmp_path_factory.mktemp("checkpoints"))
        first = reference.write("first", {name: torch.randn(t.shape) * 0.1 for name, t in reference.weights.items()})
        vllm = stack.enter_context(serving(first, short, plain=True))
        sglang = SGLang(first, tmp_path_factory.mktemp("sglang"))
        stack.callback(sglang.end)
        sglang.await_ready()
        yield Scene(daemon, trainer, reference, vllm, sglang)


@pytest.mark.matrix(
    model="qwen3", trainer="megatron TP2 PP2", engine="vllm TP2, over HTTP", checked="vLLM's own loader"
)
@pytest.mark.matrix(
    model="qwen3", trainer="megatron TP2 PP2", engine="sglang TP2, over HTTP", checked="SGLang's own loader"
)
def test_three_updates_in_a_row_of_which_the_second_fails(scene: Scene) -> None:
    with scene.reference.reading() as checkpoint:
        scene.trainer.publish(1, 10)
        first = checkpoint(1)
        for reader in scene.readers.values():
            assert reader.update(1).step == 1
        after_first = scene.states()
        assert scene.versions() == {"vllm": "1.1", "sglang": "1.1"}

        scene.trainer.publish(2, 20)
        checkpoint(2)
        corrupt(scene.reference.weights[NAME][:, : CONFIG["intermediate_size"] // TP])
        for reader in scene.readers.values():
            with pytest.raises(IntegrityError, match=re.escape(NAME)):
                reader.update(2)
        assert scene.states() == after_first
        assert scene.versions() == {"vllm": "1.1", "sglang": "1.1"}
        events = json.dumps(scene.daemon.ask("events", job="grpo", after=0))
        assert events.count(NAME) >= len(scene.readers)

        scene.trainer.publish(3, 30)
        third = checkpoint(3)
    for reader in scene.readers.values():
        assert reader.update().step == 3
        assert (reader.state, reader.version) == ("ready", (1, 3))
    after_third = scene.states()
    assert scene.versions() == {"vllm": "1.3", "sglang": "1.3"}

    assert scene.loaded(first) == after_first
    assert scene.loaded(third) == after_third
    assert after_first["vllm"]["tokens"] != after_third["vllm"]["tokens"]
    assert after_third["vllm"]["tokens"] == after_third["sglang"]["tokens"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_dry_run_foresees_what_has_been_registered(scene: Scene, engine: str) -> None:
    """Who sends how much to whom, from a configuration and two specifications, and from the adapters themselves."""

    def planned(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "awexd.ctl", "plan", "--json", *arguments]
        return dict(json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout))

    def links(plan: dict[str, Any], name: str) -> list[dict[str, Any]]:
        return [{**link, "engine": ""} for link in plan["links"] if link["engine"] == name]

    model = scene.reference.write(f"planned-{engine}", scene.reference.weights)
    trainer, workers = f"megatron:tp={TP},pp={PP}", f"{engine}:tp=2"
    foreseen = planned(
        "--model", str(model / "config.json"), "--train", trainer, "--infer", workers, "--dtype", "float32"
    )
    registered = planned("--job", "grpo", "--socket", scene.daemon.socket)
    assert foreseen["works"]
    assert registered["works"]
    assert links(foreseen, f"{engine} 0") == links(registered, engine) != []


def test_trainer_that_is_killed_while_it_publishes(scene: Scene) -> None:
    before, versions = scene.states(), scene.versions()
    scene.trainer.die(4, 40)
    for reader in scene.readers.values():
        with pytest.raises(DeadlineExceeded, match="step 4 to be committed"):
            reader.update(4, timeout=1.0)
        assert (reader.state, reader.version) == ("ready", (1, 3))
    assert scene.states() == before
    assert scene.versions() == versions
    events = scene.daemon.ask("events", job="grpo", after=0)["events"]
    assert any(f"writer rank {TP * PP - 1} left" in event["text"] for event in events)
