"""What the demo shows: a table that grows by a line a step, a bar while it works, and the result as text or JSON."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from awexd.demo.tasks import TASKS

if TYPE_CHECKING:
    from pathlib import Path

    from awexd.demo.session import HandOver, Outcome, Plan, Step

HEADER = " step  reward     loss  version        bytes    stage     pause  an answer sampled in this step"
PHASES_A_STEP = 5
PHASES_AROUND = 11
SHOWN_ANSWERS = 3
COLUMNS = 110
SHORTEST_ANSWER = 12


class Report:
    """Lines on a stream; with a terminal and rich, a progress bar under them. It is a `session.Progress`."""

    def __init__(self, stream: IO[str], plan: Plan) -> None:
        self._stream = stream
        self._plan = plan
        self._bar = _bar(stream, PHASES_A_STEP * plan.steps + PHASES_AROUND)

    def __enter__(self) -> Report:
        task = TASKS[self._plan.model]
        if self._bar is not None:
            self._bar.start()
        self.line(f"awexd demo: {task.title} learns to {task.goal} (GRPO, {self._plan.dtype})")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def phase(self, text: str) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, description=text, advance=1 if task.description else 0)
        elif not text.startswith("step "):
            self.line(f"{text} ...")

    def handed_over(self, record: HandOver) -> None:
        self.line(HEADER)
        self.line(_row(record, "-", "-", "(the first weights, into zeros)"))

    def stepped(self, record: Step) -> None:
        self.line(_row(record, f"{record.reward:.3f}", f"{record.loss:+.4f}", record.answer))

    def finish(self, outcome: Outcome, plot: Path, seconds: float) -> None:
        """The checks, a few greedy answers before and after, and where the plot is."""
        prompts = TASKS[self._plan.model].prompts
        for prompt, before, after in list(zip(prompts, outcome.before, outcome.after, strict=True))[:SHOWN_ANSWERS]:
            self.line(f"\n{prompt}\n  before: {_one_line(before)}\n  after:  {_one_line(after)}")
        self.line("")
        self.line(_verdict_of_bytes(outcome))
        verdict = "the same tokens" if outcome.tokens_equal else "DIFFERENT tokens"
        self.line(f"greedy answers of generator and trainer: {verdict}")
        steps = outcome.steps
        self.line(f"mean reward: {steps[0].reward:.3f} in the first step, {steps[-1].reward:.3f} in the last")
        self.line(f"plot: {plot}")
        self.line(f"{seconds:.0f} s in all")


def as_json(plan: Plan, outcome: Outcome, plot: Path, seconds: float) -> str:
    """The result as one JSON object."""
    return json.dumps(
        {
            "model": plan.model,
            "bit_exact": outcome.bit_exact,
            "tokens_equal": outcome.tokens_equal,
            "reward_first": outcome.steps[0].reward,
            "reward_last": outcome.steps[-1].reward,
            "seconds": seconds,
            "load_seconds": outcome.load_seconds,
            "dtype": plan.dtype,
            "tensors": outcome.tensors,
            "before": outcome.before,
            "after": outcome.after,
            "plot": str(plot),
            "initial": asdict(outcome.first),
            "steps": [asdict(step) for step in outcome.steps],
        }
    )


def _bar(stream: IO[str], total: int) -> Any:
    """A rich progress bar, or None where there is no terminal or no rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    bar.add_task("", total=total)
    return bar


def _row(record: HandOver, reward: str, loss: str, answer: str) -> str:
    return (
        f"{record.step:5d} {reward:>7} {loss:>8} {f'{record.epoch}:{record.step}':>8} {record.bytes / 1e6:9.1f} MB"
        f" {record.stage_seconds * 1e3:6.1f} ms {record.pause_seconds * 1e3:6.1f} ms"
        f"  {_cut(_one_line(answer), _answer_width())}"
    )


def _answer_width() -> int:
    columns = shutil.get_terminal_size((COLUMNS, 0)).columns
    return max(SHORTEST_ANSWER, columns - HEADER.index("an answer") - 1)


def _verdict_of_bytes(outcome: Outcome) -> str:
    versions = [outcome.first, *outcome.steps]
    found = "weights in the memory of generator and trainers, by SHA-256 of each tensor after each hand-over:"
    for version in versions:
        if version.differing:
            count, first = len(version.differing), version.differing[0]
            return f"{found}\n  DIFFERENT at step {version.step} in {count} of {outcome.tensors}, the first is {first}"
    return f"{found}\n  bit for bit the same, {outcome.tensors} tensors {len(versions)} times"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
