"""``awexctl verify``: a held version against a checkpoint on disk."""

from __future__ import annotations

import argparse
import sys
import time

import orjson

from awexd_transports.errors import AwexdError, abbreviate

SAY_SECONDS = 2.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--job", required=True, help="OWNER/NAME, or NAME for your own")
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder of safetensors files")
    command.add_argument("--step", type=int, help="the version of that step (default: the newest)")


def main(arguments: argparse.Namespace) -> int:
    """0 where every tensor that is held is the checkpoint's, bit by bit."""
    from awexd_client.held import HeldVersion

    try:
        with HeldVersion(arguments.job, arguments.step, arguments.socket, arguments.timeout) as held:
            found = held.verify(arguments.checkpoint, progress=_Progress())
            version = [held.epoch, held.step]
    except AwexdError as error:
        print(f"awexctl verify: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        told = {
            "version": version,
            "equal": not found.differences,
            "tensors": found.tensors,
            "bytes": found.nbytes,
            "differences": [{"name": one.name, "index": one.index, "text": str(one)} for one in found.differences],
            "unseen": found.unseen,
        }
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    else:
        what = f"epoch {version[0]} step {version[1]}: {found.tensors} tensors, {found.nbytes} bytes"
        print(f"{what}: {len(found.differences) or 'none'} differ")
        for one in found.differences:
            print(f"  {one}")
        if found.unseen:
            print(f"  only in the checkpoint: {abbreviate(found.unseen)}")
    return 1 if found.differences else 0


class _Progress:
    """Says every few seconds how far it is."""

    def __init__(self) -> None:
        self._next = time.monotonic() + SAY_SECONDS

    def __call__(self, done: int, whole: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_SECONDS
            print(f"compared {done / (1 << 30):.1f} of {whole / (1 << 30):.1f} GiB", file=sys.stderr)
