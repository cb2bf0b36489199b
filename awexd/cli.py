"""``awexd``: the daemon, the MetaServer and the demo."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from awexd import __version__
from awexd_transports.errors import AwexdError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="awexd", description="Hands a trainer's new weights to rollout engines.")
    parser.add_argument("--version", action="version", version=f"awexd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_serve(commands.add_parser("serve", help="run the node daemon"))
    help_text = "run the MetaServer, which daemons of several nodes tell each other through"
    _add_metaserver(commands.add_parser("metaserver", help=help_text, description=help_text))
    demo = commands.add_parser("demo", help="train a small real model here, handing over its weights each step")
    from awexd.demo import add_arguments

    add_arguments(demo)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "demo":
            from awexd.demo import main as demo_main

            return demo_main(arguments)
        if arguments.command == "metaserver":
            return _metaserver(arguments)
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
    add("--metaserver", metavar="URL", help="the cluster's MetaServer (default: this node is by itself)")
    add("--node", help="this node's name in the cluster (default: the host's)")
    add("--listen", metavar="HOST:PORT", help="where to serve other nodes' daemons (default: not at all)")
    add("--advertise", metavar="HOST:PORT", help="where those reach this one (default: as --listen)")
    add("--fetch-grace", help="seconds that a node in the middle of a fetch may keep a retired version (default 10)")
    add("--peer-transport", help="between nodes: tcp, rdma, or auto: the fastest that both can do (default auto)")
    add("--peer-tls-cert", metavar="FILE", help="for TLS between daemons: this one's certificate chain")
    add("--peer-tls-key", metavar="FILE", help="its key")
    add("--peer-tls-ca", metavar="FILE", help="certificates that the others' are to be signed by")
    add("--token-file", metavar="FILE", help="with the token for the MetaServer")
    add("--tls-ca", metavar="FILE", help="certificates that the MetaServer's is to be signed by")
    add("--tls-cert", metavar="FILE", help="this daemon's own certificate chain")
    add("--tls-key", metavar="FILE", help="its key")


def _add_metaserver(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", help="name or address to listen on (default 127.0.0.1)")
    add("--port", help="port to listen on; 0: any that is free (default 7471)")
    add("--token-file", metavar="FILE", help="bearer tokens by role; without it only this machine is served")
    add("--state-dir", help="folder for epochs and last steps (default /var/lib/awexd, or the user's state folder)")
    add("--config", metavar="FILE.toml", help="settings by the same names, with '_' for '-'")
    add("--tls-cert", metavar="FILE", help="certificate chain; with it, TLS is spoken")
    add("--tls-key", metavar="FILE", help="its key")
    add(
        "--tls-client-ca",
        metavar="FILE",
        help="certificates that callers' are to be signed by (default: they need none)",
    )
    add("--node-ttl", help="seconds after which a daemon that says nothing is gone (default 15)")
    add("--max-connections", help="open at once (default 8192)")
    add("--log-level", help="DEBUG, INFO, WARNING or ERROR (default INFO)")


def _metaserver(arguments: argparse.Namespace) -> int:
    from awexd.metaserver.config import load
    from awexd.metaserver.server import run

    settings = load(_given(arguments), os.environ, arguments.config)
    _log_at(settings.log_level)
    run(settings, os.environ)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from awexd.config import load
    from awexd.daemon import run

    settings = load(_given(arguments), os.environ, arguments.config)
    _log_at(settings.log_level)
    run(settings, os.environ)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among them."""
    return {key: value for key, value in vars(arguments).items() if key not in ("command", "config")}


def _log_at(level: str) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
