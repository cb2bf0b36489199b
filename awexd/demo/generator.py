"""The generation process: its own copy of the model, filled by the daemon alone, and the sampling of answers."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from awexd.demo import model as models
from awexd.demo.sampling import decode
from awexd.demo.tasks import TASKS
from awexd.demo.wire import Channel, Message, answer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from awexd.demo.tasks import Task, Text
    from awexd_client import WorkerWeightsReader

UPDATE_SECONDS = 60


class Generator:
    """Holds the model and the reader; one method a request of the parent."""

    def __init__(self) -> None:
        self._random = torch.Generator()

    def load(self, request: Message) -> Message:
        """Makes the model with zero for every weight: what it holds later came through the daemon."""
        directory = Path(request["directory"])
        self._task: Task = TASKS[request["model"]]
        self._text: Text = self._task.text(directory)
        self._prompts = [self._text.encode(prompt) for prompt in self._task.prompts]
        self._model: LlamaForCausalLM = models.blank(directory, models.DTYPES[request["dtype"]])
        self._random.manual_seed(request["seed"])
        return {"nonzero": sum(int(tensor.count_nonzero()) for tensor in self._model.parameters())}

    def connect(self, request: Message) -> Message:
        from awexd_client import WorkerWeightsReader

        self._reader: WorkerWeightsReader = WorkerWeightsReader(
            job=request["job"], engine="rollout-0", rank=0, world_size=1, socket=request["socket"]
        )
        self._reader.register(self._model)
        return {}

    def update(self, request: Message) -> Message:
        result = self._reader.update(step=request["step"], timeout=UPDATE_SECONDS)
        return {
            "epoch": result.epoch,
            "step": result.step,
            "bytes": result.bytes,
            "stage_seconds": result.stage_seconds,
            "pause_seconds": result.pause_seconds,
            "transport": result.transport,
        }

    def rollout(self, request: Message) -> Message:
        """Samples a group of answers to each prompt, with the reward of each."""
        del request
        task, size = self._task, self._task.answers
        batch = [prompt for prompt in self._prompts for _ in range(size)]
        samples = asdict(decode(self._model, batch, task.limit, task.end, self._random))
        groups: list[Message] = []
        for index, prompt in enumerate(self._prompts):
            part = slice(index * size, (index + 1) * size)
            group = {name: values[part] for name, values in samples.items()}
            groups.append({"prompt": prompt, "rewards": [task.reward(tokens) for tokens in group["tokens"]], **group})
        return {"groups": groups, "answer": self._text.decode(samples["tokens"][0])}

    def greedy(self, request: Message) -> Message:
        """The greedy answers to all prompts; one thread, because the order of sums depends on their number."""
        del request
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        tokens = decode(self._model, self._prompts, self._task.limit, self._task.end).tokens
        torch.set_num_threads(threads)
        return {"prompts": self._prompts, "tokens": tokens, "texts": [self._text.decode(answer) for answer in tokens]}

    def digests(self, request: Message) -> Message:
        """Digests of the live weights."""
        del request
        return {"digests": {name: models.digest(tensor) for name, tensor in self._model.named_parameters()}}

    def close(self, request: Message) -> Message:
        del request
        self._reader.close()
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="awexd.demo.generator")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(args.threads)
    generator = Generator()
    return answer(
        Channel.inherited(args.channel),
        {
            "load": generator.load,
            "connect": generator.connect,
            "update": generator.update,
            "rollout": generator.rollout,
            "greedy": generator.greedy,
            "digests": generator.digests,
            "close": generator.close,
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
