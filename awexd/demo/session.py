"""Leads the processes of one run: prepare, load, connect, then publish, update, roll out and train step by step."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from awexd.demo.children import Child, ChildFailed, Children
from awexd.demo.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awexd.demo.wire import Message

TRAINERS = 2
LOAD_SECONDS = 300.0
CONNECT_SECONDS = 120.0
PUBLISH_SECONDS = 120.0
REQUEST_SECONDS = 300.0
MOST_THREADS = 16


class Progress(Protocol):
    """Where a run tells what it does."""

    def phase(self, text: str) -> None:
        """What happens from now on."""

    def handed_over(self, record: HandOver) -> None:
        """The first weights have arrived."""

    def stepped(self, record: Step) -> None:
        """A step is over."""


@dataclass(frozen=True)
class Plan:
    """What to run. ``dtype`` is that of the generator, of the wire, and of the trainers' arithmetic."""

    model: str
    steps: int
    seed: int
    dtype: str
    socket: str
    job: str


@dataclass(frozen=True)
class HandOver:
    """One version on its way from the trainers to the generator, as the product's reader reports it.

    ``differing`` names the tensors whose bytes in the generator's memory are not those in the trainers', afterwards.
    """

    step: int
    epoch: int
    bytes: int
    stage_seconds: float
    pause_seconds: float
    transport: str
    publish_seconds: float
    differing: list[str]


