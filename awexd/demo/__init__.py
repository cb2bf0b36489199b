"""``awexd demo``: reinforcement learning of a real small model on this machine, its weights handed over by the daemon.

The parent process (this package without torch) starts a daemon, two trainers and a generator, and leads them through
the steps. `add_arguments` and `main` are what the command line calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``awexd demo``."""
    from awexd.demo.options import add_arguments

    add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the demo; the exit status is 0 only if everything worked and every check passed."""
    from awexd.demo.command import main

    return main(args)
