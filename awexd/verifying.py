"""``awexctl verify``: a held version, or what an engine's workers have live, against a checkpoint on disk."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

import orjson

from awexd_transports.errors import AwexdError, InvalidArgument, abbreviate

if TYPE_CHECKING:
    from awexd_client.verify import Verified

SAY_SECONDS = 2.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--job", required=True, help="OWNER/NAME, or NAME for your own")
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder of safetensors files")
    what = command.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, help="the held version of that step (default: the newest)")
    what.add_argument("--vllm", metavar="URL", help="what the workers of this server have live, instead")
    what.add_argument("--sglang", metavar="URL", help="likewise")
    command.add_argument("--engine", help="of a server: its name in the job")


def main(arguments: argparse.Namespace) -> int:
    """0 where every tensor that was compared is the checkpoint's, bit by bit."""
    try:
        what, found = _compare(arguments)
    except AwexdError as error:
        print(f"awexctl verify: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        told = {
            **what,
            "equal": not found.differences,
            "tensors": found.tensors,
            "bytes": found.nbytes,
            "differences": [{"name": one.name, "index": one.index, "text": str(one)} for one in found.differences],
            "unseen": found.unseen,
            "aside": dict(found.aside),
            "more": found.more,
        }
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
        return 1 if found.differences else 0
    version = what["version"]
    known = f"epoch {version[0]} step {version[1]}" if version else "weights of no version"
    count = len(found.differences) + found.more
    print(f"{known}: {found.tensors} tensors, {found.nbytes} bytes: {count or 'none'} differ")
    for one in found.differences:
        print(f"  {one}")
    if found.more:
        print(f"  and {found.more} more")
    for name, why in found.aside.items():
        print(f"  not compared: {name}: {why}")
    if found.unseen:
        print(f"  only in the checkpoint: {abbreviate(found.unseen)}")
    return 1 if found.differences else 0


def _compare(arguments: argparse.Namespace) -> tuple[dict[str, list[int] | None], Verified]:
    """The version that was compared, and what came of it."""
    if arguments.vllm or arguments.sglang:
        return _compare_live(arguments)
    if arguments.engine:
        raise InvalidArgument("--engine needs --vllm URL or --sglang URL: only its own server reaches its workers")
    from awexd_client.held import HeldVersion

    with HeldVersion(arguments.job, arguments.step, arguments.socket, arguments.timeout) as held:
        found = held.verify(arguments.checkpoint, progress=_Progress())
        return {"version": [held.epoch, held.step]}, found


def _compare_live(arguments: argparse.Namespace) -> tuple[dict[str, list[int] | None], Verified]:
    from awexd_client import WeightReader
    from awexd_client.instance import VERIFY_TIMEOUT
    from awexd_client.sglang import SGLangServer
    from awexd_client.vllm import VLLMServer

    job, engine, socket = arguments.job, arguments.engine, arguments.socket
    if not engine:
        raise InvalidArgument("--vllm and --sglang need --engine: the server's name in the job")
    workers = VLLMServer(arguments.vllm) if arguments.vllm else SGLangServer(arguments.sglang, job, engine, socket)
    with WeightReader(job, engine, workers, socket) as reader:
        found = reader.compare(arguments.checkpoint, max(arguments.timeout, VERIFY_TIMEOUT))
        return {"version": list(reader.version) if reader.version else None}, found


class _Progress:
    """Says every few seconds how far it is."""

    def __init__(self) -> None:
        self._next = time.monotonic() + SAY_SECONDS

    def __call__(self, done: int, whole: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_SECONDS
            print(f"compared {done / (1 << 30):.1f} of {whole / (1 << 30):.1f} GiB", file=sys.stderr)