@dataclass(frozen=True)
class Step(HandOver):
    """One step: answers are sampled, the trainers learn from them, and their new weights are handed over.

    ``reward`` is the answers' mean, ``answer`` the first of them, ``gap`` the mean absolute difference between the
    trainers' and the generator's log-probabilities of the same tokens.
    """

    reward: float
    loss: float
    gap: float
    answer: str
    rollout_seconds: float
    train_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a run that came to its end found."""

    first: HandOver
    steps: list[Step]
    tensors: int
    tokens_equal: bool
    before: list[str]
    after: list[str]
    load_seconds: float

    @property
    def bit_exact(self) -> bool:
        """Whether every version arrived bit for bit."""
        return not any(version.differing for version in [self.first, *self.steps])


class Session:
    """One job: the trainers and the generator, all connected to the daemon at ``plan.socket``."""

    def __init__(self, children: Children, directory: Path, plan: Plan, progress: Progress) -> None:
        self._children = children
        self._plan = plan
        self._task = TASKS[plan.model]
        self._progress = progress
        self._model = directory / "model"
        self._tensors = 0
        cores = len(os.sched_getaffinity(0))
        self._prepare = self._start_prepare()
        self._trainers = [self._start_trainer(rank, directory, max(1, cores // TRAINERS)) for rank in range(TRAINERS)]
        self._generator = self._start_generator(cores)

    def run(self) -> Outcome:
        """The whole job; the children are still there afterwards, with nothing left to do.

        Raises:
            ChildFailed: a process ended or could not do its part.
            DeadlineExceeded: a process did not answer in time.
        """
        started = time.perf_counter()
        self._load()
        load_seconds = time.perf_counter() - started
        self._connect()
        first = self._hand_over(0)
        self._progress.handed_over(first)
        before = self._greedy("greedy answers before training")
        steps = []
        for number in range(1, self._plan.steps + 1):
            steps.append(self._step(number))
            self._progress.stepped(steps[-1])
        after = self._greedy("greedy answers after training")
        tokens = self._trainer_tokens(after["prompts"])
        self._close()
        return Outcome(
            first=first,
            steps=steps,
            tensors=self._tensors,
            tokens_equal=tokens == after["tokens"],
            before=before["texts"],
            after=after["texts"],
            load_seconds=load_seconds,
        )

    def end(self) -> None:
        """Ends this session's processes at once, whatever they are doing."""
        self._children.end([self._prepare, *self._trainers, self._generator], at_once=True)

    def _start_prepare(self) -> Child:
        arguments = ["--model", self._plan.model, "--directory", str(self._model), "--seed", str(self._plan.seed)]
        return self._children.start("prepare", "awexd.demo.prepare", arguments, finishes=True)

    def _start_trainer(self, rank: int, directory: Path, threads: int) -> Child:
        numbers = {"--rank": rank, "--world-size": TRAINERS, "--threads": min(threads, MOST_THREADS)}
        arguments = [str(part) for pair in numbers.items() for part in pair]
        arguments += ["--rendezvous", str(directory / "rendezvous")]
        return self._children.start(f"trainer-{rank}", "awexd.demo.trainer", arguments, answers=True)

    def _start_generator(self, threads: int) -> Child:
        arguments = ["--threads", str(min(threads, MOST_THREADS))]
        return self._children.start("generator", "awexd.demo.generator", arguments, answers=True)

    def _load(self) -> None:
        plan = self._plan
        self._progress.phase("preparing the model")
        self._children.finish(self._prepare, "preparing the model", LOAD_SECONDS)
        self._progress.phase("loading the model")
        request: Message = {"do": "load", "directory": str(self._model), "model": plan.model, "dtype": plan.dtype}
        request |= {"seed": plan.seed, "learning_rate": self._task.learning_rate}
        replies = self._children.ask([*self._trainers, self._generator], request, "loading the model", LOAD_SECONDS)
        nonzero = replies[-1]["nonzero"]
        if nonzero:
            raise ChildFailed(f"generator: {nonzero} weights are not zero before the first update")

    def _connect(self) -> None:
        phase = "registering with the daemon"
        self._progress.phase(phase)
        request = {"do": "connect", "job": self._plan.job, "socket": self._plan.socket}
        self._children.ask([*self._trainers, self._generator], request, phase, CONNECT_SECONDS)

    def _hand_over(self, number: int) -> HandOver:
        phase = f"step {number}, publishing"
        self._progress.phase(phase)
        published = self._children.ask(self._trainers, {"do": "publish", "step": number}, phase, PUBLISH_SECONDS)
        seconds = max(reply["seconds"] for reply in published)
        phase = f"step {number}, updating the generator"
        self._progress.phase(phase)
        result = self._one({"do": "update", "step": number}, phase)
        if result["step"] != number:
            raise ChildFailed(f"generator: asked for step {number}, it reports step {result['step']}")
        return HandOver(**result, publish_seconds=seconds, differing=self._differing(number))

    def _step(self, number: int) -> Step:
        phase = f"step {number}, sampling answers"
        self._progress.phase(phase)
        started = time.perf_counter()
        sampled = self._one({"do": "rollout"}, phase)
        rollout_seconds = time.perf_counter() - started
        phase = f"step {number}, training"
        self._progress.phase(phase)
        started = time.perf_counter()
        request = {"do": "train", "groups": sampled["groups"]}
        trained = self._children.ask(self._trainers, request, phase, REQUEST_SECONDS)
        train_seconds = time.perf_counter() - started
        rewards = [reward for group in sampled["groups"] for reward in group["rewards"]]
        return Step(
            **asdict(self._hand_over(number)),
            reward=sum(rewards) / len(rewards),
            loss=sum(reply["loss"] for reply in trained),
            gap=sum(reply["gap"] for reply in trained) / len(trained),
            answer=sampled["answer"],
            rollout_seconds=rollout_seconds,
            train_seconds=train_seconds,
        )

    def _greedy(self, phase: str) -> Message:
        self._progress.phase(phase)
        return self._one({"do": "greedy"}, phase)

    def _differing(self, number: int) -> list[str]:
        """Compares what lies in both sides' memory, not what the product says of it."""
        phase = f"step {number}, comparing both sides' memory"
        self._progress.phase(phase)
        everyone = [*self._trainers, self._generator]
        *shares, theirs = self._children.ask(everyone, {"do": "digests"}, phase, REQUEST_SECONDS)
        ours = {name: digest for share in shares for name, digest in share["digests"].items()}
        self._tensors = len(ours)
        return differing(ours, theirs["digests"])

    def _trainer_tokens(self, prompts: list[list[int]]) -> list[list[int]]:
        phase = "greedy answers of the trainer"
        self._progress.phase(phase)
        request = {"do": "greedy", "prompts": prompts, "limit": self._task.limit, "end": self._task.end}
        tokens: list[list[int]] = self._children.ask(self._trainers, request, phase, REQUEST_SECONDS)[0]["tokens"]
        return tokens

    def _close(self) -> None:
        phase = "closing the job"
        self._progress.phase(phase)
        self._one({"do": "close"}, phase)
        self._children.ask(self._trainers, {"do": "close"}, phase, CONNECT_SECONDS)

    def _one(self, request: Message, phase: str) -> Message:
        return self._children.ask([self._generator], request, phase, REQUEST_SECONDS)[0]


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The names whose digests differ, or that only one side has, in the order of the trainer's, then the others."""
    names = dict.fromkeys([*ours, *theirs])
    return [name for name in names if ours.get(name) != theirs.get(name)]
