"""``awexctl bench``, and what the project's own benchmarks share with it: limits of a machine, and awexd against them.

The parent process starts a daemon and two measured processes, and leads them through the rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``awexctl bench`` takes beyond ``--socket`` and ``--json``."""
    parser.add_argument(
        "--size", type=float, help="GiB of weights (default 1, with --quick 0.0625; of a GPU 4, with --quick 0.25)"
    )
    parser.add_argument("--gpu", action="store_true", help="on this machine's first GPU, not in host memory alone")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: does it work, and roughly how fast")
