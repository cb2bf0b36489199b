"""``awexd``: the daemon and the demo."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from awexd import __version__
from awexd_transports.errors import AwexdError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="awexd", description="Hands a trainer's new weights to rollout engines.")
    parser.add_argument("--version", action="version", version=f"awexd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", help="run the node daemon"))
    demo = commands.add_parser("demo", help="train a small real model here, handing over its weights each step")
    from awexd.demo import add_arguments

    add_arguments(demo)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "demo":
            from awexd.demo import main as demo_main

            return demo_main(arguments)
        return _serve(arguments)
    except AwexdError as error:
        print(f"awexd {arguments.command}: {error}", file=sys.stderr)
        return 1


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--socket", help="path of the Unix socket (default /run/awexd/awexd.sock)")
    add("--state-dir", help="folder for epochs and manifests (default /var/lib/awexd, or the user's state folder)")
    add("--config", metavar="FILE.toml", help="settings by the same names, with '_' for '-'")
    add("--memory-budget", help="shared memory for weights, as 64GiB (default: what memory and cgroup leave)")
    add("--lease-ttl", help="seconds that a reader may hold a version at most (default 600)")
    add("--job-ttl", help="seconds after which an unused job is closed (default 86400)")
    add("--allow-uids", help="users who may connect, as 1000,1001 (default: whoever can open the socket)")
    add("--allow-gids", help="groups whose members may connect")
    add("--socket-mode", help="permissions of the socket (default 660)")
    add("--lock-memory", help="keep weights resident: true or false (default true)")
    add("--log-level", help="DEBUG, INFO, WARNING or ERROR (default INFO)")


def _serve(arguments: argparse.Namespace) -> int:
    from awexd.config import load
    from awexd.daemon import run

    given = {key: value for key, value in vars(arguments).items() if key not in ("command", "config")}
    settings = load(given, os.environ, arguments.config)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(settings, os.environ)
    return 0
