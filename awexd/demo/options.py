"""The options of ``awexd demo``. Importing this is cheap: every ``awexd`` command does."""

from __future__ import annotations

import argparse
from pathlib import Path

from awexd.demo.tasks import TASKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``awexd demo``."""
    defaults = ", ".join(f"{task.steps} for {name}" for name, task in TASKS.items())
    parser.add_argument("--model", choices=sorted(TASKS), default="smollm2", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help=f"optimizer steps; default: {defaults}")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--socket", type=Path, help="use the daemon there instead of starting one")
    parser.add_argument("--plot", type=Path, default=Path("awexd-demo.png"), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and all else to standard error")
