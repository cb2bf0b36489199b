"""``awexctl plan``: from two parallelism specs, or from what has registered, to what would move between whom.

A dry run: no GPU, no engine, no torch. Layouts are those of the adapters, computed instead of read from live memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what ``awexctl plan`` takes beyond ``--socket``, ``--timeout`` and ``--json``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="FILE", help="a Hugging Face config.json, or its folder")
    what.add_argument("--job", help="what this job's ranks and engines have registered (OWNER/NAME, or NAME)")
    parser.add_argument("--train", metavar="SPEC", help="such as megatron:tp=4,pp=2,ep=8,etp=1,dp=2 or fsdp:shards=8")
    parser.add_argument(
        "--infer", metavar="SPEC", help="such as vllm:tp=8,engines=2 or sglang:tp=8,ep=4,dp_attention=2"
    )
    parser.add_argument("--dtype", help="of the weights, where it is not to be the configuration's")
    parser.add_argument(
        "--rate", type=float, metavar="GB/s", help="of each rank's link, for the estimate (default: host memory)"
    )
    parser.add_argument("--svg", metavar="FILE", help="also write a picture of who sends to whom")
