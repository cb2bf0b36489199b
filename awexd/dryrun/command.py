"""``awexctl plan``: reads what is asked for, and shows the report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from awexd.dryrun.engines import engine
from awexd.dryrun.families import model_of
from awexd.dryrun.live import pair_of_job
from awexd.dryrun.models import Kind, Model
from awexd.dryrun.picture import picture
from awexd.dryrun.report import Pair, Side, as_json, examine
from awexd.dryrun.spec import ENGINES, TRAINERS, Spec, parse
from awexd.dryrun.table import lines
from awexd.dryrun.trainers import trainer
from awexd_transports.errors import AwexdError, InvalidArgument

_DIRECT = (
    "every worker is taken to write in place; what an engine transforms after loading (quantized or packed weights), it"
    " takes whole instead"
)
_FUSED = "FSDP2 of transformers 5 or newer: a layer's experts are one parameter, cut between experts"
_SHARED = (
    "SGLang's shared experts are taken to be cut over tp; say shared=fused where it fuses them with the routed ones,"
    " shared=whole where an all-to-all back end (DeepEP and others) has them on each rank"
)


def main(arguments: argparse.Namespace) -> int:
    """0 where the pair works."""
    try:
        _check(arguments)
        pair = _pair(arguments)
        report = examine(pair, arguments.rate)
        if arguments.svg:
            _write(Path(arguments.svg), picture(report))
    except AwexdError as error:
        print(f"awexctl plan: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(lines(report)))
    return 0 if report.works else 1


def _check(arguments: argparse.Namespace) -> None:
    specs = {"--train": arguments.train, "--infer": arguments.infer, "--dtype": arguments.dtype}
    if arguments.job:
        given = [name for name, value in specs.items() if value]
        if given:
            raise InvalidArgument(f"{', '.join(given)}: --job plans what has registered; leave it out")
    else:
        absent = [name for name in ("--train", "--infer") if not specs[name]]
        if absent:
            raise InvalidArgument(f"{' and '.join(absent)}: needed with --model, such as --train fsdp:shards=8")
    if arguments.rate is not None and not 0 < arguments.rate < 1e6:
        raise InvalidArgument(f"--rate {arguments.rate:g}: GB/s of a rank's link, more than 0")


def _pair(arguments: argparse.Namespace) -> Pair:
    if arguments.job:
        return pair_of_job(arguments.job, arguments.socket, arguments.timeout)
    return dry_pair(_read(Path(arguments.model)), arguments.train, arguments.infer, arguments.dtype)


def dry_pair(values: Mapping[str, Any], train: str, infer: str, dtype: str | None = None) -> Pair:
    """Both sides of a dry run.

    Args:
        values: of the ``config.json``.
        train, infer: specs.

    Raises:
        InvalidArgument: what does not fit, and what to change.
    """
    left, right = parse(train, TRAINERS), parse(infer, ENGINES)
    model = model_of(values, dtype)
    workers = engine(model, right)
    engines = [Side(f"{right.kind} {number}", workers) for number in range(right.size("engines"))]
    notes = (*model.notes, *_notes(model, left, right))
    return Pair(Side(left.text, trainer(model, left)), engines, right.text, model, notes=notes)


def _notes(model: Model, train: Spec, infer: Spec) -> Iterator[str]:
    kinds = {each.kind for each in model.tensors}
    if train.kind == "fsdp" and Kind.EXPERT_UP in kinds:
        yield _FUSED
    if infer.kind == "sglang" and Kind.SHARED_UP in kinds and infer.choice("shared") == "cut":
        yield _SHARED
    if infer.kind != "hf":
        yield _DIRECT


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        values = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as a configuration: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{path} holds no configuration")
    return values


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path)} cannot be written: {error}") from error
