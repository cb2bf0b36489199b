"""Tidies up when the demo's parent process is killed outright: its last child, which outlives it.

The other children are on a leash and end with the parent; what they leave is the job's shared memory and the temporary
directory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
from pathlib import Path

from awexd.demo import daemon
from awexd.demo.children import Child, Children
from awexd.demo.wire import Channel

LONGEST_RUN_SECONDS = 7 * 86400.0
DAEMON_END_SECONDS = 30.0


def start(children: Children, directory: Path, socket: str, job: str, own: Child | None) -> Child:
    """Starts the janitor; it tidies up when its channel ends without a word.

    Args:
        own: the daemon, where the demo has started it.
    """
    arguments = ["--directory", str(directory), "--socket", socket, "--job", job]
    if own is not None:
        arguments += ["--daemon", str(own.process.pid)]
    return children.start("janitor", "awexd.demo.janitor", arguments, answers=True, outlives=True)


def dismiss(children: Children, janitor: Child) -> None:
    """Ends it with nothing to do: the job is closed, and the parent lives to remove its directory."""
    if janitor.channel is not None:
        with contextlib.suppress(OSError):  # it was killed
            janitor.channel.send({"do": "leave"})
    children.end([janitor], at_once=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="awexd.demo.janitor")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--daemon", type=int)
    args = parser.parse_args()
    try:
        Channel.inherited(args.channel).receive(LONGEST_RUN_SECONDS)
    except EOFError:
        _tidy(args)
    return 0


def _tidy(args: argparse.Namespace) -> None:
    try:
        with Children(args.directory, os.environ) as children:
            if args.daemon is not None:
                _await_end(args.daemon)
                daemon.start(children, args.directory)  # it finds what the one before it left
            daemon.close_job(args.socket, args.job)
    finally:
        shutil.rmtree(args.directory)


def _await_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([handle], [], [], DAEMON_END_SECONDS)
    finally:
        os.close(handle)


if __name__ == "__main__":
    raise SystemExit(main())
