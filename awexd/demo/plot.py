"""The plot of reward and pause over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from awexd.demo.session import Step


def draw(steps: Sequence[Step], title: str, path: Path) -> None:
    """Writes a PNG of the mean reward and the generator's pause in milliseconds, both over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed, and pyplot's global state is left alone
    upper, lower = figure.subplots(2, 1, sharex=True)
    numbers = [step.step for step in steps]
    upper.plot(numbers, [step.reward for step in steps], marker="o", color="tab:green")
    upper.set(title=title, ylabel="mean reward", ylim=(0, 1.05))
    lower.bar(numbers, [step.pause_seconds * 1e3 for step in steps], color="tab:blue")
    lower.set(xlabel="step", ylabel="generator's pause (ms)")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
