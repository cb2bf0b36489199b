"""A whole vLLM in this process: updates, failures and updates again, and what it generates after each.

``python engine.py '{...}'`` prints a line of JSON: the steps in order, each with the tokens that vLLM generated, those
that transformers generates from the same checkpoint, the version that vLLM says, and the error if there was one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import stand
from generation import PROMPT, TOKENS, generated
from trainer import Trainer

from awexd_client import WeightReader, WeightWriter
from awexd_client.vllm import VLLMWorkers

ASIDE = "model.layers.0.self_attn.q_proj.weight"
DIRECT = "model.layers.0.input_layernorm.weight"


def main() -> None:
    task = json.loads(sys.argv[1])
    folder = Path(task["models"]) / task["family"]
    sys.stdout.write("\n" + json.dumps(_run(folder, task["job"], task["socket"], task["options"])) + "\n")


def _run(folder: Path, job: str, socket: str, options: dict[str, Any]) -> dict[str, Any]:
    llm = stand.engine(folder / "old", **options)
    with WeightWriter(job, 0, 1, socket, keep=8) as writer:
        return _Sequence(folder, llm, writer, job, socket).run()


class _Sequence:
    def __init__(self, folder: Path, llm: Any, writer: WeightWriter, job: str, socket: str) -> None:
        self.folder, self.llm, self.writer, self.job, self.socket = folder, llm, writer, job, socket
        self.report: dict[str, Any] = {"steps": {}}

    def run(self) -> dict[str, Any]:
        self.note("start", "old", lambda: None)
        trainer = Trainer(self.writer, self.folder)
        workers = VLLMWorkers(self.llm).connect(self.job, "rollout", self.socket)
        with WeightReader(self.job, "rollout", workers, self.socket) as reader:
            self.note("update", "new", lambda: reader.update(trainer.publish(1, "new")))
            with _failing_once(self.llm):
                self.note("loader", "new", lambda: reader.update(trainer.publish(2, "newer")))
            self.note("aside", "new", lambda: reader.update(trainer.corrupted(3, ASIDE)))
            self.note("direct", "new", lambda: reader.update(trainer.corrupted(4, DIRECT)))
            self.note("again", "newer", lambda: reader.update(trainer.publish(5, "newer")))
            self.report["state"] = reader.state
        self.note("unknown", "newer", lambda: self.by_hand({"steps": 6}))
        self.note("late", "newer", lambda: self.by_hand({"step": 6, "timeout": 0.2}))
        trainer.publish(6, "old")
        self.note("by hand", "old", lambda: self.by_hand({"step": 6}))
        self.report["meta"] = [name for name, tensor in _model(self.llm).named_parameters() if tensor.is_meta]
        self.llm.shutdown_weight_transfer_engine()
        return self.report

    def by_hand(self, info: dict[str, Any]) -> None:
        """vLLM's own calls, none of ours."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": info})
        self.llm.finish_weight_update(f"by hand {info['step']}")
        self.llm.reset_prefix_cache()

    def note(self, name: str, version: str, act: Callable[[], object]) -> None:
        """Acts, and says what vLLM then generates, and what it should."""
        said = None
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told in the report
            said = [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        self.report["steps"][name] = {
            "tokens": self.tokens(),
            "expected": generated(self.folder / version),
            "version": self.llm.get_weight_version(),
            "error": said,
        }

    def tokens(self) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        (answer,) = self.llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return list(answer.outputs[0].token_ids)


def _model(llm: Any) -> Any:
    (model,) = llm.apply_model(lambda live: live)
    return model


@contextlib.contextmanager
def _failing_once(llm: Any) -> Iterator[None]:
    """The model's loader breaks off in the midst of the next load, and works again after that."""
    model = _model(llm)

    def load_weights(weights: Any) -> None:
        del model.load_weights

        def half() -> Iterator[Any]:
            yield from list(weights)[:9]
            raise OSError("the loader broke off")

        model.load_weights(half())

    model.load_weights = load_weights
    yield


if __name__ == "__main__":
    main()
